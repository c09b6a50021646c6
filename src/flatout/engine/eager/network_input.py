"""What the network reads: images augmented and normalised on the device, or the output of its frozen prefix.

Shape letters: B samples of this rank in a batch, C channels.
"""

from collections.abc import Callable, Sequence

import torch
from torch.nn import functional

from flatout.engine.eager.split import Inputs, Source
from flatout.errors import InputError
from flatout.models.layers import Cut
from flatout.numerics import augment
from flatout.recipe import Recipe


class NetworkInput:
    """Makes the input of the network on one device.

    Args:
        recipe: for sizes and normalisation.
        cut: between the frozen prefix, whose output is stored in place of the images, and the rest; None for none.
        batch_transforms: of training images [B, C, H, W] as the model takes them; each returns such images.
    """

    def __init__(
        self,
        recipe: Recipe,
        device: torch.device,
        cut: Cut | None,
        batch_transforms: Sequence[Callable[[torch.Tensor], torch.Tensor]],
    ) -> None:
        self._recipe, self._cut, self._batch_transforms = recipe, cut, batch_transforms
        mean, std = (torch.tensor(v, device=device) for v in (recipe.data.mean, recipe.data.std))
        # A pixel p of 0..255 becomes p * scale + bias.
        self._normalisation = 1 / (255 * std), -mean / std

    def normalised(self, images: torch.Tensor, transforms: dict[str, torch.Tensor] | None = None) -> torch.Tensor:
        """Return stored images [B, H, W, C] as the model takes them, [B, C, H, W]: augmented, or for evaluation."""
        size = self._recipe.eval_sides if transforms is None else self._recipe.image_sides
        return augment.apply(images, transforms, *self._normalisation, size)

    def of(self, images: torch.Tensor, transforms: dict[str, torch.Tensor] | None = None) -> torch.Tensor:
        """Return what the network reads, [B, C, ...]: `normalised` images, or the output of the prefix."""
        return images.movedim(-1, 1) if self._cut else self.normalised(images, transforms)

    def of_batch(self, source: Source, inputs: Inputs) -> torch.Tensor:
        """Return a batch's augmented images, mixed with others if the recipe says so, in the size of the epoch."""
        rows = source.transforms_of(inputs.samples)
        images = self.of(source.images_of(inputs), rows)
        if inputs.partners is not None:
            partner_rows = source.transforms_of(inputs.partners)
            partners = self.of(source.images_of(inputs, of_partners=True), partner_rows)
            images = augment.mix(images, partners, rows["mix"])
        if source.size not in (None, self._recipe.image_sides):
            images = functional.interpolate(images, size=source.size, mode="area")
        for transform in self._batch_transforms:
            shape, images = images.shape, transform(images)
            found = tuple(images.shape) if isinstance(images, torch.Tensor) else type(images).__name__
            if found != tuple(shape):
                name = getattr(transform, "__name__", type(transform).__name__)
                raise InputError(f"batch_transforms: {name} returned {found} for {tuple(shape)}")
        return images
