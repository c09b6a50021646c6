"""`flatout plan`: programs compiled by the real TPU compiler, steps measured on devices that are there, bad input."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from flatout.cli import main
from flatout.jobs import builtin_jobs, load_job
from flatout.plan.chips import GENERATIONS, Topology, parse_topology
from flatout.plan.roofline import Work, row_of

HAS_COMPILER = all(importlib.util.find_spec(name) for name in ("jax", "libtpu", "torchax", "optax"))
needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="needs the TPU compiler: pip install 'flatout[tpu]'")
GIVEN = {"digits": ["--images", "1258", "--classes", "10"], "caltech101": ["--images", "2848", "--classes", "101"]}
ROUNDS_OF_REPEATS = 5


def run(*arguments: str, out: Path, **environment: str) -> tuple[dict[str, Any], str]:
    """Run `flatout plan` as a user does; return what it printed as JSON, and what it wrote to stderr."""
    command = [sys.executable, "-m", "flatout", "plan", *arguments, "--json", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=os.environ | environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def gradient_bytes(result: dict[str, Any]) -> int:
    """Return the bytes of the gradients of a job, as 16-bit numbers."""
    from flatout.plan.compile import build_model

    recipe = load_job(result["job"])
    work = Work(recipe=recipe, images=result["images"], classes=result["classes"], about="")
    return sum(2 * p.numel() for p in build_model(work, False).parameters() if p.requires_grad)


def is_a_picture(path: Path) -> bool:
    with Image.open(path) as image:
        return image.format == "PNG" and image.width > 1000


# --- compiled ---------------------------------------------------------------------------------------------------------


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("job", builtin_jobs())
def test_every_job_fits_eight_chips_which_add_up_their_gradients_and_wait_for_no_host(job: str, tmp_path: Path) -> None:
    result, errors = run(job, *GIVEN.get(job, []), "--topology", "v5e:2x4", out=tmp_path / "plan")
    (row,) = result["topologies"]
    assert result["estimate"] is True
    assert row["fits"]
    assert 0 < row["needed_bytes"] < row["memory_bytes"] == 16 * 2**30
    assert row["flops"] > 0
    assert row["host_transfers"] == []
    sums = [c for c in row["collectives"] if c["kind"] == "all-reduce"]
    assert sum(c["bytes"] for c in sums) >= gradient_bytes(result)
    assert row["seconds"]["step"] == max(row["seconds"][limit] for limit in ("compute", "memory", "interconnect"))
    assert row["images_per_second"] * row["job_seconds"] == pytest.approx(
        result["epochs"] * result["images"], rel=0.02
    ), "a short last batch is dropped at most"
    assert errors.splitlines() == [f"compiling {result['model']}, batch {result['batch_size']:,}, for v5e:2x4"]
    assert is_a_picture(tmp_path / "plan" / "plan.png")
    assert json.loads((tmp_path / "plan" / "plan.json").read_text()) == {k: v for k, v in result.items() if k != "out"}


@needs_compiler
@pytest.mark.slow
def test_a_whole_pod_and_a_single_chip(tmp_path: Path) -> None:
    result, _ = run("digits", *GIVEN["digits"], "--topology", "v5e:16x16,v5e:1x1", out=tmp_path / "plan")
    pod, chip = result["topologies"]
    assert (pod["chips"], chip["chips"]) == (256, 1)
    assert pod["fits"]
    assert any(c["kind"] == "all-reduce" for c in pod["collectives"])
    assert chip["collectives"] == []
    assert chip["seconds"]["interconnect"] == 0.0
    # 64 images on 256 chips: three of four chips compute padding.
    assert (pod["batch_padded"], pod["padding_fraction"]) == (256, 0.75)
    assert [row["chips"] for row in result["scaling"]] == [2**n for n in range(9)]
    assert result["scaling_of"] == "v5e:16x16"
    assert result["scaling"][0]["efficiency"] == 1.0


@needs_compiler
@pytest.mark.slow
def test_a_step_compiles_for_other_generations(tmp_path: Path) -> None:
    """Chips that need a setting of their own, the oldest, and the newest, of which each is two devices."""
    generations = [GENERATIONS[name] for name in ("v2", "v4", "tpu7x")]
    names = [f"{g.name}:{next(s for s in g.slices if s.startswith('2x2'))}" for g in generations]
    result, _ = run("mnist-parallel", "--topology", ",".join(names), out=tmp_path / "plan")
    assert [row["topology"] for row in result["topologies"]] == names
    for row, generation in zip(result["topologies"], generations, strict=True):
        assert row["fits"]
        assert (row["chips"], row["devices"]) == (4, 4 * generation.cores)


@needs_compiler
@pytest.mark.slow
def test_a_batch_that_does_not_fit_is_reported_with_the_largest_that_does(tmp_path: Path) -> None:
    """A batch of 25 GB of pixels, on its way 100 GB; the answer is itself compiled."""
    topology, small = "v5e:2x2", ["--set", "image_size=64"]
    cache = {"FLATOUT_CACHE": str(tmp_path / "cache")}
    asked = ["cats-dogs", *small, "--topology", topology, "--batch-size"]
    result, errors = run(*asked, "2000000", "--images", "60000000", "--classes", "2", out=tmp_path / "a", **cache)
    (row,) = result["topologies"]
    assert row["fits"] is False
    assert "images_per_second" not in row
    assert row["needed_bytes"] > row["memory_bytes"]
    assert result["scaling"] == []
    assert errors.count("compiling") <= 6
    largest = row["largest_batch"]
    assert largest % 4 == 0
    again, _ = run(*asked, str(largest), "--images", "60000000", "--classes", "2", out=tmp_path / "b", **cache)
    (fitting,) = again["topologies"]
    assert fitting["fits"]
    assert fitting["needed_bytes"] > 0.7 * 16 * 2**30


@needs_compiler
@pytest.mark.slow
def test_the_second_time_nothing_is_compiled_nor_imported(tmp_path: Path) -> None:
    arguments = ["digits", *GIVEN["digits"], "--topology", "v5e:2x4"]
    first, _ = run(*arguments, out=tmp_path / "first")
    code = (
        "import sys; from flatout.cli import main; assert main(sys.argv[1:]) == 0; "
        "sys.exit(', '.join({'torch', 'jax', 'torchax'} & set(sys.modules)) or 0)"
    )
    command = [sys.executable, "-c", code, "plan", *arguments, "--price", "1.2", "--out", str(tmp_path / "second")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    second = json.loads((tmp_path / "second" / "plan.json").read_text())
    row = second["topologies"][0]
    assert row["cost"] == pytest.approx(1.2 * 8 * row["job_seconds"] / 3600)
    assert {k: v for k, v in row.items() if k != "cost"} == {
        k: v for k, v in first["topologies"][0].items() if k != "cost"
    }
    assert f"{row['images_per_second']:,.0f}" in done.stdout


@needs_compiler
def test_what_is_searched_for_in_programs_would_be_found() -> None:
    """Lines as the TPU compiler writes them, from a program that prints in the middle and from one that trains."""
    from flatout.plan.topology import Collective, collectives, host_transfers, needed_bytes

    text = """
  %get = f32[10]{0:T(128)S(1)} get-tuple-element(%all-reduce.23), index=0, metadata={op_name="all-reduce"}
  %all-reduce.23 = (f32[10]{0:T(128)S(1)}, /*index=1*/bf16[50,320]{1,0:T(8,128)(2,1)}) all-reduce(%a, %b), channel_id=1
  ROOT %all-reduce.2 = f32[]{:T(128)} all-reduce(%fusion.4), channel_id=3
  %ag = (f32[8]{0}, f32[64]{0}) all-gather-start(%x), channel_id=4
  %rs.1 = u8[16]{0:T(128)} reduce-scatter(%y), channel_id=5
  %print.15 = (f32[]{:T(128)}, u32[], token[]) send(%reduce, %print.14), channel_id=1, is_host_transfer=true
  %print.16 = token[] send-done(%print.15), channel_id=1, is_host_transfer=true
  %print.17 = (f32[]{:T(128)}, u32[], token[]) recv(%print.16), channel_id=2, is_host_transfer=true
  %shift = (f32[8]{0}, u32[], token[]) send(%reduce, %print.14), channel_id=7
  %in = (u8[8]{0}, token[]) infeed(%token)
