"""Photos in a fine-tuning loop written by hand, with timm's network and its published weights. No flatout.

    python benchmarks/torch_photos.py --data FOLDER --minutes 2 [--network lite0] [--weights-dir DIR]

The loop has no time limit. Some steps are measured first in each memory format and precision, and an epoch in the
fastest of them. This is not counted. Then as many epochs are trained as fit, at least one. The test images are
evaluated once, at the end. The last line printed is JSON.
"""

import itertools
import json
import time

BEGAN = time.perf_counter()

from collections.abc import Callable  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
from PIL import Image  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, Dataset  # noqa: E402
from torchvision import transforms  # noqa: E402

from photo_files import Split, arguments, create_network, read_photos  # noqa: E402

# Whether images are channels_last, and whether in bfloat16 by autocast.
Settings = tuple[bool, bool]
BATCH, SIZE, HEAD_RATE, BODY_RATE = 32, 224, 1e-3, 1e-4
NORMALIZE = [transforms.ToTensor(), transforms.Normalize((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))]
TRAIN = transforms.Compose([transforms.RandomResizedCrop(SIZE), transforms.RandomHorizontalFlip(), *NORMALIZE])
TEST = transforms.Compose([transforms.Resize((SIZE, SIZE)), *NORMALIZE])


class Photos(Dataset):
    """Images [3, SIZE, SIZE] and their classes."""

    def __init__(self, split: Split, transform: transforms.Compose) -> None:
        self.split, self.transform = split, transform

    def __len__(self) -> int:
        return len(self.split)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        file, label = self.split[index]
        with Image.open(file) as image:
            return self.transform(image.convert("RGB")), label  # pyright: ignore[reportReturnType]


def computes_bfloat16() -> bool:
    """Return whether the processor has units for bfloat16."""
    info = Path("/proc/cpuinfo")
    flags = info.read_text().split() if info.exists() else []
    return "avx512_bf16" in flags or "amx_bf16" in flags


class Training:
    """A network with a new head, its optimizer and a cosine schedule over `steps`."""

    def __init__(self, network: Any, classes: int, steps: int, settings: Settings) -> None:
        self.layout = torch.channels_last if settings[0] else torch.contiguous_format
        self.autocast = settings[1]
        network.reset_classifier(classes)
        self.network = network.to(memory_format=self.layout)
        head = list(network.get_classifier().parameters())
        body = [p for p in network.parameters() if all(p is not q for q in head)]
        groups = [{"params": body, "lr": BODY_RATE}, {"params": head, "lr": HEAD_RATE}]
        self.optimizer = torch.optim.AdamW(groups)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, steps)

    def logits(self, images: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            return self.network(images.contiguous(memory_format=self.layout)).float()

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.logits(images), labels).backward()
        self.optimizer.step()
        self.schedule.step()

    def epoch(self, loader: DataLoader) -> float:
        """Train an epoch; return its seconds."""
        began = time.perf_counter()
        self.network.train()
        for images, labels in loader:
            self.step(images, labels)
        return time.perf_counter() - began

    @torch.inference_mode()
    def accuracy(self, loader: DataLoader) -> float:
        self.network.eval()
        correct = [self.logits(images).argmax(1) == labels for images, labels in loader]
        return torch.cat(correct).float().mean().item()


def fastest(create: Callable[[int, Settings], Training]) -> Settings:
    """Return the settings with the fastest training step, each measured in its best of 3 steps after a first one."""
    images, labels = torch.rand(BATCH, 3, SIZE, SIZE), torch.zeros(BATCH, dtype=torch.long)
    best: dict[Settings, float] = {}
    for settings in itertools.product((True, False), {False, computes_bfloat16()}):
        training, times = create(4, settings), []
        for _ in range(4):
            began = time.perf_counter()
            training.step(images, labels)
            times.append(time.perf_counter() - began)
        best[settings] = min(times[1:])
    return min(best, key=lambda settings: best[settings])


def main() -> None:
    args = arguments(__doc__, minutes=True).parse_args()
    torch.manual_seed(args.seed)
    train, test, classes = read_photos(args.data)
    loader = DataLoader(Photos(train, TRAIN), BATCH, shuffle=True, drop_last=True, num_workers=args.workers)
    test_loader = DataLoader(Photos(test, TEST), BATCH, num_workers=args.workers)

    def create(steps: int, settings: Settings) -> Training:
        return Training(create_network(args.network, args.weights_dir), len(classes), steps, settings)

    create(1, (True, False))
    starting_seconds = time.perf_counter() - BEGAN
    settings = fastest(create)
    probe = create(len(loader), settings)
    epoch_seconds = probe.epoch(loader)
    began = time.perf_counter()
    probe.accuracy(test_loader)
    evaluate_seconds = time.perf_counter() - began
    probe_seconds = time.perf_counter() - BEGAN - starting_seconds

    epochs = max(1, int((60 * args.minutes - starting_seconds - evaluate_seconds) / epoch_seconds))
    torch.manual_seed(args.seed)
    learn = create(epochs * len(loader), settings)
    train_seconds = sum(learn.epoch(loader) for _ in range(epochs))
    result = {
        "accuracy": learn.accuracy(test_loader),
        "image_size": SIZE,
        "channels_last": settings[0],
        "precision": "bf16" if settings[1] else "fp32",
        "epochs": epochs,
        "starting_seconds": starting_seconds,
        "train_seconds": train_seconds,
        "probe_seconds": probe_seconds,
        "seconds": time.perf_counter() - BEGAN - probe_seconds,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
