"""Training loops as anybody would write them, on the CPU: what recorded steps must reproduce to the bit.

They use what the engine uses on a GPU wherever that decides the last bit: channels_last order, pixels times a scale
plus a bias, the loss as a sum divided by its weight, and fused optimizers whose learning rate is a tensor.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from flatout.config import Recipe
from flatout.data.batches import epoch_batches, steps_per_epoch
from flatout.engine.schedule import learning_rate
from tests.engine.recorded import BATCH, CLASSES, net_recipe
from tests.engine.test_against_plain_loop import make_samples

Optimizer = Callable[[list[nn.Parameter], torch.Tensor], torch.optim.Optimizer]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A training: the network, the recipe, the samples, and the optimizer of the parameters with a learning rate."""

    make_net: Callable[[], nn.Module]
    recipe: Recipe
    count: int
    optimizer: Optimizer


def _net(*norm: nn.Module) -> nn.Module:
    # The last layer but one pools, so gradients of the convolutions are in channels_last order on every device.
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(3, 6, 3), *norm, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(150, CLASSES))


def _norm_net() -> nn.Module:
    return _net(nn.BatchNorm2d(6))


def _recipe(**changes: object) -> Recipe:
    colours = {"data.mean": [0.4] * 3, "data.std": [0.3] * 3}
    return net_recipe(channels=3, precision="fp32", **colours, **changes)


CASES = {
    "batch normalisation, momentum": Case(
        make_net=_norm_net,
        recipe=_recipe(**{"optimizer.name": "momentum", "optimizer.nesterov": True}),
        count=3 * BATCH,
        optimizer=lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9, nesterov=True, fused=True),
    ),
    "adamw, averaged weights": Case(
        make_net=_norm_net,
        recipe=_recipe(ema=0.9, **{"optimizer.name": "adamw", "optimizer.lr": 0.01, "optimizer.weight_decay": 0.05}),
        count=3 * BATCH,
        optimizer=lambda p, lr: torch.optim.AdamW(p, lr, weight_decay=0.05, fused=True),
    ),
    "label smoothing, padded batch": Case(
        make_net=_net,
        recipe=_recipe(label_smoothing=0.1),
        count=3 * BATCH - 3,
        optimizer=lambda p, lr: torch.optim.SGD(p, lr, fused=True),
    ),
}


def loop(case: Case) -> dict[str, torch.Tensor]:
    """Train on the CPU; return weights and their averages under the names of checkpoints."""
    recipe, samples = case.recipe, make_samples(case.count, 12, 3, CLASSES)
    net = case.make_net().to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    mean, std = torch.tensor(recipe.data.mean), torch.tensor(recipe.data.std)
    pixels, labels = torch.from_numpy(samples.images), torch.from_numpy(samples.labels)
    rate = torch.tensor(recipe.optimizer.lr)
    optimizer = case.optimizer(list(net.parameters()), rate)
    averages = {name: value.clone() for name, value in net.state_dict().items()} if recipe.ema else {}
    step, steps = 0, steps_per_epoch(case.count, recipe.batch_size)
    for epoch in range(recipe.epochs):
        for batch in epoch_batches(recipe, samples, epoch):
            rate.fill_(learning_rate(recipe, step, steps))
            x = (pixels[batch.samples].float() * (1 / (255 * std)) - mean / std).permute(0, 3, 1, 2)
            y, weights = labels[batch.samples], torch.from_numpy(batch.weights)
            losses = functional.cross_entropy(net(x), y, reduction="none", label_smoothing=recipe.label_smoothing)
            optimizer.zero_grad()
            ((losses * weights).sum() / weights.sum()).backward()
            optimizer.step()
            step += 1
            share = 1 - torch.clamp(torch.tensor(1.0 + step) / (10 + step), max=recipe.ema)
            for name, average in averages.items():
                value = net.state_dict()[name]
                average += share * (value - average) if value.is_floating_point() else value - average
    weights = {f"model.{name}": value for name, value in net.state_dict().items()}
    return weights | {f"ema.{name}": value for name, value in averages.items()}
