"""The parts of `gpu.py`: each measures one thing on the first GPU and writes its figures as it goes.

Every measurement builds its own model and engine. Times are of the host's clock around work that was waited for.
"""

import contextlib
import functools
import gc
import importlib.util
import itertools
import json
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import numpy as np
import torch
from torch import nn

from flatout.config import Augment, Momentum, Recipe
from flatout.config.jobs import load_job
from flatout.data.batches import Batch, Split, epoch_batches
from flatout.distributed.world import World
from flatout.engine.devices import machine as describe_machine
from flatout.engine.factory import join
from flatout.engine.torch.engine import TorchEngine
from flatout.models.build import build_model

if TYPE_CHECKING:
    from gpu import Results

ROOT = Path(__file__).resolve().parent.parent
IMAGENET = {"data.mean": [0.485, 0.456, 0.406], "data.std": [0.229, 0.224, 0.225]}
RECORDED = "the whole step runs as one CUDA graph"
# The kernels of a profile that are written, and the steps that it has.
TOP_KERNELS, PROFILED_STEPS = 25, 5
# The steps of two ranks that are timed. Both ranks must take the same ones, so their number cannot depend on the clock.
RANK_STEPS = 50
# Launched one by one; as a graph; as a graph of the compiled model, with algorithms that cuDNN has measured.
WAYS = ("eager", "graph", "tuned graph")


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How much is measured.

    Attributes:
        seconds: of the timing of a small network's step; of ResNet-50's, three times as long.
        warm_up_steps: after which cuDNN has chosen its algorithms and the step is recorded.
        matrix_size: of the largest product.
        copied_bytes: of a copy.
        network: of part 5.
        image_size, image_batches, image_count: side, batch sizes and number of its images.
        small_batch, small_images: batch size and number of images of the small networks.
        ways: to run a step.
        command: arguments of `flatout train fashion-mnist`.
        tests: arguments of pytest.
    """

    seconds: float
    warm_up_steps: int
    matrix_size: int
    copied_bytes: int
    network: str
    image_size: int
    image_batches: tuple[int, ...]
    image_count: int
    small_batch: int
    small_images: int
    ways: tuple[str, ...] = WAYS
    command: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()


FULL = Scale(
    seconds=1.0,
    warm_up_steps=12,
    matrix_size=8192,
    copied_bytes=1 << 28,
    network="timm:resnet50",
    image_size=224,
    image_batches=(256, 512),
    image_count=4096,
    small_batch=1024,
    small_images=50_000,
    tests=("--maxfail=5",),
)
REHEARSAL = Scale(
    seconds=0.0,
    warm_up_steps=5,
    matrix_size=256,
    copied_bytes=1 << 20,
    network="timm:test_resnet",
    image_size=32,
    image_batches=(8, 16),
    image_count=32,
    small_batch=64,
    small_images=256,
    ways=("eager", "graph"),  # tests/cuda_mock/test_steps.py has the third
    command=("--epochs", "1"),
    tests=("--maxfail=1",),
)


# --- pieces -----------------------------------------------------------------------------------------------------------


def random_split(recipe: Recipe, count: int, classes: int, images: np.ndarray | None = None) -> Split:
    """Return random images and labels; `images` [count, H, W, C] is filled if it is given."""
    random = np.random.default_rng(1)
    shape = (count, *recipe.stored_sides, recipe.channels)
    images = np.empty(shape, np.uint8) if images is None else images
    for image in images:
        image[:] = random.integers(0, 256, image.shape, dtype=np.uint8)
    return Split(images=images, rows=np.arange(count), labels=np.arange(count) % classes)


class Training:
    """A model in training on the GPU, step by step.

    Args:
        samples: random images.
        net: the model; None for the recipe's, always with the same weights.
        way: one of `WAYS`.
        world: the ranks; None for one.
    """

    def __init__(
        self,
        recipe: Recipe,
        samples: Split,
        *,
        net: nn.Module | None = None,
        way: str = "graph",
        world: World | None = None,
    ) -> None:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.reset_peak_host_memory_stats()
        recipe = recipe.override({"tune": "always" if way == "tuned graph" else "never"})
        self.recipe, self.notes = recipe, list[str]()
        net = net or build_model(recipe, int(samples.labels.max()) + 1)
        world, may_record = world or join("cuda"), way != "eager"
        self.engine = TorchEngine(net, recipe, world=world, capture=may_record, report=self.notes.append)
        self.split = self.engine.place(samples)
        self.split.begin_epoch(0)
        self._batches = itertools.cycle(epoch_batches(recipe, samples, 0))
        self._steps = 0

    def close(self) -> None:
        """See `Engine.close`."""
        self.engine.close()
        if "torch._dynamo" in sys.modules:
            torch.compiler.reset()

    @property
    def is_recorded(self) -> bool:
        """Whether the steps are replays of a graph."""
        return RECORDED in self.notes

    def run(self, steps: int, batches: Iterator[Batch] | None = None) -> None:
        """Train for some steps, on the batches of the first epoch again and again or on others, and wait for them."""
        for inputs in self.split.feed(itertools.islice(batches or self._batches, steps)):
            self.split.train_step(inputs, self.recipe.optimizer.lr, self._steps)
            self._steps += 1
        self.engine.counts()

    def figures(self, warm_up_steps: int, seconds: float) -> dict[str, Any]:
        """Return the speed of the steps after those of the warm-up, timed for `seconds`, and their memory."""
        self.run(warm_up_steps)
        seconds = seconds_of(self.run, seconds)
        return {
            "milliseconds": 1000 * seconds,
            "images_per_second": self.recipe.batch_size / seconds,
            "is_recorded": self.is_recorded,
            "peak_bytes": self.engine.peak_memory_bytes(),
            "pinned_bytes": torch.cuda.host_memory_stats()["allocated_bytes.peak"],
            "notes": self.notes,
        }

    def weights(self) -> dict[str, torch.Tensor]:
        """Return copies of the model's parameters and buffers."""
        return {name: value.clone() for name, value in self.engine.state().items() if name.startswith("model.")}


