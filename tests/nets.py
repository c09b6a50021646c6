"""Models by name, for tests."""

from typing import Any

from torch import nn

from flatout.config import Recipe
from flatout.models.build import build_model


def build(name: str, *, num_classes: int, allow_code: bool = False, **of_recipe: Any) -> nn.Module:
    """Return a model with fresh weights; `of_recipe` are its shape, seed and loss."""
    recipe = Recipe(model=name, epochs=1, batch_size=1, **of_recipe)
    return build_model(recipe, num_classes, allow_code=allow_code)
