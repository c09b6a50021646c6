"""The first stage of a run from published weights: features of all images, and a linear head fitted to them.

It is solved by L-BFGS, regularised by cross-validation. Fine-tuning from it distorts the features less than from a
random head (Kumar et al., arXiv 2202.10054). Shapes: N images, V views, F features, K outputs.
"""

import contextlib
import copy
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import repeat
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import nn

from flatout.config import Augment, Recipe
from flatout.data.batches import Split
from flatout.data.pack import Pack
from flatout.data.splits import divide, identical, joined
from flatout.distributed.world import World
from flatout.engine import optim
from flatout.engine.base import Engine, Evaluation
from flatout.engine.torch.dataset import TorchDataset
from flatout.engine.torch.engine import TorchEngine
from flatout.inference.calibration import FeatureStats, both_logits, fit_temperature
from flatout.models.features import compact
from flatout.models.heads import Head, HeadNetwork, find_head, set_head
from flatout.tasks import Task, task_of
from flatout.train.request import TrainContext, metrics_of
from flatout.utils.errors import InputError
from flatout.utils.host import physical_cores
from flatout.utils.run_files import JsonObject

# Splits whose labels the head may see. In a cross-validation, the fold is held out completely.
FITTED = ("train", "valid")
# With a time budget, fine-tuning is skipped if the head reaches this accuracy.
ENOUGH = 0.99
# Penalties on the weights of standardised features: the first one, and those tried next while the loss falls.
FIRST_STRENGTH, WEAKER, STRONGER = 0.3, (0.1, 0.03, 0.01, 0.003, 0.001), (1.0, 3.0)
FOLDS = 5
# Cross-validation is limited to this many images, or numbers in their outputs and features, so that it takes seconds.
MAX_IMAGES, MAX_PRODUCTS = 20_000, 4e9
# Iterations of L-BFGS for a fold, which starts from the previous strength's head, and for the final head.
FOLD_ITERATIONS, LAST_ITERATIONS = 7, 30
# Principal components with less than this share of the largest variance are dropped.
SMALLEST_VARIANCE = 1e-6

# Weight, float32 [K, F], and bias, float32 [K].
WeightAndBias: TypeAlias = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True, kw_only=True, eq=False)
class FittedHead:
    """A linear head: logits are `features @ weight.T + bias`."""

    weight: np.ndarray  # float32 [K, F]
    bias: np.ndarray  # float32 [K]
    strength: float  # of the regularisation
    temperature: float  # the logits were divided by it to calibrate probabilities on unseen images
    out_of_fold: np.ndarray  # logits float32 [N, K]; NaN beyond `MAX_IMAGES`, and if there are too few images to divide


