"""From a model's name to the model, with weights that depend on the seed alone."""

import contextlib
import difflib
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.errors import InputError
from flatout.recipe import Recipe
from flatout.settings import nearest

if TYPE_CHECKING:
    from torch import nn

_NETS = {
    "fashion-cnn": "flatout.models.nets:FashionCNN",
    "cats-dogs-cnn": "flatout.models.nets:CatsDogsCNN",
    "parallel-cnn": "flatout.models.nets:ParallelCNN",
    "keras-cnn": "flatout.models.nets:KerasCNN",
    "caltech-cnn": "flatout.models.nets:CaltechCNN",
    "vgg16": "flatout.models.vgg:VGG16",
}


def list_names() -> list[str]:
    """Return the names of our own models."""
    return list(_NETS)


def build_for(recipe: Recipe, *, num_classes: int, allow_code: bool) -> "nn.Module":
    """Return a recipe's model with fresh weights; see `build`."""
    return build(
        recipe.model,
        num_classes=num_classes,
        image_size=recipe.image_size,
        channels=recipe.channels,
        loss=recipe.loss,
        seed=recipe.seed,
        allow_code=allow_code,
    )


def build(
    name: str,
    *,
    num_classes: int,
    image_size: int,
    channels: int,
    loss: str = "cross-entropy",
    seed: int,
    allow_code: bool = False,
) -> "nn.Module":
    """Build a classifier with fresh weights, on the CPU, in training mode.

    It takes float images `[N, channels, image_size, image_size]` and returns logits `[N, num_classes]`, or `[N, 1]`
    where `loss` is "binary-cross-entropy". The random generators of the caller stay as they are.

    Args:
        name: one of `list_names()`; `timm:NAME`; or `package.module:factory`, a callable that returns a torch.nn.Module
            and takes `num_classes` (the number of logits), `image_size` and `channels` too if its signature names them.
        num_classes: classes of the data.
        image_size: height and width in pixels.
        channels: 1 (grey) or 3 (RGB).
        loss: "cross-entropy" or "binary-cross-entropy".
        seed: decides the fresh weights.
        allow_code: whether a factory may be imported and called: only for a name from the user's own command line or
            code, never for one read from a file.

    Raises:
        InputError: there is no such model, it cannot be built for these images and classes, or it is code and code is
            not allowed.
    """
    if loss == "binary-cross-entropy" and num_classes != 2:
        raise InputError(f"loss = {loss!r}: needs data of 2 classes, not {num_classes}; use loss = 'cross-entropy'")
    num_outputs = 1 if loss == "binary-cross-entropy" else num_classes
    if name in _NETS:
        with seeded(seed):
            return _resolve(_NETS[name])(num_outputs, image_size, channels)
    if name.startswith("timm:"):
        model = _build_timm(name, num_outputs, image_size, channels, seed)
    elif ":" in name:
        if name.startswith("python:"):
            raise InputError(f"model = {name!r}: was given in Python; train it with flatout.fit(model, ...) again")
        if not allow_code:
            raise InputError(
                f"model = {name!r}: names Python code, and code named in a file is never run; "
                f"if you trust it, name it yourself: train with --model {name}, evaluate and predict with --allow-code"
            )
        model = _call_factory(name, num_outputs, image_size, channels, seed)
    else:
        raise InputError(
            f"no model called {name!r}; {nearest(name, list_names())} (or timm:NAME, or package.module:factory)"
        )
    check_outputs(model, name, num_outputs=num_outputs, image_size=image_size, channels=channels)
    return model


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw what torch draws inside from `seed`, on the CPU; afterwards the generator is as it was before."""
    import torch

    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would reseed the accelerators too
        yield


def create_timm(name: str, num_outputs: int, image_size: int, channels: int, *, pretrained: bool) -> "nn.Module":
    """Call timm.create_model, with the image size where the model takes one; timm's own errors come through."""
    import timm

    options: dict[str, Any] = {"num_classes": num_outputs, "in_chans": channels, "pretrained": pretrained}
    timm_name = name.removeprefix("timm:")
    try:
        return timm.create_model(timm_name, img_size=image_size, **options)
    except TypeError as error:
        if "unexpected keyword argument 'img_size'" not in str(error):
            raise
    return timm.create_model(timm_name, **options)


