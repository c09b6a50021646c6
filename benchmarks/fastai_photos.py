"""Photos with fastai, fine-tuned from published weights as its users do. No flatout.

    python benchmarks/fastai_photos.py --data FOLDER --minutes 2 [--network lite0] [--weights-dir DIR]

fastai has no time limit: an epoch of each kind is measured first, which is not counted, and then as many epochs are
trained as fit, at least one of each kind. The test images are evaluated once, at the end. The last line printed is
JSON.
"""

import json
import tempfile
import time

BEGAN = time.perf_counter()

from pathlib import Path  # noqa: E402

import torch  # noqa: E402
from fastai.callback.core import Callback, CancelValidException  # pyright: ignore[reportMissingImports]  # noqa: E402
from fastai.callback.schedule import Learner  # pyright: ignore[reportMissingImports]  # noqa: E402
from fastai.torch_core import set_seed  # pyright: ignore[reportMissingImports]  # noqa: E402
from fastai.vision.all import (  # pyright: ignore[reportMissingImports]  # noqa: E402
    CategoryBlock,
    DataBlock,
    ImageBlock,
    IndexSplitter,
    Resize,
    accuracy,
    aug_transforms,
    vision_learner,
)

from photo_files import Split, arguments, read_photos, timm_name, timm_weights  # noqa: E402

# The batch size of fastai's own tutorials.
BATCH, SIZE = 64, 224


class NoValidation(Callback):
    """Leaves out the evaluation after each epoch, which chooses nothing and takes time from training."""

    def before_validate(self) -> None:
        raise CancelValidException


def loaders(train: Split, test: Split, workers: int):
    """Return fastai's data loaders; the test images are those for validation."""
    labels = dict([*train, *test])
    block = DataBlock(
        blocks=(ImageBlock, CategoryBlock),
        get_y=labels.get,
        splitter=IndexSplitter(range(len(train), len(train) + len(test))),
        item_tfms=Resize(SIZE),
        batch_tfms=aug_transforms(),
    )
    return block.dataloaders(list(labels), bs=BATCH, num_workers=workers)


def create(data, network: str, weights: Path) -> Learner:
    """Return a learner with a new head on the network with its published weights; the body is frozen."""
    return vision_learner(data, timm_name(network), metrics=accuracy, pretrained_cfg_overlay={"file": str(weights)})


def seconds(train, *args) -> float:
    began = time.perf_counter()
    train(*args, cbs=NoValidation())
    return time.perf_counter() - began


def main() -> None:
    args = arguments(__doc__, minutes=True).parse_args()
    set_seed(args.seed)
    train, test, _ = read_photos(args.data)
    data = loaders(train, test, args.workers)
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder) / "weights.pth"
        torch.save(timm_weights(args.network, args.weights_dir), weights)
        learn, probe = (create(data, args.network, weights) for _ in range(2))
    starting_seconds = time.perf_counter() - BEGAN

    # As `fine_tune` does: an epoch of the head, then epochs of everything.
    frozen_seconds = seconds(probe.fit_one_cycle, 1, 2e-3)
    probe.unfreeze()
    epoch_seconds = seconds(probe.fit_one_cycle, 1, slice(1e-5, 1e-3))
    began = time.perf_counter()
    probe.validate()
    evaluate_seconds = time.perf_counter() - began
    probe_seconds = time.perf_counter() - BEGAN - starting_seconds

    left = 60 * args.minutes - starting_seconds - frozen_seconds - evaluate_seconds
    epochs = max(1, int(left / epoch_seconds))
    set_seed(args.seed)
    train_seconds = seconds(learn.fine_tune, epochs)
    result = {
        "accuracy": float(learn.validate()[1]),
        "image_size": SIZE,
        "epochs": epochs,
        "starting_seconds": starting_seconds,
        "train_seconds": train_seconds,
        "probe_seconds": probe_seconds,
        "seconds": time.perf_counter() - BEGAN - probe_seconds,
    }
    print(f"\n{json.dumps(result)}")  # a progress bar ends without a new line


if __name__ == "__main__":
    main()