def fit_head(
    views_VNF: Sequence[np.ndarray],
    labels: np.ndarray,
    task: Task,
    num_outputs: int,
    *,
    class_weights: np.ndarray | None = None,
    groups: np.ndarray | None = None,
    copies: np.ndarray | None = None,
    has_bias: bool = True,
    seed: int = 1,
    strength: float | None = None,
    temperature: float = 1.0,
    base: WeightAndBias | None = None,
) -> FittedHead:
    """Fit a head to features [N, F] of the images and perhaps of mirrored ones, by the loss without label smoothing.

    A `strength` and `temperature`, as of a head for more images, replace the cross-validation. `groups` share a fold;
    so do `copies`, equal numbers for identical images. With a `base`, the difference from it is regularised.
    """
    task = replace(task, label_smoothing=0.0)
    out_of_fold = np.full((len(labels), num_outputs), np.nan, np.float32)
    heads: list[torch.Tensor] = []
    with contextlib.ExitStack() as stack:
        stack.callback(optim.keep_compiler_out())
        # With all threads, many small operations would wait for threads on busy cores.
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(max(1, physical_cores() // 2))
        problem = _Problem(views_VNF, labels, task, num_outputs, class_weights, has_bias=has_bias, base=base)
        if strength is None:
            strength, heads, answers, chosen = _cross_validate(problem, groups, copies, seed)
            if task.name == "single-label" and heads:
                # If few images are all classified correctly, weak regularisation lets logits grow without bound.
                temperature = fit_temperature(answers, labels[chosen])
            out_of_fold[chosen] = answers / temperature
        start = torch.stack(heads).mean(0) if heads else problem.zeros
        weight, bias = (part / temperature for part in problem.plain(problem.solve(strength, start, LAST_ITERATIONS)))
    return FittedHead(weight=weight, bias=bias, strength=strength, temperature=temperature, out_of_fold=out_of_fold)


class _Problem:
    """The loss of a head in principal-component coordinates, in which L-BFGS needs few iterations."""

    def __init__(
        self,
        views_VNF: Sequence[np.ndarray],
        labels: np.ndarray,
        task: Task,
        num_outputs: int,
        class_weights: np.ndarray | None,
        *,
        has_bias: bool,
        base: WeightAndBias | None,
    ) -> None:
        self.task, self.labels, self.outputs = task, labels, num_outputs
        self.count, self.views = len(labels), len(views_VNF)
        rows = torch.from_numpy(np.concatenate(views_VNF, dtype=np.float32))
        self._mean, self._std = has_bias * rows.mean(0), rows.std(0, correction=0) + 1e-6
        standard = (rows - self._mean) / self._std
        are_few = len(rows) < rows.shape[1]
        products = standard @ standard.T if are_few else standard.T @ standard
        variances, axes = torch.linalg.eigh((products / len(rows)).double())
        kept = variances > SMALLEST_VARIANCE * variances[-1]
        variances, axes = variances[kept], axes[:, kept]
        if are_few:
            # From vectors of images to those of features.
            axes = standard.double().T @ axes / (len(rows) * variances).sqrt()
        self._variances, self._axes = variances.float(), axes.float()
        ones = torch.full((len(rows), 1), float(has_bias))
        self._rows = torch.cat([standard @ self._axes, ones], 1)  # [V * N, components + 1]
        self.zeros = torch.zeros(self._rows.shape[1], num_outputs)
        self._base, self._base_logits = base, torch.zeros(len(rows), 1)  # [V * N, 1], or K with a base
        if base:
            weight, bias = map(torch.from_numpy, base)
            self._base_logits = rows @ weight.T + bias
        self._targets = torch.cat([torch.from_numpy(task.targets(labels))] * self.views)
        weights = task.sample_weights(labels, class_weights)
        self._weights = torch.ones(self.count) if weights is None else torch.from_numpy(weights)
        self._class_weights = None if class_weights is None else torch.from_numpy(class_weights)
        # The mean curvature of the loss in a logit: squared error, sigmoid or softmax.
        of_loss = {"mse": 1.0, "huber": 1.0, "binary-cross-entropy": 0.25}
        self._curvature = of_loss.get(task.loss, 1 / max(2, num_outputs))

    def solve(
        self, strength: float, start: torch.Tensor, iterations: int, images: np.ndarray | None = None
    ) -> torch.Tensor:
        """Return the best difference from the base, [components + 1, K]; its last row is of the bias."""
        chosen = slice(None) if images is None else torch.from_numpy(images)
        rows, targets, base = self._rows[chosen], self._targets[chosen], self._base_logits[chosen]
        weights = self._weights.repeat(self.views)[chosen]
        weights = weights / weights.sum()
        curvatures = [self._curvature * self._variances + strength, torch.tensor([self._curvature])]
        scale = torch.cat(curvatures).sqrt()[:, None]
        scaled = (start * scale).requires_grad_()
        optimizer = torch.optim.LBFGS(
            [scaled], max_iter=iterations, history_size=10, tolerance_grad=1e-5, line_search_fn="strong_wolfe"
        )

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            head = scaled / scale
            losses = self.task.per_sample(base + rows @ head, targets, self._class_weights)
            # The bias is not regularised.
            loss = (losses * weights).sum() + strength / 2 * head[:-1].square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)  # pyright: ignore[reportArgumentType]
        return (scaled / scale).detach()

    def answers(self, head: torch.Tensor, images: np.ndarray) -> torch.Tensor:
        """Return logits [n, K] whose probabilities are the mean over the views."""
        chosen = [torch.from_numpy(images) + view * self.count for view in range(self.views)]
        each = [self._base_logits[rows] + self._rows[rows] @ head for rows in chosen]
        return self.task.averaged(torch.stack(each)) if len(each) > 1 else each[0]

    def plain(self, head: torch.Tensor) -> WeightAndBias:
        """Return weight [K, F] and bias [K] of a head for the original features."""
        weight = (self._axes @ head[:-1]).T / self._std
        bias = head[-1] - weight @ self._mean
        base_weight, base_bias = self._base or (0.0, 0.0)
        return base_weight + weight.numpy(), base_bias + bias.numpy()

    def loss(self, logits: np.ndarray, images: np.ndarray) -> float:
        """Return the mean loss of logits at their best temperature."""
        labels, answers = self.labels[images], torch.from_numpy(logits)
        if self.task.name == "single-label":
            answers = answers / fit_temperature(logits, labels)
        losses = self.task.per_sample(answers, torch.from_numpy(self.task.targets(labels)), self._class_weights)
        weights = self._weights[torch.from_numpy(images)]
        return float((losses * weights).sum() / weights.sum())


class _Tried(NamedTuple):
    loss: float
    strength: float
    heads: list[torch.Tensor]  # by fold
    answers: np.ndarray  # out-of-fold logits [n, K]


def _cross_validate(
    problem: _Problem, groups: np.ndarray | None, copies: np.ndarray | None, seed: int
) -> tuple[float, list[torch.Tensor], np.ndarray, np.ndarray]:
    """Return the best strength, its heads by fold, and their out-of-fold logits [n, K] with the images' indices."""
    most = min(MAX_IMAGES, int(MAX_PRODUCTS / problem.outputs / len(problem.zeros)))
    chosen = np.arange(problem.count)
    if problem.count > most:
        chosen = np.sort(np.random.default_rng(seed).permutation(problem.count)[:most])
    together = copies if groups is None else joined(groups, copies)
    groups, copies = (None if of is None else of[chosen] for of in (groups, copies))
    count = min(FOLDS, len(chosen) if together is None else len(np.unique(together[chosen])))
    if count < 2:
        return STRONGER[0], [], np.full((len(chosen), problem.outputs), np.nan, np.float32), chosen
    folds = divide(problem.labels[chosen], count, seed, groups, copies)

    def tried(strength: float, starts: Sequence[torch.Tensor]) -> _Tried:
        held_out = [folds == fold for fold in range(1, count + 1)]
        seen = [chosen[~is_out] for is_out in held_out]
        heads = [*pool.map(problem.solve, repeat(strength), starts, repeat(FOLD_ITERATIONS), seen)]
        answers = np.empty((len(chosen), problem.outputs), np.float32)
        for is_out, head in zip(held_out, heads, strict=True):
            answers[is_out] = problem.answers(head, chosen[is_out]).numpy()
        return _Tried(problem.loss(answers, chosen), strength, heads, answers)

    with ThreadPoolExecutor(min(count, physical_cores())) as pool, contextlib.ExitStack() as stack:
        # Threads of folds use all cores without waiting for each other in every operation.
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)
        first = best = tried(FIRST_STRENGTH, [problem.zeros] * count)
        for strengths in (WEAKER, STRONGER):
            if best is not first:
                break
            for strength in strengths:
                if (found := tried(strength, best.heads)).loss >= best.loss:
                    break
                best = found
    return best.strength, best.heads, best.answers, chosen


