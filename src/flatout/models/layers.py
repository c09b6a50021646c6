"""Layers of a model: its head, trained layers, their learning rates, and frozen layers whose output can be cached."""

import contextlib
import copy
import fnmatch
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from flatout.utils.errors import InputError

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_CONTAINERS = (nn.Identity, nn.Sequential, nn.ModuleList, nn.ModuleDict)
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
# The source files, in torch and in timm, of the parameterless modules that are not counted as layers.
_UNCOUNTED_SOURCES = ("activation", "drop", "flatten")
# Modules and functions whose output is random, or depends on the rest of the batch.
_RANDOM_MODULES = (*_DROPOUTS, nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)
_RANDOM_WORDS = ("dropout", "rand", "bernoulli", "normal_", "uniform_", "multinomial", "rrelu", "batch_norm")


def head_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Find the head of a classifier, or several heads, by module name.

    It is what the model's `get_classifier()` returns, and the classifiers in its `pretrained_cfg` (timm's conventions);
    else the linear layer registered last; else the last module that directly has parameters.
    """
    modules = dict(model.named_modules())
    if callable(get_classifier := getattr(model, "get_classifier", None)):
        named = get_classifier()
        found = named if isinstance(named, tuple | list) else (named,)
        heads = {name: module for name, module in modules.items() if any(module is head for head in found)}
        if any(_has_parameters(head) for head in heads.values()):
            config: dict[str, Any] = getattr(model, "pretrained_cfg", None) or {}
            named = config.get("classifier") or ()
            for name in (named,) if isinstance(named, str) else named:
                is_part = any(f"{name}.".startswith(f"{head}.") or f"{head}.".startswith(f"{name}.") for head in heads)
                if name in modules and not is_part and _has_parameters(modules[name]):
                    heads[name] = modules[name]  # such as an auxiliary one
            return heads
    linear = [name for name, module in modules.items() if isinstance(module, nn.Linear)]
    candidates = linear or [name for name, module in modules.items() if _has_parameters(module, recurse=False)]
    if not candidates:
        raise InputError(f"the model {type(model).__name__} has no parameters, so there is nothing to train")
    return {candidates[-1]: modules[candidates[-1]]}


def _has_parameters(module: nn.Module, *, recurse: bool = True) -> bool:
    return next(module.parameters(recurse), None) is not None


def freeze(model: nn.Module, spec: str) -> None:
    """Stop the parameters that `spec` names from training.

    `spec` is `""`; or comma-separated patterns of names, such as `features.0.*,features.2.*`; or `all-but-last-N`: all
    parameters but those of the head and of the last N layers before it. Layers are counted as Keras lists them:
    convolutions, norms, poolings and linear layers count; activations, dropout, identity and flatten do not. So VGG16
    with `all-but-last-4` trains block 5 (three convolutions and its pool) and the head.
    """
    spec = spec.strip()
    parameters = dict(model.named_parameters())
    if spec.startswith("all-but-last"):
        frozen = _all_but_last(model, spec)
    else:
        frozen = _matching(list(parameters), spec) if spec else set()
    if all(name in frozen or not parameter.requires_grad for name, parameter in parameters.items()):
        raise InputError(f"freeze = {spec!r}: leaves no parameter to train; freeze fewer")
    for name in frozen:
        parameters[name].requires_grad_(False)


def _all_but_last(model: nn.Module, spec: str) -> set[str]:
    count = re.fullmatch(r"all-but-last-(\d+)", spec)
    if not count:
        raise InputError(f"freeze = {spec!r}: must be all-but-last-N with a whole number N, such as all-but-last-4")
    layers = layers_before_head(model)
    training = {*_modules_of_heads(model), *layers[max(0, len(layers) - int(count[1])) :]}
    kept = {parameter for module in training for parameter in module.parameters(recurse=False)}
    frozen = {name for name, parameter in model.named_parameters() if parameter not in kept}
    if not frozen:
        raise InputError(f"freeze = {spec!r}: freezes nothing; the model has {len(layers)} layers before its head")
    return frozen


def _modules_of_heads(model: nn.Module) -> set[nn.Module]:
    return {module for head in head_modules(model).values() for module in head.modules()}


def layers_before_head(model: nn.Module) -> list[nn.Module]:
    """List the layers of a classifier before its head, as `freeze` counts them."""
    in_heads = _modules_of_heads(model)
    return [module for module in model.modules() if module not in in_heads and _is_layer(module)]


def _is_layer(module: nn.Module) -> bool:
    """Whether a module counts as a layer: it has parameters or buffers itself, or is a leaf such as a pooling."""
    if [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
        return True
    source = type(module).__module__.rpartition(".")[2]
    is_leaf = not list(module.children()) and not isinstance(module, _CONTAINERS)
    return is_leaf and not source.startswith(_UNCOUNTED_SOURCES)


def _matching(names: list[str], spec: str) -> set[str]:
    frozen: set[str] = set()
    for pattern in map(str.strip, spec.split(",")):
        matched = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
        if not matched:
            is_module = pattern and any(name.startswith(f"{pattern}.") for name in names)
            hint = f"did you mean '{pattern}.*'?" if is_module else f"names look like {next(iter(names), '')!r}"
            raise InputError(f"freeze = {spec!r}: the pattern {pattern!r} matches no parameter; {hint}")
        frozen.update(matched)
    return frozen


def learning_rate_scales(model: nn.Module, decay: float) -> dict[str, float]:
    """Compute the factor on the learning rate of each parameter, by name: `decay` for each group after its own.

    The groups are those of `timm.optim.param_groups_layer_decay` where the model has timm's `group_matcher`. Otherwise,
    each module with a matrix begins a group, which the norm after it belongs to. The head is the last group.
    """
    if callable(group_matcher := getattr(model, "group_matcher", None)):
        from timm.models import group_parameters

        groups: Any = group_parameters(model, group_matcher(coarse=False), reverse=True)
    else:
        groups = _layer_groups(model)
    last = max(groups.values())
    return {name: decay ** (last - group) for name, group in groups.items()}


def _layer_groups(model: nn.Module) -> dict[str, int]:
    heads = head_modules(model)
    in_heads = [name for prefix, head in heads.items() for name, _ in head.named_parameters(prefix)]
    groups, number = {}, 0
    for prefix, module in model.named_modules():
        own = {name: p for name, p in module.named_parameters(prefix, recurse=False) if name not in in_heads}
        number += any(parameter.ndim > 1 for parameter in own.values())
        groups |= dict.fromkeys(own, number)
    return groups | dict.fromkeys(in_heads, number + 1)


def set_train_mode(model: nn.Module, norm: str = "global") -> None:
    """Put a model in training mode, but its frozen modules in evaluation mode; also all batch norms if norm = "frozen".

    A frozen batch norm must not move its statistics, nor dropout vary the output of a frozen block.
    """
    model.train()
    for module in model.modules():
        trains = [parameter.requires_grad for parameter in module.parameters()]
        if (trains and not any(trains)) or (norm == "frozen" and isinstance(module, _BATCH_NORMS)):
            module.eval()


def submodule(root: nn.Module, path: list[str]) -> nn.Module:
    """Return a submodule by the parts of its name; parts that are missing are created."""
    for part in path:
        if part not in dict(root.named_children()):
            root.add_module(part, nn.Module())
        root = root.get_submodule(part)
    return root


@contextlib.contextmanager
def keep_modes(model: nn.Module) -> Iterator[None]:
    """Restore the training or evaluation mode of each module after the block."""
    modes = {module: module.training for module in model.modules()}
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def set_dropout(model: nn.Module, share: float) -> None:
    """Set the rate, 0 to 1, of torch's dropout modules, not of functional calls; -1 leaves the model unchanged."""
    if share == -1:
        return
    layers = [module for module in model.modules() if isinstance(module, _DROPOUTS)]
    if not layers and share > 0:
        raise InputError(f"dropout = {share:g}: {type(model).__name__} has no dropout layer; leave the key out")
    for layer in layers:
        layer.p = share


