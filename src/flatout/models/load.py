"""From a recipe to its model: our nets, timm's, a factory of the user's, or a module given in Python."""

import contextlib
import copy
import difflib
import importlib
import importlib.util
import inspect
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.errors import InputError, first_line
from flatout.recipe import Recipe
from flatout.settings import Size, nearest, one_or_both, shown
from flatout.tasks import task_of

if TYPE_CHECKING:
    from torch import nn

    from flatout.models.weights import Tensors

# The names of our own nets, and their classes in `models.nets`.
_NETS = {
    "fashion-cnn": "FashionCNN",
    "cats-dogs-cnn": "CatsDogsCNN",
    "parallel-cnn": "ParallelCNN",
    "keras-cnn": "KerasCNN",
    "caltech-cnn": "CaltechCNN",
    "vgg16": "VGG16",
    "fast-cnn-16": "FastCNN16",
    "fast-cnn-32": "FastCNN32",
    "fast-cnn-64": "FastCNN64",
    "fast-cnn-128": "FastCNN128",
    "keras-resnet50": "KerasResNet50",
    "keras-resnet101": "KerasResNet101",
    "keras-resnet152": "KerasResNet152",
}


def default_shape(name: str) -> tuple[int, Size, int]:
    """Return classes, image size and channels that a model has if nothing else is known: those of its publication."""
    if name in _NETS:
        from flatout.models import nets

        parameters = inspect.signature(getattr(nets, _NETS[name])).parameters
        classes, size, channels = (parameters[key].default for key in ("num_outputs", "image_size", "channels"))
        return classes, size, channels
    config = None
    if name.startswith("timm:"):
        import timm

        config = timm.get_pretrained_cfg(name.removeprefix("timm:"))
    if config is None:
        return 1000, 224, 3
    channels, height, width = config.input_size
    return config.num_classes, one_or_both((height, width)), channels


def list_names() -> list[str]:
    """Return the names of our own models."""
    return list(_NETS)


def check_name(name: str) -> None:
    """Raise InputError for the name of a model that is neither ours, nor timm's, nor the place of a factory."""
    if name in _NETS or (":" in name and not name.startswith("timm:")):
        return
    import timm

    architecture, _, tag = name.removeprefix("timm:").partition(".")
    if ":" not in name:
        hint = f"{nearest(name, _NETS)} (or timm:NAME, package.module:factory, file.py:factory)"
        if name.endswith(".py"):
            hint = f"to use a class or function of this file, write {name}:NAME"
        elif timm.is_model(architecture):
            hint = f"did you mean 'timm:{name}'?"
        raise InputError(f"no model called {name!r}; {hint}")
    if not timm.is_model(architecture):
        close = difflib.get_close_matches(architecture, timm.list_models(), n=3, cutoff=0.5)
        hint = f"nearest: {', '.join(f'timm:{c}' for c in close)}" if close else "see timm.list_models()"
        raise InputError(f"timm has no model called {architecture!r}; {hint}")
    tags = [tagged.partition(".")[2] for tagged in timm.list_pretrained(f"{architecture}.*")]
    if tag and tag not in tags:
        raise InputError(f"timm has no weights {tag!r} for {architecture}; {nearest(tag, tags)}")


def net_named(name: str) -> "Callable[..., nn.Module] | None":
    """Return what makes our own net of a name from outputs, image size and channels; None where there is none."""
    from flatout.models import nets

    return getattr(nets, _NETS[name]) if name in _NETS else None


def build_model(
    recipe: Recipe,
    num_classes: int,
    *,
    module: "nn.Module | None" = None,
    allow_code: bool = False,
    report: Callable[[str], None] = lambda sentence: None,
) -> "nn.Module":
    """Return the model of a recipe on the CPU, with fresh weights that the seed determines, ready to train.

    It takes float images [N, C, H, W] and returns logits [N, K]; K is `Task.num_outputs`. A factory returns a
    torch.nn.Module and takes `num_classes` (the number of logits), and `image_size` and `channels` if its signature
    names them.

    Args:
        recipe: its `model` is one of `list_names()`, `timm:NAME`, `package.module:factory` or `file.py:factory`.
        num_classes: classes of the data; 0 in regression.
        module: the model, where it was given in Python; a copy is returned.
        allow_code: whether a factory may be called: only if the user's own command line or code names it, never a file.
        report: takes a sentence about outputs that are no logits.

    Raises:
        InputError: there is no such model, it may not be called, or it does not fit the data or the recipe.
    """
    from flatout.models.layers import freeze, set_dropout
    from flatout.models.outputs import check_size, ensure_logits

    num_outputs = task_of(recipe).num_outputs(num_classes)
    if module is None:
        name, model = recipe.model, _build(recipe, num_outputs, allow_code)
    else:
        name, model = type(module).__name__, copied(module)
    if module is not None or name not in _NETS:
        ensure_logits(model, name, recipe, num_outputs, report)
    if recipe.eval_sides != recipe.image_sides:
        check_size(model, name, recipe, num_outputs, recipe.data.eval_size, "data.eval_size")
    if recipe.augment.start_size:
        check_size(model, name, recipe, num_outputs, recipe.augment.start_size, "augment.start_size")
    freeze(model, recipe.freeze)
    set_dropout(model, recipe.dropout)
    return model


def _build(recipe: Recipe, num_outputs: int, allow_code: bool) -> "nn.Module":
    name = recipe.model
    if net := net_named(name):
        with seeded(recipe.seed):
            return net(num_outputs, recipe.image_size, recipe.channels)
    check_name(name)
    if name.startswith("timm:"):
        return _build_timm(recipe, num_outputs)
    if name.startswith("python:"):
        raise InputError(f"model = {name!r}: was given in Python; train it with flatout.fit(model, ...)")
    if not allow_code:
        raise InputError(
            f"model = {name!r}: is Python code, and code named in a file is never run; if you trust it, "
            f"use train --model {name}, evaluate or predict --allow-code, or in Python allow_code=True"
        )
    return _call_factory(recipe, num_outputs)


