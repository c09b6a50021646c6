"""Photos in class folders with fastai, as its users train them, from random weights. No flatout.

    python benchmarks/fastai_photos.py --data FOLDER --minutes 2 [--model resnet18] [--size 128]

FOLDER holds the training and the test images in the folders of `--train` and `--test`. fastai has no time budget: an
epoch is measured first, which is not counted, and then as many epochs are trained as fit. The last line printed is
JSON.
"""

import argparse
import json
import time

BEGAN = time.perf_counter()

from fastai.vision.all import (  # pyright: ignore[reportMissingImports]  # noqa: E402
    ImageDataLoaders,
    Resize,
    accuracy,
    aug_transforms,
    models,
    vision_learner,
)

# The batch size of fastai's own tutorials; evaluation and the end of the process take the rest of the time.
BATCH, TRAINING_SHARE = 64, 0.97


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="the folder of images")
    parser.add_argument("--train", default="training_set", help="its folder of training images")
    parser.add_argument("--test", default="test_set", help="its folder of test images")
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--model", default="resnet18", help="a network of torchvision")
    parser.add_argument("--size", type=int, default=128, help="height and width of the images in pixels")
    parser.add_argument("--workers", type=int, default=2, help="processes that decode images")
    args = parser.parse_args()
    data = ImageDataLoaders.from_folder(
        args.data,
        train=args.train,
        valid=args.test,
        item_tfms=Resize(args.size),
        batch_tfms=aug_transforms(),
        bs=BATCH,
        num_workers=args.workers,
    )

    def learner():
        return vision_learner(data, getattr(models, args.model), pretrained=False, metrics=accuracy)

    starting_seconds = time.perf_counter() - BEGAN
    probe = learner()
    began = time.perf_counter()
    probe.fit_one_cycle(1)
    epoch_seconds = time.perf_counter() - began
    epochs = max(1, int((TRAINING_SHARE * 60 * args.minutes - starting_seconds) / epoch_seconds))
    learn = learner()
    began = time.perf_counter()
    learn.fit_one_cycle(epochs)
    train_seconds = time.perf_counter() - began
    print(
        json.dumps(
            {
                "epochs": epochs,
                "starting_seconds": starting_seconds,
                "train_seconds": train_seconds,
                "counted_seconds": starting_seconds + train_seconds,
                "test_accuracy": float(learn.validate()[1]),
            }
        )
    )


if __name__ == "__main__":
    main()
