"""One training step and one evaluation batch as pure functions, which XLA compiles for any number of devices.

Shape letters: B batch, padded to equal parts per device, H height, W width, C channels, K outputs, N samples, V views.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

from flatout.config import Recipe
from flatout.engine import augment, pixels
from flatout.engine.xla.function import Function, KerasFunction, SampleMask
from flatout.engine.xla.functional import Augmentation, UpdateRule, mix
from flatout.models.features import caught
from flatout.models.keras import KerasModule
from flatout.models.layers import Cut, cut_frozen_prefix, learning_rate_scales, set_train_mode
from flatout.tasks import Task, task_of

Array = Any  # jax.Array or np.ndarray
Arrays = dict[str, jax.Array]


class State(NamedTuple):
    """Everything that training changes, and the frozen weights; `average` is None without one."""

    trained: Arrays
    frozen: Arrays
    buffers: Arrays
    optimizer: Any
    average: Any = None


class Average(NamedTuple):
    """An exponential moving average of weights and buffers; see `engine.torch.state`."""

    steps: Array
    trained: Arrays
    buffers: Arrays

    def update(self, trained: Arrays, buffers: Arrays, decay: float) -> "Average":
        """Return the average after a step."""
        steps = self.steps + 1
        share = 1 - jnp.minimum(decay, (1 + steps) / (10 + steps))

        def mixed(average: Array, value: Array) -> Array:
            is_float = jnp.issubdtype(value.dtype, jnp.floating)
            return (average + share * (value - average)).astype(value.dtype) if is_float else value

        both = jax.tree.map(mixed, (self.trained, self.buffers), (trained, buffers))
        return Average(steps, *both)


class DeviceBatch(NamedTuple):
    """One batch; or several, with a leading dimension of steps in each array."""

    images: Array  # uint8 or uint16 [B, H, W, C]; or int32 [B], rows of the images on the devices
    targets: Array  # see `Task.targets`; integers as int32
    weights: Array  # float32 [B]; -1 for padding, else the weight of the sample in the loss
    transforms: Any = None  # the batch's rows of the augmentation tables, unless nothing is random
    partners: Any = None  # images, targets and transforms of the samples that these are mixed with
    learning_rate: Any = None  # float32 []
    seed: Any = None  # uint32 [2], determines dropout


class Evaluated(NamedTuple):
    """Results of an evaluation batch: loss sum [] without padding, and values per sample, see `Evaluation`."""

    loss_sum: jax.Array
    predicted: jax.Array
    probabilities: jax.Array
    logits: jax.Array
    features: jax.Array | None


class Program:
    """The pure functions of a job: of state, batch, and the table [N, H, W, C] if the images of the batch are its rows.

    The model is exported when a function is first traced for a shape; see `Function` for errors. Batches include
    padding. With a `cut`, images are the output of its prefix, float32 with channels last.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        *,
        devices: int = 1,
        precision: str = "fp32",
        cut: Cut | None = None,
        class_weights: np.ndarray | None = None,
    ) -> None:
        self._task, self._augment, self._cut = task_of(recipe), Augmentation(recipe), cut
        self._class_weights = None if class_weights is None else tuple(class_weights.tolist())
        self._model, self._recipe, self.precision = model, recipe, precision
        self._groups = devices if recipe.norm == "per-device" else 1
        self._optimizer = UpdateRule(recipe.optimizer)
        self._networks: dict[tuple[bool, tuple[int, ...]], Function | KerasFunction] = {}

    def _network(self, shape: tuple[int, ...], *, is_training: bool) -> Function | KerasFunction:
        """Return the model, after its frozen prefix, for inputs of a shape; in evaluation with the head's input."""
        key, model, cut = (is_training, shape), self._model, self._cut
        if key in self._networks:
            return self._networks[key]
        if is_training:
            set_train_mode(model, self._recipe.norm)
            self._networks[key] = self._exported(cut.train_suffix if cut else model, shape)
        else:
            network = cut.eval_suffix if cut else model.eval()
            with (
                caught(model, network) as features,
                network.register_forward_hook(
                    lambda module, images, logits: logits if (found := features.take()) is None else (logits, found)
                ),
            ):
                self._networks[key] = self._exported(network, shape)
        return self._networks[key]

    def _exported(self, network: nn.Module, shape: tuple[int, ...]) -> Function | KerasFunction:
        kind: Any = KerasFunction if isinstance(network, KerasModule) else Function
        return kind(network, (example(*shape),), name=self._recipe.model, precision=self.precision)

    def _input(self, images: Array, transforms: object, table: jax.Array | None, *, is_training: bool) -> jax.Array:
        if table is not None:
            images = jnp.take(table, images, axis=0, mode="clip")
        return jnp.moveaxis(images, -1, 1) if self._cut else self._augment(images, transforms, is_training=is_training)

    def _results(
        self, logits: jax.Array, targets: Array, class_weights: tuple[float, ...] | None = None
    ) -> tuple[jax.Array, ...]:
        """Return losses, step metrics, predictions and probabilities."""
        head = head_of(self._task, class_weights, logits.shape, targets.shape[1:])
        return head({}, {}, logits.astype(jnp.float32), targets)[0]

    def initial_state(self) -> State:
        """Return the state before the first step, on the host."""
        parameters = dict(self._model.named_parameters())
        trained: Any = {name: to_array(p) for name, p in parameters.items() if p.requires_grad}
        frozen: Any = {name: to_array(p) for name, p in parameters.items() if name not in trained}
        buffers: Any = {name: to_array(b) for name, b in self._model.named_buffers()}
        average: Any = None
        if self._recipe.ema:
            average = Average(np.asarray(self._recipe.averaged_steps, np.float32), dict(trained), dict(buffers))
        return State(trained, frozen, buffers, self._optimizer.init(trained), average)

    def train_step(self, state: State, inputs: DeviceBatch, table: jax.Array | None = None) -> tuple[State, jax.Array]:
        """Return the state after one batch, and sums of losses, weights, the task's metric and samples, float32 [4]."""
        real, weights = (inputs.weights >= 0).astype(jnp.float32), jnp.maximum(inputs.weights, 0)
        x = self._input(inputs.images, inputs.transforms, table, is_training=True)
        if inputs.partners is not None:
            images, partner_targets, transforms = inputs.partners
            partners = self._input(images, transforms, table, is_training=True)
            x = mix(x, partners, inputs.transforms["mix"])
        network = self._network(x.shape, is_training=True)
        results = functools.partial(self._results, class_weights=self._class_weights)
        # Avoids the gradient of 0 / 0 in a batch of padding and of classes that weigh nothing.
        total = jnp.maximum(weights.sum(), jnp.finfo(jnp.float32).tiny)

        def objective(trained: Arrays) -> tuple[jax.Array, Any]:
            logits, buffers = network(
                {**trained, **state.frozen},
                state.buffers,
                x,
                key=jax.random.wrap_key_data(inputs.seed, impl="threefry2x32"),
                mask=SampleMask(real, self._groups),
            )
            losses, metrics, *_ = results(logits, inputs.targets)
            if inputs.partners is not None:
                share = inputs.transforms["mix"][:, 5]
                losses = self._task.mixed(
                    lambda targets: results(logits, targets)[0], inputs.targets, partner_targets, share
                )
            loss_sum = (losses * weights).sum()
            metric_sum = jnp.where(real > 0, metrics, 0).sum()
            return loss_sum / total, (buffers, jnp.stack([loss_sum, weights.sum(), metric_sum, real.sum()]))

        gradients, (buffers, sums) = jax.grad(objective, has_aux=True)(state.trained)
        if limit := self._recipe.clip_norm:
            # See torch's clip_grad_norm_.
            norm = jnp.sqrt(sum(jnp.square(g).sum() for g in gradients.values()))
            scale = jnp.minimum(1, limit / (norm + 1e-6))
            gradients = jax.tree.map(lambda g: g * scale, gradients)
        directions, optimizer = self._optimizer.update(gradients, state.optimizer, state.trained)
        scales = learning_rate_scales(self._model, self._recipe.optimizer.layer_decay)
        rates = {name: inputs.learning_rate * scales[name] for name in state.trained}
        trained = jax.tree.map(lambda p, d, rate: p - rate * d, state.trained, directions, rates)
        average = state.average and state.average.update(trained, buffers, self._recipe.ema)
        return State(trained, state.frozen, buffers, optimizer, average), sums

    def train_steps(self, state: State, inputs: DeviceBatch, table: jax.Array | None = None) -> tuple[State, jax.Array]:
        """Take several steps in one program, given in a leading dimension; return their sums as [steps, 4]."""
        return jax.lax.scan(lambda state, one: self.train_step(state, one, table), state, inputs)

    def evaluate(self, state: State, inputs: DeviceBatch, table: jax.Array | None = None) -> Evaluated:
        """Return the results of one batch without augmentation."""
        x = self._input(inputs.images, None, table, is_training=False)
        return self._evaluated(inputs, *self._outputs(state, x))

    def evaluate_views(self, state: State, inputs: DeviceBatch, table: jax.Array | None = None) -> Evaluated:
        """Return the results of one batch, averaged over `augment.tta_views`."""
        x = self._input(inputs.images, None, table, is_training=False)
        views = [self._outputs(state, pixels.view(jnp, x, *view)) for view in augment.tta_views(self._recipe)]
        logits_VBK = jnp.stack([logits for logits, _ in views]).astype(jnp.float32)
        mean = Function(_Traced(self._task.averaged), (example(*logits_VBK.shape),), name="views")
        seen = [features for _, features in views if features is not None]
        features = jnp.stack(seen).mean(axis=0) if seen else None
        return self._evaluated(inputs, mean({}, {}, logits_VBK)[0], features)

    def _outputs(self, state: State, x: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Return logits and, if known, the input of the head."""
        weights, network = state.average or state, self._network(x.shape, is_training=False)
        found = network({**weights.trained, **state.frozen}, weights.buffers, x)[0]
        return found if isinstance(found, tuple) else (found, None)

    def _evaluated(self, inputs: DeviceBatch, logits: jax.Array, features: jax.Array | None) -> Evaluated:
        losses, _, predicted, probabilities = self._results(logits, inputs.targets)
        # NaN predictions for padding must not reach the sums.
        loss_sum = jnp.where(inputs.weights >= 0, losses, 0).sum()
        return Evaluated(loss_sum, predicted, probabilities, logits.astype(jnp.float32), features)

    def prefix(self, state: State, inputs: DeviceBatch, table: None = None) -> jax.Array:
        """Return the output of the cut's prefix for stored images, float32 [B, ...] with channels last."""
        assert self._cut is not None
        # Without augmentation, a fitted head gets what evaluations see.
        is_augmented, prefix = inputs.transforms is not None, self._cut.prefix
        x = self._augment(inputs.images, inputs.transforms, is_training=is_augmented)
        names = {id(tensor): name for name, tensor in _tensors(self._model)}
        values = {**state.trained, **state.frozen, **state.buffers}
        own = {name: values[names[id(tensor)]] for name, tensor in _tensors(prefix)}
        output, _ = self._exported(prefix, x.shape)(own, {}, x)
        return jnp.moveaxis(output, 1, -1).astype(jnp.float32)


def _tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


def shapes_of(inputs: DeviceBatch, batch: int, steps: int | None = None) -> DeviceBatch:
    """Return the shapes of a training batch of `batch` samples, or of `steps` of them; `inputs` are [1, B] of any B."""
    front = () if steps is None else (steps,)
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct((*front, batch, *a.shape[2:]), a.dtype), inputs)
    rate, seed = jax.ShapeDtypeStruct(front, np.float32), jax.ShapeDtypeStruct((*front, 2), np.uint32)
    return shapes._replace(learning_rate=rate, seed=seed)