# --- The stage --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class HeadStage:
    """The fitted head, with the features and labels of the splits."""

    task: Task
    fit: Callable[..., FittedHead]  # to features by split; see `fit_to_features`
    head: Head  # the module that was fitted
    layers: HeadNetwork  # a copy of it
    fitted: FittedHead  # for the splits in `fitted_splits`
    fitted_splits: tuple[str, ...]
    # For the training images alone: fine-tuning starts from it, and it judges validation images beyond `MAX_IMAGES`.
    training_only: FittedHead | None
    features: dict[str, list[np.ndarray]]  # by split, float32 [N, F] for each view
    placed: Mapping[str, TorchDataset]  # the splits in the engine that trains; empty if it has no cached layers
    labels: dict[str, np.ndarray]
    seconds: dict[str, float]  # of the features and of the head

    @property
    def share_right(self) -> float:
        """The out-of-fold accuracy on training and validation images; 0 for other tasks than single-label."""
        if self.task.name != "single-label":
            return 0.0
        labels, answers = np.concatenate([self.labels[name] for name in self.fitted_splits]), self.fitted.out_of_fold
        is_judged = np.isfinite(answers).all(axis=1)
        right = both_logits(answers[is_judged]).argmax(axis=1) == labels[is_judged]
        return float(right.mean()) if len(right) else 0.0

    def give(self, to: Engine | nn.Module, fitted: FittedHead | None = None) -> None:
        """Load a head, by default the one fitted to all images, into an engine or a model. All ranks call this."""
        fitted, model = fitted or self.fitted, to if isinstance(to, nn.Module) else self.layers
        set_head(model, self.head, torch.from_numpy(fitted.weight), torch.from_numpy(fitted.bias))
        if not isinstance(to, nn.Module):
            own = {f"{of}.{name}": value for of in ("model", "ema") for name, value in model.state_dict().items()}
            to.load_state({name: own.get(name, value) for name, value in to.state().items()})

    @functools.cached_property
    def known(self) -> FeatureStats | None:
        """The distribution of training features; None for a network with several heads."""
        is_single = len(self.head.layers) == 1 and not self.head.silent
        return FeatureStats.of(self._compact("train"), self.labels["train"]) if is_single else None

    def evaluation(
        self, split: str, task: Task, *, with_logits: bool = False, known: FeatureStats | None = None
    ) -> Evaluation:
        """Return the evaluation of a split, of validation images by heads that have not seen them."""
        logits, labels = self._unseen_logits(split), self.labels[split]
        return Evaluation(
            task=task,
            loss_sum=float(self._losses(logits, labels).sum()),
            predicted=task.predicted(logits).numpy(),
            labels=labels,
            probabilities=task.probabilities(logits).numpy(),
            logits=logits.numpy() if with_logits else None,
            features=known.distances(self._compact(split)) if known else None,
        )

    @functools.cached_property
    def record(self) -> JsonObject:
        """The line of metrics.jsonl: epoch 0."""
        task, logits = self.task, self._logits("train", self.fitted)
        targets = torch.from_numpy(task.targets(self.labels["train"]))
        metrics = {f"train_{task.step_metric}": float(task.step_metrics(logits, targets).float().mean())}
        watched = next((name for name in ("valid", "test") if name in self.labels), None)
        if watched:
            found = self.evaluation(watched, task)
            metrics |= {f"{watched}_{key}": value for key, value in {"loss": found.loss, **found.metrics}.items()}
        images = sum(map(len, self.labels.values())) * len(self.features["train"])
        return {
            "epoch": 0,
            "step": 0,
            "learning_rate": 0.0,
            "train_loss": float(self._losses(logits, self.labels["train"]).mean()),
            "images": images,
            "seconds": sum(self.seconds.values()),
            "images_per_second": images / self.seconds["features"],
            **metrics,
        }

    def describe(self) -> str:
        """Return a sentence for the log."""
        count = sum(len(self.labels[name]) for name in self.fitted_splits)
        views = " and their mirror images" if len(self.features["train"]) > 1 else ""
        worth = _validated(self.task, metrics_of(self.record, "valid"))
        return (
            f"head fitted to the features of {count:,} images{views} (regularisation {self.fitted.strength:g}){worth}: "
            f"{self.record['images_per_second']:,.0f} images/s, features {self.seconds['features']:.1f} s, "
            f"head {self.seconds['head']:.1f} s"
        )

    def _losses(self, logits: torch.Tensor, labels: np.ndarray) -> torch.Tensor:
        return self.task.per_sample(logits, torch.from_numpy(self.task.targets(labels)))

    def _compact(self, split: str) -> np.ndarray:
        views = [compact(torch.from_numpy(view)) for view in self.features[split]]
        return torch.stack(views).mean(dim=0).numpy()

    def _logits(self, split: str, fitted: FittedHead) -> torch.Tensor:
        weight, bias = torch.from_numpy(fitted.weight), torch.from_numpy(fitted.bias)
        each = torch.stack([torch.from_numpy(view) @ weight.T + bias for view in self.features[split]])
        return self.task.averaged(each) if len(each) > 1 else each[0]

    def _unseen_logits(self, split: str) -> torch.Tensor:
        if split != "valid" or split not in self.fitted_splits:
            return self._logits(split, self.fitted)
        out_of_fold = torch.from_numpy(self.fitted.out_of_fold[-len(self.labels["valid"]) :])
        if self.training_only is None:
            return out_of_fold
        is_left_out = out_of_fold.isnan().any(dim=1, keepdim=True)
        return torch.where(is_left_out, self._logits("valid", self.training_only), out_of_fold)


