"""Build the model of a recipe: a built-in net, timm's, from a user's factory, or a module given in Python."""

import contextlib
import copy
import difflib
import functools
import importlib
import importlib.util
import inspect
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.config import Recipe
from flatout.config.settings import Size, collapse_size, nearest, shown, sides
from flatout.tasks import task_of
from flatout.utils.errors import InputError, first_line

if TYPE_CHECKING:
    from timm.models import PretrainedCfg
    from torch import nn

    from flatout.models.weights import Tensors

# The names of the built-in nets, and their classes in `models.nets`, which imports torch.
NETS = {
    "fashion-cnn": "FashionCNN",
    "cats-dogs-cnn": "CatsDogsCNN",
    "parallel-cnn": "ParallelCNN",
    "keras-cnn": "KerasCNN",
    "caltech-cnn": "CaltechCNN",
    "vgg16": "VGG16",
    **{f"fast-cnn-{width}": f"FastCNN{width}" for width in (16, 32, 64, 128)},
    **{f"keras-resnet{depth}": f"KerasResNet{depth}" for depth in (50, 101, 152)},
}


def net_named(name: str) -> "Callable[..., nn.Module] | None":
    """Return the constructor (outputs, image size, channels) of a built-in net; None for other names."""
    from flatout.models import nets

    return getattr(nets, NETS[name]) if name in NETS else None


def default_shape(name: str) -> tuple[int, Size, int]:
    """Return the published classes, image size and channels of a model."""
    if net := net_named(name):
        parameters = inspect.signature(net).parameters
        classes, size, channels = (parameters[key].default for key in ("num_outputs", "image_size", "channels"))
        return classes, size, channels
    if (config := published_config(name)) is None:
        return 1000, 224, 3
    channels, height, width = config.input_size
    return config.num_classes, collapse_size((height, width)), channels


def published_config(name: str) -> "PretrainedCfg | None":
    """Return timm's configuration of the published weights of a model, `timm:NAME` or `timm:NAME.TAG`."""
    import timm

    return timm.get_pretrained_cfg(name.removeprefix("timm:")) if name.startswith("timm:") else None


def check_name(name: str) -> None:
    """Check the name of a model: one of `NETS`, one of timm's, or a factory."""
    if name in NETS or (":" in name and not name.startswith("timm:")):
        return
    import timm

    architecture, _, tag = name.removeprefix("timm:").partition(".")
    if ":" not in name:
        hint = f"{nearest(name, NETS)} (or timm:NAME, package.module:factory, file.py:factory)"
        if name.endswith(".py"):
            hint = f"to use a class or function of this file, write {name}:NAME"
        elif timm.is_model(architecture):
            hint = f"did you mean 'timm:{name}'?"
        raise InputError(f"no model called {name!r}; {hint}")
    if not timm.is_model(architecture):
        close = difflib.get_close_matches(architecture, timm.list_models(), n=3, cutoff=0.5)
        hint = f"nearest: {', '.join(f'timm:{c}' for c in close)}" if close else "see timm.list_models()"
        raise InputError(f"timm has no model called {architecture!r}; {hint}")
    if architecture.endswith("_enc") and timm.is_model(whole := architecture.removesuffix("_enc")):
        raise InputError(f"model = {name!r}: encodes images and has no classifier; take 'timm:{whole}', which has one")
    tags = [tagged.partition(".")[2] for tagged in timm.list_pretrained(f"{architecture}.*")]
    if tag and tag not in tags:
        raise InputError(f"timm has no weights {tag!r} for {architecture}; {nearest(tag, tags)}")


def build_model(
    recipe: Recipe,
    num_classes: int,
    *,
    module: "nn.Module | None" = None,
    allow_code: bool = False,
    report: Callable[[str], None] = lambda sentence: None,
) -> "nn.Module":
    """Build the model of a recipe on the CPU, with fresh weights that the seed determines, ready to train.

    It takes float images [N, C, H, W] and returns logits [N, K]; K is `Task.num_outputs`. `recipe.model` is one of
    `NETS`, `timm:NAME`, `package.module:factory` or `file.py:factory`. A factory returns a torch.nn.Module and
    takes `num_classes` (the number of logits), and `image_size` and `channels` if its signature names them.

    Args:
        num_classes: classes of the data; 0 in regression.
        module: the model, if given in Python; a copy is returned.
        allow_code: whether a factory may be called: only if the user's own command line or code names it, never a file.
    """
    from flatout.models.heads import check_size, ensure_logits
    from flatout.models.layers import freeze, set_dropout

    num_outputs = task_of(recipe).num_outputs(num_classes)
    if module is None:
        name, model = recipe.model, _build(recipe, num_outputs, allow_code)
    else:
        name, model = type(module).__name__, copied(module)
    if module is not None or name not in NETS:
        ensure_logits(model, name, recipe, num_outputs, report)
    if recipe.eval_sides != recipe.image_sides:
        check_size(model, name, recipe, num_outputs)
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
        try:
            with seeded(recipe.seed):
                return create_timm(recipe, num_outputs)
        except (AssertionError, RuntimeError, TypeError, ValueError) as error:
            raise InputError(
                f"model = {name!r}: cannot be built for {recipe.channels}-channel images of "
                f"{shown(recipe.image_size)} pixels ({first_line(error)}); try another image_size or model"
            ) from error
    if name.startswith("python:"):
        raise InputError(f"model = {name!r}: was given in Python; train it with flatout.fit(model, ...)")
    if not allow_code:
        raise InputError(
            f"model = {name!r}: is Python code, and code named in a file is never run; if you trust it, "
            f"use train --model {name}, evaluate or predict --allow-code, or in Python allow_code=True"
        )
    with seeded(recipe.seed):
        return _call_factory(recipe, num_outputs)