def frozen_cut(model: nn.Module, recipe: Recipe) -> Cut | None:
    """Return a model in two parts if the output of the first can be cached; test-time augmentation needs the whole."""
    if isinstance(model, KerasModule) or recipe.shard == "full" or not recipe.is_cacheable or recipe.tta:
        return None
    set_train_mode(model, recipe.norm)
    return cut_frozen_prefix(model)


class _Traced(nn.Module):
    """A function of tensors as a module, to be exported."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._function = function

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self._function(*inputs)


@functools.lru_cache(maxsize=16)
def head_of(
    task: Task, class_weights: tuple[float, ...] | None, logits_shape: tuple[int, ...], target_shape: tuple[int, ...]
) -> Function:
    """Return a function from logits and targets to losses, step metrics, predictions and probabilities."""
    weights = None if class_weights is None else torch.tensor(class_weights)

    def results(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, ...]:
        losses = task.per_sample(logits, targets, weights)
        return losses, task.step_metrics(logits, targets), task.predicted(logits), task.probabilities(logits)

    dtype = torch.float32 if task.mixes_targets else torch.int64
    examples = example(*logits_shape), example(logits_shape[0], *target_shape, dtype=dtype)
    return Function(_Traced(results), examples, name="loss")


def example(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a tensor of zeros that occupies a single element of memory."""
    return torch.zeros((), dtype=dtype).expand(shape)


def to_array(tensor: torch.Tensor) -> np.ndarray:
    """Return a copy of a tensor as an array for JAX: integers have 32 bits."""
    array = tensor.detach().cpu().numpy()
    return array.astype(np.int32) if array.dtype == np.int64 else array.copy()
