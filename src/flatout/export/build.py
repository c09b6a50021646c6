"""From a run to its classifier, and to what a file says about it."""

import copy
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from flatout import __version__
from flatout.errors import InputError
from flatout.export.graph import Classifier, Member, Novelty, Resize
from flatout.models.keras import KerasModule
from flatout.models.layers import head_modules
from flatout.numerics.augment import tta_views

if TYPE_CHECKING:
    from flatout.run.folder import Run


def classifier_of(run: "Run", dtype: torch.dtype = torch.float32) -> Classifier:
    """Return the classifier of a run, in evaluation mode; its networks are copies.

    Args:
        run: one run, or a cross-validation, whose folds are averaged.
        dtype: of the weights and the arithmetic of the networks.

    Raises:
        InputError: the run trained a Keras model.
    """
    recipe = run.recipe
    resize = Resize(recipe.stored_sides, recipe.data.resize, bits_of(run))
    return Classifier(resize, [_member(one, dtype) for one in run.members]).eval().requires_grad_(False)


def bits_of(run: "Run") -> int:
    """Return the bits of each channel of a run's images."""
    return run.recipe.data.bits or 8


def _member(run: "Run", dtype: torch.dtype) -> Member:
    recipe = run.recipe
    if isinstance(run.model, KerasModule):
        raise InputError(f"{run.path}: trained a Keras model; export it with --format keras")
    network = copy.deepcopy(run.model).eval().to(dtype)
    head, novelty = _novelty(run)
    member = Member(
        network,
        task=run.task.name,
        size=recipe.eval_sides,
        channels=recipe.channels,
        views=tta_views(recipe) if recipe.tta else (),
        head=head,
        novelty=novelty,
        dtype=dtype,
    )
    mean, std = (torch.tensor(values).expand(recipe.channels) for values in (recipe.data.mean, recipe.data.std))
    member.load_state_dict(
        {
            "scale": (1 / (255 * std))[:, None, None],
            "bias": (-mean / std)[:, None, None],
            "temperature": torch.tensor(run.task.temperature),
            "label_scale": torch.tensor(run.task.label_std),
            "label_bias": torch.tensor(run.task.label_mean),
        },
        strict=False,
    )
    return member


def _novelty(run: "Run") -> tuple[str, Novelty | None]:
    """Return the name of the module that reads the features, and the score of unknown images; None for none."""
    found = run.trust.novelty if run.trust else None
    if found is None:
        return "", None
    values: dict[str, Any] = {"centre": np.resize(found.centre, 2), "scale": np.resize(found.scale, 2)}
    name, known = "", found.known
    if known:
        (name,) = head_modules(run.model)
        means = known.means.astype(np.float64)
        for key, precision in (("within", known.precision), ("overall", known.overall)):
            values[key] = np.linalg.cholesky(precision.astype(np.float64))
        values |= {"means": means[:-1] @ values["within"], "mean": means[-1:] @ values["overall"]}
    novelty = Novelty(*(values["means"].shape if name else (0, 0)))
    novelty.load_state_dict({n: torch.from_numpy(np.asarray(v, np.float32)) for n, v in values.items()})
    return name, novelty


def metadata_of(run: "Run", precision: str) -> dict[str, str]:
    """Return what a file says about a run, all as text; docs/export.md has the keys."""
    recipe, trust = run.recipe, run.trust
    found = {
        "producer": f"flatout {__version__}",
        "model": recipe.model,
        "task": run.task.name,
        "classes": json.dumps(run.classes, ensure_ascii=False),
        "image_size": json.dumps(recipe.stored_sides),
        "channels": str(recipe.channels),
        "bits": str(bits_of(run)),
        "resize": recipe.data.resize,
        "precision": precision,
        "temperature": repr(run.task.temperature),
    }
    if run.task.thresholds:
        found["thresholds"] = json.dumps(run.task.thresholds)
    if trust:
        found |= {"calibration_images": str(trust.images), "set_thresholds": json.dumps(trust.set_thresholds)}
        found |= {"unknown_threshold": repr(trust.novelty.threshold)} if trust.novelty else {}
    return found
