"""What a training run leaves in the process that called it: nothing, also where it failed."""

import contextlib
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import flatout
from flatout.utils.errors import InputError
from tests.system.run_files import grey_levels


def state() -> dict[str, Any]:
    cudnn = torch.backends.cudnn
    return {
        "torch's random state": torch.get_rng_state().tolist(),
        "NumPy's random state": np.random.get_state()[1].tolist(),  # pyright: ignore
        "Python's random state": random.getstate(),
        "threads": torch.get_num_threads(),
        "denormal numbers": torch.tensor(1e-310, dtype=torch.float64).mul(1.0).item(),
        "cuDNN's choice of algorithms": cudnn.benchmark,
        "formats": (torch.get_float32_matmul_precision(), cudnn.allow_tf32),
        "default type": torch.get_default_dtype(),
        "gradients": torch.is_grad_enabled(),
        "variables": {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")},
        "folder": Path.cwd(),
    }


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def net() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 3))


class Fails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and x.shape[0] == 16:
            raise RuntimeError("the model fails in training")
        return self.layer(x.flatten(1))


@pytest.mark.parametrize(
    ("model", "changes", "error"),
    [
        (net(), {"devices": "cpu"}, None),
        (net(), {"devices": "auto"}, None),
        (Fails(), {"devices": "cpu"}, RuntimeError),
        (net(), {"devices": "cpu", "precision": "tf32"}, InputError),
    ],
    ids=["cpu", "auto", "fails in a step", "fails before the first"],
)
def test_fit_leaves_the_process_as_it_was(
    model: nn.Module, changes: dict[str, Any], error: type[Exception] | None, threads: None, tmp_path: Path
) -> None:
    samples, before = grey_levels(64), state()
    with pytest.raises(error) if error else contextlib.nullcontext():
        run = flatout.fit(model, samples, out=tmp_path / "run", epochs=2, batch_size=16, quiet=True, **changes)
        run.evaluate(samples)
        run.predict(samples[0][:2])
    assert {name: value for name, value in state().items() if value != before[name]} == {}
