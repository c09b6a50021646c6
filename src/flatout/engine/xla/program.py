"""One training step and one evaluation batch as pure functions, which XLA compiles for any number of devices.

Shape letters: B batch, padded to equal parts per device, H height, W width, C channels, K outputs, N samples, V views.
"""

import contextlib
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
    weights: Array  # float32 [B]; 0 for padding, else the weight of the sample in the loss
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
    """The pure functions of a job. The model is exported when a function is first traced; see `Function` for errors.

    Batches include padding. `groups` are parts of a batch with separate batch statistics. With a `cut`, from
    `frozen_cut`, images are the output of its prefix, float32 with channels last.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        *,
        batch: int,
        evaluation_batch: int,
        groups: int = 1,
        precision: str = "fp32",
        cut: Cut | None = None,
        class_weights: np.ndarray | None = None,
        target_shape: tuple[int, ...] = (),
    ) -> None:
        self.batch, self.evaluation_batch = batch, evaluation_batch
        self.task, self._target_shape = task_of(recipe), target_shape
        self._class_weights = None if class_weights is None else tuple(class_weights.tolist())
        self._model, self._recipe, self._groups, self._precision = model, recipe, groups, precision
        self._optimizer = UpdateRule(recipe.optimizer)
        self._scales = learning_rate_scales(model, recipe.optimizer.layer_decay)
        self._augment, self._cut = Augmentation(recipe), cut
        # The shape of the network's input for one image, channels first, and its stored shape and type.
        self._read = (recipe.channels, *recipe.image_sides)
        self._stored: tuple[tuple[int, ...], Any] = (
            (*recipe.stored_sides, recipe.channels),
            np.uint16 if recipe.data.bits == 16 else np.uint8,
        )
        if cut:
            with torch.no_grad():
                self._read = tuple(cut.prefix(torch.zeros(1, *self._read)).shape[1:])
            self._stored = (*self._read[1:], self._read[0]), np.float32

    @functools.cached_property
    def _training(self) -> "_Network":
        set_train_mode(self._model, self._recipe.norm)
        network = self._cut.train_suffix if self._cut else self._model
        return self._network(network, (self.batch, *self._read), self._class_weights)

    @functools.cached_property
    def _evaluation(self) -> "_Network":
        network, shape = self._model.eval(), (self._recipe.channels, *self._recipe.eval_sides)
        if self._cut:
            network, shape = self._cut.eval_suffix, self._read
        # The head's input becomes a second result.
        with caught(self._model, network) as features:
            hook = network.register_forward_hook(
                lambda module, images, logits: logits if (found := features.take()) is None else (logits, found)
            )
            try:
                return self._network(network, (self.evaluation_batch, *shape))
            finally:
                hook.remove()

    def _network(
        self, model: nn.Module, shape: tuple[int, ...], class_weights: tuple[float, ...] | None = None
    ) -> "_Network":
        kind: Any = KerasFunction if isinstance(model, KerasModule) else Function
        function = kind(model, (example(*shape),), name=self._recipe.model, precision=self._precision)
        return _Network(function, head_of(self.task, class_weights, function.output_shapes[0], self._target_shape))

    def _input(self, images: Any, transforms: Any, *, is_training: bool) -> jax.Array:
        if self._cut:
            return jnp.moveaxis(images, -1, 1)
        return self._augment(images, transforms, is_training=is_training)

    def matmul_precision(self) -> contextlib.AbstractContextManager[Any]:
        return jax.default_matmul_precision("highest" if self._precision == "fp32" else "default")

    def example_inputs(self, *, is_resident: bool, batch: int = 0, steps: int | None = None) -> DeviceBatch:
        """Return the shapes of a training batch (of `batch` samples if given), or of `steps` batches."""
        front, count = () if steps is None else (steps,), batch or self.batch

        def shape(*lengths: int, dtype: Any = np.float32) -> Any:
            return jax.ShapeDtypeStruct((*front, *lengths), dtype)

        pixels = shape(count, *self._stored[0], dtype=self._stored[1])
        tables = None if self._cut else augment.epoch_transforms(self._recipe, 0, 1)
        images = shape(count, dtype=np.int32) if is_resident else pixels
        targets = shape(count, *self._target_shape, dtype=np.float32 if self.task.mixes_targets else np.int32)
        transforms = tables and {n: shape(count, *t.shape[1:], dtype=t.dtype) for n, t in tables.items()}
        return DeviceBatch(
            images=images,
            targets=targets,
            weights=shape(count),
            transforms=transforms,
            partners=(images, targets, transforms) if tables and "partner" in tables else None,
            learning_rate=shape(),
            seed=shape(2, dtype=np.uint32),
        )

    def initial_state(self) -> State:
        """Return the state before the first step, on the host."""
        parameters = dict(self._model.named_parameters())
        trained: Any = {name: to_array(p) for name, p in parameters.items() if p.requires_grad}
        frozen: Any = {name: to_array(p) for name, p in parameters.items() if name not in trained}
        buffers: Any = {name: to_array(b) for name, b in self._model.named_buffers()}
        shapes = jax.eval_shape(self._optimizer.init, trained)
        optimizer = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
        average: Any = None
        if self._recipe.ema:
            average = Average(np.asarray(self._recipe.averaged_steps, np.float32), dict(trained), dict(buffers))
        return State(trained, frozen, buffers, optimizer, average)

    def train_step(self, state: State, inputs: DeviceBatch, table: jax.Array | None = None) -> tuple[State, jax.Array]:
        """Return the state after one batch, whose images are in `table` [N, H, W, C] if `inputs` has their rows.

        And loss sum, weight sum, sum of the task's metric and samples, float32 [4].
        """
        real = (inputs.weights > 0).astype(jnp.float32)
        x = self._input(_images(inputs.images, table), inputs.transforms, is_training=True)
        if inputs.partners is not None:
            images, partner_targets, transforms = inputs.partners
            partners = self._augment(_images(images, table), transforms, is_training=True)
            x = mix(x, partners, inputs.transforms["mix"])
        network = self._training
        # Avoids the gradient of 0 / 0 in a batch that is only padding.
        total = jnp.maximum(inputs.weights.sum(), jnp.finfo(jnp.float32).tiny)

        def objective(trained: Arrays) -> tuple[jax.Array, Any]:
            logits, buffers = network.model(
                {**trained, **state.frozen},
                state.buffers,
                x,
                key=jax.random.wrap_key_data(inputs.seed, impl="threefry2x32"),
                mask=SampleMask(real, self._groups),
            )
            losses, metrics, *_ = network.results(logits, inputs.targets)
            if inputs.partners is not None:
                share = inputs.transforms["mix"][:, 5]
                losses = self.task.mixed(
                    lambda targets: network.results(logits, targets)[0], inputs.targets, partner_targets, share
                )
            loss_sum = (losses * inputs.weights).sum()
            metric_sum = jnp.where(real > 0, metrics, 0).sum()
            return loss_sum / total, (buffers, jnp.stack([loss_sum, inputs.weights.sum(), metric_sum, real.sum()]))

        gradients, (buffers, sums) = jax.grad(objective, has_aux=True)(state.trained)
        if limit := self._recipe.clip_norm:
            # See torch's clip_grad_norm_.
            norm = jnp.sqrt(sum(jnp.square(g).sum() for g in gradients.values()))
            scale = jnp.minimum(1, limit / (norm + 1e-6))
            gradients = jax.tree.map(lambda g: g * scale, gradients)
        directions, optimizer = self._optimizer.update(gradients, state.optimizer, state.trained)
        rates = {name: inputs.learning_rate * self._scales[name] for name in state.trained}
        trained = jax.tree.map(lambda p, d, rate: p - rate * d, state.trained, directions, rates)
        average = state.average and state.average.update(trained, buffers, self._recipe.ema)
        return State(trained, state.frozen, buffers, optimizer, average), sums

    def train_steps(self, state: State, inputs: DeviceBatch, table: jax.Array | None = None) -> tuple[State, jax.Array]:
        """Take several steps in one program, given in a leading dimension; return their sums as [steps, 4]."""
        return jax.lax.scan(lambda state, one: self.train_step(state, one, table), state, inputs)

    def evaluate(
        self,
        state: State,
        images: jax.Array,
        targets: jax.Array,
        mask: jax.Array,
        table: jax.Array | None = None,
        *,
        tta: bool = False,
    ) -> Evaluated:
        """Return the results of one batch; `mask` [B] is 0 for padding, `tta` averages over `augment.tta_views`."""
        x = self._input(_images(images, table), None, is_training=False)
        weights = state.average or state

        def outputs_of(x: jax.Array) -> tuple[jax.Array, jax.Array | None]:
            found = self._evaluation.model({**weights.trained, **state.frozen}, weights.buffers, x)[0]
            return found if isinstance(found, tuple) else (found, None)

        if tta:
            views = [outputs_of(pixels.view(jnp, x, *view)) for view in augment.tta_views(self._recipe)]
            logits_VBK = jnp.stack([logits for logits, _ in views]).astype(jnp.float32)
            views_mean = Function(_Traced(self.task.averaged), (example(*logits_VBK.shape),), name="views")
            logits = views_mean({}, {}, logits_VBK)[0]
            seen = [features for _, features in views if features is not None]
            features = jnp.stack(seen).mean(axis=0) if seen else None
        else:
            logits, features = outputs_of(x)
        losses, _, predicted, probabilities = self._evaluation.results(logits, targets)
        # NaN predictions for padding must not reach the sums.
        loss_sum = jnp.where(mask > 0, losses, 0).sum()
        return Evaluated(loss_sum, predicted, probabilities, logits.astype(jnp.float32), features)


class FrozenPrefix:
    """The frozen prefix of a model as a JAX function of stored images; its output has channels last."""

    def __init__(self, cut: Cut, recipe: Recipe, batch: int, precision: str) -> None:
        x = example(batch, recipe.channels, *recipe.image_sides)
        self._function = Function(cut.prefix, (x,), name=recipe.model, precision=precision)
        self._augment = Augmentation(recipe)
        self.parameters = {name: to_array(p) for name, p in cut.prefix.named_parameters()}
        self.buffers = {name: to_array(b) for name, b in cut.prefix.named_buffers()}

    def __call__(self, parameters: Arrays, buffers: Arrays, images: jax.Array, transforms: Any) -> jax.Array:
        output, _ = self._function(parameters, buffers, self._augment(images, transforms, is_training=True))
        return jnp.moveaxis(output, 1, -1).astype(jnp.float32)


def frozen_cut(model: nn.Module, recipe: Recipe) -> Cut | None:
    """Return a model in two parts if the output of the first can be cached; test-time augmentation needs the whole."""
    if isinstance(model, KerasModule) or recipe.shard == "full" or not recipe.is_cacheable or recipe.tta:
        return None
    set_train_mode(model, recipe.norm)
    return cut_frozen_prefix(model)


class _Network(NamedTuple):
    """The model after its frozen prefix, and its loss, as JAX functions of batches of one shape."""

    model: Any
    head: Function

    def results(self, logits: jax.Array, targets: Array) -> tuple[jax.Array, ...]:
        return self.head({}, {}, logits.astype(jnp.float32), targets)[0]


def _images(images: Array, table: jax.Array | None) -> Any:
    return images if table is None else jnp.take(table, images, axis=0, mode="clip")


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