def copied(module: Any) -> "nn.Module":
    """Return a copy of a user's module, on the CPU."""
    from torch import nn

    if not isinstance(module, nn.Module):
        raise InputError(f"model: must be a torch module, a Keras 3 model or a name, not {module!r}")
    try:
        return copy.deepcopy(module).to("cpu")
    except Exception as error:  # what a user's module holds may raise anything
        raise InputError(
            f"model: {type(module).__qualname__} cannot be copied ({type(error).__name__}: {error}); "
            "remove locks, open files, generators and results of earlier computations from it"
        ) from error


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's CPU generator inside the block; restore it afterwards."""
    import torch

    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would reseed the accelerators too
        yield


@contextlib.contextmanager
def quiet(library: str = "timm") -> Iterator[None]:
    """Leave out what a library logs and what torch warns of inside the block."""
    logger = logging.getLogger(library)
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def create_timm(recipe: Recipe, num_outputs: int, weights: "Tensors | None" = None) -> "nn.Module":
    """Call timm.create_model, with the image size if the model takes one. timm's own errors are not translated.

    `weights` are those of the published network, or of another with as many outputs as `num_outputs`. timm adapts them
    to image size and channels, and downloads nothing.
    """
    return create_sized(recipe, num_outputs, weights)[0]


def create_sized(
    recipe: Recipe, num_outputs: int, weights: "Tensors | None" = None
) -> "tuple[nn.Module, dict[str, Any]]":
    """Return what `create_timm` does, and the options of the call: with `img_size` if the model takes one."""
    import timm

    options: dict[str, Any] = {"num_classes": num_outputs, "in_chans": recipe.channels}
    if weights is not None:
        # A copy, since timm changes the dict; without the other sources, which timm would use in place of an empty one.
        source: dict[str, Any] = {"state_dict": dict(weights), "hf_hub_id": None, "url": "", "custom_load": False}
        published = timm.get_pretrained_cfg(recipe.model.removeprefix("timm:"))
        if published is not None and published.num_classes != num_outputs:
            source |= {"num_classes": num_outputs, "label_offset": 0}
        options |= {"pretrained": True, "pretrained_cfg_overlay": source}
    return _create_timm(recipe, options)


def timm_call(recipe: Recipe, num_outputs: int) -> str:
    """Return the source of the call that makes a model of timm's with fresh weights, as `create_timm` does."""
    with seeded(recipe.seed):
        _, options = create_sized(recipe, num_outputs)
    words = "".join(f", {name}={value!r}" for name, value in options.items())
    return f'timm.create_model("{recipe.model.removeprefix("timm:")}"{words})'


def _create_timm(recipe: Recipe, options: dict[str, Any]) -> "tuple[nn.Module, dict[str, Any]]":
    """Return a model and the options that it was made with: these, and the image size if it takes one."""
    import timm

    name, sized = recipe.model.removeprefix("timm:"), {**options, "img_size": recipe.image_size}
    try:
        return timm.create_model(name, **sized), sized
    except TypeError as error:
        if "unexpected keyword argument" not in str(error) or "'img_size'" not in str(error):
            raise
    return timm.create_model(name, **options), options


def _build_timm(recipe: Recipe, num_outputs: int) -> "nn.Module":
    try:
        with seeded(recipe.seed):
            return create_timm(recipe, num_outputs)
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        raise InputError(
            f"model = {recipe.model!r}: cannot be built for {recipe.channels}-channel images of "
            f"{shown(recipe.image_size)} pixels ({first_line(error)}); try another image_size or model"
        ) from error


def _call_factory(recipe: Recipe, num_outputs: int) -> "nn.Module":
    from torch import nn

    name, sizes = recipe.model, {"image_size": recipe.image_size, "channels": recipe.channels}
    place = Path(name.rpartition(":")[0]).absolute().parent if ".py:" in name else Path.cwd()
    with seeded(recipe.seed), contextlib.ExitStack() as stack:
        # Modules of the folder can be imported, as with `python -m`, after all others.
        sys.path.append(str(place))
        stack.callback(sys.path.remove, str(place))
        try:
            factory = _import(name)
            parameters = inspect.signature(factory).parameters
        except (AttributeError, ImportError, OSError, SyntaxError, TypeError, ValueError) as error:
            raise InputError(
                f"model = {name!r}: cannot be imported as package.module:factory or file.py:factory "
                f"({type(error).__name__}: {first_line(error)})"
            ) from error
        takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
        if "num_classes" not in parameters and not takes_any:
            raise InputError(f"model = {name!r}: must take num_classes, the number of logits; it takes {[*parameters]}")
        try:
            model = factory(num_classes=num_outputs, **{k: v for k, v in sizes.items() if k in parameters})
        except Exception as error:  # the user's code may raise anything
            raise InputError(f"model = {name!r}: raised {type(error).__name__}: {first_line(error)}") from error
    if not isinstance(model, nn.Module):
        raise InputError(f"model = {name!r}: must return a torch.nn.Module, not {type(model).__name__}")
    return model


def _import(name: str) -> Callable[..., Any]:
    """Import `package.module:attribute` or `path/to/file.py:attribute`."""
    place, _, attribute = name.rpartition(":")
    if place.endswith(".py"):
        path = Path(place).absolute()
        # Under a name of its own: `random.py` must not become Python's `random`.
        spec = importlib.util.spec_from_file_location(f"flatout_user_{path.stem}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(place)
    return reduce(getattr, attribute.split("."), module)
