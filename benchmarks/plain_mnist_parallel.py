"""MNIST from JSON as written by hand: a Python generator reads, shuffles and batches. No flatout.

    python benchmarks/plain_mnist_parallel.py --data mnist.json.gz [--epochs 2] [--optimizer momentum]

The single-device part of the PaddlePaddle tutorial, in PyTorch. The reader turns the lists into arrays once, where the
tutorial converts every image each time it comes by. The last line printed is JSON.
"""

import gzip
import json
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from common import loop_parser, print_figures

Part = tuple[np.ndarray, np.ndarray]


def load(path: Path) -> list[Part]:
    """Return images float32 [N, 784] and labels int64 [N] of the train, validation and evaluation parts."""
    parts = []
    with gzip.open(path, "rt") as file:
        for images, labels in json.load(file):
            if len(images) != len(labels):
                raise ValueError(f"{len(images)} images but {len(labels)} labels")
            parts.append((np.array(images, np.float32), np.array(labels, np.int64)))
    return parts


def read(part: Part, batch_size: int, *, shuffle: bool) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield batches of images float32 [B, 1, 28, 28] and labels int64 [B]; the last one may be short."""
    images, labels = part
    order = list(range(len(labels)))
    if shuffle:
        random.shuffle(order)
    image_list, label_list = [], []
    for index in order:
        image_list.append(images[index].reshape(1, 28, 28))
        label_list.append(labels[index])
        if len(image_list) == batch_size:
            yield np.array(image_list), np.array(label_list)
            image_list, label_list = [], []
    if image_list:
        yield np.array(image_list), np.array(label_list)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 20, kernel_size=5, padding=2)
        self.conv2 = nn.Conv2d(20, 20, kernel_size=5, padding=2)
        self.fc = nn.Linear(20 * 7 * 7, 10)
        # As PaddlePaddle starts its layers.
        for conv in (self.conv1, self.conv2):
            nn.init.normal_(conv.weight, std=math.sqrt(2 / conv.weight[0].numel()))
        nn.init.xavier_uniform_(self.fc.weight)
        for layer in (self.conv1, self.conv2, self.fc):
            assert layer.bias is not None
            nn.init.zeros_(layer.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.max_pool2d(functional.relu(self.conv1(x)), 2)
        x = functional.max_pool2d(functional.relu(self.conv2(x)), 2)
        return self.fc(torch.flatten(x, 1))


OPTIMIZERS = {
    "sgd": lambda parameters, lr: torch.optim.SGD(parameters, lr=lr),
    "momentum": lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
    "adagrad": lambda parameters, lr: torch.optim.Adagrad(parameters, lr=lr),
    "adam": lambda parameters, lr: torch.optim.Adam(parameters, lr=lr),
}


def train(net: nn.Module, part: Part, batch_size: int, optimizer: torch.optim.Optimizer, limit: int | None) -> int:
    """Train one epoch, or its first `limit` steps; return the number of images."""
    net.train()
    count = 0
    for step, (images, labels) in enumerate(read(part, batch_size, shuffle=True)):
        if step == limit:
            break
        x, y = torch.from_numpy(images), torch.from_numpy(labels)
        loss = functional.cross_entropy(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        count += len(y)
        if step % 200 == 0:
            print(f"  step {step}: loss {loss.item():.4f}")
    return count


@torch.no_grad()
def evaluate(net: nn.Module, part: Part, batch_size: int, limit: int | None) -> float:
    net.eval()
    correct = count = 0
    for step, (images, labels) in enumerate(read(part, batch_size, shuffle=False)):
        if step == limit:
            break
        correct += int((net(torch.from_numpy(images)).argmax(dim=1) == torch.from_numpy(labels)).sum())
        count += len(labels)
    return correct / count


def main() -> None:
    parser = loop_parser(__doc__, epochs=2, batch_size=100, lr=0.01)
    parser.add_argument("--optimizer", choices=list(OPTIMIZERS), default="sgd")
    parser.add_argument("--limit-steps", type=int, help="steps of an epoch and of the evaluation, for a trial")
    args = parser.parse_args()

    began = time.perf_counter()
    random.seed(1)
    torch.manual_seed(1)
    train_part, _, evaluation_part = load(args.data)
    net = Net()
    optimizer = OPTIMIZERS[args.optimizer](net.parameters(), args.lr)
    images, train_seconds = [], []
    for epoch in range(1, args.epochs + 1):
        start = time.perf_counter()
        images.append(train(net, train_part, args.batch_size, optimizer, args.limit_steps))
        train_seconds.append(time.perf_counter() - start)
        print(f"epoch {epoch}: {images[-1] / train_seconds[-1]:,.0f} images per second")
    accuracy = evaluate(net, evaluation_part, args.batch_size, args.limit_steps)
    print(f"evaluation accuracy {accuracy:.4f}")
    none = [0.0] * args.epochs
    print_figures(began, images, train_seconds, none, accuracy=accuracy, threads=torch.get_num_threads())


if __name__ == "__main__":
    main()