# ---- the frozen prefix -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Cut:
    """A model in two parts that share its parameters: `model(x) == suffix(prefix(x))`."""

    prefix: nn.Module  # frozen, deterministic and in evaluation mode
    train_suffix: nn.Module
    eval_suffix: nn.Module

    @property
    def layers(self) -> int:
        """The number of layers with parameters in the prefix."""
        return sum(_has_parameters(module, recurse=False) for module in self.prefix.modules())

    def describe(self, views: int) -> str:
        """Describe the cache for the log; `views` of each image are cached, 0 for the image itself."""
        often = f"for {views} views of each image" if views else "once"
        return f"the first {self.layers} layers are frozen: their output is computed {often} and cached"


def cut_frozen_prefix(model: nn.Module) -> Cut | None:
    """Cut off the longest frozen and deterministic prefix, whose output can be cached; None if there is none.

    In torch.fx's graph, the cut is the last value that depends on nothing trained or random, and through which alone
    all later values depend on the input (a dominator). The model must be in training mode, as by `set_train_mode`.
    """
    # fx traces `forward`, so hooks of the model itself would be lost.
    if all(p.requires_grad for p in model.parameters()) or model._forward_hooks or model._forward_pre_hooks:
        return None
    # A copy of the module tree in evaluation mode, which shares every tensor.
    shared = {id(t): t for t in (*model.parameters(), *model.buffers())}
    try:
        train_graph, eval_graph = _trace(model), _trace(copy.deepcopy(model, shared).eval())
    except Exception:  # fx raises whatever the model's code raises on a symbolic value
        return None
    last = _last_frozen(model, train_graph.graph)
    if last not in [node.name for node in eval_graph.graph.nodes]:
        return None
    prefix, train_suffix = _split(train_graph, last)
    _, eval_suffix = _split(eval_graph, last)
    return Cut(prefix=prefix.eval(), train_suffix=train_suffix, eval_suffix=eval_suffix)


