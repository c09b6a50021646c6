"""What one training step and one evaluation batch compute, as pure functions that XLA compiles for any devices.

The model, the augmentation and the loss are the torch engine's own, exported; the gradients, their sum over the
devices and the update are XLA's. Nothing here knows on how many devices it will run: arrays are global.

Shape letters: B batch, padded to what the devices can share, H height, W width, C channels, K outputs, N samples.
"""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

from flatout.engine.xla import optim as updates
from flatout.engine.xla.function import Function
from flatout.engine.xla.keras import KerasFunction
from flatout.engine.xla.lowerings import Counted
from flatout.models.freeze import set_train_mode
from flatout.models.keras import KerasModule
from flatout.numerics import augment, loss
from flatout.recipe import Recipe

Arrays = dict[str, jax.Array]


class State(NamedTuple):
    """Everything that training changes, and the weights that it does not."""

    trained: Arrays
    frozen: Arrays
    buffers: Arrays
    optimizer: Any


class Inputs(NamedTuple):
    """One batch.

    Attributes:
        images: uint8 [B, H, W, C]; or int32 [B], rows of the images that lie on the devices.
        labels: int32 [B].
        weights: float32 [B]; 0 for padding, else the weight of the sample's class.
        transforms: the batch's rows of the augmentation table; None where nothing is random.
        learning_rate: float32 [].
        seed: uint32 [2], decides what dropout drops.
    """

    images: jax.Array
    labels: jax.Array
    weights: jax.Array
    transforms: jax.Array | None
    learning_rate: jax.Array
    seed: jax.Array


class Evaluated(NamedTuple):
    """Of one evaluation batch: loss sum [] without padding, predicted classes [B], probabilities [B, K]."""

    loss_sum: jax.Array
    predicted: jax.Array
    probabilities: jax.Array


class _Augmented(nn.Module):
    """The pixels of a batch as the model reads them: normalised, and changed at random where transforms are given."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        mean, std = torch.tensor(recipe.data.mean), torch.tensor(recipe.data.std)
        self.scale, self.bias = nn.Buffer(1 / (255 * std)), nn.Buffer(-mean / std)

    def forward(self, images: torch.Tensor, transforms: torch.Tensor | None = None) -> torch.Tensor:
        return augment.apply(images, transforms, self.scale, self.bias)


class _Judge(nn.Module):
    """Losses [B], predicted classes [B] and probabilities [B, classes] of a batch of logits."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self._recipe = recipe

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
        losses = loss.per_sample(logits, labels, self._recipe.loss, self._recipe.label_smoothing)
        return losses, loss.predicted(logits), loss.probabilities(logits)


