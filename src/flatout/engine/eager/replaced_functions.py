"""Functions of torch, replaced while a model is called."""

from collections.abc import Callable, Mapping
from typing import Any

from torch.overrides import TorchFunctionMode


class ReplacedFunctions(TorchFunctionMode):
    """While active, calls of these functions of torch, wherever the model makes them, go to their replacements."""

    def __init__(self, functions: Mapping[Callable[..., Any], Callable[..., Any]]) -> None:
        super().__init__()
        self._functions = functions

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function or its replacement; inside a replacement, torch's own are called."""
        return self._functions.get(func, func)(*args, **(kwargs or {}))
