"""The classifier that every export format is made from: it resizes as packs are resized."""

from typing import Any

import numpy as np
import pytest
import torch

from flatout.data.pixels import resize_images
from flatout.inference.export import Resize


@pytest.mark.parametrize("resize", ["squash", "crop", "pad"])
@pytest.mark.parametrize("bits", [8, 16])
def test_images_are_resized_as_in_a_pack(resize: str, bits: int) -> None:
    """To a level of 255 at most, or of 65535, where the pack's kernels round otherwise."""
    rng, kind = np.random.default_rng(0), {8: np.uint8, 16: np.uint16}[bits]
    for shape in ((28, 28, 1), (50, 71, 3), (13, 9, 5), (301, 224, 3), (1, 1, 1), (3, 400, 1)):
        images = rng.integers(0, 2**bits, (2, *shape), dtype=kind)
        for size in ((28, 28), (20, 45)):
            target: dict[str, Any] = {"size": size, "channels": shape[-1], "resize": resize, "bits": bits}
            expected = resize_images(images, **target).astype(np.int64)
            found = Resize(size, resize, bits)(torch.from_numpy(images)).permute(0, 2, 3, 1).numpy()
            assert np.abs(found - expected).max() <= 1, (shape, size)
            if shape[:2] == size:
                assert np.array_equal(found, images)