class Program:
    """The pure functions of a job.

    Args:
        model: with the weights to start from; it is not changed.
        recipe: data.mean and data.std must be filled in.
        batch: samples in a training batch, padding included.
        evaluation_batch: samples in an evaluation batch, padding included.
        groups: parts of the batch that have batch statistics of their own; 1 for global ones.
        precision: "bf16" or "fp32".

    Attributes:
        example_transforms: a row of an augmentation table; None where nothing is random.

    The model is exported when a function is first traced, which raises what `Function` does.
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
    ) -> None:
        self.model, self.recipe, self.groups = model, recipe, groups
        self.batch, self.evaluation_batch = batch, evaluation_batch
        self.optimizer = updates.build(recipe.optimizer)
        self._trained = {name for name, p in model.named_parameters() if p.requires_grad}
        self.example_transforms = augment.epoch_transforms(recipe.augment, 0, 0, 1)
        self._precision = precision

    @functools.cached_property
    def training(self) -> "_Pipeline":
        """The model in training mode; exported when it is first needed."""
        set_train_mode(self.model)
        row = None if self.example_transforms is None else torch.from_numpy(self.example_transforms)
        return _Pipeline(self.model, self.recipe, self.batch, self._precision, row=row)

    @functools.cached_property
    def evaluation(self) -> "_Pipeline":
        """The model in evaluation mode; exported when it is first needed."""
        self.model.eval()
        return _Pipeline(self.model, self.recipe, self.evaluation_batch, self._precision, row=None)

    def example_inputs(self, *, is_resident: bool, batch: int = 0, steps: int | None = None) -> Inputs:
        """Return the shapes of a batch, of as many samples as in training or of `batch`; of several if `steps`."""
        size = self.recipe.image_size
        front, count = () if steps is None else (steps,), batch or self.batch

        def shape(*lengths: int, dtype: Any = np.float32) -> Any:
            return jax.ShapeDtypeStruct((*front, *lengths), dtype)

        pixels = shape(count, size, size, self.recipe.channels, dtype=np.uint8)
        row = self.example_transforms
        return Inputs(
            images=shape(count, dtype=np.int32) if is_resident else pixels,
            labels=shape(count, dtype=np.int32),
            weights=shape(count),
            transforms=None if row is None else shape(count, *row.shape[1:], dtype=row.dtype),
            learning_rate=shape(),
            seed=shape(2, dtype=np.uint32),
        )

    def initial_state(self) -> State:
        """Return the state before the first step, as arrays on the host."""
        parameters = {name: to_array(p) for name, p in self.model.named_parameters()}
        trained = {name: value for name, value in parameters.items() if name in self._trained}
        frozen = {name: value for name, value in parameters.items() if name not in self._trained}
        buffers = {name: to_array(b) for name, b in self.model.named_buffers()}
        shapes = jax.eval_shape(self.optimizer.init, trained)
        optimizer = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
        return State(trained, frozen, buffers, optimizer)  # pyright: ignore[reportArgumentType]

    def train_step(self, state: State, inputs: Inputs, table: jax.Array | None = None) -> tuple[State, jax.Array]:
        """Update the state from one batch.

        Args:
            state: before the step.
            inputs: the batch.
            table: uint8 [N, H, W, C], the images that `inputs.images` are rows of; None where those are the images.

        Returns:
            The state after it, and the step's sums as `engine.totals` has them, float32 [4].
        """
        real = (inputs.weights > 0).astype(jnp.float32)
        images = inputs.images if table is None else jnp.take(table, inputs.images, axis=0)
        # Rounding to zero weight would turn 0 / 0 into a gradient where a batch is nothing but padding.
        total = jnp.maximum(inputs.weights.sum(), jnp.finfo(jnp.float32).tiny)

        def objective(trained: Arrays) -> tuple[jax.Array, Any]:
            logits, buffers = self.training.logits(
                {**trained, **state.frozen},
                state.buffers,
                images,
                inputs.transforms,
                key=jax.random.wrap_key_data(inputs.seed, impl="threefry2x32"),
                counted=Counted(real, self.groups),
            )
            losses, predicted, _ = self.training.judge(logits, inputs.labels)
            loss_sum = (losses * inputs.weights).sum()
            right = ((predicted == inputs.labels) * real).sum()
            return loss_sum / total, (buffers, jnp.stack([loss_sum, inputs.weights.sum(), right, real.sum()]))

        gradients, (buffers, sums) = jax.grad(objective, has_aux=True)(state.trained)
        directions, optimizer = self.optimizer.update(gradients, state.optimizer, state.trained)
        trained = jax.tree.map(lambda p, d: p - inputs.learning_rate * d, state.trained, directions)
        return State(trained, state.frozen, buffers, optimizer), sums

    def train_steps(self, state: State, inputs: Inputs, table: jax.Array | None = None) -> tuple[State, jax.Array]:
        """Take many steps in one program; every array of `inputs` has one more dimension in front.

        Returns:
            The state after them, and their sums [steps, 4].
        """
        return jax.lax.scan(lambda state, one: self.train_step(state, one, table), state, inputs)

    def evaluate(
        self, state: State, images: jax.Array, labels: jax.Array, mask: jax.Array, table: jax.Array | None = None
    ) -> Evaluated:
        """Return the figures of one batch; arguments as in `Inputs`, `mask` [B] is 0 for padding."""
        if table is not None:
            images = jnp.take(table, images, axis=0)
        parameters = {**state.trained, **state.frozen}
        logits, _ = self.evaluation.logits(parameters, state.buffers, images, None)
        losses, predicted, probabilities = self.evaluation.judge(logits, labels)
        # A prediction of NaN for padding must not reach the sums.
        loss_sum = jnp.where(mask > 0, losses, 0).sum()
        return Evaluated(loss_sum, predicted, probabilities)


class _Pipeline:
    """The way from pixels to losses for batches of one size."""

    def __init__(
        self, model: nn.Module, recipe: Recipe, batch: int, precision: str, *, row: torch.Tensor | None
    ) -> None:
        size, channels = recipe.image_size, recipe.channels
        images = _example(batch, size, size, channels, dtype=torch.uint8)
        x = _example(batch, channels, size, size)
        transforms = () if row is None else (row.expand(batch, *row.shape[1:]),)
        self._augment = Function(_Augmented(recipe), (images, *transforms), name="augmentation")
        about: dict[str, Any] = {"name": recipe.model, "precision": precision}
        is_keras = isinstance(model, KerasModule)
        self._network = KerasFunction(model, (x,), **about) if is_keras else Function(model, (x,), **about)
        self._scales = {n: to_array(b) for n, b in _Augmented(recipe).named_buffers()}
        logits, labels = _example(*self._network.output_shapes[0]), _example(batch, dtype=torch.int64)
        self._judge = Function(_Judge(recipe), (logits, labels), name="loss")

    def logits(
        self,
        parameters: Mapping[str, jax.Array],
        buffers: Mapping[str, jax.Array],
        images: jax.Array,
        transforms: jax.Array | None,
        *,
        key: jax.Array | None = None,
        counted: Counted | None = None,
    ) -> tuple[jax.Array, Arrays]:
        given = () if transforms is None else (transforms,)
        x, _ = self._augment({}, self._scales, images, *given)
        return self._network(parameters, buffers, x, key=key, counted=counted)

    def judge(self, logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, ...]:
        return self._judge({}, {}, logits.astype(jnp.float32), labels)[0]


def _example(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a tensor of zeros that takes no memory, however large: every element is the same one."""
    return torch.zeros((), dtype=dtype).expand(shape)


def to_array(tensor: torch.Tensor) -> np.ndarray:
    """Return a tensor as an array that JAX takes as it is: whole numbers in 32 bits."""
    array = tensor.detach().cpu().numpy()
    return array.astype(np.int32) if array.dtype == np.int64 else array.copy()
