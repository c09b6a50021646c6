"""The recipe of a training run, its conversion from plain values, and recipe files."""

import dataclasses
import math
import operator
import tomllib
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from flatout.config.sections import Augment, Checked, Data, ImageSize, Optimizer, Schedule
from flatout.config.settings import collapse_size, nearest, shown, sides, typed
from flatout.utils.errors import InputError

T = TypeVar("T")

MAX_CHANNELS = 1024
Channels = Annotated[int, f"[1, {MAX_CHANNELS}]"]
# Keys of earlier versions: the neutral value, and the replacement of others.
REMOVED = {
    "data.decode": ("before", "images are decoded before training"),
    "augment.start_size": (0, "all epochs train on images of image_size"),
    "exact_sums": (False, "weights on several devices agree up to floating-point summation order"),
}
# Keys that survive a change of the optimizer's name.
KEPT_OF_OPTIMIZER = ("lr", "lr_base_batch", "layer_decay", "weight_decay")
# These keys may differ when a run is resumed: they set its length, or affect only rounding.
FREE_KEYS = (
    "epochs",
    "max_steps",
    "schedule.corrections",
    "early_stopping",
    "log_every",
    "micro_batch",
    "precision",
    "shard",
    "data.path",
    "data.placement",
)


@dataclass(frozen=True, kw_only=True)
class Recipe(Checked):
    """A training run.

    Attributes:
        image_size: of the images that the model is trained on: height and width in pixels, or one number if they are
            equal.
        channels: 1 for grey, 3 for RGB, 4 for RGBA, or any number of bands.
        batch_size: the global batch, on any number of devices.
        max_steps: the steps of the whole run, if they are fewer than those of all epochs; 0 for all.
        micro_batch: the largest number of samples that a device computes at once (gradient accumulation); 0 is
            automatic.
        shard: whether each device has all parameters and optimizer state, or a slice (full).
        task: the kind of labels: one class, any number of classes, or a number. auto: inferred from the data.
        loss: one of the task's losses; the default means that of the task.
        norm: whose statistics batch norms use in training: those of the whole batch; of each device's share of it; or
            the running ones of the initial weights, which are not changed.
        dropout: the rate of every dropout layer; -1 for the model's own.
        class_weights: weights in the loss: balanced, inverse to the number of images; a number for each; or numbers by
            name, and 1 for the other classes.
        clip_norm: the largest norm of all gradients together; larger ones are scaled down. 0 for no limit.
        ema: the decay of an exponential moving average of the weights, which is evaluated and kept; 0 for none.
        drop_last: leave out a short last batch instead of padding it.
        pretrained: start from published weights.
        weights: start from this file or folder instead.
        epochs: passes over the training images; 0 with `linear_probe` fits the head and trains nothing.
        linear_probe: fit the head to the features before the first step.
        freeze: `all-but-last-N` layers, or comma-separated patterns of parameter names.
        keep: whether the run's weights are those of the best epoch by validation, or of the last.
        early_stopping: epochs without improvement in validation before training ends; 0 for never.
        log_every: steps between printed losses; 0 for none.
        tta: whether the evaluation at the end averages over views of each image (test-time augmentation).
    """

    job: str = "custom"
    model: str
    image_size: ImageSize
    channels: Channels = 3
    epochs: Annotated[int, "[0, inf)"]
    batch_size: Annotated[int, "[1, inf)"]
    max_steps: Annotated[int, "[0, inf)"] = 0
    micro_batch: Annotated[int, "[0, inf)"] = 0
    shard: Literal["none", "full"] = "none"
    seed: int = 1
    norm: Literal["global", "per-device", "frozen"] = "global"
    task: Literal["auto", "single-label", "multi-label", "regression"] = "auto"
    loss: Literal["cross-entropy", "binary-cross-entropy", "mse", "huber"] = "cross-entropy"
    label_smoothing: Annotated[float, "[0, 1)"] = 0.0
    dropout: float = -1.0
    clip_norm: Annotated[float, "[0, inf)"] = 0.0
    ema: Annotated[float, "[0, 1)"] = 0.0
    class_weights: Literal["none", "balanced"] | tuple[float, ...] | dict[str, float] = "none"
    drop_last: bool = False
    pretrained: bool = False
    weights: str = ""
    linear_probe: bool = False
    freeze: str = ""
    precision: Literal["auto", "fp32", "tf32", "bf16"] = "auto"
    keep: Literal["best", "last"] = "best"
    early_stopping: Annotated[int, "[0, inf)"] = 0
    log_every: Annotated[int, "[0, inf)"] = 0
    tta: bool = False
    optimizer: Optimizer = field(default_factory=Optimizer)
    schedule: Schedule = field(default_factory=Schedule)
    augment: Augment = field(default_factory=Augment)
    data: Data = field(default_factory=Data)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dropout != -1:
            self._check_range("dropout", "[0, 1)")
        weights = tuple(given.values()) if isinstance(given := self.class_weights, dict) else given
        weights = weights if isinstance(weights, tuple) else ()
        positive = "must be at least 0, and not all 0"
        need = f"must have 1 value or one for each of the {self.channels} channels"
        self._require(
            (bool(self.model), "model", "must name a model"),
            (self.epochs > 0 or self.linear_probe, "epochs", "must be at least 1, or linear_probe must be true"),
            (all(weight >= 0 for weight in weights) and (not weights or any(weights)), "class_weights", positive),
            (
                self.norm != "frozen" or self.pretrained or bool(self.weights),
                "norm",
                '"frozen" keeps the statistics of pre-trained weights: set pretrained = true or weights',
            ),
            (0 <= self.seed < 2**63, "seed", "must be at least 0 and less than 2^63"),
        )
        largest = self._largest_sides
        larger = (
            f"must be at least {shown(collapse_size(largest))}, the largest of image_size and data.eval_size, or 0 "
        )
        larger += "for that"
        of_pictures = f"needs images of 1 or 3 channels and 8 bits; these have {self.channels} channels"
        of_pictures += f" and {self.data.bits} bits" * bool(self.data.bits)
        is_picture = self.channels in (1, 3) and self.data.bits != 16
        self.augment._require(
            (is_picture or self.augment.policy == "none", "policy", of_pictures),
        )
        self.data._require(
            (len(self.data.mean) in (0, 1, self.channels), "mean", need),
            (all(map(operator.ge, self.stored_sides, largest)), "stored_size", larger),
        )

    @property
    def averaged_steps(self) -> int:
        """The initial step count of the average of the weights.

        Random weights should soon be forgotten. Pre-trained weights are kept: the decay is `ema` from the beginning.
        """
        is_pretrained = self.pretrained or bool(self.weights)
        return math.ceil((10 * self.ema - 1) / (1 - self.ema)) if is_pretrained and self.ema > 0.1 else 0

    def total_steps(self, steps_per_epoch: int) -> int:
        """Return the steps of the whole run."""
        every = self.epochs * steps_per_epoch
        return min(every, self.max_steps or every)

    def length_at(self, step: int, steps_per_epoch: int) -> tuple[int, int]:
        """Return the planned epochs and steps of the whole run at a step, counted from 0."""
        for end, total in self.schedule.earlier_lengths:
            if step < end:
                return -(-total // steps_per_epoch), total
        return self.epochs, self.total_steps(steps_per_epoch)

    @property
    def image_sides(self) -> tuple[int, int]:
        """Height and width of the images that the model is trained on."""
        return sides(self.image_size)

    @property
    def stored_sides(self) -> tuple[int, int]:
        """Height and width of the decoded images."""
        return sides(self.data.stored_size) if self.data.stored_size else self._largest_sides

    @property
    def _largest_sides(self) -> tuple[int, int]:
        (height, width), (eval_height, eval_width) = self.image_sides, self.eval_sides
        return max(height, eval_height), max(width, eval_width)

    @property
    def eval_sides(self) -> tuple[int, int]:
        """Height and width of the images in evaluation and prediction."""
        return sides(self.data.eval_size or self.image_size)

    @property
    def is_cacheable(self) -> bool:
        """Whether the output of frozen layers can be cached for training and evaluation."""
        return self.augment.is_finite and self.image_sides == self.eval_sides

    def override(self, changes: Mapping[str, Any]) -> "Recipe":
        """Return a recipe with dotted keys changed, such as `{"epochs": 3, "optimizer.lr": 0.1}`.

        Another `optimizer.name` or `schedule.name` resets the rest of that section to its defaults, except the learning
        rate, its base batch, its decay by layer and weight decay. Another length or batch size resets
        `schedule.corrections`.

        Raises:
            InputError: a key is unknown, or a value has the wrong type or is impossible.
        """
        table = self.to_dict()
        for key in ("optimizer", "schedule"):
            name = changes.get(f"{key}.name", table[key]["name"])
            if name != table[key]["name"]:
                kept = {k: v for k, v in table[key].items() if k in KEPT_OF_OPTIMIZER}
                table[key] = {"name": name, **kept}
        if any(table[key] != changes.get(key, table[key]) for key in ("epochs", "max_steps", "batch_size")):
            table["schedule"].pop("corrections", None)
        for key, value in changes.items():
            section, _, name = key.partition(".")
            if name and isinstance(table.get(section), dict):
                table[section][name] = value
            else:
                table[key] = value
        return from_dict(table)

    def without_fine_tuning(self) -> "Recipe":
        """Return the recipe of a fitted head alone."""
        return self.override({"epochs": 0, "freeze": "", "norm": "global"})

    def to_dict(self) -> dict[str, Any]:
        """Return the recipe as nested plain values, in the order of the file."""
        return dataclasses.asdict(self)

    def flat(self) -> dict[str, Any]:
        """Return the recipe as one level of dotted keys."""
        table = {}
        for key, value in self.to_dict().items():
            is_section = isinstance(getattr(self, key), Checked)
            table |= {f"{key}.{inner}": v for inner, v in value.items()} if is_section else {key: value}
        return table

    def to_toml(self, comment: str = "") -> str:
        """Return the complete recipe as TOML, every line of `comment` above it.

        Defaults of torch's and timm's own optimizers are left out.
        """
        import tomli_w

        table = self.to_dict()
        table["optimizer"] = {key: value for key, value in table["optimizer"].items() if value is not None}
        head = "".join(f"# {line}".rstrip() + "\n" for line in comment.splitlines())
        return head + ("\n" if head else "") + tomli_w.dumps(table)


def known_keys() -> list[str]:
    """Return every dotted recipe key."""
    return list(with_settings({}).flat())


def from_dict(table: Mapping[str, Any], where: str = "") -> Recipe:
    """Build a recipe from nested plain values, as read from TOML.

    Raises:
        InputError: a key is unknown or missing, or a value has the wrong type or is impossible; `where` comes first.
    """
    try:
        return _build(Recipe, table)
    except InputError as error:
        raise InputError(f"{where}: {error}" if where else str(error)) from None


def _build(cls: type[T], table: Mapping[str, Any], prefix: str = "") -> T:
    hints, values = typing.get_type_hints(cls), {}
    for name, value in table.items():
        key = prefix + name
        if key in REMOVED:
            default, reason = REMOVED[key]
            if value != default:
                raise InputError(f"{key} = {value!r}: is no longer available; {reason}")
            continue
        if name not in hints:
            raise InputError(f"unknown recipe key {key!r}; {nearest(key, known_keys())}")
        if key == "data.resize" and value == "stretch":
            value = "squash"  # its name in older recipes
        if not dataclasses.is_dataclass(hints[name]):
            values[name] = typed(value, hints[name], key)
        elif isinstance(value, Mapping):
            values[name] = _build(hints[name], value, f"{key}.")
        else:
            first = dataclasses.fields(hints[name])[0].name
            raise InputError(f"{key} = {value!r}: is a section; give one of its keys, such as {key}.{first}")
    for f in dataclasses.fields(cls):  # pyright: ignore[reportArgumentType]
        if f.name not in values and f.default is f.default_factory is dataclasses.MISSING:
            raise InputError(f"recipe key {prefix + f.name!r} is missing")
    return cls(**values)


def with_settings(changes: Mapping[str, Any]) -> Recipe:
    """Return a recipe in which only `changes`, dotted keys, are meaningful.

    Raises:
        InputError: see `Recipe.override`.
    """
    return Recipe(model="any", image_size=1, epochs=1, batch_size=1).override(changes)


# The fixed values of runs from before these keys existed.
EARLIER = {"data.bits": 8, "data.order": "full", "task": "single-label"}


def of_run(recipe: Recipe) -> Recipe:
    """Return a recipe from a run's files, completed with keys that earlier versions did not write."""
    flat = recipe.flat()
    return recipe.override({key: value for key, value in EARLIER.items() if flat[key] in (0, "auto")})


def load_recipe(path: Path) -> Recipe:
    """Read a recipe file.

    Raises:
        InputError: the file cannot be read or parsed, or its content is not a recipe.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"{path}: cannot be read as a recipe: {error}") from None
    return from_dict({"job": path.stem, **table}, where=str(path))
