"""Caltech-101 as written by hand: every image is decoded and resized each time it comes by. No flatout.

    python benchmarks/plain_caltech101.py --data FOLDER [--epochs 50] [--workers 2] [--lr 0.01]

FOLDER holds desc_train.csv and desc_valid.csv, rows of image path and label. The accuracy on the training images is
counted while they train, which is cheaper than a second pass over them. The last line printed is JSON.
"""

import csv
import time
from collections.abc import Callable
from pathlib import Path

import torch
from PIL import Image
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

from common import loop_parser, print_figures

MEAN, STD = (0.4948, 0.4857, 0.4468), (0.2458, 0.2424, 0.2603)


class Caltech(Dataset):
    def __init__(self, manifest: Path, transform: Callable[[Image.Image], torch.Tensor]) -> None:
        with manifest.open(newline="") as file:
            self.rows = [(manifest.parent / row["file"], int(row["label"])) for row in csv.DictReader(file)]
        self.transform = transform

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        path, label = self.rows[index]
        image = Image.open(path).convert("RGB").resize((32, 32), Image.Resampling.BILINEAR)
        return self.transform(image), label


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 32, kernel_size=3)
        self.conv2 = nn.Conv2d(32, 64, kernel_size=3)
        self.fc1 = nn.Linear(64 * 6 * 6, 256)
        self.fc2 = nn.Linear(256, 128)
        self.fc3 = nn.Linear(128, 101)
        for conv in (self.conv1, self.conv2):
            nn.init.xavier_normal_(conv.weight)
        for linear in (self.fc1, self.fc2, self.fc3):
            nn.init.normal_(linear.weight, std=0.01)
        for layer in (self.conv1, self.conv2, self.fc1, self.fc2, self.fc3):
            assert layer.bias is not None
            nn.init.zeros_(layer.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.max_pool2d(functional.relu(self.conv1(x)), 2)
        x = functional.max_pool2d(functional.relu(self.conv2(x)), 2)
        x = functional.relu(self.fc1(torch.flatten(x, 1)))
        return self.fc3(functional.relu(self.fc2(x)))


def train(net: nn.Module, loader: DataLoader, optimizer: torch.optim.Optimizer, limit: int | None) -> tuple[int, float]:
    """Train one epoch, or its first `limit` steps; return the number of images and the accuracy on them."""
    net.train()
    correct = count = 0
    for step, (x, y) in enumerate(loader):
        if step == limit:
            break
        optimizer.zero_grad()
        logits = net(x)
        loss = functional.cross_entropy(logits, y)
        loss.backward()
        optimizer.step()
        correct += int((logits.argmax(dim=1) == y).sum())
        count += len(y)
        if step % 100 == 0:
            print(f"  step {step}: loss {loss.item():.4f}")
    return count, correct / count


@torch.no_grad()
def evaluate(net: nn.Module, loader: DataLoader, limit: int | None) -> tuple[float, float]:
    """Return the mean loss and the accuracy."""
    net.eval()
    loss_sum, correct, count = 0.0, 0, 0
    for step, (x, y) in enumerate(loader):
        if step == limit:
            break
        logits = net(x)
        loss_sum += functional.cross_entropy(logits, y, reduction="sum").item()
        correct += int((logits.argmax(dim=1) == y).sum())
        count += len(y)
    return loss_sum / count, correct / count


def main() -> None:
    parser = loop_parser(__doc__, epochs=50, batch_size=32, lr=0.001)
    parser.add_argument("--workers", type=int, default=0, help="processes of the DataLoader")
    parser.add_argument("--limit-steps", type=int, help="steps of an epoch and of an evaluation, for a trial")
    args = parser.parse_args()

    began = time.perf_counter()
    print(f"torch {torch.__version__}, GPU usable: {torch.cuda.is_available()}, GPUs: {torch.cuda.device_count()}")
    torch.manual_seed(1)
    to_normal = [transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
    train_set = Caltech(
        args.data / "desc_train.csv", transforms.Compose([transforms.RandomHorizontalFlip(), *to_normal])
    )
    valid_set = Caltech(args.data / "desc_valid.csv", transforms.Compose(to_normal))
    options = {"batch_size": args.batch_size, "num_workers": args.workers, "persistent_workers": args.workers > 0}
    train_loader, valid_loader = DataLoader(train_set, shuffle=True, **options), DataLoader(valid_set, **options)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=args.lr, momentum=0.9, dampening=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    images, train_seconds, evaluate_seconds = [], [], []
    accuracy = 0.0
    for epoch in range(1, args.epochs + 1):
        start = time.perf_counter()
        count, train_accuracy = train(net, train_loader, optimizer, args.limit_steps)
        trained = time.perf_counter()
        loss, accuracy = evaluate(net, valid_loader, args.limit_steps)
        scheduler.step(loss)
        images.append(count)
        train_seconds.append(trained - start)
        evaluate_seconds.append(time.perf_counter() - trained)
        print(f"epoch {epoch}: train accuracy {train_accuracy:.4f}, valid loss {loss:.4f}, accuracy {accuracy:.4f}")
    threads = torch.get_num_threads()
    print_figures(began, images, train_seconds, evaluate_seconds, accuracy=accuracy, threads=threads)


if __name__ == "__main__":
    main()
