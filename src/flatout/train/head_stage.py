"""The first stage of a run from published weights: features of all images, and a head fitted to them.

Nothing is trained here: the network before its head keeps the published weights. The head of the run is fitted to all
training and validation images; its validation metrics are those of heads that have not seen the images.

Shape letters: N images, F features, K outputs.
"""

import contextlib
import copy
import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from flatout.config import Augment, Recipe
from flatout.engine.base import Evaluation
from flatout.engine.torch.dataset import TorchDataset
from flatout.engine.torch.engine import TorchEngine
from flatout.inference.calibration import FeatureStats, both_logits
from flatout.models.features import compact
from flatout.models.heads import Head, HeadNetwork, find_head, set_head
from flatout.tasks import Task, task_of
from flatout.train.head import FittedHead, fit_head
from flatout.train.progress import EpochRecord
from flatout.utils.errors import InputError

if TYPE_CHECKING:
    from torch import nn

    from flatout.data.batches import Split
    from flatout.data.pack import Pack
    from flatout.distributed.world import World
    from flatout.engine.base import DeviceDataset, Engine

# Splits whose labels the head may see. In a cross-validation, the fold is held out completely.
FITTED = ("train", "valid")
# With a time budget, fine-tuning is skipped if the head reaches this accuracy.
ENOUGH = 0.99


@dataclass(frozen=True, kw_only=True, eq=False)
class HeadStage:
    """The results of the stage.

    Attributes:
        head, layers: the module that was fitted, and a copy of it.
        fitted: the head for the splits in `fitted_splits`.
        training_only: the head for the training images alone, from which fine-tuning starts; None without fine-tuning.
        features: by split, float32 [N, F] for each view.
        placed: the splits on the devices of the engine that trains; empty if it has no cached layers.
        labels: the labels of each split.
        record: the line of `metrics.jsonl`.
        seconds: the time of the features and of the head.
    """

    head: Head
    layers: HeadNetwork
    fitted: FittedHead
    fitted_splits: tuple[str, ...]
    training_only: FittedHead | None
    features: dict[str, list[np.ndarray]]
    placed: "dict[str, DeviceDataset]"
    labels: dict[str, np.ndarray]
    record: EpochRecord
    seconds: dict[str, float]

    @property
    def share_right(self) -> float:
        """The out-of-fold accuracy on training and validation images."""
        labels = np.concatenate([self.labels[name] for name in self.fitted_splits])
        answers = self.fitted.out_of_fold
        is_seen = np.isfinite(answers).all(axis=1)
        right = both_logits(answers[is_seen]).argmax(axis=1) == labels[is_seen]
        return float(right.mean()) if len(right) else 0.0

    def is_enough(self) -> bool:
        """Whether the out-of-fold accuracy is so high that fine-tuning can hardly improve it."""
        is_single = self.labels["train"].ndim == 1 and self.labels["train"].dtype.kind == "i"
        return is_single and self.share_right >= ENOUGH

    def give_to(self, model: "nn.Module") -> None:
        """Load the head fitted to all images into a model."""
        set_head(model, self.head, torch.from_numpy(self.fitted.weight), torch.from_numpy(self.fitted.bias))

    def give(self, engine: "Engine", fitted: FittedHead | None = None) -> None:
        """Load a head into an engine, by default the one fitted to all images; all ranks call this."""
        fitted = fitted or self.fitted
        set_head(self.layers, self.head, torch.from_numpy(fitted.weight), torch.from_numpy(fitted.bias))
        own = {f"{of}.{name}": value for of in ("model", "ema") for name, value in self.layers.state_dict().items()}
        state = engine.state()
        engine.load_state({**state, **{name: value for name, value in own.items() if name in state}})

    @functools.cached_property
    def known(self) -> FeatureStats | None:
        """The distribution of training features; None for a network with several heads."""
        return FeatureStats.of(self._compact("train"), self.labels["train"]) if len(self.head.layers) == 1 else None

    def evaluation(self, split: str, task: Task) -> Evaluation:
        """Return the evaluation of a split; of validation images, by heads that have not seen them."""
        known = self.known if task.name == "single-label" else None
        distances = None if known is None else known.distances(self._compact(split))
        return evaluation_of(_logits(self, split, task), self.labels[split], task, distances)

    def _compact(self, split: str) -> np.ndarray:
        views = [compact(torch.from_numpy(view)) for view in self.features[split]]
        return torch.stack(views).mean(dim=0).numpy()


def evaluation_of(
    logits: torch.Tensor, labels: np.ndarray, task: Task, features: np.ndarray | None = None
) -> Evaluation:
    """Return an evaluation of logits [N, K]; `features` are stored in it."""
    losses = task.per_sample(logits, torch.from_numpy(task.targets(labels)))
    return Evaluation(
        task=task,
        loss_sum=float(losses.sum()),
        predicted=task.predicted(logits).numpy(),
        labels=labels,
        probabilities=task.probabilities(logits).numpy(),
        logits=logits.numpy(),
        features=features,
    )