def seconds_of(run: Callable[[int], object], seconds: float) -> float:
    """Return how long one of several repetitions takes; `run` is given their number and waits for them.

    `seconds` is how long they take together, unless one takes longer.
    """
    began = time.perf_counter()
    run(3)
    count = max(3, int(3 * seconds / (time.perf_counter() - began)))
    began = time.perf_counter()
    run(count)
    return (time.perf_counter() - began) / count


def seconds_of_calls(call: Callable[[], object], seconds: float) -> float:
    """Return how long the GPU takes for one of many calls that follow each other."""

    def run(count: int) -> None:
        for _ in range(count):
            call()
        torch.cuda.synchronize()

    run(3)
    return seconds_of(run, seconds)


def top_kernels(training: Training) -> list[dict[str, Any]]:
    """Return the kernels that take longest in a step: microseconds and calls of each step, by name."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        training.run(PROFILED_STEPS)
    events = sorted(profile.key_averages(), key=lambda event: -event.self_device_time_total)[:TOP_KERNELS]
    return [
        {
            "kernel": event.key[:120],
            "microseconds": event.self_device_time_total / PROFILED_STEPS,
            "calls": event.count / PROFILED_STEPS,
        }
        for event in events
    ]


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Return the largest absolute difference of two models' parameters and buffers."""
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in a)


# --- 1: the machine ---------------------------------------------------------------------------------------------------