def copied(module: object) -> "nn.Module":
    """Copy a user's module to the CPU."""
    from torch import nn

    if not isinstance(module, nn.Module):
        raise InputError(f"model: must be a torch module, a Keras 3 model or a name, not {module!r}")
    try:
        return copy.deepcopy(module).to("cpu")
    except Exception as error:  # a user's module may raise anything
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
def quiet() -> Iterator[None]:
    """Suppress the logs and warnings of libraries inside the block."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings(action="ignore"))
        stack.callback(logging.disable, logging.root.manager.disable)
        logging.disable(logging.ERROR)
        yield


# ---- timm ------------------------------------------------------------------------------------------------------------


def create_timm(recipe: Recipe, num_outputs: int, weights: "Tensors | None" = None) -> "nn.Module":
    """Call timm.create_model, with the image size if the model takes one.

    timm adapts `weights`, of the published network or of one with `num_outputs`, to image size and channels.
    """
    import timm

    options: dict[str, Any] = {"num_classes": num_outputs, "in_chans": recipe.channels}
    if weights is not None:
        # A copy, since timm changes the dict; without the other sources, which timm would use in place of an empty one.
        source: dict[str, Any] = {"state_dict": dict(weights), "hf_hub_id": None, "url": "", "custom_load": False}
        if (published := published_config(recipe.model)) and published.num_classes != num_outputs:
            source |= {"num_classes": num_outputs, "label_offset": 0}
        options |= {"pretrained": True, "pretrained_cfg_overlay": source}
    name = recipe.model.removeprefix("timm:")
    try:
        return timm.create_model(name, **options, img_size=recipe.image_size)
    except TypeError as error:
        if "unexpected keyword argument" not in str(error) or "'img_size'" not in str(error):
            raise
    return timm.create_model(name, **options)


def usable_size(model_name: str, wanted: Size, *, channels: int) -> Size:
    """Return `wanted`, unless a timm network does not take it with its published weights: then their size."""
    published = default_shape(model_name)[1]
    is_free = not model_name.startswith("timm:") or sides(wanted) == sides(published)
    return wanted if is_free or _takes(model_name, wanted, channels) else published


def _takes(model_name: str, size: Size, channels: int) -> bool:
    """Whether a timm network and its published weights take images of a size, tried on torch's meta device."""
    import torch

    least = getattr(published_config(model_name), "min_input_size", None) or (3, 1, 1)
    if any(side < smallest for side, smallest in zip(sides(size), least[1:], strict=True)):
        return False
    wanted = Recipe(model=model_name, image_size=size, channels=channels, epochs=1, batch_size=1)
    try:
        with quiet(), seeded(0), torch.device("meta"), torch.no_grad():
            model = create_timm(wanted, default_shape(model_name)[0], _published_shapes(model_name)).eval()
            model(torch.zeros(2, channels, *sides(size)))
    except Exception:  # timm's code may raise anything
        return False
    proj = getattr(getattr(model, "patch_embed", None), "proj", None)
    if not isinstance(proj, torch.nn.Conv2d) or proj.kernel_size != proj.stride:
        return True
    # Pixels beyond the last full patch would be ignored.
    return not any(side % patch for side, patch in zip(sides(size), proj.stride, strict=True))


@functools.cache
def _published_shapes(model_name: str) -> "Tensors":
    """Return tensors like the published weights of a timm network; on the meta device, without values."""
    classes, size, channels = default_shape(model_name)
    published = Recipe(model=model_name, image_size=size, channels=channels, epochs=1, batch_size=1)
    return create_timm(published, classes).state_dict()


# ---- factories -------------------------------------------------------------------------------------------------------


def _call_factory(recipe: Recipe, num_outputs: int) -> "nn.Module":
    from torch import nn

    name, sizes = recipe.model, {"image_size": recipe.image_size, "channels": recipe.channels}
    place = Path(name.rpartition(":")[0]).absolute().parent if ".py:" in name else Path.cwd()
    # Modules of the current folder can be imported, as with `python -m`, with the lowest priority.
    sys.path.append(str(place))
    try:
        factory, parameters = _import_factory(name)
        try:
            model = factory(num_classes=num_outputs, **{k: v for k, v in sizes.items() if k in parameters})
        except Exception as error:  # the user's code may raise anything
            raise InputError(f"model = {name!r}: raised {type(error).__name__}: {first_line(error)}") from error
    finally:
        sys.path.remove(str(place))
    if not isinstance(model, nn.Module):
        raise InputError(f"model = {name!r}: must return a torch.nn.Module, not {type(model).__name__}")
    return model


def _import_factory(name: str) -> tuple[Callable[..., Any], Mapping[str, inspect.Parameter]]:
    """Import `package.module:attribute` or `path/to/file.py:attribute`, and read its signature."""
    place, _, attribute = name.rpartition(":")
    try:
        if place.endswith(".py"):
            path = Path(place).absolute()
            # Under a unique name: `random.py` must not replace Python's `random`.
            spec = importlib.util.spec_from_file_location(f"flatout_user_{path.stem}", path)
            assert spec is not None and spec.loader is not None
            module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(place)
        factory: Any = functools.reduce(getattr, attribute.split("."), module)
        parameters = inspect.signature(factory).parameters
    except Exception as error:  # users' code may raise anything
        raise InputError(
            f"model = {name!r}: cannot be imported as package.module:factory or file.py:factory "
            f"({type(error).__name__}: {first_line(error)})"
        ) from error
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    if "num_classes" not in parameters and not takes_any:
        raise InputError(f"model = {name!r}: must take num_classes, the number of logits; it takes {[*parameters]}")
    return factory, parameters