def fit_to_features(
    model: "nn.Module",
    recipe: Recipe,
    splits: "Mapping[str, Split]",
    pack: "Pack",
    make: "Callable[..., Engine]",
    world: "World",
    *,
    class_weights: np.ndarray | None,
    report: Callable[[str], None],
    engine: "Engine | None" = None,
) -> HeadStage:
    """Fit the head of a model and load it; before fine-tuning, the head for the training split alone.

    All ranks call this. The features are computed on the devices of the run.

    Args:
        make: creates an engine for the features.
        engine: the one that trains the model, which also gets the head; its cached output of frozen layers provides the
            features. None if it is made later.

    Raises:
        InputError: the logits are not linear in the input of any layer.
    """
    began = time.perf_counter()
    head = find_head(model, recipe.image_sides, recipe.channels)
    if head is None:
        raise InputError(
            f"linear_probe = true: {recipe.model} has no linear layer or convolution that ends it, so no head can be "
            "fitted; set linear_probe = false"
        )
    placed: dict[str, TorchDataset] = {}
    if isinstance(engine, TorchEngine) and engine.cut:
        placed = {name: engine.place(samples) for name, samples in splits.items()}
        placed["train"].compile()
        views = [False, True] if _is_mirrored(recipe) else [False]
        features = {name: [of.head_features(head, mirrored=view) for view in views] for name, of in placed.items()}
    else:
        plain = replace(recipe, augment=Augment(), shard="none", precision="fp32", tta=False, ema=0.0)
        with contextlib.closing(make(model, plain, report=report, head=head)) as alone:
            features = {name: _features(alone, samples, recipe) for name, samples in splits.items()}
    labels = {name: samples.labels for name, samples in splits.items()}
    computed = time.perf_counter()
    names = tuple(name for name in FITTED if name in splits and not (recipe.data.fold and name != "train"))

    def fit(names: tuple[str, ...], like: FittedHead | None = None) -> FittedHead:
        groups = None if pack.groups is None else np.concatenate([pack.groups[splits[name].rows] for name in names])
        views = [np.concatenate([features[name][view] for name in names]) for view in range(len(features["train"]))]
        return fit_head(
            views,
            np.concatenate([labels[name] for name in names]),
            task_of(recipe),
            head.outputs,
            class_weights=class_weights,
            groups=groups,
            has_bias=head.has_bias,
            seed=recipe.seed,
            **({"strength": like.strength, "temperature": like.temperature} if like else {}),
        )

    def fit_both() -> tuple[FittedHead, FittedHead | None]:
        fitted = fit(names)
        return fitted, fit(("train",), fitted) if recipe.epochs else None

    fitted, training_only = world.from_main(fit_both)
    start = training_only or fitted
    stage = HeadStage(
        head=head,
        layers=copy.deepcopy(HeadNetwork(model, head)).cpu(),
        fitted=fitted,
        fitted_splits=names,
        training_only=training_only,
        features=features,
        placed=dict(placed),
        labels=labels,
        record=_NO_RECORD,
        seconds={"features": computed - began, "head": time.perf_counter() - computed},
    )
    if engine:
        stage.give(engine, start)
    else:
        set_head(model, head, torch.from_numpy(start.weight), torch.from_numpy(start.bias))
    record = _record(stage, task_of(recipe))
    report(_sentence(stage, record, task_of(recipe)))
    return replace(stage, record=record)


def _is_mirrored(recipe: Recipe) -> bool:
    """Whether predictions are averaged over images and their mirror images."""
    return recipe.tta and recipe.augment.flip


def _features(engine: "Engine", samples: "Split", recipe: Recipe) -> list[np.ndarray]:
    """Return the features of a split's images, and of the mirrored ones if predictions are averaged over both."""
    views = [samples, samples.mirrored()] if _is_mirrored(recipe) else [samples]
    found = [engine.place(view).features() for view in views]
    return [values for values in found if values is not None]


def _logits(stage: HeadStage, split: str, task: Task) -> torch.Tensor:
    weight, bias = torch.from_numpy(stage.fitted.weight), torch.from_numpy(stage.fitted.bias)
    each = torch.stack([torch.from_numpy(view) @ weight.T + bias for view in stage.features[split]])
    logits = task.averaged(each) if len(each) > 1 else each[0]
    if split == "valid" and split in stage.fitted_splits:
        out_of_fold = torch.from_numpy(stage.fitted.out_of_fold[len(stage.labels["train"]) :])
        # Images beyond the cross-validation limit have been seen.
        logits = torch.where(out_of_fold.isnan().any(dim=1, keepdim=True), logits, out_of_fold)
    return logits


_NO_RECORD = EpochRecord(
    epoch=0, step=0, learning_rate=0.0, train_loss=0.0, images=0, seconds=0.0, images_per_second=0.0, metrics={}
)


def _record(stage: HeadStage, task: Task) -> EpochRecord:
    """Return the line of metrics.jsonl: epoch 0."""
    logits, labels = _logits(stage, "train", task), stage.labels["train"]
    targets = torch.from_numpy(task.targets(labels))
    watched = "valid" if "valid" in stage.labels else "test"
    metrics = {f"train_{task.step_metric}": float(task.step_metrics(logits, targets).float().mean())}
    if watched in stage.labels:
        found = evaluation_of(_logits(stage, watched, task), stage.labels[watched], task)
        metrics |= {f"{watched}_{key}": value for key, value in {"loss": found.loss, **found.metrics}.items()}
    images = sum(map(len, stage.labels.values())) * len(stage.features["train"])
    return replace(
        _NO_RECORD,
        train_loss=float(task.per_sample(logits, targets).mean()),
        images=images,
        seconds=sum(stage.seconds.values()),
        images_per_second=images / stage.seconds["features"],
        metrics=metrics,
    )


def _sentence(stage: HeadStage, record: EpochRecord, task: Task) -> str:
    count = sum(len(stage.labels[name]) for name in stage.fitted_splits)
    views = " and their mirror images" if len(stage.features["train"]) > 1 else ""
    name = task.metric_names[0]
    value = record.of("valid").get(name)
    worth = "" if value is None else f"; validation {name.replace('_', ' ')} {value:.4f} by cross-validation"
    return (
        f"head fitted to the features of {count:,} images{views} (regularisation {stage.fitted.strength:g}){worth}: "
        f"{record.images_per_second:,.0f} images/s, features {stage.seconds['features']:.1f} s, "
        f"head {stage.seconds['head']:.1f} s"
    )
