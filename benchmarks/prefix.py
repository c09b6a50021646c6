"""A frozen prefix computed once, against computed in every step: seconds of each epoch of oct-vgg16; prints JSON.

    python benchmarks/prefix.py --data FOLDER [--device cpu] [--repeats 1] [--image-size 224]

The first epoch with the cache fills it, so the third is what all further epochs cost. The run without the cache has two
epochs, of which the second counts, as the first warms up.
"""

import json
import sys
from pathlib import Path
from typing import Any

from common import about, make_parser, median_ratio
from flatout.config import Recipe
from flatout.config.jobs import load_job
from flatout.data.batches import Split
from flatout.data.build import load_pack
from flatout.data.detect import find
from flatout.data.pack import Pack, PackSettings
from flatout.data.splits import splits_of
from flatout.distributed.world import World
from flatout.engine.factory import join
from flatout.engine.torch.engine import TorchEngine
from flatout.models.build import build_model
from flatout.train.loop import LoopHooks, TrainingLoop
from flatout.train.request import Progress
from flatout.utils.console import Console
from flatout.utils.run_files import JsonObject

CACHED_EPOCHS, UNCACHED_EPOCHS = 3, 2
SILENT = LoopHooks()


def load(recipe: Recipe, folder: Path, console: Console) -> tuple[Pack, dict[str, Split]]:
    """Decode the images, into a pack that lives as long as this process."""
    settings = PackSettings(
        size=recipe.image_size,
        channels=recipe.channels,
        resize=recipe.data.resize,
        on_bad_image=recipe.data.on_bad_image,
        max_bad_share=recipe.data.max_bad_share,
    )
    pack = load_pack(find(folder), settings, cache=None, report=console)
    console.finish()
    return pack, splits_of(pack, recipe.data, recipe.seed)


def run(recipe: Recipe, splits: dict[str, Split], classes: int, device: str, *, cache_prefix: bool) -> list[JsonObject]:
    """Train a fresh model and return the record of every epoch."""
    model = build_model(recipe, classes)
    engine = TorchEngine(model, recipe, world=join(device), cache_prefix=cache_prefix)
    placed = {name: engine.place(samples) for name, samples in splits.items()}
    progress = Progress()
    TrainingLoop(engine, World(), recipe, placed, progress, SILENT).run()
    return progress.history


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="the folder with train/ and test/")
    parser.add_argument("--device", default="cpu", help="a torch device name")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--image-size", type=int, help="smaller images for a quick run; default: the job's 224")
    args = parser.parse_args()

    # What the weights are does not matter for the time, and neither does what is learnt from so few images.
    recipe = load_job("oct-vgg16").override({"pretrained": False, "keep": "last"})
    if args.image_size:
        recipe = recipe.override({"image_size": args.image_size})
    console = Console(sys.stderr)
    pack, splits = load(recipe, args.data, console)
    cached: list[list[JsonObject]] = []
    uncached: list[list[JsonObject]] = []
    for repeat in range(1, args.repeats + 1):
        for runs, epochs, name in ((uncached, UNCACHED_EPOCHS, "without"), (cached, CACHED_EPOCHS, "with")):
            with_epochs = recipe.override({"epochs": epochs})
            runs.append(run(with_epochs, splits, len(pack.classes), args.device, cache_prefix=runs is cached))
            shown = ", ".join(f"{record['seconds']:.1f}" for record in runs[-1])
            console.note(f"repeat {repeat}, {name} the cache: epochs of {shown} s")
    console.close()

    def seconds(runs: list[list[JsonObject]]) -> list[list[float]]:
        return [[record["seconds"] for record in history] for history in runs]

    def ratio(epoch: int) -> float:
        return median_ratio([run[-1] for run in seconds(uncached)], [run[epoch - 1] for run in seconds(cached)])

    result: dict[str, Any] = {
        "job": recipe.job,
        **about("flatout", "torch"),
        "device": args.device,
        "image_size": recipe.image_size,
        "train_images": len(splits["train"]),
        "batch_size": recipe.batch_size,
        "epoch_seconds_with_cache": seconds(cached),
        "epoch_seconds_without_cache": seconds(uncached),
        "train_losses_with_cache": [record["train_loss"] for record in cached[0]],
        "train_losses_without_cache": [record["train_loss"] for record in uncached[0]],
        "first_epoch_times_faster": ratio(1),
        "third_epoch_times_faster": ratio(CACHED_EPOCHS),
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
