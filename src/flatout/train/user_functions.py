"""User functions: a loss, transforms of images and of whole batches, and metrics."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flatout.config import Recipe
from flatout.tasks import TASKS
from flatout.utils.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class UserFunctions:
    """The functions that a caller of `fit` passes.

    Attributes:
        loss: a function of logits [B, K] and targets that returns a loss for each image, [B]; None for the recipe's.
        transforms: functions of one augmented image, float32 [C, H, W] in 0..1; each returns such an image.
        batch_transforms: functions of augmented and normalised images, float32 [B, C, H, W]; each returns such images.
        metrics: pairs of a name and a function of labels and predictions, as in scikit-learn.
    """

    loss: Callable[..., Any] | None = None
    transforms: tuple[Callable[..., Any], ...] = ()
    batch_transforms: tuple[Callable[..., Any], ...] = ()
    metrics: tuple[tuple[str, Callable[..., Any]], ...] = ()

    def check(self, recipe: Recipe, engine: str) -> None:
        """Raise InputError if the engine or the recipe cannot use them. Metrics are always possible."""
        reason = ""
        if engine == "xla":
            reason = "the XLA engine compiles its own losses and augmentations; use engine='torch'"
        elif recipe.shard == "full":
            reason = "a sharded model is trained by FSDP with built-in functions; set shard='none'"
        if reason and (given := self._in_training()):
            raise InputError(f"{given[0]}: a function of your own cannot be used here: {reason}")

    def notes(self) -> list[str]:
        """Return notes about functions that a recipe cannot contain."""
        return [
            f"{name} is a function given in Python: recipe.toml does not contain it" for name in self._in_training()
        ]

    def for_engine(self, recipe: Recipe) -> dict[str, Any]:
        """Return arguments of the torch engine; empty without functions."""
        per_image = (PerImage(self.transforms, recipe),) if self.transforms else ()
        transforms = (*per_image, *self.batch_transforms)
        return {"loss": self.loss, "batch_transforms": transforms} if self._in_training() else {}

    def _in_training(self) -> list[str]:
        """Return the arguments of `fit` that change training itself."""
        given = {"loss": self.loss, "transform": self.transforms, "batch_transforms": self.batch_transforms}
        return [name for name, value in given.items() if value]


class PerImage:
    """Applies transforms of single images to a batch of normalised images.

    Args:
        transforms: functions of float32 [C, H, W] in 0..1, on the device; each returns such an image.
    """

    def __init__(self, transforms: tuple[Callable[..., Any], ...], recipe: Recipe) -> None:
        self._transforms, self._data = transforms, recipe.data

    def __call__(self, images_BCHW: "Tensor") -> "Tensor":
        """Return changed images, [B, C, H, W].

        Raises:
            InputError: a transform failed, or returned something else.
        """
        import torch

        mean, std = (images_BCHW.new_tensor(v).reshape(-1, 1, 1) for v in (self._data.mean, self._data.std))
        # Mixing and erasing stay in 0..1, but rounding may exceed it.
        images = (images_BCHW * std + mean).clamp(0, 1)
        return (torch.stack([self._changed(image) for image in images]) - mean) / std

    def _changed(self, image_CHW: "Tensor") -> "Tensor":
        import torch

        def described(value: Any) -> str:
            return f"{value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__

        wanted = described(image_CHW)
        takes = f"images are tensors, {wanted} in 0..1; leave ToTensor, Normalize and Resize out"
        for transform in self._transforms:
            name = getattr(transform, "__name__", type(transform).__name__)
            try:
                image_CHW = transform(image_CHW)
            except Exception as error:  # users' functions may raise anything
                raise InputError(f"transform: {name} raised {type(error).__name__}: {error}; {takes}") from error
            if (found := described(image_CHW)) != wanted:
                raise InputError(f"transform: {name} returned {found}; {takes}")
        return image_CHW


def user_functions(loss: Any, transform: Any, batch_transforms: Any, metrics: Any) -> UserFunctions:
    """Validate and return the functions passed to `fit`.

    Raises:
        InputError: one is not a function, or a metric has no name or a built-in one's.
    """
    return UserFunctions(
        loss=loss,
        transforms=_functions(transform, "transform", "an image [C, H, W]"),
        batch_transforms=_functions(batch_transforms, "batch_transforms", "images [B, C, H, W]"),
        metrics=_named(metrics),
    )


def _functions(given: Any, argument: str, of: str) -> tuple[Callable[..., Any], ...]:
    functions = (given,) if callable(given) else tuple(given or ())
    for function in functions:
        if not callable(function):
            raise InputError(f"{argument}: {function!r} is not a function of {of}")
    return functions


def _named(metrics: Any) -> tuple[tuple[str, Callable[..., Any]], ...]:
    if callable(metrics) or isinstance(metrics, str):
        metrics = [metrics]
    pairs = metrics.items() if isinstance(metrics, Mapping) else [(getattr(m, "__name__", ""), m) for m in metrics]
    taken = {"loss", "count", *(name for task in TASKS.values() for name in task.metric_names)}
    found = []
    for name, function in pairs:
        if not callable(function):
            known = ", ".join(sorted(taken - {"loss", "count"}))
            raise InputError(f"metrics: {function!r} is not a function of labels and answers; always computed: {known}")
        if not str(name).isidentifier():
            raise InputError('metrics: a function without a name; give a dict: metrics={"name": function}')
        if name in taken:
            raise InputError(f"metrics: {name} is the name of a built-in metric; give the function another name")
        found.append((str(name), function))
    return tuple(found)
