"""The features of an image: what the head of a network reads, caught while the network computes.

Shape letters: B batch, F features, V views.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from flatout.errors import InputError
from flatout.models.layers import head_modules

# More features than these are averaged in groups of neighbours, such as the pixels of a channel.
MOST_FEATURES = 1024


class Features:
    """Catches what the head reads; with several calls of the network, the mean of their features."""

    def __init__(self) -> None:
        self._seen: list[torch.Tensor] = []

    def catch(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        """Keep the input of the head: a forward pre-hook."""
        if arguments and isinstance(arguments[0], torch.Tensor) and arguments[0].ndim > 1:
            self._seen.append(compact(arguments[0]))

    def take(self) -> torch.Tensor | None:
        """Return the features float32 [B, F] since the last call; None where the head was not called."""
        seen, self._seen = self._seen, []
        return torch.stack(seen).mean(dim=0) if seen else None


def compact(x: torch.Tensor) -> torch.Tensor:
    """Return the input of a head, [B, F], [B, tokens, F] or [B, F, height, width], as float32 [B, F]."""
    x = x.float()
    if x.ndim == 3:
        x = x.mean(dim=1)
    x = x.flatten(2).mean(dim=2) if x.ndim > 3 else x
    width = int(x.shape[1])  # a constant in a trace, whose division would round otherwise
    group = -(-width // MOST_FEATURES)
    if group > 1:
        x = functional.pad(x, (0, -width % group)).unflatten(1, (-1, group)).mean(dim=2)
    return x


@contextlib.contextmanager
def caught(model: nn.Module, network: nn.Module) -> Iterator[Features]:
    """Catch the features while `network`, the model or its last part, computes inside the block.

    Nothing is caught where the model has several heads, or a head that `network` does not contain.
    """
    features = Features()
    try:
        (name,) = head_modules(model)
        head = network.get_submodule(name)
    except (AttributeError, InputError, ValueError):
        yield features
        return
    # Of a head with a norm or hidden layers, what its last layer reads.
    layers = [module for module in head.modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    hook = (layers[-1] if layers else head).register_forward_pre_hook(features.catch)
    try:
        yield features
    finally:
        hook.remove()
