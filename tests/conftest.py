"""Fixtures that every test may use."""

import gc
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest

# Machines are shared: how long an example takes says nothing about the code. The examples are the same in every run, so
# that a change is judged by what it changes; `--hypothesis-profile=default` draws others.
hypothesis.settings.register_profile(
    "flatout",
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
    max_examples=50,
    derandomize=True,
)
hypothesis.settings.load_profile("flatout")

# Nets this small gain nothing from a second thread, and two threads that wait for each other crawl on a busy machine.
# Tests of what threads may change set it themselves.
os.environ["OMP_NUM_THREADS"] = "1"
# Where the CPU computes bfloat16, every run would measure for a second which format is faster, and choose by the load.
os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_VNNI"
# No test depends on the network; those of the hub start a server of their own.
os.environ["HF_HUB_OFFLINE"] = "1"
# JAX keeps the number of simulated devices that it starts with: enough for every test.
os.environ["JAX_NUM_CPU_DEVICES"] = "8"
# Programs of tests run for milliseconds. Without optimisations and fusions, compiling them takes a tenth of the time.
os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"

ROOT = Path(__file__).resolve().parent.parent
Command = Callable[..., str]


def pytest_configure(config: pytest.Config) -> None:
    """Give this process's tests a cache of their own: packs, compiled programs and plans are made once for all."""
    folder = tempfile.TemporaryDirectory(prefix="flatout-tests-")
    config.add_cleanup(folder.cleanup)
    os.environ["FLATOUT_CACHE"] = folder.name
    gc.disable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest in slow tests: no process waits for them at the end."""
    longest = ("test_hosts.py", "test_export.py", "test_upload.py", "test_notebook.py", "test_site.py")
    items.sort(key=lambda item: item.path.name not in longest)


def pytest_collection_finish() -> None:
    """Leave out of garbage collections what torch and JAX have imported: a million objects that stay."""
    gc.freeze()
    gc.enable()
    gc.set_threshold(20_000, 20, 20)


def pytest_unconfigure() -> None:
    """Let the last collection see everything: Triton would report what stays frozen as leaked."""
    gc.unfreeze()


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Return the folder of real data, or skip the test."""
    folder = Path(os.environ.get("FLATOUT_TEST_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"needs real data in {folder}; FLATOUT_TEST_DATA names another folder")
    return folder


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Return a function that runs a command and returns its output; its errors, where it must fail with a code."""
    from flatout.cli.main import main

    def run(*words: object, code: int = 0) -> str:
        capsys.readouterr()
        assert main([str(word) for word in words]) == code
        printed = capsys.readouterr()
        return printed.err if code else printed.out

    return run


@pytest.fixture(scope="module")
def no_pictures_in_module() -> Iterator[None]:
    """Leave pictures and report out of all runs of a module, those of its fixtures too."""
    from tests.system.conftest import leave_out_pictures

    with pytest.MonkeyPatch.context() as patch:
        leave_out_pictures(patch)
        yield


@pytest.fixture(autouse=True)
def process_as_it_was() -> Iterator[None]:
    """Put back what engines that a test did not close have changed in the process, and forget the modules of tests."""
    yield
    sys.modules.pop("mine", None)
    if "torch" in sys.modules:
        import torch

        torch.set_flush_denormal(False)
