"""Fixtures that every test may use."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

# Machines are shared: how long an example takes says nothing about the code.
hypothesis.settings.register_profile(
    "flatout", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow], max_examples=50
)
hypothesis.settings.load_profile("flatout")

# Nets this small gain nothing from a second thread, and two threads that wait for each other crawl on a busy machine.
# Tests of what threads may change set it themselves.
os.environ["OMP_NUM_THREADS"] = "1"
# JAX keeps the number of simulated devices that it starts with: enough for every test.
os.environ["JAX_NUM_CPU_DEVICES"] = "8"

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Return the folder of real data beside the project, or skip the test."""
    folder = ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"needs the real data in {folder}")
    return folder


@pytest.fixture(autouse=True)
def process_as_it_was() -> Iterator[None]:
    """Put back what engines that a test did not close have changed in the process."""
    yield
    if "torch" in sys.modules:
        import torch

        torch.set_flush_denormal(False)