def fit_to_features(
    model: nn.Module,
    recipe: Recipe,
    splits: Mapping[str, Split],
    pack: Pack,
    make: Callable[..., Engine],
    world: World,
    *,
    class_weights: np.ndarray | None,
    report: Callable[[str], None],
    engine: Engine | None = None,
) -> HeadStage:
    """Fit the head of a model and load it; before fine-tuning, the head for the training split alone.

    The cached output of frozen layers of an `engine` that trains the model provides the features. All ranks call this.
    """
    began = time.perf_counter()
    head = find_head(model, recipe.image_sides, recipe.channels)
    if head is None:
        raise InputError(
            f"linear_probe = true: {recipe.model} has no linear layer or convolution that ends it, so no head can be "
            "fitted; set linear_probe = false"
        )
    # Whether each view of an image is mirrored; predictions are averaged over them.
    views = [False, True] if recipe.tta and recipe.augment.flip else [False]
    placed: dict[str, TorchDataset] = {}
    if isinstance(engine, TorchEngine) and engine.cut:
        placed = {name: engine.place(samples) for name, samples in splits.items()}
        placed["train"].compile()
        features = {name: [of.head_features(head, mirrored=view) for view in views] for name, of in placed.items()}
    else:
        plain = replace(recipe, augment=Augment(), shard="none", precision="fp32", tta=False, ema=0.0)
        features = dict[str, list[np.ndarray]]()
        with contextlib.closing(make(model, plain, report=report, head=head)) as alone:
            for name, samples in splits.items():
                found = [alone.place(samples.mirrored() if view else samples).features() for view in views]
                features[name] = [values for values in found if values is not None]
    labels = {name: samples.labels for name, samples in splits.items()}
    computed, task = time.perf_counter(), task_of(recipe)
    names = tuple(name for name in FITTED if name in splits and not (recipe.data.fold and name != "train"))

    def fit(
        features: Mapping[str, Sequence[np.ndarray]], like: FittedHead | None = None, base: WeightAndBias | None = None
    ) -> FittedHead:
        rows = np.concatenate([splits[name].rows for name in features])
        return fit_head(
            [np.concatenate(of_view) for of_view in zip(*features.values(), strict=True)],
            np.concatenate([labels[name] for name in features]),
            task,
            head.outputs,
            class_weights=class_weights,
            groups=None if pack.groups is None else pack.groups[rows],
            copies=None if like else identical(pack, rows),
            has_bias=head.has_bias,
            seed=recipe.seed,
            strength=like.strength if like else None,
            temperature=like.temperature if like else 1.0,
            base=base,
        )

    fitted = world.from_main(lambda: fit({name: features[name] for name in names}))
    has_seen = "valid" in names and np.isnan(fitted.out_of_fold[-len(labels["valid"]) :]).any()
    training_only = None
    if recipe.epochs or has_seen:
        training_only = world.from_main(lambda: fit({"train": features["train"]}, like=fitted))
    stage = HeadStage(
        task=task,
        fit=fit,
        head=head,
        layers=copy.deepcopy(HeadNetwork(model, head)).cpu(),
        fitted=fitted,
        fitted_splits=names,
        training_only=training_only,
        features=features,
        placed=placed,
        labels=labels,
        seconds={"features": computed - began, "head": time.perf_counter() - computed},
    )
    stage.give(engine or model, training_only)
    report(stage.describe())
    return stage