"""
    assert list(collectives(text)) == [
        Collective(kind="all-gather", count=1, bytes=4 * 64),
        Collective(kind="all-reduce", count=2, bytes=4 * 10 + 2 * 50 * 320 + 4),
        Collective(kind="reduce-scatter", count=1, bytes=16),
    ]
    assert [line.partition(" ")[0] for line in host_transfers(text)] == ["%print.15", "%print.17", "%in"]
    early = "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (1.50T) is"
    late = "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 21.25G of 15.75G hbm."
    assert needed_bytes(early) == 1.5 * 2**40
    assert needed_bytes(late) == 21.25 * 2**30
    assert needed_bytes("INVALID_ARGUMENT: no") is None


@needs_compiler
@pytest.mark.slow
def test_a_program_that_prints_waits_for_the_host() -> None:
    """The real compiler's text of a host transfer and of a sum is what the search looks for."""
    code = """
import jax, json, numpy as np, sys
from flatout.engine.xla import devices
devices.settle_for_compiling()
from flatout.plan.chips import parse_topology
from flatout.plan.topology import chips, collectives, host_transfers
from jax.sharding import Mesh, NamedSharding, PartitionSpec
mesh = Mesh(np.array(chips(parse_topology("v5e:2x4"))), ("batch",))
cut, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (["batch"], []))
def step(x):
    jax.debug.print("{}", x.sum())
    return x.sum(0)
x = jax.ShapeDtypeStruct((1024, 256), np.float32)
text = jax.jit(step, in_shardings=cut, out_shardings=whole).lower(x).compile().as_text()
print(json.dumps([len(list(host_transfers(text))), [[c.kind, c.bytes] for c in collectives(text)]]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    transfers, found = json.loads(done.stdout)
    assert transfers > 0
    assert dict(found)["all-reduce"] >= 4 * 256


# --- arithmetic -------------------------------------------------------------------------------------------------------


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
    pod, part = (parse_topology(f"v5e:{sides}") for sides in ("16x16", "8x8"))
    assert pod.all_reduce_seconds(1e12) == pytest.approx(part.all_reduce_seconds(1e12) / 2, rel=0.02)
    cube, flat = (parse_topology(f"v5p:{sides}") for sides in ("4x4x4", "2x4x4"))
    assert cube.all_reduce_seconds(1e12) == pytest.approx(flat.all_reduce_seconds(1e12) / 2, rel=0.02)
    assert parse_topology("v6e:1x1").all_reduce_seconds(1e12) == 0.0
    assert part.all_gather_seconds(1e9, 3) == pytest.approx(part.all_reduce_seconds(1e9, 3) / 2)


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


@needs_compiler
@pytest.mark.slow
def test_the_compiler_knows_every_slice_in_the_table() -> None:
    code = """
