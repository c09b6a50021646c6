"""Fashion-MNIST as written by hand: Pillow images, per-sample transforms, a DataLoader and a loop. No flatout.

    python benchmarks/plain_fashion_mnist.py --data FOLDER_OF_IDX_FILES [--epochs 50] [--workers 2]

The net and the training of the eight-core TPU tutorial in a single process: one core's batch of 128, and one core's
learning rate, 0.01. `--device cuda` trains on a GPU. The last line printed is JSON.
"""

import time
from collections.abc import Callable
from pathlib import Path

import torch
from PIL import Image
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

from common import loop_parser, print_figures, read_idx


class FashionMNIST(Dataset):
    """What torchvision.datasets.FashionMNIST is, read from gzipped files."""

    def __init__(self, folder: Path, part: str, transform: Callable[[Image.Image], torch.Tensor]) -> None:
        self.images = read_idx(folder / f"{part}-images-idx3-ubyte.gz")
        self.labels = read_idx(folder / f"{part}-labels-idx1-ubyte.gz")
        self.transform = transform

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = Image.fromarray(self.images[index])
        return self.transform(image), int(self.labels[index])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, kernel_size=5)
        self.bn1 = nn.BatchNorm2d(10)
        self.conv2 = nn.Conv2d(10, 20, kernel_size=5)
        self.bn2 = nn.BatchNorm2d(20)
        self.fc1 = nn.Linear(320, 50)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.bn1(functional.relu(functional.max_pool2d(self.conv1(x), 2)))
        x = self.bn2(functional.relu(functional.max_pool2d(self.conv2(x), 2)))
        x = functional.relu(self.fc1(torch.flatten(x, 1)))
        return functional.log_softmax(self.fc2(x), dim=1)


def train(net: nn.Module, loader: DataLoader, optimizer: torch.optim.Optimizer, limit: int | None, device: str) -> int:
    """Train one epoch, or its first `limit` steps; return the number of images."""
    net.train()
    images = 0
    for step, (x, y) in enumerate(loader):
        if step == limit:
            break
        x, y = x.to(device), y.to(device)
        optimizer.zero_grad()
        loss = functional.nll_loss(net(x), y)
        loss.backward()
        optimizer.step()
        images += len(y)
        if step % 20 == 0:
            print(f"  step {step}: loss {loss.item():.4f}")
    return images


@torch.no_grad()
def evaluate(net: nn.Module, loader: DataLoader, limit: int | None, device: str) -> float:
    net.eval()
    correct = count = 0
    for step, (x, y) in enumerate(loader):
        if step == limit:
            break
        x, y = x.to(device), y.to(device)
        correct += int((net(x).argmax(dim=1) == y).sum())
        count += len(y)
    return correct / count


def main() -> None:
    parser = loop_parser(__doc__, epochs=50, batch_size=128, lr=0.01)
    parser.add_argument("--workers", type=int, default=0, help="processes of the DataLoader")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--limit-steps", type=int, help="steps of an epoch and of an evaluation, for a trial")
    args = parser.parse_args()

    began = time.perf_counter()
    torch.manual_seed(1)
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])
    options = {"batch_size": args.batch_size, "num_workers": args.workers, "persistent_workers": args.workers > 0}
    train_loader = DataLoader(FashionMNIST(args.data, "train", transform), shuffle=True, drop_last=True, **options)
    test_loader = DataLoader(FashionMNIST(args.data, "t10k", transform), **options)
    net = Net().to(args.device)
    optimizer = torch.optim.SGD(net.parameters(), lr=args.lr, momentum=0.5)
    images, train_seconds, evaluate_seconds = [], [], []
    accuracy = 0.0
    for epoch in range(1, args.epochs + 1):
        start = time.perf_counter()
        images.append(train(net, train_loader, optimizer, args.limit_steps, args.device))
        trained = time.perf_counter()
        accuracy = evaluate(net, test_loader, args.limit_steps, args.device)
        train_seconds.append(trained - start)
        evaluate_seconds.append(time.perf_counter() - trained)
        print(f"epoch {epoch}: test accuracy {accuracy:.4f}, {images[-1] / train_seconds[-1]:,.0f} images per second")
    threads = torch.get_num_threads()
    print_figures(began, images, train_seconds, evaluate_seconds, accuracy=accuracy, threads=threads)


if __name__ == "__main__":
    main()