def _build_timm(name: str, num_outputs: int, image_size: int, channels: int, seed: int) -> "nn.Module":
    import timm

    architecture, _, tag = name.removeprefix("timm:").partition(".")
    if not timm.is_model(architecture):
        close = difflib.get_close_matches(architecture, timm.list_models(), n=3, cutoff=0.5)
        hint = f"nearest: {', '.join(f'timm:{c}' for c in close)}" if close else "see timm.list_models()"
        raise InputError(f"timm has no model called {architecture!r}; {hint}")
    tagged = timm.list_pretrained(f"{architecture}.*")
    if tag and f"{architecture}.{tag}" not in tagged:
        raise InputError(f"timm has no weights {tag!r} for {architecture}; {nearest(tag, _tags(tagged))}")
    try:
        with seeded(seed):
            return create_timm(name, num_outputs, image_size, channels, pretrained=False)
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        raise InputError(
            f"model = {name!r}: cannot be built for {channels}-channel images of {image_size}x{image_size} pixels "
            f"({first_line(error)}); change image_size or the model"
        ) from error


def _tags(names: list[str]) -> list[str]:
    return [name.partition(".")[2] for name in names]


def _call_factory(name: str, num_outputs: int, image_size: int, channels: int, seed: int) -> "nn.Module":
    from torch import nn

    with seeded(seed), _importing_from_here():
        try:
            factory = _resolve(name)
            parameters = inspect.signature(factory).parameters
        except (AttributeError, ImportError, SyntaxError, TypeError, ValueError) as error:
            raise InputError(
                f"model = {name!r}: cannot be imported as package.module:factory "
                f"({type(error).__name__}: {first_line(error)})"
            ) from error
        takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
        if "num_classes" not in parameters and not takes_any:
            raise InputError(f"model = {name!r}: must take num_classes, the number of logits; it takes {[*parameters]}")
        sizes = {"image_size": image_size, "channels": channels}
        try:
            model = factory(
                num_classes=num_outputs, **{key: value for key, value in sizes.items() if key in parameters}
            )
        except Exception as error:  # the user's code may raise anything
            raise InputError(f"model = {name!r}: raised {type(error).__name__}: {first_line(error)}") from error
    if not isinstance(model, nn.Module):
        raise InputError(f"model = {name!r}: must return a torch.nn.Module, not {type(model).__name__}")
    return model


def _resolve(path: str) -> Callable[..., Any]:
    module, _, attribute = path.partition(":")
    return reduce(getattr, attribute.split("."), importlib.import_module(module))


@contextlib.contextmanager
def _importing_from_here() -> Iterator[None]:
    """Let a factory in a file of the current folder be imported, as `python -m` does, without hiding anything else."""
    here = str(Path.cwd())
    sys.path.append(here)
    try:
        yield
    finally:
        sys.path.remove(here)


def check_outputs(model: "nn.Module", name: str, *, num_outputs: int, image_size: int, channels: int) -> None:
    """Check that a model not of ours takes such images and returns logits `[N, num_outputs]`, leaving it as it was.

    Raises:
        InputError: it fails on them, or returns something else.
    """
    import torch

    modes = {module: module.training for module in model.modules()}
    model.eval()
    shown = f"{channels}-channel images of {image_size}x{image_size} pixels"
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            logits = model(torch.zeros(2, channels, image_size, image_size, device=device))
    except Exception as error:  # someone else's code may raise anything
        raise InputError(f"model {name!r} fails on {shown}: {type(error).__name__}: {first_line(error)}") from error
    finally:
        for module, training in modes.items():
            module.training = training
    if not isinstance(logits, torch.Tensor) or logits.shape != (2, num_outputs):
        found = list(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
        raise InputError(
            f"model {name!r} must return logits [N, {num_outputs}] for a batch of N {shown}; "
            f"for N = 2 it returned {found}"
        )


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its type where it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