from flatout.engine.xla import devices
devices.settle_for_compiling()
from flatout.plan.chips import GENERATIONS, parse_topology
from flatout.plan.topology import chips
for generation in GENERATIONS.values():
    for sides in generation.slices:
        topology = parse_topology(f"{generation.name}:{sides}")
        assert len(chips(topology)) == topology.devices, topology.name
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stderr) == (0, "")


# --- measured ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_devices_that_are_there_are_measured(tmp_path: Path) -> None:
    out = tmp_path / "plan"
    began = time.monotonic()
    result, errors = run("cats-dogs", "--set", "image_size=32", "--devices", "cpu,2xcpu", out=out)
    seconds = time.monotonic() - began
    assert result["estimate"] is False
    assert [row["devices"] for row in result["devices"]] == ["cpu", "2xcpu"]
    assert [row["processes"] for row in result["devices"]] == [1, 2]
    for row in result["devices"]:
        rate, job, step = row["images_per_second"], row["job_seconds"], row["step_seconds"]
        assert 0 < rate["min"] <= rate["median"] <= rate["max"]
        assert job["median"] * rate["median"] == pytest.approx(10 * 8000)
        assert job["max"] == pytest.approx(row["once_seconds"] + 10 * 250 * step["max"])
        # What was measured is no longer than the command ran, and the processes take what torch takes at least.
        assert 0 < row["repeats"] * row["steps_each"] * step["min"] < seconds
        assert row["repeats"] <= ROUNDS_OF_REPEATS
        assert row["peak_rss_bytes"] > row["processes"] * 100e6
        assert row["peak_device_bytes"] is None
        assert row["warmup_seconds"] > 0
        assert row["images_measured"] <= 8000
    assert result["devices"][1]["peak_rss_bytes"] > result["devices"][0]["peak_rss_bytes"]
    assert errors.splitlines() == [f"{spec}: measuring steps of 32 images" for spec in ("cpu", "2xcpu")]
    assert is_a_picture(out / "plan.png")
    assert sorted(path.name for path in out.iterdir()) == ["plan.json", "plan.png"]


