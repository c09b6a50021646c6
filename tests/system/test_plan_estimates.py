"""`flatout plan` where nothing is compiled: arithmetic, bad input, and what a job has to do."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from flatout.cli import main
from flatout.jobs import load_job
from flatout.plan.chips import GENERATIONS, Topology, parse_topology
from flatout.plan.compile import MAX_COMPILATIONS, MEMORY_SHARE, find_largest_batch
from flatout.plan.roofline import Work, row_of


def compiled(**changes: Any) -> dict[str, Any]:
    step = {"fits": True, "needed_bytes": 1e9, "argument_bytes": 1, "temporary_bytes": 1, "flops": 197e9}
    step |= {"memory_bytes": 0.0, "seconds": 0.0, "collectives": [], "host_transfers": [], "state_bytes": 1}
    return step | changes


def make_work(batch: int, images: int = 60_000, epochs: int = 1) -> Work:
    recipe = load_job("mnist-parallel").override({"batch_size": batch, "epochs": epochs})
    return Work(recipe=recipe, images=images, classes=10, about="")


def test_the_slowest_of_three_limits_decides() -> None:
    work, topology = make_work(1000, epochs=3), parse_topology("v5e:2x4")
    row = row_of(work, topology, compiled(), None)
    assert (row["limit"], row["seconds"]["step"]) == ("compute", pytest.approx(1e-3))
    assert row["images_per_second"] == pytest.approx(1e6)
    assert row["job_seconds"] == pytest.approx(3 * 60 * 1e-3)
    assert row_of(work, topology, compiled(memory_bytes=8.19e9), None)["seconds"]["memory"] == pytest.approx(0.01)
    # Rows of 2 and of 4 chips: one link each way for either, 7/8 of the bytes twice over them, four hops twice.
    links = row_of(work, topology, compiled(collectives=[{"kind": "all-reduce", "count": 1, "bytes": 1e9}]), 2.0)
    assert links["seconds"]["interconnect"] == pytest.approx(2 * (7 / 8 * 1e9 / 100e9 + 4e-6))
    assert links["limit"] == "interconnect"
    assert links["cost"] == pytest.approx(2 * 8 * links["job_seconds"] / 3600)


def test_rows_with_linked_ends_are_twice_as_fast() -> None:
    def seconds(topology: str, kind: str = "all-reduce", size: float = 1e12, count: int = 1) -> float:
        return parse_topology(topology).message_seconds(kind, size, count)

    assert seconds("v5e:16x16") == pytest.approx(seconds("v5e:8x8") / 2, rel=0.02)
    assert seconds("v5p:4x4x4") == pytest.approx(seconds("v5p:2x4x4") / 2, rel=0.02)
    assert seconds("v6e:1x1") == 0.0
    assert seconds("v5e:8x8", "all-gather", 1e9, 3) == pytest.approx(seconds("v5e:8x8", "all-reduce", 1e9, 3) / 2)


def test_cores_that_are_devices_have_half_a_chip_each() -> None:
    topology = parse_topology("v2:2x2")
    row = row_of(make_work(1000), topology, compiled(flops=23e12, memory_bytes=350e9), None)
    assert row["seconds"]["compute"] == row["seconds"]["memory"] == pytest.approx(1.0)
    assert (row["chips"], row["devices"], row["memory_bytes"]) == (4, 8, 8 * 2**30)


@pytest.mark.parametrize("generation", GENERATIONS.values(), ids=GENERATIONS)
def test_every_slice_in_the_table_can_be_named(generation: Any) -> None:
    for sides in generation.slices:
        topology = parse_topology(f" {generation.name}:{sides} ")
        assert topology.name == f"{generation.name}:{sides}"
        assert topology == Topology(generation=generation, sides=tuple(map(int, sides.split("x"))))


@pytest.mark.parametrize("batch", [64, 5_000, 90_000, 40_000_000])
@pytest.mark.parametrize(("fixed", "per_image"), [(1e9, 2e5), (0, 1.5e6), (15e9, 1e3)])
def test_the_search_for_the_largest_batch(fixed: float, per_image: float, batch: int) -> None:
    topology = parse_topology("v5e:2x2")
    limit = MEMORY_SHARE * topology.device_memory_bytes
    tried = []

    def compile_step(topology: Topology, batch: int) -> dict[str, Any]:
        tried.append(batch)
        needed = fixed + per_image * batch / topology.devices
        return {"fits": needed <= limit, "needed_bytes": needed}

    largest = find_largest_batch(compile_step, topology, batch)
    assert largest is not None
    assert largest in tried
    assert largest % 4 == 0
    assert 0.9 * limit < fixed + per_image * largest / 4 <= limit
    assert len(tried) <= MAX_COMPILATIONS


def test_no_batch_fits() -> None:
    refused = {"fits": False, "needed_bytes": 0}
    assert find_largest_batch(lambda topology, batch: refused, parse_topology("v5e:2x2"), 64) is None


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "--topology v5e:2x4"),
        (["--topology", "v5e:2x4", "--devices", "cpu"], "give one of them"),
        (["--topology", "v9:2x4"], "v2:"),
        (["--topology", "v5e:3x3"], "2x2, 2x4, 4x4"),
        (["--topology", "v5e"], "the slices of v5e"),
        (["--topology", "v5e:2x4,v5e:2x4"], "v5e:2x4 is named twice"),
        (["--topology", "v5e:2x4", "--price", "0"], "--price 0"),
        (["--topology", "v5e:2x4", "--price", "nan"], "--price nan"),
        (["--topology", "v5e:2x4", "--images", "0"], "--images 0"),
        (["--topology", "v5e:2x4", "--engine", "torch"], "--engine torch"),
        (["--topology", "v5e:2x4", "--set", "epoch=1"], "epoch"),
        (["--devices", "cpu", "--price", "1"], "--price: requires --topology"),
        (["--devices", "cpu", "--largest-batch"], "--largest-batch: requires --topology"),
        (["--devices", "cpu,gpu"], "--devices gpu"),
        (["--devices", "cpu,cpu"], "cpu is named twice"),
        (["--devices", "cpu", "--engine", "tpu"], "--engine tpu"),
        (["--devices", "2xcpu", "--batch-size", "1"], "batch_size = 1 is less than"),
        (["--devices", "cpu", "--data", "nowhere"], "nowhere"),
    ],
)
def test_wrong_input_is_one_message(arguments: list[str], named: str, tmp_path: Path, capsys) -> None:
    out = tmp_path / "out"
    assert main(["plan", "fashion-mnist", *arguments, "--out", str(out)]) == 2
    message = capsys.readouterr().err
    assert named in message
    assert not out.exists()


def test_data_of_unknown_size_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "caltech101", "--topology", "v5e:2x4"]) == 2
    assert "--images N and --classes K" in capsys.readouterr().err


def test_a_folder_in_use_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "plan.json").write_text("mine")
    assert main(["plan", "digits", "--devices", "cpu", "--out", str(tmp_path)]) == 2
    assert "choose another --out" in capsys.readouterr().err
    assert (tmp_path / "plan.json").read_text() == "mine"


def test_without_the_compiler_the_command_that_installs_it_is_named(tmp_path: Path) -> None:
    """In a Python that finds no libtpu, whatever is installed."""
    code = (
        "import importlib.util, sys; find = importlib.util.find_spec; "
        "importlib.util.find_spec = lambda name, *a: None if name == 'libtpu' else find(name, *a); "
        "from flatout.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, "plan", "fashion-mnist", "--topology", "v5e:2x4", "--out", str(tmp_path)]
    environment = os.environ | {"FLATOUT_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)
    assert done.returncode == 2
    assert "pip install 'flatout[tpu]'" in done.stderr
    assert "Traceback" not in done.stderr


# --- the work ---------------------------------------------------------------------------------------------------------


def found(job: str, data: str | None = None, **given: Any) -> tuple[int, int, str]:
    from flatout.console import Console
    from flatout.plan.plan import find_work

    work = find_work(job, data, {}, given.get("images"), given.get("classes"), accelerated=False, console=Console(None))
    return work.images, work.classes, work.recipe.model


def test_images_are_counted_published_or_given(shared_data: Path, tmp_path: Path) -> None:
    assert found("fashion-mnist") == (60_000, 10, "fashion-cnn")
    assert found("fashion-mnist", images=1000) == (1000, 10, "fashion-cnn")
    assert found("caltech101", images=2848, classes=101) == (2848, 101, "caltech-cnn")
    counted = found("caltech101", str(shared_data / "caltech101"))
    assert counted == (2848, 101, "caltech-cnn")
    # 1,797 digits, a fifth of them set aside for testing and a tenth for validation.
    assert found("digits") == (1258, 10, "parallel-cnn")
    recipe = tmp_path / "mine.toml"
    recipe.write_text('model = "vgg16"\nimage_size = 64\nepochs = 2\nbatch_size = 16\n')
    assert found(str(recipe), images=500, classes=7) == (500, 7, "vgg16")
    for label in ("dark", "bright"):
        (tmp_path / "photos" / label).mkdir(parents=True)
        for number in range(20):
            Image.new("L", (16, 16), number).save(tmp_path / "photos" / label / f"{number}.png")
    # A fifth of 40 photos is set aside.
    assert found(str(tmp_path / "photos"))[:2] == (32, 2)


def test_a_short_last_batch_counts_unless_it_is_dropped() -> None:
    kept = make_work(1000, images=2500, epochs=2)
    assert (kept.steps, kept.images_trained) == (6, 5000)
    dropped = Work(recipe=kept.recipe.override({"drop_last": True}), images=2500, classes=10, about="")
    assert (dropped.steps, dropped.images_trained) == (4, 4000)
    few = make_work(1000, images=300)
    assert (few.batch, few.steps, few.images_trained) == (300, 1, 300)
