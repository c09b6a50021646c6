"""What one GPU does: the speed and memory figures that a CPU cannot give; prints one JSON object.

    python benchmarks/gpu.py --data-root FOLDER [--device cuda] [--parts PART ...]
    python benchmarks/gpu.py --data-root FOLDER --device cpu --quick      a trial that only shows that it runs

FOLDER holds the data sets fashion-mnist/ and cats-dogs/. Every measurement builds its own model and engine. Rates are
of training passes from the second epoch on, as the first warms up, chooses algorithms and records the graph.
"""

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flatout.config import Augment, Momentum, Recipe
from flatout.config.jobs import load_job
from flatout.data.batches import Batch, Split
from flatout.data.build import find, load_pack
from flatout.data.pack import Pack, PackSettings
from flatout.data.splits import splits_of
from flatout.distributed.world import World
from flatout.engine.base import Engine
from flatout.engine.devices import machine, parse_devices
from flatout.engine.factory import join, make_engine
from flatout.engine.torch.accelerator import accelerator_of
from flatout.models.build import build_model
from flatout.train.loop import LoopHooks, run_loop
from flatout.train.progress import Progress
from flatout.utils.console import Console

IMAGENET = {"data.mean": [0.485, 0.456, 0.406], "data.std": [0.229, 0.224, 0.225]}
RESNET_CLASSES = 1000
WARM_UP_STEPS = 10
WRITTEN_AT_ONCE = 256


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How much is measured. A limit of None takes all images."""

    fashion_epochs: int
    fashion_limit: int | None
    timed_epochs: int
    rounds: int
    cats_dogs_images: int
    synthetic_steps: int
    resnet_size: int
    resnet_batch_size: int
    resnet_images: int


# cats-dogs: as many images as the published data has; a smaller set is gone through repeatedly within an epoch.
FULL = Scale(
    fashion_epochs=50,
    fashion_limit=None,
    timed_epochs=5,
    rounds=3,
    cats_dogs_images=8000,
    synthetic_steps=500,
    resnet_size=224,
    resnet_batch_size=256,
    resnet_images=8192,
)
QUICK = Scale(
    fashion_epochs=2,
    fashion_limit=2048,
    timed_epochs=1,
    rounds=2,
    cats_dogs_images=64,
    synthetic_steps=3,
    resnet_size=32,
    resnet_batch_size=8,
    resnet_images=32,
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Setting:
    """What every measurement needs."""

    device: str
    scale: Scale
    data_root: Path
    console: Console


# --- pieces -----------------------------------------------------------------------------------------------------------


def load(recipe: Recipe, folder: Path, console: Console, limit: int | None = None) -> tuple[Pack, dict[str, Split]]:
    """Decode a data set; return its pack, to be held as long as it is read, and splits of `limit` images at most."""
    settings = PackSettings(
        size=recipe.image_size,
        channels=recipe.channels,
        resize=recipe.data.resize,
        on_bad_image=recipe.data.on_bad_image,
        max_bad_share=recipe.data.max_bad_share,
    )
    pack = load_pack(find(folder), settings, cache=None, report=console)
    console.finish()
    splits = splits_of(pack, recipe.data, recipe.seed).items()
    return pack, {name: Split(images=s.images, rows=s.rows[:limit], labels=s.labels[:limit]) for name, s in splits}


def fresh_engine(
    recipe: Recipe, classes: int, device: str, notes: list[str], *, engine: str = "torch", **options: Any
) -> Engine:
    """Build the recipe's model, always with the same weights, and an engine for it, on a device that is empty again."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    model = build_model(recipe, classes)
    world = join(device, engine)
    return make_engine(model, recipe, engine=engine, devices=device, world=world, report=notes.append, **options)


def fit(
    engine: Engine,
    recipe: Recipe,
    splits: dict[str, Split],
    after_epoch: Callable[[Progress], None] = lambda progress: None,
) -> Progress:
    """Train and return what the loop measured."""

    class AfterEpoch(LoopHooks):
        def epoch(self, *, is_best: bool) -> None:
            after_epoch(progress)

    progress = Progress()
    placed = {name: engine.place(samples) for name, samples in splits.items()}
    placed["train"].compile()
    run_loop(engine, World(), recipe, placed, progress, AfterEpoch())
    return progress


def later_rate(progress: Progress) -> float:
    """Return images per second from the second epoch on."""
    later = progress.history[1:]
    return sum(record.images for record in later) / sum(record.seconds for record in later)


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Return the largest absolute difference of two models' parameters and buffers."""
    assert a.keys() == b.keys()
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in a)


# --- measurements -----------------------------------------------------------------------------------------------------