def refit_to_validation(context: TrainContext) -> HeadStage | None:
    """Correct the head of a fine-tuned network, and load it; None without cached layers or validation images to divide.

    It is fitted to the features of the validation images, which the network has not been trained on, and leaves 0.94 of
    the errors on Caltech 101. All ranks call this.
    """
    stage, engine = context.stage, context.engine
    if stage is None or "valid" not in stage.placed or context.recipe.data.fold:
        return None
    assert isinstance(engine, TorchEngine)
    valid, head = stage.placed["valid"], stage.head
    with torch.no_grad(), engine.evaluation_network():
        views = range(len(stage.features["valid"]))  # the second one is mirrored
        features = {"valid": [valid.head_features(head, mirrored=view > 0) for view in views]}
        network = HeadNetwork(engine.model, head)
        bias = network(torch.zeros(1, head.width, device=engine.device))
        weight = (network(torch.eye(head.width, device=engine.device)) - bias).T
        base = weight.float().cpu().numpy(), bias[0].float().cpu().numpy()
    fitted = context.world.from_main(lambda: stage.fit(features, base=base))
    if np.isnan(fitted.out_of_fold).all():
        # There are too few images to divide, so nothing says whether the correction helps.
        return None
    refitted = replace(
        stage,
        fitted=fitted,
        fitted_splits=("valid",),
        training_only=replace(fitted, weight=base[0], bias=base[1]),
        features=features,
        labels={"valid": stage.labels["valid"]},
    )
    refitted.give(engine)
    worth = _validated(stage.task, refitted.evaluation("valid", stage.task).metrics)
    images = f"the features of {len(refitted.labels['valid']):,} validation images"
    context.log.note(f"head corrected by {images} (regularisation {fitted.strength:g}){worth}")
    return refitted


def _validated(task: Task, metrics: Mapping[str, float]) -> str:
    """Return the end of a sentence about a head, with its validation metric; "" without one."""
    name = task.metric_names[0]
    return f"; validation {name.replace('_', ' ')} {metrics[name]:.4f} by cross-validation" if name in metrics else ""
