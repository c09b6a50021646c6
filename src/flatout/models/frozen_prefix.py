"""Cut a model in two where everything before the cut is frozen and gives the same output every time.

The output of the prefix is computed once per image and cached. In torch.fx's graph of the model, the cut is the last
value that depends on nothing trained or random, and through which alone all later values depend on the input (a
dominator).
"""

import copy
from dataclasses import dataclass

import torch
from torch import fx, nn

from flatout.models.heads import FeatureNetwork, Head, HeadNetwork

# Modules and functions whose output is random, or depends on the rest of the batch.
_RANDOM_MODULES = (nn.modules.dropout._DropoutNd, nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)
_RANDOM_WORDS = ("dropout", "rand", "bernoulli", "normal_", "uniform_", "multinomial", "rrelu", "batch_norm")


@dataclass(frozen=True, kw_only=True)
class Cut:
    """A model in two parts that share its parameters: `model(x) == suffix(prefix(x))`.

    Attributes:
        prefix: frozen and deterministic, in evaluation mode.
        train_suffix: the rest, as it computes in training.
        eval_suffix: the rest, as it computes in evaluation.
        layers: layers with parameters in the prefix.
        at: the name of the last operation before the cut.
    """

    prefix: nn.Module
    train_suffix: nn.Module
    eval_suffix: nn.Module
    layers: int
    at: str

    def describe(self, views: int) -> str:
        """Return a sentence for the log; `views` of each image are cached, 0 for the image itself."""
        often = f"for {views} views of each image" if views else "once"
        return f"the first {self.layers} layers are frozen: their output is computed {often} and cached"


def cut_frozen_prefix(model: nn.Module) -> Cut | None:
    """Return the longest frozen prefix and the rest, or None where there is none or the model cannot be traced.

    The model must be in training mode, with its frozen modules in evaluation mode.
    """
    # fx traces `forward`, so that hooks of the model itself would be lost.
    if all(p.requires_grad for p in model.parameters()) or model._forward_hooks or model._forward_pre_hooks:
        return None
    try:
        train_graph, eval_graph = _trace(model), _trace(_in_eval_mode(model))
    except Exception:
        # fx raises whatever the model's code raises on a symbolic value.
        return None
    index = _last_frozen_cut(model, train_graph.graph)
    if index is None:
        return None
    at = list(train_graph.graph.nodes)[index].name
    eval_index = next((i for i, node in enumerate(eval_graph.graph.nodes) if node.name == at), None)
    if eval_index is None:
        return None
    prefix, train_suffix = _split(model, train_graph, index)
    _, eval_suffix = _split(model, eval_graph, eval_index)
    layers = sum(1 for module in prefix.modules() if any(True for _ in module.parameters(recurse=False)))
    return Cut(prefix=prefix.eval(), train_suffix=train_suffix, eval_suffix=eval_suffix, layers=layers, at=at)


def before_head(model: nn.Module, head: Head) -> Cut:
    """Return the model cut before its head, for a model of which nothing else changes or is random."""
    prefix, suffix = FeatureNetwork(model, head), HeadNetwork(model, head)
    count = sum(1 for module in prefix.modules() if any(True for _ in module.parameters(recurse=False)))
    return Cut(prefix=prefix, train_suffix=suffix, eval_suffix=suffix, layers=count, at=head.layers[0])


class _Tracer(fx.Tracer):
    """Keeps modules without parts whole, such as timm's padded convolutions, whose code depends on shapes.

    Batch normalisation is kept whole, too, also in subclasses with parts: whether it is frozen is up to the module.
    """

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        is_whole = isinstance(m, nn.modules.batchnorm._BatchNorm) or not any(True for _ in m.children())
        return (is_whole and m is not self.root) or super().is_leaf_module(m, module_qualified_name)


def _trace(model: nn.Module) -> fx.GraphModule:
    return fx.GraphModule(model, _Tracer().trace(model))


def _in_eval_mode(model: nn.Module) -> nn.Module:
    """Return a copy of the module tree, sharing every tensor, in evaluation mode."""
    memo = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, memo).eval()


def _last_frozen_cut(model: nn.Module, graph: fx.Graph) -> int | None:
    """Return the position of the last node up to which everything is frozen and which alone is used later."""
    nodes = list(graph.nodes)
    position = {node: i for i, node in enumerate(nodes)}
    last_use = {node: max((position[user] for user in node.users), default=-1) for node in nodes}
    modules = dict(model.named_modules())
    best, has_layer, reach = None, False, -1
    for i, node in enumerate(nodes):
        if node.op == "output" or not _is_fixed(node, model, modules):
            break
        if node.op == "call_module":
            has_layer |= any(True for _ in modules[str(node.target)].parameters())
        elif node.op == "get_attr":
            has_layer = True
        # `reach` is where an earlier value is last used: if not beyond this node, the rest needs this value alone.
        if reach <= i and has_layer and node.op != "get_attr":
            best = i
        reach = max(reach, last_use[node])
    return best


def _is_fixed(node: fx.Node, model: nn.Module, modules: dict[str, nn.Module]) -> bool:
    if node.op == "placeholder":
        return True
    if node.op == "get_attr":
        value: object = model
        for name in str(node.target).split("."):
            value = getattr(value, name)
        return not (isinstance(value, torch.Tensor) and value.requires_grad)
    if node.op == "call_module":
        module = modules[str(node.target)]
        trained = any(p.requires_grad for p in module.parameters())
        moves_buffers = module.training and any(True for _ in module.buffers())
        random = module.training and any(isinstance(m, _RANDOM_MODULES) or _is_foreign(m) for m in module.modules())
        return not (trained or moves_buffers or random)
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return not any(word in name for word in _RANDOM_WORDS)


def _is_foreign(module: nn.Module) -> bool:
    """Whether a module's own code is not torch's, and may be random in training, as stochastic depth is."""
    is_plain = isinstance(module, nn.modules.conv._ConvNd | nn.modules.batchnorm._BatchNorm | nn.Linear)
    return not (is_plain or type(module).__module__.startswith("torch.nn"))


def _split(model: nn.Module, traced: fx.GraphModule, index: int) -> tuple[nn.Module, nn.Module]:
    """Split a traced graph after the node at `index`."""
    nodes = list(traced.graph.nodes)
    before, after = fx.Graph(), fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in nodes[: index + 1]:
        copies[node] = before.node_copy(node, lambda n: copies[n])
    before.output(copies[nodes[index]])
    copies = {nodes[index]: after.placeholder("features")}
    for node in nodes[index + 1 :]:
        copies[node] = after.node_copy(node, lambda n: copies[n])
    return fx.GraphModule(traced, before), fx.GraphModule(traced, after)
