"""Device names, and the choice of engine, processes and threads."""

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import timm
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from flatout.config import Recipe
from flatout.engine import devices, factory
from flatout.engine.devices import engine_for, parse_devices, spec_of, tpu_count
from flatout.engine.torch import accelerator
from flatout.utils.errors import InputError

Host = Callable[..., None]


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    """Return a function that sets what this host has."""

    def has(cores: int = 4, **found: int) -> None:
        monkeypatch.setattr(devices, "available", lambda: {"cpu": cores, **found})
        monkeypatch.setattr(devices, "tpu_count", lambda: found.get("tpu", 0))
        monkeypatch.setattr(factory, "usable_cores", lambda: cores)
        monkeypatch.setattr(factory, "physical_cores", lambda: cores)
        monkeypatch.setattr(devices, "physical_cores", lambda: cores)
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    return has


# --- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "names"),
    [
        ("cpu", ("cpu",)),
        ("3xcpu", ("cpu", "cpu", "cpu")),
        ("cuda", ("cuda:0",)),
        ("2xcuda", ("cuda:0", "cuda:1")),
        ("cuda:1", ("cuda:1",)),
        ("cuda:0,2", ("cuda:0", "cuda:2")),
        ("cuda:0,0", ("cuda:0", "cuda:0")),
        ("auto", ("cuda:0", "cuda:1", "cuda:2")),
        ("2xGPU", ("cuda:0", "cuda:1")),
    ],
)
def test_specs(spec: str, names: tuple[str, ...], host: Host) -> None:
    host(cuda=3)
    parsed = parse_devices(spec)
    assert parsed.names == names
    assert parsed.is_accelerated == (names[0] != "cpu")
    assert parse_devices(str(parsed)) == parsed


def test_ranks_that_share_gpus_are_counted() -> None:
    assert spec_of(["cuda:0"] * 2 + ["cuda:1"] * 2) == "4xcuda"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("4xcuda", "--devices 4xcuda: only 3 available; this host has: cpu (2), cuda (3)"),
        ("cuda:3", "--devices cuda:3: only 3 available"),
        ("mps", "--devices mps: none found"),
        ("33xcpu", "--devices 33xcpu: at most 32 processes"),
        *((spec, f"--devices {spec}: must be auto, cpu") for spec in ("cpu:1", "2xcuda:1", "0xcpu", "2xauto", "cqu")),
        ("tpu", "--devices tpu: TPUs need --engine xla"),
    ],
)
def test_wrong_specs_are_explained(spec: str, message: str, host: Host) -> None:
    host(cores=2, cuda=3)
    with pytest.raises(InputError) as raised:
        parse_devices(spec)
    assert str(raised.value).startswith(message)


# --- TPUs, without starting JAX ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nodes", "chips", "count"),
    [
        (["vfio/0", "vfio/1"], [("0x1ae0", "0x0063"), ("0x1ae0", "0x0063"), ("0x1ae0", "0x0042")], 2),
        (["accel0", "accel1"], [("0x1ae0", "0x0027"), ("0x1ae0", "0x0027")], 4),
        # A GPU that is passed through, chips without a device node, chips yet to come.
        (["vfio/12"], [("0x10de", "0x2330")], 0),
        ([], [("0x1ae0", "0x0063")], 0),
        (["accel0"], [], 1),
    ],
)
def test_tpus_are_counted_as_linux_shows_them(
    nodes: list[str], chips: list[tuple[str, str]], count: int, tmp_path: Path
) -> None:
    for number, (vendor, device) in enumerate(chips):
        folder = tmp_path / "sys/bus/pci/devices" / f"0000:00:0{number}.0"
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(f"{vendor}\n")
        (folder / "device").write_text(f"{device}\n")
    for node in nodes:
        (tmp_path / "dev" / node).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "dev" / node).touch()
    assert tpu_count(tmp_path) == count


def test_auto_on_a_tpu_host_is_xla_on_its_tpus(host: Host) -> None:
    host(tpu=8)
    assert engine_for("auto", "auto") == "xla"
    with pytest.raises(InputError, match="--engine tpu: known engines: auto, torch, xla"):
        engine_for("tpu", "tpu")
    assert engine_for("cpu", "auto") == engine_for("auto", "torch") == "torch"
    assert str(parse_devices("auto", "xla")) == "8xtpu"
    assert str(parse_devices("4xtpu", "xla")) == "4xtpu"
    assert str(parse_devices("tpu:2,3", "xla")) == "tpu:2,3"
    assert factory.join("8xtpu", "xla").device.type == "cpu"  # of the host, which drives the TPUs


