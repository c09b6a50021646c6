"""What is trained with recorded steps: on the stand-in for a GPU (tests/cuda_mock), and on GPUs (test_cuda.py)."""

from typing import Any

import torch
from torch import nn

from flatout.config import Recipe
from flatout.config.jobs import load_job
from flatout.models.build import build_model
from tests.engine.test_against_plain_loop import make_net, make_recipe

# In each epoch two full batches and a padded one: three eager steps of the full ones, and one padded; then two graphs.
BATCH, COUNT, CLASSES, EPOCHS = 8, 20, 4, 3
SIZES = {"cats-dogs": 32, "oct-vgg16": 32, "caltech101": 32, "digits": 8}
# 32-bit floats: otherwise differences between recorded and eager steps would have to be tolerated.
EXACT = {"precision": "fp32"}


def job_recipe(job: str, **changes: Any) -> Recipe:
    small = {
        "epochs": EPOCHS, "batch_size": BATCH, "image_size": SIZES.get(job, 28), "drop_last": False,
        "pretrained": False, "keep": "last", "data.valid_fraction": 0.0, "schedule.name": "cosine",
    }  # fmt: skip
    return load_job(job).override({**small, **changes})


def job_net(recipe: Recipe) -> nn.Module:
    return build_model(recipe, 2 if recipe.loss == "binary-cross-entropy" else CLASSES)


def net_recipe(**changes: Any) -> Recipe:
    return make_recipe(epochs=EPOCHS, batch_size=BATCH, **{"schedule.name": "cosine", "optimizer.lr": 0.05, **changes})


CASES: dict[str, dict[str, Any]] = {
    "label smoothing": {"label_smoothing": 0.1},
    "micro-batches": {"micro_batch": 3, "norm": "per-device"},
    "momentum": {"optimizer.name": "momentum", "optimizer.nesterov": True},
    "adamw": {"optimizer.name": "adamw", "optimizer.lr": 0.01},
    "RMSprop": {"optimizer.name": "torch:RMSprop", "optimizer.lr": 0.005},
    "layer decay": {"optimizer.name": "momentum", "optimizer.layer_decay": 0.5},
    "affine maps": {"augment.rotate": 20.0, "augment.flip": True},
    "colours and rectangles": {"augment.color_jitter": 0.4, "augment.policy": "trivialaugment", "augment.erase": 0.5},
    "mixtures": {"augment.mixup": 0.4, "augment.cutmix": 1.0, "augment.flip": True},
    "streamed mixtures": {"augment.mixup": 0.4, "data.placement": "disk"},
    "averaged weights, limited gradients": {"ema": 0.9, "clip_norm": 0.5},
    "bfloat16": {"precision": "bf16"},
    "streamed images": {"data.placement": "disk"},
}


def norm_net() -> nn.Module:
    return make_net(classes=CLASSES)


def plain_net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Flatten(), nn.Dropout(0.5), nn.Linear(600, CLASSES))


def net_of(case: str) -> nn.Module:
    return plain_net() if case == "micro-batches" else norm_net()


class Waits(nn.Module):
    """Waits for the device."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (1.0 if x.mean().item() > 0 else 2.0)
