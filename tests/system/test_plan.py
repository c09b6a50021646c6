"""`flatout plan`: estimates, steps compiled by the real TPU compiler and measured on this machine, bad input."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from flatout.analysis.plan import Work, find_work, format_plan
from flatout.analysis.tpu import CompiledStep, Topology, estimate_row, needed_bytes, parse_topologies
from flatout.config.jobs import load_job
from flatout.models.build import build_model
from flatout.utils.console import Console
from flatout.utils.errors import InputError
from tests.conftest import Command
from tests.system.run_files import write_class_folders

HAS_COMPILER = all(importlib.util.find_spec(name) for name in ("jax", "libtpu", "torchax"))
needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="needs the TPU compiler: pip install 'flatout[tpu]'")
# Four devices cannot share 66 images equally.
SMALL = ["digits", "--images", "1258", "--classes", "10", "--batch-size", "66", "--topology", "v5e:2x2"]


# --- estimated --------------------------------------------------------------------------------------------------------


def topology(name: str) -> Topology:
    return parse_topologies(name)[0]


def compiled(**changes: Any) -> CompiledStep:
    return CompiledStep(**{"fits": True, "needed_bytes": 10**9, "flops": 197e9} | changes)


def make_work(batch: int, images: int = 60_000, **changes: Any) -> Work:
    recipe = load_job("mnist-parallel").override({"batch_size": batch, **changes})
    return Work(recipe=recipe, images=images, classes=10, about="")


def test_the_slowest_of_three_limits_decides() -> None:
    work, eight = make_work(1000, epochs=3), topology("v5e:2x4")
    row = estimate_row(work, eight, compiled())
    assert (row["limit"], row["seconds"]["step"]) == ("compute", pytest.approx(1e-3))
    assert row["images_per_second"] == pytest.approx(1e6)
    assert row["job_seconds"] == pytest.approx(3 * 60 * 1e-3)
    assert estimate_row(work, eight, compiled(memory_bytes=8.19e9))["seconds"]["memory"] == pytest.approx(0.01)
    # Rows of 2 and of 4 chips: one link each way for either, 7/8 of the bytes twice over them, four hops twice.
    links = estimate_row(work, eight, compiled(collectives=[{"kind": "all-reduce", "count": 1, "bytes": 1e9}]), 2.0)
    assert links["seconds"]["interconnect"] == pytest.approx(2 * (7 / 8 * 1e9 / 100e9 + 4e-6))
    assert links["limit"] == "interconnect"
    assert links["cost"] == pytest.approx(2 * 8 * links["job_seconds"] / 3600)
    # A job that fits its head alone.
    none = estimate_row(make_work(1000, epochs=0, linear_probe=True), eight, compiled())
    assert (none["images_per_second"], none["job_seconds"]) == (pytest.approx(1e6), 0)
    # Cores that are devices have half a chip each.
    halves = estimate_row(work, topology("v2:2x2"), compiled(flops=23e12, memory_bytes=350e9))
    assert halves["seconds"]["compute"] == halves["seconds"]["memory"] == pytest.approx(1.0)
    assert (halves["chips"], halves["devices"], halves["memory_bytes"]) == (4, 8, 8 * 2**30)


def test_rows_with_linked_ends_are_twice_as_fast() -> None:
    def seconds(name: str, kind: str = "all-reduce", size: float = 1e12, count: int = 1) -> float:
        return topology(name).message_seconds(kind, size, count)

    assert seconds("v5e:16x16") == pytest.approx(seconds("v5e:8x8") / 2, rel=0.02)
    assert seconds("v5p:4x4x4") == pytest.approx(seconds("v5p:2x4x4") / 2, rel=0.02)
    assert seconds("v6e:1x1") == 0.0
    assert seconds("v5e:8x8", "all-gather", 1e9, 3) == pytest.approx(seconds("v5e:8x8", "all-reduce", 1e9, 3) / 2)


def test_a_batch_that_does_not_fit_is_reported() -> None:
    row = estimate_row(make_work(1000), topology("v5e:2x2"), compiled(fits=False, needed_bytes=20 * 2**30))
    assert "images_per_second" not in row
    planned = {"price_per_chip_hour": None, "topologies": [row]}
    head = {"job": "mine", "model": "cnn", "batch_size": 1000, "epochs": 1, "images": 9, "classes": 2, "data": ""}
    assert "20 GiB of 16 GiB  does not fit" in "\n".join(format_plan({**head, **planned, "out": ""}))


def test_a_short_last_batch_counts_unless_it_is_dropped() -> None:
    kept = make_work(1000, images=2500, epochs=2)
    dropped = make_work(1000, images=2500, epochs=2, drop_last=True)
    small = make_work(1000, images=300, epochs=1)
    short = make_work(1000, images=2500, epochs=2, max_steps=4)
    found = [(w.batch, w.steps_per_epoch, w.images_per_epoch, w.steps) for w in (kept, dropped, small, short)]
    assert found == [(1000, 3, 2500, 6), (1000, 2, 2000, 4), (300, 1, 300, 1), (1000, 3, 2500, 4)]


def found(job: str, data: str | None = None, images: int | None = None, classes: int | None = None) -> tuple:
    work = find_work(job, data, {}, images, classes, console=Console(None))
    return work.images, work.classes, work.recipe.model


def test_the_source_of_each_number_is_named() -> None:
    def source(images: int | None, classes: int | None) -> str:
        return find_work("fashion-mnist", None, {}, images, classes, console=Console(None)).about

    assert source(None, None) == "as published"
    assert source(1000, None) == "as published, but images as given"
    assert source(1000, 5) == "as given"


def test_images_are_counted_published_or_given(shared_data: Path, tmp_path: Path) -> None:
    assert found("fashion-mnist") == (60_000, 10, "fashion-cnn")
    assert found("fashion-mnist", images=1000) == (1000, 10, "fashion-cnn")
    assert found("caltech101", images=2848, classes=101) == (2848, 101, "caltech-cnn")
    assert found("caltech101", str(shared_data / "caltech101")) == (2848, 101, "caltech-cnn")
    # 1,797 digits, a fifth of them set aside for testing and a tenth for validation.
    assert found("digits") == (1258, 10, "parallel-cnn")
    with pytest.raises(InputError, match=r"data\.folds = 3: flatout plan estimates single runs"):
        find_work("digits", None, {"data.folds": 3}, None, None, console=Console(None))
    with pytest.raises(InputError, match=r"epochs = 0: .*--epochs N estimates training"):
        find_work("digits", None, {"epochs": 0, "linear_probe": True}, None, None, console=Console(None))
    recipe = tmp_path / "mine.toml"
    recipe.write_text('model = "vgg16"\nimage_size = 64\nepochs = 2\nbatch_size = 16\n')
    assert found(str(recipe), images=500, classes=7) == (500, 7, "vgg16")
    # A fifth of 40 photos is set aside.
    assert found(str(write_class_folders(tmp_path / "photos", per_class=20)))[:2] == (32, 2)


def test_without_the_compiler_the_command_that_installs_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("flatout.engine.devices.importlib.util.find_spec", lambda name: None)
    words = ("plan", "fashion-mnist", "--topology", "v5e:2x4", "--out", tmp_path / "out")
    assert "pip install 'flatout[tpu]'" in command(*words, code=2)


def test_a_number_format_that_tpus_lack_is_refused(tmp_path: Path, command: Command) -> None:
    words = ("plan", "fashion-mnist", "--topology", "v5e:2x4", "--set", "precision=tf32", "--out", tmp_path / "out")
    said = "precision = 'tf32': XLA on tpu supports only bf16, fp32; use --set precision=auto"
    assert said in command(*words, code=2)


# --- compiled ---------------------------------------------------------------------------------------------------------


# Plans, names the heavy imports in the last line on stderr, and runs other code.
PLAN = """
import sys
from flatout.cli.main import main
assert main(sys.argv[1:]) == 0
print({"torch", "jax", "torchax"} & set(sys.modules), file=sys.stderr)
"""
COMPILER_KNOWS_EVERY_SLICE_IN_THE_TABLE = """
from flatout.analysis.tpu import GENERATIONS, devices_of, parse_topologies
for generation in GENERATIONS.values():
    for topology in parse_topologies(",".join(f"{generation.name}:{sides}" for sides in generation.slices)):
        assert len(devices_of(topology)) == topology.devices, topology.name
