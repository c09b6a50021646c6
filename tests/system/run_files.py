"""What a run has written."""

import json
from pathlib import Path
from typing import Any

import torch

from flatout.models.weights import read_weights


def summary(run: Path) -> dict[str, Any]:
    return json.loads((run / "summary.json").read_text())


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def weights(run: Path) -> dict[str, torch.Tensor]:
    return read_weights(run / "weights.safetensors")[0]