def machine(results: "Results", scale: Scale, data: Path | None) -> None:
    """What the hardware can do at most, for comparison with what follows."""
    with results.measuring("versions") as figures:
        figures["python"] = platform.python_version()
        figures |= {name: version(name) for name in ("torch", "numpy", "timm", "triton")}
        figures |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
        figures["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # pyright: ignore[reportAttributeAccessIssue]
    with results.measuring("machine") as figures:
        figures |= describe_machine()
        properties = torch.cuda.get_device_properties(0)
        figures["gpu_memory_bytes"], figures["multiprocessors"] = (
            properties.total_memory,
            properties.multi_processor_count,
        )
        if shutil.which("nvidia-smi"):
            figures["nvidia-smi"] = subprocess.run(["nvidia-smi", "-q"], capture_output=True, text=True).stdout
    count, seconds = scale.copied_bytes, scale.seconds / 3
    there, here = torch.empty(count, dtype=torch.uint8, device="cuda"), torch.empty(count, dtype=torch.uint8)
    for name, source in {"pageable": here, "pinned": here.pin_memory(), "device": there.clone()}.items():
        with results.measuring(f"copy from {name} memory") as figures:
            taken = seconds_of_calls(lambda source=source: there.copy_(source, non_blocking=True), seconds)
            figures["gigabytes_per_second"] = count / taken / 1e9
    for precision in ("highest", "high", "bf16"):
        with results.measuring(f"matrix product, {precision}") as figures:
            torch.set_float32_matmul_precision("highest" if precision == "bf16" else precision)
            dtype = torch.bfloat16 if precision == "bf16" else torch.float32
            a = torch.randn(scale.matrix_size, scale.matrix_size, dtype=dtype, device="cuda")
            taken = seconds_of_calls(lambda a=a: a @ a, seconds)
            figures["teraflops"] = 2 * scale.matrix_size**3 / taken / 1e12
    with results.measuring("launches") as figures:
        figures["eager_microseconds_per_kernel"] = 1e6 * seconds_of_calls(
            _add_to(torch.zeros(1, device="cuda")), seconds
        )
        one, many = (1e6 * seconds_of_calls(_graph_of(kernels).replay, seconds) for kernels in (1, 101))
        figures["microseconds_per_graph"], figures["microseconds_per_kernel_of_a_graph"] = one, (many - one) / 100


def _add_to(x: torch.Tensor) -> Callable[[], object]:
    return lambda: x.add_(1)


def _graph_of(kernels: int) -> torch.cuda.CUDAGraph:
    """Record small kernels that depend on each other."""
    x, graph = torch.zeros(1, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(kernels):
            x += 1
    return graph


# --- 2: is it right? --------------------------------------------------------------------------------------------------


def tests(results: "Results", scale: Scale, data: Path | None) -> None:
    """Recorded steps against eager ones, which `gpu.py` waits for, and the tests that need a GPU."""
    for model, size in {"fashion-cnn": 28, "fast-cnn-16": 32, "timm:resnet18": 64}.items():
        with results.measuring(f"{model}, recorded and eager") as figures:
            recipe = Recipe(model=model, image_size=size, epochs=1, batch_size=32, precision="fp32", **_middle())
            recipe = recipe.override(IMAGENET)
            samples = random_split(recipe, 128, 10)
            weights = []
            for way in ("graph", "eager"):
                with contextlib.closing(Training(recipe, samples, way=way)) as training:
                    training.run(scale.warm_up_steps)
                    weights.append(training.weights())
                    figures.setdefault("is_recorded", training.is_recorded)
            recorded, eager = weights
            figures["largest_difference"] = largest_difference(recorded, eager)
            are_close = all(torch.allclose(recorded[name], eager[name], rtol=1e-3, atol=1e-4) for name in eager)
            figures["equals_eager"] = figures["is_recorded"] and are_close
    if importlib.util.find_spec("pytest") is None:
        results.write("tests", skipped="there is no pytest")
        return
    with results.measuring("tests") as figures, tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "tests.xml"
        # Warnings of other versions are not what these tests are for here.
        options = ["-v", "-W", "default", "-p", "no:cacheprovider", f"--junitxml={report}", *scale.tests]
        subprocess.run([sys.executable, "-m", "pytest", "tests/engine/test_cuda.py", *options], cwd=ROOT, check=False)
        cases = list(ElementTree.parse(report).iter("testcase"))
        failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
        figures |= {"run": len(cases), "skipped": sum(case.find("skipped") is not None for case in cases)}
        figures |= {"failed": len(failed), "names_of_failed": [case.get("name") for case in failed]}


def _middle() -> dict[str, Any]:
    """Return what recipes of random images have in common."""
    return {"drop_last": True, "optimizer": Momentum(lr=0.01)}


# --- 3: the command ---------------------------------------------------------------------------------------------------


def command(results: "Results", scale: Scale, data: Path | None) -> None:
    """`flatout train fashion-mnist` as a user runs it: seconds of the process and of its phases, and the accuracy."""
    if data is None:
        results.write("flatout train", skipped="needs --data fashion-mnist=PATH")
        return
    with results.measuring("flatout train") as figures, tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        options = ["--data", str(data), "--out", str(run), "--no-cache", "--devices", "cuda", *scale.command]
        began = time.perf_counter()
        done = subprocess.run([sys.executable, "-m", "flatout", "train", "fashion-mnist", *options], check=False)
        figures |= {"process_seconds": time.perf_counter() - began, "exit_code": done.returncode}
        if (run / "summary.json").exists():
            summary = json.loads((run / "summary.json").read_text())
            kept = ("test_accuracy", "train_seconds", "wall_seconds", "setup_seconds", "images_per_second")
            figures |= {key: summary[key] for key in kept}
            figures |= {f"{phase}_seconds": seconds for phase, seconds in summary["time_seconds"].items()}
            figures["notes"] = summary["notes"]
        if done.returncode and scale is not REHEARSAL:
            raise RuntimeError(f"flatout train ended with exit code {done.returncode}; see log.txt")


# --- 4 to 6: steps ----------------------------------------------------------------------------------------------------


def fashion_step(results: "Results", scale: Scale, data: Path | None) -> None:
    """The step of the job fashion-mnist in each precision and way."""
    job = load_job("fashion-mnist").override({"batch_size": scale.small_batch})
    samples = random_split(job, scale.small_images, 10)
    # What is compiled comes last, since the time may run out.
    for way, precision in itertools.product(scale.ways, ("bf16", "tf32")):
        with results.measuring(f"{precision}, {way}") as figures:
            training = Training(job.override({"precision": precision}), samples, way=way)
            with contextlib.closing(training):
                figures |= training.figures(scale.warm_up_steps, scale.seconds)
                if way != "eager":
                    figures["kernels"] = top_kernels(training)


def resnet50(results: "Results", scale: Scale, data: Path | None) -> None:
    """ResNet-50 in bfloat16: from each placement of the images, against one batch that stays on the device."""
    recipe = Recipe(
        model=scale.network,
        image_size=scale.image_size,
        epochs=1,
        batch_size=scale.image_batches[0],
        precision="bf16",
        augment=Augment(flip=True, crop=0.25),
        **_middle(),
    ).override(IMAGENET)
    with tempfile.TemporaryDirectory() as folder:
        shape = (scale.image_count, *recipe.stored_sides, recipe.channels)
        file = np.lib.format.open_memmap(Path(folder) / "images.npy", mode="w+", dtype=np.uint8, shape=shape)
        samples = random_split(recipe, scale.image_count, 1000, file)
        file.flush()
        for way, batch, placement in _resnet50_cases(scale):
            with results.measuring(f"{way}, batch {batch}, {placement}") as figures:
                chosen = samples.at(np.arange(batch)) if placement == "synthetic" else samples
                placed = "device" if placement == "synthetic" else placement
                changed = recipe.override({"batch_size": batch, "data.placement": placed})
                with contextlib.closing(Training(changed, chosen, way=way)) as training:
                    figures |= training.figures(scale.warm_up_steps, 3 * scale.seconds)
                    figures["kernels"] = top_kernels(training)


def _resnet50_cases(scale: Scale) -> Iterator[tuple[str, int, str]]:
    """Yield way, batch size and placement: first what the others are compared with, last what may not fit."""
    small, large = scale.image_batches
    for placement in ("synthetic", "device", "memory", "disk"):
        yield "graph", small, placement
    for way in scale.ways:
        if way != "graph":
            yield way, small, "synthetic"
    yield "graph", large, "synthetic"
    yield "graph", large, "disk"


def fast_cnn(results: "Results", scale: Scale, data: Path | None) -> None:
    """fast-cnn-64 on images of 32 pixels: full steps, steps on the padded last batch, and evaluation."""
    recipe = Recipe(
        model="fast-cnn-64",
        image_size=32,
        epochs=1,
        batch_size=scale.small_batch,
        precision="bf16",
        augment=Augment(flip=True, shift=0.1),
        **_middle(),
    ).override({"data.mean": [0.5] * 3, "data.std": [0.25] * 3})
    samples = random_split(recipe, scale.small_images, 10)
    for way in scale.ways:
        with results.measuring(way) as figures, contextlib.closing(Training(recipe, samples, way=way)) as training:
            figures |= training.figures(scale.warm_up_steps, scale.seconds)
            figures["kernels"] = top_kernels(training)
            size = recipe.batch_size
            weights = np.where(np.arange(size) < size // 2, 1, 0).astype(np.float32)
            padded = itertools.repeat(Batch(samples=np.arange(size), weights=weights, count=size // 2))
            training.run(scale.warm_up_steps, padded)
            seconds = seconds_of(functools.partial(training.run, batches=padded), scale.seconds / 3)
            figures["padded_milliseconds"] = 1000 * seconds
            evaluate = training.engine.place(samples.at(np.arange(len(samples) // 5))).evaluate
            evaluate()
            began = time.perf_counter()
            evaluate()
            figures["evaluate_milliseconds"] = 1000 * (time.perf_counter() - began)
            figures["evaluated_images"] = len(samples) // 5


# --- 7: what may go wrong ---------------------------------------------------------------------------------------------


class Waiting(nn.Module):
    """Multiplies by a number that the host reads from the device, which no graph can record, after a dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout, self.linear = nn.Dropout(0.5), nn.Linear(28 * 28, 10)

    def forward(self, x_NCHW: torch.Tensor) -> torch.Tensor:
        logits = self.linear(self.dropout(x_NCHW.flatten(1)))
        return logits * (1 + abs(logits.mean().item()))


def recovery(results: "Results", scale: Scale, data: Path | None) -> None:
    """Whether training goes on after a capture that failed, and whether two ranks can share the GPU."""
    recipe = load_job("fashion-mnist").override({"batch_size": 64, "precision": "fp32"})
    samples = random_split(recipe, 512, 10)
    dropout = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(28 * 28, 10))
    for name, net in {"a step that waits": Waiting(), "dropout after it": dropout}.items():
        training = Training(recipe, samples, net=net)
        with results.measuring(name) as figures, contextlib.closing(training):
            figures |= training.figures(scale.warm_up_steps, scale.seconds)
            figures["is_finite"] = training.engine.is_finite()
    with results.measuring("two ranks") as figures:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        ranks = [str(ROOT / "benchmarks" / "gpu.py"), "--part", "rank", "--out", str(results.out)]
        done = subprocess.run([*launcher, *ranks, *(["--rehearse"] if scale is REHEARSAL else [])], check=False)
        figures["exit_code"] = done.returncode
        done.check_returncode()


def rank(results: "Results", scale: Scale, data: Path | None) -> None:
    """One of two ranks: trains with the other, then the first compares the weights with those of training alone."""
    recipe = load_job("fashion-mnist").override({"batch_size": 64, "precision": "fp32"})
    samples = random_split(recipe, 512, 10)
    world = join("auto")
    with contextlib.closing(Training(recipe, samples, world=world)) as training:
        training.run(scale.warm_up_steps)
        together, notes = training.weights(), training.notes
        began = time.perf_counter()
        training.run(RANK_STEPS)
        seconds = (time.perf_counter() - began) / RANK_STEPS
    is_first, backend = world.rank == 0, world.backend
    world.barrier()
    world.leave()
    if not is_first:
        return
    with results.measuring("two ranks against one") as figures:
        figures |= {"milliseconds": 1000 * seconds, "backend": backend, "notes": notes}
        with contextlib.closing(Training(recipe, samples, world=World(device=torch.device("cuda:0")))) as training:
            training.run(scale.warm_up_steps)
            figures["largest_difference"] = largest_difference(together, training.weights())


PARTS: dict[str, Callable[["Results", Scale, Path | None], None]] = {
    "machine": machine,
    "tests": tests,
    "command": command,
    "fashion-step": fashion_step,
    "resnet50": resnet50,
    "fast-cnn": fast_cnn,
    "recovery": recovery,
    "rank": rank,
}
