"""What a run has written, and what to train on."""

import json
import socket
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from flatout.models.weights import read_weights


def summary(run: Path) -> dict[str, Any]:
    return json.loads((run / "summary.json").read_text())


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def weights(run: Path) -> dict[str, torch.Tensor]:
    return read_weights(run / "weights.safetensors")[0]


def grey_levels(
    count: int = 120, *, size: int = 8, noise: int = 40, step: int = 90, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Return grey images uint8 [N, size, size] of three classes, which differ in their level by a step, and labels."""
    labels = np.arange(count) % 3
    pixels = np.random.default_rng(seed).integers(0, noise, (count, size, size))
    return (pixels + step * labels[:, None, None]).astype(np.uint8), labels


def write_digits(path: Path) -> Path:
    """Write the digits into a file: no process needs scikit-learn, which takes long to import."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    np.savez(path, images=(images * 15).astype(np.uint8).reshape(-1, 8, 8), labels=labels)
    return path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def write_class_folders(root: Path, per_class: int = 12, size: int = 20, parts: tuple[str, ...] = ("",)) -> Path:
    """Pictures of two classes that any net tells apart: dark and bright."""
    rng = np.random.default_rng(0)
    for part in parts:
        for name, level in (("bright", 200), ("dark", 40)):
            folder = root / part / name
            folder.mkdir(parents=True)
            for i in range(per_class):
                pixels = rng.integers(level - 30, level + 30, (size + i % 3, size, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{i:03}.jpg")
    return root
