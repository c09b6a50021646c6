"""Training as anybody would write it by hand for one device: what every engine must equal."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from flatout.config import Recipe
from flatout.data.batches import Split, epoch_batches
from flatout.engine import augment

State = dict[str, torch.Tensor]


@dataclass
class Result:
    """The state after training, its moving average, and the mean training loss."""

    state: State = field(default_factory=dict)
    average: State = field(default_factory=dict)
    loss: float = 0.0


def normalised(samples: Split, recipe: Recipe, tables: dict[str, torch.Tensor] | None = None) -> torch.Tensor:
    """Return all images as the network's input, [N, C, H, W], mixed with their partners."""
    mean, std = torch.tensor(recipe.data.mean), torch.tensor(recipe.data.std)
    images = torch.from_numpy(samples.images[samples.rows])
    if not tables:
        return (images.permute(0, 3, 1, 2).float() / 255 - mean[:, None, None]) / std[:, None, None]
    x = augment.apply(images, tables, 1 / (255 * std), -mean / std)
    if "mix" not in tables:
        return x
    mixed, height, width = x.clone(), *x.shape[2:]
    for i, (partner, row) in enumerate(zip(tables["partner"], tables["mix"], strict=True)):
        mixed[i] = (1 - row[0]) * x[i] + row[0] * x[partner]
        # A pixel belongs to a box if its centre does.
        top, left, bottom, right = (row[1:5] * torch.tensor([height, width, height, width]) - 0.5).ceil().int()
        mixed[i, :, top:bottom, left:right] = x[partner, :, top:bottom, left:right]
    return mixed


def plain_loop(
    net: nn.Module,
    samples: Split,
    recipe: Recipe,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    class_weights: torch.Tensor | None = None,
    shares: int = 1,
    inputs: Callable[[], torch.Tensor] | None = None,
) -> Result:
    """Train on batches of samples: the short last batch is simply short.

    Args:
        optimizer: SGD by default.
        shares: parts of a batch that go through the net one after the other, each with buffers of its own; their
            gradients are added up, and the state has the mean of the buffers.
        inputs: returns the network's input [N, C, H, W]; the images of the recipe by default.
    """
    optimizer = optimizer or torch.optim.SGD(net.parameters(), lr=recipe.optimizer.lr)
    net.train()
    for layer in net.modules():
        is_frozen = recipe.norm == "frozen" or not all(p.requires_grad for p in layer.parameters(recurse=False))
        if isinstance(layer, nn.BatchNorm2d) and is_frozen:
            layer.eval()
    buffers = [{name: b.clone() for name, b in net.named_buffers()} for _ in range(shares)]
    size = recipe.batch_size
    borders = np.cumsum([0, *(size // shares + (r < size % shares) for r in range(shares))]).tolist()
    average = {name: value.clone() for name, value in net.state_dict().items()}
    y, loss_sum, weight_sum = _targets(samples, recipe), 0.0, 0.0
    steps = 1000 if recipe.pretrained else 0  # an average of published weights forgets as slowly as one of so many
    sample_weights = torch.ones(len(y)) if class_weights is None else class_weights[y]
    for epoch in range(recipe.epochs):
        tables = augment.epoch_transforms(recipe, epoch, len(samples)) or {}
        rows = {name: torch.from_numpy(table) for name, table in tables.items()}
        x = inputs() if inputs else normalised(samples, recipe, rows or None)
        for batch in epoch_batches(recipe, samples, epoch):
            optimizer.zero_grad()
            order = torch.from_numpy(batch.samples[: batch.count])
            total = sample_weights[order].sum()
            for own, start, stop in zip(buffers, borders[:-1], borders[1:], strict=True):
                chosen = order[start:stop]
                if len(chosen):
                    logits = torch.func.functional_call(net, own, (x[chosen],)).float()
                    losses = _losses(logits, y, chosen, rows, samples, recipe)
                    share = (losses * sample_weights[chosen]).sum()
                    if total:
                        (share / total).backward()
                    loss_sum += float(share.detach())
            weight_sum += float(total)
            if recipe.clip_norm:
                nn.utils.clip_grad_norm_(net.parameters(), recipe.clip_norm)
            optimizer.step()
            steps += 1
            _average(average, {**net.state_dict(), **buffers[0]}, min(recipe.ema, (1 + steps) / (10 + steps)))
    for name, buffer in net.named_buffers():
        own = [each[name] for each in buffers]
        buffer.copy_(torch.stack(own).sum(0) / shares if buffer.is_floating_point() else own[0])
    state = {name: value.detach().clone() for name, value in net.state_dict().items()}
    return Result(state, average, loss_sum / weight_sum)


def _targets(samples: Split, recipe: Recipe) -> torch.Tensor:
    y = torch.from_numpy(samples.labels)
    if recipe.task == "regression":
        return ((y - recipe.data.label_mean) / recipe.data.label_std).float()[:, None]
    return y.float() if recipe.task == "multi-label" else y


def _losses(
    logits: torch.Tensor, y: torch.Tensor, chosen: torch.Tensor, rows: State, samples: Split, recipe: Recipe
) -> torch.Tensor:
    """Return the loss of each sample, [B]."""
    smoothing = recipe.label_smoothing
    share = rows["mix"][chosen, 5] if "mix" in rows else torch.zeros(len(chosen))
    other = y[rows["partner"].long()[chosen]] if "mix" in rows else y[chosen]
    if recipe.task in ("auto", "single-label"):
        own, others = (
            functional.cross_entropy(logits, target, reduction="none", label_smoothing=smoothing)
            for target in (y[chosen], other)
        )
        return (1 - share) * own + share * others
    target = torch.lerp(y[chosen], other, share[:, None])
    if recipe.task == "regression":
        function = {"mse": functional.mse_loss, "huber": functional.huber_loss}[recipe.loss]
        return function(logits, target, reduction="none").mean(1)
    labels = torch.from_numpy(samples.labels)
    weights = (len(labels) - labels.sum(0)) / labels.sum(0) if recipe.class_weights == "balanced" else None
    target = target * (1 - smoothing) + smoothing / 2
    return functional.binary_cross_entropy_with_logits(logits, target, pos_weight=weights, reduction="none").mean(1)


def _average(average: State, values: State, decay: float) -> None:
    for name, value in average.items():
        new = values[name].detach()
        average[name] = decay * value + (1 - decay) * new if new.is_floating_point() else new.clone()
