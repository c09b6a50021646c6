"""The model card of a run: what the report says, as the README.md of a repository."""

from collections.abc import Mapping
from typing import Any

from flatout import __version__
from flatout.console import duration
from flatout.hub.torch_code import torch_code
from flatout.numerics.augment import tta_views
from flatout.run.folder import Run
from flatout.style import finite
from flatout.tasks import describe_metrics

# The kinds of the hub; it has none for several labels or a number of an image.
_PIPELINE = "image-classification"
_METRIC_NAMES = {"map": "mAP", "f1_macro": "F1 (macro)", "f1_micro": "F1 (micro)", "mae": "MAE", "r2": "R²"}
_LARGEST_TABLE = 100  # classes


def card_of(run: Run, repository: str, files: list[str]) -> str:
    """Return the text of README.md.

    Args:
        run: the copy that is published, see `portable.copy_run`.
        repository: `USER/NAME`.
        files: the names of the files beside the card.
    """
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("flatout.hub", package_path=""),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["cell"] = _cell
    summary = run.summary
    rows = summary.get("per_class") or []
    return environment.get_template("card.md.j2").render(
        metadata=_metadata(run, repository).to_yaml().rstrip(),
        name=repository.partition("/")[2],
        repository=repository,
        files=files,
        sentence=_sentence(summary),
        facts=_facts(run),
        rows=rows[:_LARGEST_TABLE],
        left_out=max(0, len(rows) - _LARGEST_TABLE),
        split="test" if summary.get("test_count") else "validation",
        pairs=summary.get("confused_pairs") or [],
        trust=summary.get("trust") or {},
        data=_data(run),
        recipe=(run.path / "recipe.toml").read_text(encoding="utf-8").strip(),
        notes=[*(summary.get("verdict") or ()), *(summary.get("notes") or ())],
        load=_load(run, repository),
        torch=torch_code(run, repository),
        views=len(tta_views(run.recipe)) if run.recipe.tta else 1,
        version=__version__,
    )


def _metadata(run: Run, repository: str) -> Any:
    """Return the front matter."""
    from huggingface_hub import EvalResult, ModelCardData

    summary, model = run.summary, run.recipe.model
    results = []
    for split in ("test", "valid"):
        for name in run.task.metric_names:
            value = finite(summary.get(f"{split}_{name}"))
            if value is None or name == "correct":
                continue
            shown = f"{'validation' if split == 'valid' else 'test'} {_METRIC_NAMES.get(name, name.replace('_', ' '))}"
            results.append(
                EvalResult(
                    task_type=_PIPELINE,
                    dataset_type=run.recipe.job or "images",
                    dataset_name=_source(run),
                    dataset_split="validation" if split == "valid" else "test",
                    metric_type=name,
                    metric_name=shown,
                    metric_value=round(value, 6),
                )
            )
    tags = ["flatout", "pytorch", run.task.name, *(["timm"] if model.startswith("timm:") else ())]
    return ModelCardData(
        library_name="flatout",
        pipeline_tag=_PIPELINE if run.task.name != "regression" else None,
        tags=tags,
        metrics=list(dict.fromkeys(result.metric_type for result in results)) or None,
        model_name=repository.partition("/")[2] if results else None,
        eval_results=results or None,
    )


def _sentence(summary: Mapping[str, Any]) -> str:
    """Return the main result in words."""
    for split, name in (("test", "test"), ("valid", "validation")):
        if summary.get(f"{split}_count"):
            text = describe_metrics(split, summary).replace(split, name, 1)
            interval = summary.get(f"{split}_accuracy_interval")
            return text + (f", 95 % interval {interval[0]:.4f} to {interval[1]:.4f}" if interval else "")
    return "It has not been tested."


def _source(run: Run) -> str:
    return str(run.recipe.data.path or run.recipe.job or "images given in Python")


def _facts(run: Run) -> list[tuple[str, str]]:
    recipe, summary = run.recipe, run.summary
    height, width = recipe.image_sides
    machine = summary.get("machine") or {}
    where = machine.get("gpu") or machine.get("cpu")
    epochs, trained = summary.get("epochs_trained") or summary.get("epochs"), summary.get("images_trained")
    rows = [
        ("task", run.task.name),
        ("network", recipe.model),
        ("parameters", f"{summary['parameters']:,}" if summary.get("parameters") else None),
        ("images", f"{height} x {width} pixels, {recipe.channels} channel{'s' * (recipe.channels > 1)}"),
        ("epochs", f"{epochs:,} ({trained:,} images)" if epochs and trained else None),
        ("batch size", f"{recipe.batch_size:,}"),
        ("optimizer", f"{recipe.optimizer.name}, learning rate {recipe.optimizer.lr:g}, {recipe.schedule.name}"),
        ("training time", duration(summary["train_seconds"]) if summary.get("train_seconds") else None),
        ("trained on", ", ".join(str(part) for part in (summary.get("devices"), where) if part) or None),
        ("date", str(summary.get("date") or "")[:10] or None),
    ]
    return [(name, value) for name, value in rows if value]


def _data(run: Run) -> list[tuple[str, str]]:
    counts = {name: run.summary.get(f"{name}_images") for name in ("train", "valid", "test")}
    names = {"train": "training", "valid": "validation", "test": "test"}
    rows = [("source", _source(run))]
    return rows + [(f"{names[name]} images", f"{count:,}") for name, count in counts.items() if count]


def _load(run: Run, repository: str) -> str:
    """Return the call that loads the run."""
    model = run.recipe.model
    if model.startswith("python:"):
        return f'flatout.load("hf://{repository}", model={model.removeprefix("python:")}())  # your class of that name'
    more = ", allow_code=True" if ":" in model and not model.startswith("timm:") else ""
    return f'flatout.load("hf://{repository}"{more})'


def _cell(value: object) -> str:
    """Return text as a cell of a Markdown table, without markup of its own."""
    text = " ".join(str(value).split())
    for character in "\\`*_[]<>|":
        text = text.replace(character, f"\\{character}")
    return text