"""


@needs_compiler
@pytest.mark.slow
def test_a_step_is_compiled_once(tmp_path: Path) -> None:
    """It fits, and its devices add up all gradients. The second time nothing is compiled, nor imported."""

    def run(code: str, *arguments: str, out: Path) -> tuple[str, dict[str, Any], list[str]]:
        """Return what was printed, plan.json, and the lines on stderr."""
        command = [sys.executable, "-c", code, "plan", *SMALL, *arguments, "--out", str(out)]
        environment = os.environ | {"FLATOUT_CACHE": str(tmp_path / "cache")}
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout, json.loads((out / "plan.json").read_text()), done.stderr.splitlines()

    first = PLAN + COMPILER_KNOWS_EVERY_SLICE_IN_THE_TABLE
    printed, result, errors = run(first, "--json", out=tmp_path / "first")
    assert json.loads(printed) == result | {"out": str(tmp_path / "first")}
    assert errors[:-1] == [f"compiling {result['model']}, batch 66, for v5e:2x2"]
    (row,) = result["topologies"]
    assert row["fits"]
    assert 0 < row["needed_bytes"] < row["memory_bytes"] == 16 * 2**30
    assert row["flops"] > 0
    sums = [c for c in row["collectives"] if c["kind"] == "all-reduce"]
    model = build_model(load_job(result["job"]), result["classes"])
    # As 16-bit numbers.
    assert sum(c["bytes"] for c in sums) >= sum(2 * p.numel() for p in model.parameters() if p.requires_grad)
    assert row["seconds"]["step"] == max(row["seconds"][limit] for limit in ("compute", "memory", "interconnect"))
    trained = row["images_per_second"] * row["job_seconds"]
    assert trained == pytest.approx(result["epochs"] * result["images"], rel=0.02), "a short last batch may be dropped"

    printed, again, errors = run(PLAN, "--price", "1.2", out=tmp_path / "second")
    assert errors == ["set()"]
    (second,) = again["topologies"]
    assert second["cost"] == pytest.approx(1.2 * 4 * row["job_seconds"] / 3600)
    assert second | {"cost": None} == row
    assert f"≤ {row['images_per_second']:,.0f}" in printed
    assert "4 devices cannot share a batch of 66 evenly; 2.9% of the work is padding" in printed


@needs_compiler
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_a_compilation(number: int, code: int, tmp_path: Path) -> None:
    """A long computation outside of Python, during which Python handles no signal, stands for the compiler."""
    (tmp_path / "mine.py").write_text(
        "import hashlib, pathlib\n"
        "def make(**_):\n"
        "    pathlib.Path('begun').touch()\n"
        "    hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)\n"
    )
    command = [sys.executable, "-m", "flatout", "plan", *SMALL, "--model", "mine:make", "--out", "out"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True) as process:
        while not (tmp_path / "begun").exists():
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.05)
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == code
    assert errors.splitlines()[1:] == ["flatout: interrupted"] * (number == signal.SIGINT)
    assert not (tmp_path / "out").exists()


def test_the_memory_of_a_rejected_program_is_read_from_its_message() -> None:
    """Messages as the TPU compiler writes them."""
    early = "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (1.50T) is"
    late = "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 21.25G of 15.75G hbm."
    assert needed_bytes(early) == 1.5 * 2**40
    assert needed_bytes(late) == 21.25 * 2**30
    assert needed_bytes("INVALID_ARGUMENT: no") is None
