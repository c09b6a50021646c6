"""Fashion-MNIST as Lightning users write it: a LightningModule, a data set with transforms and the Trainer. No flatout.

    python benchmarks/lightning_fashion_mnist.py --data FOLDER_OF_IDX_FILES [--epochs 50] [--in-memory]

It needs `pip install lightning`. The net of the eight-core TPU tutorial and its global batch of 1024, on one CPU.
`--in-memory` normalises all images before the first epoch, as few users do. The last line printed is JSON.
"""

import logging
import time
import warnings
from pathlib import Path

import lightning  # pyright: ignore[reportMissingImports]
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torchvision import transforms

from common import loop_parser, print_figures, read_idx
from plain_fashion_mnist import FashionMNIST, Net


class Classifier(lightning.LightningModule):
    """The net, its loss and its optimizer; the times of its epochs."""

    def __init__(self, lr: float) -> None:
        super().__init__()
        self.net, self.lr = Net(), lr
        self.train_seconds: list[float] = []
        self.evaluate_seconds: list[float] = []
        self.accuracies: list[float] = []

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        return functional.nll_loss(self.net(batch[0]), batch[1])

    def validation_step(self, batch: list[torch.Tensor], _: int) -> None:
        self.correct += int((self.net(batch[0]).argmax(dim=1) == batch[1]).sum())
        self.count += len(batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.5)

    def on_train_epoch_start(self) -> None:
        self.began = time.perf_counter()

    def on_validation_start(self) -> None:
        # Validation runs at the end of the training epoch.
        self.correct = self.count = 0
        self.train_seconds.append(time.perf_counter() - self.began)
        self.began = time.perf_counter()

    def on_validation_end(self) -> None:
        self.evaluate_seconds.append(time.perf_counter() - self.began)
        self.accuracies.append(self.correct / self.count)


def in_memory(folder: Path, part: str) -> TensorDataset:
    images = torch.from_numpy(read_idx(folder / f"{part}-images-idx3-ubyte.gz").copy())[:, None].float() / 255
    labels = torch.from_numpy(read_idx(folder / f"{part}-labels-idx1-ubyte.gz").copy()).long()
    return TensorDataset((images - 0.1307) / 0.3081, labels)


def main() -> None:
    parser = loop_parser(__doc__, epochs=50, batch_size=1024, lr=0.08)
    parser.add_argument("--in-memory", action="store_true", help="normalise all images before the first epoch")
    args = parser.parse_args()

    began = time.perf_counter()
    # Advice on the number of workers: with tensors in memory none is faster.
    warnings.filterwarnings("ignore", module="lightning")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    lightning.seed_everything(1)
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])
    train, test = (
        in_memory(args.data, part) if args.in_memory else FashionMNIST(args.data, part, transform)
        for part in ("train", "t10k")
    )
    model = Classifier(args.lr)
    trainer = lightning.Trainer(
        max_epochs=args.epochs,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(
        model,
        DataLoader(train, batch_size=args.batch_size, shuffle=True),
        DataLoader(test, batch_size=args.batch_size),
    )
    images, threads = [len(train)] * args.epochs, torch.get_num_threads()
    seconds, accuracy = (model.train_seconds, model.evaluate_seconds), model.accuracies[-1]
    print_figures(began, images, *seconds, accuracy=accuracy, threads=threads)


if __name__ == "__main__":
    main()