# --- processes and threads --------------------------------------------------------------------------------------------


RECIPE = Recipe(model="test", image_size=8, channels=1, epochs=10, batch_size=64)


def chosen(spec: str, engine: str = "torch", *, seconds: float | None = None, **changes: object) -> tuple[str, str]:
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 2))
    recipe = RECIPE.override(changes)
    found, reason = factory.choose_processes(spec, recipe, 60_000, lambda: net, engine, seconds=seconds)
    return str(found), reason


def test_more_processes_than_cores_are_warned_of(host: Host) -> None:
    host(cores=2)
    assert chosen("2xcpu") == ("2xcpu", "")
    assert chosen("3xcpu") == ("3xcpu", "--devices 3xcpu: 3 processes on 2 cores are slower than one per core")


def test_xla_says_that_it_leaves_a_gpu_unused(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host(cuda=1)
    said = "--devices auto: --engine xla does not run on GPUs, so it uses the CPU; for GPUs: --engine torch"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert chosen("auto", "xla") == ("cpu", said)
    assert chosen("2xcpu", "xla") == ("2xcpu", "")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert chosen("auto", "xla") == ("cpu", "")


@pytest.mark.parametrize(
    ("variables", "threads"),
    [
        ({}, 1),
        ({"TORCHELASTIC_RUN_ID": "x"}, 4),  # torchrun has set it
        ({"TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": "1"}, 1),  # which it does for several ranks only
        ({"TORCHELASTIC_RUN_ID": "x", "FLATOUT_DEVICE": "cpu"}, 1),  # a rank of flatout's launcher
    ],
)
def test_one_thread_is_the_users_wish_unless_torchrun_set_it(
    variables: dict[str, str], threads: int, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    host(cores=8)
    for name, value in {"OMP_NUM_THREADS": "1", **variables}.items():
        monkeypatch.setenv(name, value)
    assert devices.cpu_threads(2) == threads


@pytest.fixture
def measured(host: Host, monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
    """What is measured on a host of four cores: seconds per image by number of ranks."""
    host(cores=4)
    seconds = dict[int, float]()
    monkeypatch.setattr(factory, "seconds_per_image", lambda model, recipe, device="cpu", *, ranks=1: seconds[ranks])
    return seconds


@pytest.mark.parametrize(
    ("seconds", "budget", "spec", "reason"),
    [
        ({1: 1e-6}, None, "cpu", "using 1 process with 4 threads (about 1 s)"),  # shorter than the start of processes
        ({1: 1e-3, 4: 3e-3}, None, "4xcpu", "using 4 processes, one per core (about 8 min)"),
        ({1: 1e-3, 4: 5e-3}, None, "cpu", "using 1 process with 4 threads (about 10 min)"),
        # The start of processes takes its share of the minutes.
        ({1: 1e-3, 4: 3.8e-3}, 60.0, "cpu", "using 1 process with 4 threads"),
        ({1: 1e-3, 4: 3.8e-3}, 600.0, "4xcpu", "using 4 processes, one per core"),
    ],
)
def test_auto_measures_threads_and_processes(
    seconds: dict[int, float], budget: float | None, spec: str, reason: str, measured: dict[int, float]
) -> None:
    measured |= seconds
    assert chosen("auto", seconds=budget) == (spec, f"--devices auto: {reason}")


@pytest.mark.parametrize("budget", [None, 600.0])
def test_fine_tuning_is_one_process_as_its_recipe_is(budget: float | None, measured: dict[int, float]) -> None:
    found = chosen("auto", seconds=budget, linear_probe=True, freeze="all-but-last-3")
    assert (found, measured) == (("cpu", ""), {})


def test_the_first_model_chooses_between_threads_and_processes(measured: dict[int, float]) -> None:
    measured |= {1: 1e-3, 4: 3e-3}
    speeds = factory.speeds_on("auto", "torch")
    assert speeds is not None
    recipe = Recipe(model="fast-cnn-16", image_size=28, channels=1, epochs=1, batch_size=64)
    assert speeds.training(recipe, 10) == pytest.approx(4 / 3e-3)
    del measured[1]
    assert speeds.training(recipe, 10) == pytest.approx(4 / 3e-3)


def test_a_gpu_that_torch_warns_of_is_used_unless_its_driver_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_available(answer: bool) -> bool:
        said = "The NVIDIA driver on your system is too old (found version 11040). (Triggered internally at x.cpp:1.)"
        warnings.warn(f"CUDA initialization: {said}", UserWarning, stacklevel=1)
        return answer

    monkeypatch.setattr(torch.cuda, "is_available", lambda: is_available(False))
    for spec in ("auto", "cuda", "cpu"):
        with pytest.raises(InputError, match=r"cannot use the GPU: The NVIDIA .* is too old \(.*\)\.?; to train"):
            parse_devices(spec)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: is_available(True))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert str(parse_devices("auto")) == "cuda:0"


def test_auto_takes_the_gpus_that_the_batch_fills(host: Host) -> None:
    host(cuda=4)
    assert chosen("auto", epochs=100) == ("4xcuda", "--devices auto: using 4xcuda")
    assert chosen("auto", epochs=100, batch_size=17)[0] == "2xcuda"
    assert "cuda:0: starting several would take longer than the training (about 5 s)" in chosen("auto")[1]


@pytest.mark.parametrize(("channels", "precision"), [(8, "tf32"), (256, "bf16")])
def test_gpus_compute_much_in_bfloat16(channels: int, precision: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, channels, 3, padding=1), nn.Conv2d(channels, channels, 3, padding=1))
    recipe = Recipe(model="test", image_size=8, channels=3, epochs=1, batch_size=8)
    operations = 64 * 9 * channels * (3 + channels)
    assert accelerator.precision_of_gpu(["tf32", "fp32", "bf16"], model, recipe) == (precision, operations)
    assert accelerator.precision_of_gpu(["fp32", "bf16"], model, recipe) is None


@pytest.mark.parametrize(
    ("operations", "epochs", "seconds", "is_worth"),
    [
        (4_100_000_000, 2, None, True),  # two epochs of ResNet-50 on ImageNet
        (4_100_000_000, 1, 60.0, False),
        (4_100_000_000, 1, 600.0, True),
        (480_500, 50, None, False),  # fashion-mnist
        (480_500, 50, 600.0, False),
    ],
)
def test_long_runs_of_large_networks_are_tuned(
    operations: int, epochs: int, seconds: float | None, is_worth: bool
) -> None:
    assert accelerator.is_worth_tuning(operations, epochs * 1_281_167, seconds) == is_worth


@pytest.mark.parametrize("name", ["test_vit", "test_convnext", "test_efficientnet", "levit_128s", "edgenext_xx_small"])
def test_multiply_adds_are_those_of_torch(name: str) -> None:
    side = 224 if name == "levit_128s" else 160
    # On CPUs torch does not count attention.
    with torch.device("meta"):
        model = timm.create_model(name).eval()
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(torch.zeros(1, 3, side, side))
        assert accelerator.multiply_adds(model, (side, side), 3) == counter.get_total_flops() // 2


class Formats(nn.Module):
    """Notes the number formats that its product is computed in."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.found = nn.Linear(64, 2), set[torch.dtype]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x.flatten(1))
        self.found.add(y.dtype)
        return y


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_the_estimate_computes_in_the_recipes_precision(
    precision: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accelerator, "processor_flags", lambda: {"avx512_bf16"})
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
    recipe = RECIPE.override({"precision": precision})
    model, generator = Formats(), torch.get_rng_state()
    assert factory.seconds_per_image(model, recipe) > 0
    assert factory.seconds_per_image(model, recipe, ranks=2) > 0
    assert model.found == {dtype}
    assert torch.equal(torch.get_rng_state(), generator)
    monkeypatch.setattr(accelerator, "processor_flags", set)
    if precision == "bf16":
        with pytest.raises(InputError, match=r"precision = 'bf16': cpu here supports only fp32"):
            factory.seconds_per_image(model, recipe)


# --- ranks of a launcher ----------------------------------------------------------------------------------------------


def test_each_rank_of_a_launcher_has_a_device(host: Host) -> None:
    host(cuda=2)
    for spec, names in {"auto": ["cuda:0", "cuda:1", "cuda:0"], "cpu": ["cpu"] * 3, "3xcpu": ["cpu"] * 3}.items():
        assert factory.local_devices(spec, 3) == names
    assert factory.local_devices("cuda", 2) == ["cuda:0", "cuda:1"]
    with pytest.raises(InputError, match="names 2 devices, but the launcher started 3 ranks here"):
        factory.local_devices("2xcuda", 3)
