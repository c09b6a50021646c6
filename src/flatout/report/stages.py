"""The stages of a run that starts from given weights: the trained layers and the time of each stage."""

from collections.abc import Mapping
from typing import Any

from flatout.utils.console import counted, duration
from flatout.utils.style import finite


def stages(summary: Mapping[str, Any], recipe: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return name, layers and time of each stage, in words; the time is empty if a stage took none.

    Nothing is returned for a run in which all layers train from random weights.

    Args:
        summary: the content of `summary.json`.
        recipe: nested plain values at the end of the run.
    """
    times = summary.get("time_seconds") or {}
    source = f"the weights {recipe['weights']}" if recipe.get("weights") else ""
    if recipe.get("pretrained") and not source:
        source = f"the published weights of {recipe.get('model')}"
    if not source and "head" not in times:
        return []
    rows = [("pre-trained", f"the layers before the head: {source}" if source else "none: random weights", "")]
    if "head" in times:
        is_mirrored = recipe.get("tta") and (recipe.get("augment") or {}).get("flip")
        once = "once for each image" + " and its mirror image" * bool(is_mirrored)
        rows.append(("features", f"the layers before the head, frozen: their output is computed {once}", "features"))
        rows.append(("head", "the head is fitted to the features" + _fitted(summary), "head"))
    rows.append(("fine-tuning", _fine_tuning(summary, has_head="head" in times), "train"))
    kept = summary.get("kept_epoch")
    rows.append(("evaluation", "the fitted head" if kept == 0 else f"the weights of epoch {kept or '—'}", "evaluate"))
    seconds = [finite(times.get(key)) for *_, key in rows]
    return [
        (name, layers, duration(spent) if spent else "") for (name, layers, _), spent in zip(rows, seconds, strict=True)
    ]


def _fitted(summary: Mapping[str, Any]) -> str:
    """Return the number of parameters of the head, if only these were trained."""
    count = finite(summary.get("trained_parameters"))
    return f": {count:,.0f} parameters" if count and not summary.get("epochs_trained") else ""


def _fine_tuning(summary: Mapping[str, Any], *, has_head: bool) -> str:
    epochs, count = summary.get("epochs_trained"), finite(summary.get("trained_parameters"))
    if not epochs:
        return "left out: the layers before the head stay as they were" if has_head else "left out"
    every = finite(summary.get("parameters"))
    if not count or not every:
        return counted(epochs, "epoch")
    if count == every:
        return f"all {every:,.0f} parameters, {counted(epochs, 'epoch')}"
    return f"{count:,.0f} of {every:,.0f} parameters, {counted(epochs, 'epoch')}; the others are frozen"
