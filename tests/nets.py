"""Models by name, for tests."""

from torch import nn

from flatout.config import Recipe
from flatout.models.build import build_model


def build(
    name: str,
    *,
    num_classes: int,
    image_size: int,
    channels: int,
    seed: int,
    loss: str = "cross-entropy",
    allow_code: bool = False,
) -> nn.Module:
    """Return a model with fresh weights."""
    shape = {"image_size": image_size, "channels": channels, "loss": loss}
    recipe = Recipe(model=name, epochs=1, batch_size=1, seed=seed, **shape)  # pyright: ignore[reportArgumentType]
    return build_model(recipe, num_classes, allow_code=allow_code)
