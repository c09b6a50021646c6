"""The head of a pre-trained network, fitted to the features of all training and validation images.

A linear head on frozen features is a convex problem, so it is solved rather than trained: by L-BFGS on the loss of the
task, in coordinates that are scaled by the curvature. The strength of the regularisation is chosen by cross-validation,
and the out-of-fold predictions measure how good the head is. Fine-tuning from a fitted head distorts the features less
than from a random one (Kumar et al., arXiv 2202.10054).

Shape letters: N images, V views, F features, K outputs.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from flatout.data.splits import divide
from flatout.engine import optim
from flatout.inference.calibration import fit_temperature
from flatout.tasks import Task
from flatout.utils.host import physical_cores

# Penalties on the weights of standardised features, from strong to weak; the search stops when the loss rises.
STRENGTHS = (3.0, 1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001)
FOLDS = 5
# Cross-validation is limited to this many images, or numbers in their outputs and features, so that it takes seconds.
MAX_IMAGES, MAX_PRODUCTS = 20_000, 4e9
# Iterations of L-BFGS for a fold, which starts from the previous strength's head, and for the final head.
FOLD_ITERATIONS, LAST_ITERATIONS = 10, 50
# Principal components with less than this share of the largest variance are dropped.
SMALLEST_VARIANCE = 1e-6


@dataclass(frozen=True, kw_only=True, eq=False)
class FittedHead:
    """A linear head: logits are `features @ weight.T + bias`.

    Attributes:
        weight, bias: float32 [K, F] and [K].
        strength: the regularisation strength.
        temperature: the divisor of the logits that calibrates probabilities on unseen images; 1 without
            cross-validation, and for tasks other than single-label.
        out_of_fold: float32 [N, K], out-of-fold logits; NaN for images beyond `MAX_IMAGES`, and if there are too few
            images to divide.
    """

    weight: np.ndarray
    bias: np.ndarray
    strength: float
    temperature: float
    out_of_fold: np.ndarray


def fit_head(
    views_VNF: Sequence[np.ndarray],
    labels: np.ndarray,
    task: Task,
    num_outputs: int,
    *,
    class_weights: np.ndarray | None = None,
    groups: np.ndarray | None = None,
    has_bias: bool = True,
    seed: int = 1,
    strength: float | None = None,
    temperature: float = 1.0,
) -> FittedHead:
    """Fit a head to the features of images in all their views.

    Args:
        views_VNF: float32 [N, F] for each view of the images, such as mirrored ones; the first is the image itself.
        labels: see `Pack.labels`.
        task: its loss is minimised, without label smoothing.
        class_weights: see `Task.class_weights`; None for none.
        groups: int64 [N]; images of a group share a fold.
        has_bias: whether the head has a bias.
        seed: chooses the folds.
        strength, temperature: known values from a head for more images, which replace the cross-validation.
    """
    task = replace(task, label_smoothing=0.0)
    out_of_fold = np.full((len(labels), num_outputs), np.nan, np.float32)
    heads: list[torch.Tensor] = []
    with _threads(max(1, physical_cores() // 2)), contextlib.ExitStack() as stack:
        stack.callback(optim.keep_compiler_out())
        problem = _Problem(views_VNF, labels, task, num_outputs, class_weights, has_bias=has_bias)
        if strength is None:
            strength, heads, answers, chosen = _cross_validate(problem, groups, seed)
            if task.name == "single-label" and heads:
                # If few images are all classified correctly, weak regularisation lets logits grow without bound.
                temperature = fit_temperature(answers, labels[chosen])
            out_of_fold[chosen] = answers / temperature
        start = torch.stack(heads).mean(0) if heads else problem.zeros()
        weight, bias = problem.plain(problem.solve(strength, start, LAST_ITERATIONS))
    return FittedHead(
        weight=weight / temperature,
        bias=bias / temperature,
        strength=strength,
        temperature=temperature,
        out_of_fold=out_of_fold,
    )


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    """Compute with fewer threads: many small operations would wait for threads on busy cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


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
    ) -> None:
        self.task, self.labels, self.outputs = task, labels, num_outputs
        views = [torch.from_numpy(np.asarray(view, np.float32)) for view in views_VNF]
        self.count, self.views = len(labels), len(views)
        rows = torch.cat(views)
        self._mean, self._std = has_bias * rows.mean(0), rows.std(0, correction=0) + 1e-6
        standard = (rows - self._mean) / self._std
        variances, axes = torch.linalg.eigh((standard.T @ standard / len(rows)).double())
        kept = variances > SMALLEST_VARIANCE * variances[-1]
        self._variances, self._axes = variances[kept].float(), axes[:, kept].float()
        ones = torch.full((len(rows), 1), float(has_bias))
        self._rows = torch.cat([standard @ self._axes, ones], 1)  # [V * N, components + 1]
        self._targets = torch.from_numpy(task.targets(labels)).repeat(
            self.views, *[1] * (task.targets(labels).ndim - 1)
        )
        weights = task.sample_weights(labels, class_weights)
        self._weights = torch.ones(self.count) if weights is None else torch.from_numpy(weights)
        self._class_weights = None if class_weights is None else torch.from_numpy(class_weights)
        # The mean curvature of the loss in a logit: squared error, sigmoid or softmax.
        self._curvature = {"mse": 1.0, "huber": 1.0, "binary-cross-entropy": 0.25}.get(
            task.loss, 1 / max(2, num_outputs)
        )

    def zeros(self) -> torch.Tensor:
        """Return the zero head, [components + 1, K]; its last row is the bias."""
        return torch.zeros(self._rows.shape[1], self.outputs)

    def solve(
        self, strength: float, start: torch.Tensor, iterations: int, images: np.ndarray | None = None
    ) -> torch.Tensor:
        """Return the best head, [components + 1, K] in these coordinates, for some images or all with all views."""
        rows, targets, weights = self._rows, self._targets, self._weights.repeat(self.views)
        if images is not None:
            chosen = torch.from_numpy(images)
            rows, targets, weights = rows[chosen], targets[chosen], weights[chosen]
        weights = weights / weights.sum()
        scale = torch.cat([self._curvature * self._variances + strength, torch.tensor([self._curvature])]).sqrt()[
            :, None
        ]
        scaled = (start * scale).requires_grad_()
        optimizer = torch.optim.LBFGS(
            [scaled], max_iter=iterations, history_size=10, tolerance_grad=1e-5, line_search_fn="strong_wolfe"
        )

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            head = scaled / scale
            losses = self.task.per_sample(rows @ head, targets, self._class_weights)
            # The bias is not regularised.
            loss = (losses * weights).sum() + strength / 2 * head[:-1].square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)  # pyright: ignore[reportArgumentType]
        return (scaled / scale).detach()

    def answers(self, head: torch.Tensor, images: np.ndarray) -> torch.Tensor:
        """Return logits [n, K] whose probabilities are the mean over the views."""
        chosen = torch.from_numpy(images)
        each = [self._rows[chosen + view * self.count] @ head for view in range(self.views)]
        return self.task.averaged(torch.stack(each)) if len(each) > 1 else each[0]

    def plain(self, head: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Return weight [K, F] and bias [K] of a head for the original features."""
        weight = (self._axes @ head[:-1]).T / self._std
        return weight.numpy(), (head[-1] - weight @ self._mean).numpy()

    def loss(self, logits: np.ndarray, images: np.ndarray) -> float:
        """Return the mean loss of logits at their best temperature."""
        labels, answers = self.labels[images], torch.from_numpy(logits)
        if self.task.name == "single-label":
            answers = answers / fit_temperature(logits, labels)
        losses = self.task.per_sample(answers, torch.from_numpy(self.task.targets(labels)), self._class_weights)
        weights = self._weights[torch.from_numpy(images)]
        return float((losses * weights).sum() / weights.sum())


def _cross_validate(
    problem: _Problem, groups: np.ndarray | None, seed: int
) -> tuple[float, list[torch.Tensor], np.ndarray, np.ndarray]:
    """Return the best strength, its heads by fold, and their out-of-fold logits [n, K] with the images' indices."""
    most = min(MAX_IMAGES, int(MAX_PRODUCTS / problem.outputs / problem.zeros().shape[0]))
    chosen = np.arange(problem.count)
    if problem.count > most:
        chosen = np.sort(np.random.default_rng(seed).permutation(problem.count)[:most])
    units = len(chosen) if groups is None else len(np.unique(groups[chosen]))
    count = min(FOLDS, units)
    if count < 2:
        return STRENGTHS[1], [], np.full((len(chosen), problem.outputs), np.nan, np.float32), chosen
    folds = divide(problem.labels[chosen], count, seed, None if groups is None else groups[chosen])
    heads = [problem.zeros() for _ in range(count)]
    best: tuple[float, float, list[torch.Tensor], np.ndarray] | None = None
    for strength in STRENGTHS:
        answers = np.empty((len(chosen), problem.outputs), np.float32)
        for fold in range(count):
            is_held_out = folds == fold + 1
            heads[fold] = problem.solve(strength, heads[fold], FOLD_ITERATIONS, chosen[~is_held_out])
            answers[is_held_out] = problem.answers(heads[fold], chosen[is_held_out]).numpy()
        loss = problem.loss(answers, chosen)
        if best is not None and loss >= best[0]:
            break
        best = loss, strength, [*heads], answers
    assert best is not None
    _, strength, heads, answers = best
    return strength, heads, answers, chosen