class _Tracer(fx.Tracer):
    """Keeps modules without children whole, such as timm's padded convolutions, whose code depends on shapes.

    Batch normalisation is kept whole, too, also in subclasses with children: its mode determines whether it is frozen.
    """

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        is_whole = isinstance(m, _BATCH_NORMS) or not list(m.children())
        return (is_whole and m is not self.root) or super().is_leaf_module(m, module_qualified_name)


def _trace(model: nn.Module) -> fx.GraphModule:
    return fx.GraphModule(model, _Tracer().trace(model))


def _last_frozen(model: nn.Module, graph: fx.Graph) -> str:
    """Find the last node up to which everything is frozen and which alone is used later; "" if there is none."""
    position = {node: i for i, node in enumerate(graph.nodes)}
    modules = dict(model.named_modules())
    best, has_layer, reach = "", False, -1
    for node, i in position.items():
        if node.op == "output" or not _is_fixed(node, model, modules):
            break
        has_layer |= node.op == "get_attr"
        has_layer |= node.op == "call_module" and _has_parameters(modules[str(node.target)])
        # `reach` is the last use of earlier values: if it is not after this node, the rest needs only this value.
        if reach <= i and has_layer and node.op != "get_attr":
            best = node.name
        reach = max([reach, *(position[user] for user in node.users)])
    return best


def _is_fixed(node: fx.Node, model: nn.Module, modules: dict[str, nn.Module]) -> bool:
    if node.op == "placeholder":
        return True
    if node.op == "get_attr":
        value = functools.reduce(getattr, str(node.target).split("."), model)
        return not (isinstance(value, torch.Tensor) and value.requires_grad)
    if node.op == "call_module":
        module = modules[str(node.target)]
        trained = any(p.requires_grad for p in module.parameters())
        moves = any(map(_may_be_random, module.modules())) or any(True for _ in module.buffers())
        return not (trained or (module.training and moves))
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return not any(word in name for word in _RANDOM_WORDS)


def _may_be_random(module: nn.Module) -> bool:
    """Whether a module in training is dropout or similar, or runs code other than torch's, such as stochastic depth."""
    is_plain = isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d, *_BATCH_NORMS, nn.Linear))
    is_torchs = is_plain or type(module).__module__.startswith("torch.nn")
    return isinstance(module, _RANDOM_MODULES) or not is_torchs


def _split(traced: fx.GraphModule, last: str) -> tuple[nn.Module, nn.Module]:
    """Split a traced graph after the node `last`."""
    before, after = fx.Graph(), fx.Graph()
    graph = before
    copies: dict[fx.Node, fx.Node] = {}
    for node in traced.graph.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        if node.name == last:
            before.output(copies[node])
            graph, copies = after, {node: after.placeholder("features")}
    return fx.GraphModule(traced, before), fx.GraphModule(traced, after)