@pytest.mark.slow
def test_frozen_layers_are_counted_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A VGG16 whose last layer alone trains: nearly all of the job is the cached prefix."""
    changes = {"image_size": 32, "freeze": "all-but-last-1", "pretrained": "false", "batch_size": 16}
    settings = [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
    out = tmp_path / "plan"
    assert main(["plan", "oct-vgg16", *settings, "--images", "4096", "--devices", "cpu", "--out", str(out)]) == 0
    row = json.loads((out / "plan.json").read_text())["devices"][0]
    assert 0.3 * row["job_seconds"]["median"] < row["once_seconds"] < row["job_seconds"]["min"]
    assert "of the job is the frozen layers" in capsys.readouterr().out


@needs_compiler
@pytest.mark.slow
def test_the_other_engine_is_measured_too(tmp_path: Path) -> None:
    result, _ = run("digits", "--devices", "2xcpu", "--engine", "xla", out=tmp_path / "plan")
    (row,) = result["devices"]
    assert (row["engine"], row["processes"], row["runs_on"]) == ("xla", 1, "2xcpu")
    assert row["images_per_second"]["min"] > 0


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "--topology v5e:2x4"),
        (["--topology", "v5e:2x4", "--devices", "cpu"], "give one of them"),
        (["--topology", "v9:2x4"], "v2:"),
        (["--topology", "v5e:3x3"], "2x2, 2x4, 4x4"),
        (["--topology", "v5e"], "v5e has the slices"),
        (["--topology", "v5e:2x4,v5e:2x4"], "v5e:2x4 is named twice"),
        (["--topology", "v5e:2x4", "--price", "0"], "--price 0"),
        (["--topology", "v5e:2x4", "--price", "nan"], "--price nan"),
        (["--topology", "v5e:2x4", "--images", "0"], "--images 0"),
        (["--topology", "v5e:2x4", "--engine", "torch"], "--engine torch"),
        (["--topology", "v5e:2x4", "--set", "epoch=1"], "epoch"),
        (["--devices", "cpu", "--price", "1"], "--price: goes with --topology"),
        (["--devices", "cpu", "--largest-batch"], "--largest-batch: goes with --topology"),
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


@needs_compiler
@pytest.mark.slow
def test_an_uneven_batch_is_padded_with_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["digits", *GIVEN["digits"], "--batch-size", "65", "--topology", "v5e:2x4"]
    done = subprocess.run(
        [sys.executable, "-m", "flatout", "plan", *command, "--out", str(tmp_path / "plan")],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert "8 devices cannot share a batch of 65 evenly; 9.7% of the work is padding" in done.stdout
    assert "A batch of 72 costs the same" in done.stdout


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
    made = found(str(shared_data / "caltech101"))
    assert made[:2] == (2848, 101)


def test_a_short_last_batch_counts_unless_it_is_dropped() -> None:
    kept = make_work(1000, images=2500, epochs=2)
    assert (kept.steps, kept.images_trained) == (6, 5000)
    dropped = Work(recipe=kept.recipe.override({"drop_last": True}), images=2500, classes=10, about="")
    assert (dropped.steps, dropped.images_trained) == (4, 4000)
    few = make_work(1000, images=300)
    assert (few.batch, few.steps, few.images_trained) == (300, 1, 300)
