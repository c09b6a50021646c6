"""Photos with timm's ResNet-18 in a loop written by hand, in fp32 or under autocast in bfloat16. No flatout.

    python benchmarks/plain_resnet18.py --data FOLDER [--precision bf16] [--size 160] [--epochs 2]

FOLDER has class folders in training_set/ and test_set/. The images are decoded before the first epoch and stay in
memory as bytes, which favours the loop; its one augmentation is a flip of the batch. The last line printed is JSON.
"""

import contextlib
import time
from pathlib import Path

import timm
import torch
from torch import nn
from torchvision import datasets, transforms

from common import loop_parser, print_figures

MEAN, STD = torch.tensor([[0.485, 0.456, 0.406]]), torch.tensor([[0.229, 0.224, 0.225]])


def decode(folder: Path, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return all images as bytes [N, 3, size, size], and their labels."""
    transform = transforms.Compose([transforms.Resize((size, size)), transforms.PILToTensor()])
    images, labels = zip(*datasets.ImageFolder(str(folder), transform), strict=True)
    return torch.stack(images), torch.tensor(labels)


def normalise(images: torch.Tensor) -> torch.Tensor:
    x = (images.float() / 255 - MEAN[..., None, None]) / STD[..., None, None]
    return x.contiguous(memory_format=torch.channels_last)


def main() -> None:
    parser = loop_parser(__doc__, epochs=2, batch_size=64, lr=0.05)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--size", type=int, default=160)
    args = parser.parse_args()

    began = time.perf_counter()
    torch.manual_seed(1)
    (x, y), test = decode(args.data / "training_set", args.size), decode(args.data / "test_set", args.size)
    net = timm.create_model("resnet18", num_classes=2).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(net.parameters(), lr=args.lr, momentum=0.9)
    loss_function = nn.CrossEntropyLoss()

    def context() -> contextlib.AbstractContextManager[object]:
        return torch.autocast("cpu", torch.bfloat16, enabled=args.precision == "bf16")

    train_seconds, evaluate_seconds, accuracy = [], [], 0.0
    for epoch in range(1, args.epochs + 1):
        start = time.perf_counter()
        net.train()
        for rows in torch.randperm(len(x)).split(args.batch_size):
            images = normalise(x[rows])
            if torch.rand(()) < 0.5:
                images = images.flip(3)
            optimizer.zero_grad()
            with context():
                loss = loss_function(net(images), y[rows])
            loss.backward()
            optimizer.step()
        trained = time.perf_counter()
        net.eval()
        correct = 0
        with torch.no_grad(), context():
            for rows in torch.arange(len(test[0])).split(args.batch_size):
                correct += int((net(normalise(test[0][rows])).argmax(1) == test[1][rows]).sum())
        accuracy = correct / len(test[0])
        train_seconds.append(trained - start)
        evaluate_seconds.append(time.perf_counter() - trained)
        print(f"epoch {epoch}: test accuracy {accuracy:.4f}, {len(x) / train_seconds[-1]:,.1f} images per second")
    images, threads = [len(x)] * args.epochs, torch.get_num_threads()
    print_figures(began, images, train_seconds, evaluate_seconds, accuracy=accuracy, threads=threads)


if __name__ == "__main__":
    main()
