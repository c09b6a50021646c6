"""The engines under test: torch's, and XLA's on one and on eight simulated devices."""

from typing import Any

import torch
from torch import nn

from flatout.config import Recipe
from flatout.data.batches import Split
from flatout.distributed.world import World
from flatout.engine.base import DeviceDataset, Engine
from flatout.engine.torch.engine import TorchEngine
from flatout.train.loop import LoopHooks, TrainingLoop
from flatout.train.request import Progress

SIMULATED = 8


def make_engine(name: str, net: nn.Module, recipe: Recipe, *, world: World | None = None, **options: Any) -> Engine:
    """Return an engine by name; `torch` on the CPU, or another torch device such as `cuda`."""
    if not name.startswith("xla"):
        device = torch.device("cpu" if name == "torch" else name)
        return TorchEngine(net, recipe, world=world or World(device=device), **options)
    from flatout.engine.xla.mesh import find

    # JAX can be started once in a process, so with all devices that any test wants.
    devices = find("cpu", range(SIMULATED))[: int(name.partition(" ")[2])]
    from flatout.engine.xla.engine import XlaEngine

    return XlaEngine(net, recipe, devices=devices, **options)


def train(
    engine: Engine, recipe: Recipe, samples: Split, *, world: World | None = None, progress: Progress | None = None
) -> DeviceDataset:
    """Train an engine on samples from `progress` on; return them as the engine has placed them."""
    placed = engine.place(samples)
    placed.compile()
    TrainingLoop(engine, world or World(), recipe, {"train": placed}, progress or Progress(), LoopHooks()).run()
    return placed