def fashion_mnist(setting: Setting) -> dict[str, Any]:
    """The whole job: seconds of training, and what they gave."""
    recipe = load_job("fashion-mnist").override({"epochs": setting.scale.fashion_epochs})
    pack, splits = load(recipe, setting.data_root / "fashion-mnist", setting.console, setting.scale.fashion_limit)
    notes: list[str] = []
    with closing(fresh_engine(recipe, len(pack.classes), setting.device, notes)) as engine:
        progress, peak = fit(engine, recipe, splits), engine.peak_memory_bytes()
    return {
        "epochs": recipe.epochs,
        "batch_size": recipe.batch_size,
        "train_images": len(splits["train"]),
        "train_seconds": progress.train_seconds,
        "first_epoch_seconds": progress.history[0].seconds,
        "evaluate_seconds": progress.evaluate_seconds,
        "images_per_second": later_rate(progress),
        "test_accuracy": progress.history[-1].metrics["test_accuracy"],
        "peak_device_bytes": peak,
        "notes": notes,
    }


def graph_against_eager(setting: Setting) -> dict[str, Any]:
    """The recorded step against the same step launched kernel by kernel: equal weights after an epoch, and the rates.

    Two eager runs are compared as well: what they differ by comes from the order of sums inside the device's kernels,
    not from recording.
    """
    recipe = load_job("fashion-mnist").override({"epochs": 1 + setting.scale.timed_epochs})
    pack, every = load(recipe, setting.data_root / "fashion-mnist", setting.console, setting.scale.fashion_limit)
    splits, classes = {"train": every["train"]}, len(pack.classes)
    notes: list[str] = []

    def run(capture: bool) -> tuple[float, dict[str, torch.Tensor]]:
        """Return the rate, and the weights after the first epoch."""
        states: list[dict[str, torch.Tensor]] = []
        with closing(fresh_engine(recipe, classes, setting.device, notes, capture=capture)) as engine:
            progress = fit(engine, recipe, splits, lambda progress: states.append(engine.state()))
        return later_rate(progress), {name: v for name, v in states[0].items() if name.startswith("model.")}

    pairs = [(run(True), run(False)) for _ in range(setting.scale.rounds)]
    graph_rates, eager_rates = [g[0] for g, _ in pairs], [e[0] for _, e in pairs]
    graph, eager, eager_again = pairs[0][0][1], pairs[0][1][1], pairs[1][1][1]
    return {
        "batch_size": recipe.batch_size,
        "graph_images_per_second": statistics.median(graph_rates),
        "eager_images_per_second": statistics.median(eager_rates),
        "graph_times_faster": statistics.median(g / e for g, e in zip(graph_rates, eager_rates, strict=True)),
        "weights_are_equal": all(torch.equal(graph[name], eager[name]) for name in eager),
        "largest_difference": largest_difference(graph, eager),
        "largest_difference_of_two_eager_runs": largest_difference(eager, eager_again),
        "notes": sorted(set(notes)),
    }


def cats_dogs(setting: Setting) -> dict[str, Any]:
    """The job's epochs, input and all, against the same step on one batch that lies ready on the device."""
    recipe = load_job("cats-dogs").override({"epochs": 1 + setting.scale.timed_epochs})
    pack, splits = load(recipe, setting.data_root / "cats-dogs", setting.console)
    found, classes, count = splits["train"], len(pack.classes), setting.scale.cats_dogs_images
    samples = Split(images=found.images, rows=np.resize(found.rows, count), labels=np.resize(found.labels, count))
    real, synthetic, notes = [], [], []
    for _ in range(setting.scale.rounds):
        with closing(fresh_engine(recipe, classes, setting.device, notes)) as engine:
            real.append(later_rate(fit(engine, recipe, {"train": samples})))
        with closing(fresh_engine(recipe, classes, setting.device, notes)) as engine:
            synthetic.append(synthetic_rate(engine, recipe, classes=classes, steps=setting.scale.synthetic_steps))
    return {
        "batch_size": recipe.batch_size,
        "train_images": count,
        "different_images": min(count, len(found)),
        "images_per_second": statistics.median(real),
        "synthetic_images_per_second": statistics.median(synthetic),
        "share_of_synthetic": statistics.median(r / s for r, s in zip(real, synthetic, strict=True)),
        "notes": sorted(set(notes)),
    }


def synthetic_rate(engine: Engine, recipe: Recipe, *, classes: int, steps: int) -> float:
    """Return images per second of the recipe's step, augmentation included, on the same random batch every time."""
    size = recipe.batch_size
    random = np.random.default_rng(1)
    images = random.integers(0, 256, (size, *recipe.image_sides, recipe.channels), dtype=np.uint8)
    samples = Split(images=images, rows=np.arange(size), labels=np.arange(size) % classes)
    placed = engine.place(samples)
    placed.begin_epoch(0)
    batch = Batch(samples=np.arange(size), weights=np.ones(size, np.float32), count=size)
    inputs = next(placed.feed([batch]))

    def seconds(count: int) -> float:
        began = time.perf_counter()
        for step in range(count):
            placed.train_step(inputs, recipe.optimizer.lr, step)
        engine.counts()
        return time.perf_counter() - began

    seconds(WARM_UP_STEPS)
    return steps * size / seconds(steps)


