"""Fashion-MNIST as Keras users write it: arrays in memory and model.fit. No flatout.

    python benchmarks/keras_fashion_mnist.py --data FOLDER_OF_IDX_FILES [--epochs 50] [--backend torch]

The net of the eight-core TPU tutorial and its global batch of 1024, on one CPU. The last line printed is JSON.
"""

import os
import time
from pathlib import Path

import numpy as np

from common import loop_parser, print_figures, read_idx

# Keras reads its backend when it is imported.
parser = loop_parser(__doc__, epochs=50, batch_size=1024, lr=0.08)
parser.add_argument("--backend", choices=("jax", "torch"), default="jax")
args = parser.parse_args()
os.environ["KERAS_BACKEND"] = args.backend
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import keras  # noqa: E402


def load(folder: Path, part: str) -> tuple[np.ndarray, np.ndarray]:
    images = read_idx(folder / f"{part}-images-idx3-ubyte.gz")[..., None].astype(np.float32) / 255
    return (images - 0.1307) / 0.3081, read_idx(folder / f"{part}-labels-idx1-ubyte.gz").astype(np.int32)


def make_net() -> keras.Model:
    layers = keras.layers
    return keras.Sequential(
        [
            layers.Input((28, 28, 1)),
            layers.Conv2D(10, 5),
            layers.MaxPooling2D(),
            layers.ReLU(),
            layers.BatchNormalization(),
            layers.Conv2D(20, 5),
            layers.MaxPooling2D(),
            layers.ReLU(),
            layers.BatchNormalization(),
            layers.Flatten(),
            layers.Dense(50, activation="relu"),
            layers.Dense(10),
        ]
    )


class Times(keras.callbacks.Callback):
    """Seconds of each epoch, without its evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.epochs: list[float] = []

    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
        self.began = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:
        self.epochs.append(time.perf_counter() - self.began)


def main() -> None:
    began = time.perf_counter()
    keras.utils.set_random_seed(1)
    (x, y), test = load(args.data, "train"), load(args.data, "t10k")
    net = make_net()
    net.compile(
        optimizer=keras.optimizers.SGD(args.lr, momentum=0.5),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    times, evaluations, accuracy = Times(), [], 0.0
    for _ in range(args.epochs):
        net.fit(x, y, batch_size=args.batch_size, epochs=1, verbose=0, callbacks=[times])  # pyright: ignore
        start = time.perf_counter()
        accuracy = net.evaluate(*test, batch_size=args.batch_size, verbose=0)[1]  # pyright: ignore
        evaluations.append(time.perf_counter() - start)
        print(f"epoch {len(evaluations)}: test accuracy {accuracy:.4f}, {len(x) / times.epochs[-1]:,.0f} per second")
    # XLA takes all cores of the process; torch does, too, unless OMP_NUM_THREADS says otherwise.
    threads = len(os.sched_getaffinity(0))
    print_figures(began, [len(x)] * args.epochs, times.epochs, evaluations, accuracy=accuracy, threads=threads)


if __name__ == "__main__":
    main()