def resnet50(setting: Setting) -> dict[str, Any]:
    """ResNet-50 from a synthetic pack, kept on the device and read from its file in every step.

    The file has just been written, so the system has it in memory: this measures reading and copying, not the disk.
    """
    scale = setting.scale
    device = torch.device(parse_devices(setting.device).names[0])
    precision = "bf16" if "bf16" in accelerator_of(device).precisions() else "auto"
    recipe = Recipe(
        model="timm:resnet50",
        image_size=scale.resnet_size,
        epochs=1 + scale.timed_epochs,
        batch_size=scale.resnet_batch_size,
        precision=precision,
        optimizer=Momentum(lr=0.01),
        augment=Augment(flip=True, crop=0.25),
    ).override(IMAGENET)
    with tempfile.TemporaryDirectory(prefix="flatout-gpu-") as folder:
        samples = synthetic_pack(Path(folder), scale.resnet_images, scale.resnet_size)
        results = {
            placement: train_placed(recipe.override({"data.placement": placement}), samples, setting.device)
            for placement in ("device", "disk")
        }
    return {
        "image_size": recipe.image_size,
        "batch_size": recipe.batch_size,
        "precision": precision,
        "train_images": scale.resnet_images,
        **results,
    }


def train_placed(recipe: Recipe, samples: Split, device: str) -> dict[str, Any]:
    notes: list[str] = []
    with closing(fresh_engine(recipe, RESNET_CLASSES, device, notes)) as engine:
        progress, peak = fit(engine, recipe, {"train": samples}), engine.peak_memory_bytes()
    return {
        "images_per_second": later_rate(progress),
        "input_wait_fraction": progress.wait_seconds / progress.train_seconds,
        "peak_device_bytes": peak,
        "notes": notes,
    }


def synthetic_pack(folder: Path, count: int, size: int) -> Split:
    """Write random images as a pack holds them, and map them."""
    file = folder / "images.npy"
    random = np.random.default_rng(1)
    images = np.lib.format.open_memmap(file, mode="w+", dtype=np.uint8, shape=(count, size, size, 3))
    for start in range(0, count, WRITTEN_AT_ONCE):
        part = images[start : start + WRITTEN_AT_ONCE]
        part[:] = random.integers(0, 256, part.shape, dtype=np.uint8)
    images.flush()
    return Split(
        images=np.lib.format.open_memmap(file, mode="r"),
        rows=np.arange(count),
        labels=np.arange(count) % RESNET_CLASSES,
    )


def xla_against_torch(setting: Setting) -> dict[str, Any]:
    """The two engines on the same jobs, round after round: the ratio of their rates."""
    result = {}
    for job in ("fashion-mnist", "cats-dogs"):
        recipe = load_job(job).override({"epochs": 1 + setting.scale.timed_epochs})
        pack, splits = load(recipe, setting.data_root / job, setting.console, setting.scale.fashion_limit)
        rates: dict[str, list[float]] = {"torch": [], "xla": []}
        for _ in range(setting.scale.rounds):
            for name, found in rates.items():
                with closing(fresh_engine(recipe, len(pack.classes), setting.device, [], engine=name)) as engine:
                    found.append(later_rate(fit(engine, recipe, {"train": splits["train"]})))
        ratios = [ours / theirs for ours, theirs in zip(rates["xla"], rates["torch"], strict=True)]
        result[job] = {"images_per_second": rates, "xla_over_torch": statistics.median(ratios)}
    return result


PARTS = {
    "fashion-mnist": fashion_mnist,
    "graph-against-eager": graph_against_eager,
    "cats-dogs": cats_dogs,
    "resnet50": resnet50,
    "xla-against-torch": xla_against_torch,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, required=True, help="the folder that holds the data sets")
    parser.add_argument("--device", default="cuda", help="a device as --devices of flatout train takes it")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--quick", action="store_true", help="so little of everything that the figures mean nothing")
    args = parser.parse_args()

    console = Console(sys.stderr)
    setting = Setting(
        device=args.device, scale=QUICK if args.quick else FULL, data_root=args.data_root, console=console
    )
    result: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "device": args.device,
        "quick": args.quick,
        "versions": {
            "python": sys.version.split()[0],
            "cuda": torch.version.cuda,
            **{name: version(name) for name in ("flatout", "torch", "timm", "numpy")},
        },
    }
    for name in args.parts:
        result[name] = PARTS[name](setting)
        console.note(f"{name}: {json.dumps(result[name])}")
    console.close()
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
