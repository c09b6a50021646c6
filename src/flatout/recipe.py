"""A recipe describes a training run completely, except the devices: frozen dataclasses that check themselves.

It comes from a built-in job, a TOML file or code, is changed by `Recipe.override` only, and is written into the run
folder, so that the file alone repeats the run.
"""

import dataclasses
import functools
import html
import math
import operator
import re
import tomllib
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from flatout.errors import InputError
from flatout.settings import Size, nearest, one_or_both, shown, sides, typed

T = TypeVar("T")

# The optimizers that both engines have; torch and timm have more.
OPTIMIZERS = ("sgd", "momentum", "adagrad", "adam", "adamw")
MOMENTUM_DEFAULT = 0.9
MAX_IMAGE_SIZE, MAX_CHANNELS = 8192, 1024
# Of an optimizer whose name is changed.
KEPT_OF_OPTIMIZER = ("lr", "lr_base_batch", "layer_decay", "weight_decay")
# These keys may differ when a run is resumed: they set its length, or change results by rounding only.
FREE_KEYS = (
    "epochs",
    "max_steps",
    "early_stopping",
    "log_every",
    "micro_batch",
    "precision",
    "shard",
    "data.path",
    "data.placement",
)


class _Checked:
    """Checks fields annotated with an interval, such as `[0, 1)`; `section` is the first part of their dotted keys."""

    section = ""

    def __post_init__(self) -> None:
        for name, hint in typing.get_type_hints(type(self), include_extras=True).items():
            for interval in getattr(hint, "__metadata__", ()):
                self._check_range(name, interval)

    def _repr_html_(self) -> str:
        """Return the keys with their values, for notebooks; those that differ from their defaults are bold."""
        rows = ""
        for one in dataclasses.fields(self):  # pyright: ignore[reportArgumentType]
            value = getattr(self, one.name)
            text = value._repr_html_() if isinstance(value, _Checked) else html.escape(repr(value))
            plain = one.default if one.default_factory is dataclasses.MISSING else one.default_factory()
            name = one.name if value == plain else f"<b>{one.name}</b>"
            rows += f'<tr><th style="text-align:left">{name}</th><td style="text-align:left">{text}</td></tr>'
        return f"<table>{rows}</table>"

    def _check_range(self, name: str, interval: str) -> None:
        low, high = map(float, interval[1:-1].split(","))
        need = f"must be at least {low:g}" if interval[0] == "[" else f"must be greater than {low:g}"
        if high < math.inf:
            need += f" and at most {high:g}" if interval[-1] == "]" else f" and less than {high:g}"
        value = getattr(self, name)
        if value is None:
            return
        # Of a pair, height and width, neither may be 0.
        for number in value if isinstance(value, tuple) else (value,):
            is_end = (number == low and interval[0] == "[") or (number == high and interval[-1] == "]")
            is_inside = (is_end or low < number < high) and not (isinstance(value, tuple) and number < 1)
            self._require((is_inside, name, need))

    def _require(self, *rules: tuple[bool, str, str]) -> None:
        """Check rules of a condition, the field that it is about, and the message where it does not hold."""
        for condition, name, need in rules:
            if not condition:
                raise InputError(f"{self.section}{name} = {getattr(self, name)!r}: {need}")


@dataclass(frozen=True, kw_only=True)
class Optimizer(_Checked):
    """An optimizer and its hyper-parameters, as torch defines them.

    name: one of `OPTIMIZERS`, or `torch:NAME` or `timm:NAME`, whose own defaults hold where a field is None.
        `momentum` is SGD with a default momentum of 0.9; that of `sgd` is 0.
    lr_base_batch: the batch size that `lr` was chosen for; `lr` is scaled from it to `batch_size`. 0 for no scaling.
    lr_scaling: by the batch size or its square root; by default linear, and sqrt for Adam and AdamW.
    eps: by default torch's value for the optimizer.
    layer_decay: the rate of each group of layers is that of the next one times this; the head has the full rate.
    """

    section = "optimizer."
    name: str = "sgd"
    lr: Annotated[float, "(0, inf)"] = 0.01
    lr_base_batch: Annotated[int, "[0, inf)"] = 0
    lr_scaling: Literal["linear", "sqrt"] | None = None
    momentum: Annotated[float | None, "[0, 1)"] = None
    dampening: Annotated[float, "[0, 1)"] = 0.0
    nesterov: bool | None = None
    weight_decay: Annotated[float, "[0, inf)"] = 0.0
    betas: tuple[float, ...] | None = None
    eps: Annotated[float | None, "(0, inf)"] = None
    layer_decay: Annotated[float, "(0, 1]"] = 1.0

    def __post_init__(self) -> None:
        known = (*OPTIMIZERS, "torch:NAME", "timm:NAME")
        self._require((self.name in OPTIMIZERS or self.is_of_library, "name", nearest(self.name, known)))
        is_sgd = self.name in ("sgd", "momentum")
        defaults: dict[str, Any] = {
            "momentum": MOMENTUM_DEFAULT if self.name == "momentum" else 0.0,
            "nesterov": False,
            "betas": (0.9, 0.999),
            "eps": 1e-10 if self.name == "adagrad" else 1e-8,
        }
        defaults = {} if self.is_of_library else defaults
        defaults["lr_scaling"] = "sqrt" if self.name in ("adam", "adamw") else "linear"
        for name, value in defaults.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        super().__post_init__()
        momentum, betas = self.momentum or 0.0, self.betas or ()
        are_betas = all(0 <= beta < 1 for beta in betas)
        if self.is_of_library:
            self._require((are_betas, "betas", "each must be at least 0 and less than 1"))
            return
        can_nesterov = momentum > 0 and self.dampening == 0
        are_betas = are_betas and len(betas) == 2
        self._require(
            (is_sgd or momentum == 0, "momentum", f"{self.name} has none; set it to 0"),
            (self.name != "momentum" or momentum > 0, "momentum", "must be greater than 0; or use the optimizer sgd"),
            (self.dampening == 0 or momentum > 0, "dampening", "has no effect without momentum"),
            (can_nesterov or not self.nesterov, "nesterov", "needs a momentum greater than 0 and no dampening"),
            (are_betas, "betas", "must be two numbers, each at least 0 and less than 1"),
        )

    @property
    def is_of_library(self) -> bool:
        """Whether the name is that of a class of torch or timm."""
        return self.name.startswith(("torch:", "timm:"))


SGD = functools.partial(Optimizer, name="sgd")
Momentum = functools.partial(Optimizer, name="momentum")
Adagrad = functools.partial(Optimizer, name="adagrad")
Adam = functools.partial(Optimizer, name="adam")
AdamW = functools.partial(Optimizer, name="adamw")


@dataclass(frozen=True, kw_only=True)
class Schedule(_Checked):
    """The learning rate over time; the formulas are in `numerics/schedule.py`."""

    section = "schedule."
    name: Literal["constant", "cosine", "step", "one-cycle", "plateau"] = "constant"
    warmup_epochs: Annotated[float, "[0, inf)"] = 0.0
    step_epochs: Annotated[int, "[1, inf)"] = 30
    factor: Annotated[float, "(0, 1)"] = 0.1
    patience: Annotated[int, "[0, inf)"] = 10
    threshold: Annotated[float, "[0, inf)"] = 1e-4
    final_factor: Annotated[float, "[0, 1]"] = 0.0
    rise: Annotated[float, "(0, 1)"] = 0.3
    start_factor: Annotated[float, "(0, 1]"] = 0.04


@dataclass(frozen=True, kw_only=True)
class Augment(_Checked):
    """Random changes to training images; the geometry is in `numerics/augment.py`. Zero or false means none.

    flip: mirror left-right with probability 1/2. shear, zoom, shift: the largest amount in either direction, as a
    fraction of the image size. rotate: the largest angle in either direction, in degrees. crop: the smallest area of a
    random resized crop, as a fraction of the image; its aspect ratio is between 3/4 and 4/3. color_jitter: the largest
    change of brightness, contrast and saturation, as a factor. policy: one random operation of TrivialAugment, or two
    of RandAugment. erase: the probability that a random rectangle gets the mean colour. mixup, cutmix: the parameter of
    the Beta distribution by which images are mixed with others; where both are given, each applies to half of them.
    views: the number of ways in which each image is changed; after as many epochs they repeat. 0 for no limit.
    start_size: size of the training images in the first epoch, from which they grow to `image_size`.
    """

    section = "augment."
    flip: bool = False
    shear: Annotated[float, "[0, 1]"] = 0.0
    zoom: Annotated[float, "[0, 1)"] = 0.0
    rotate: Annotated[float, "[0, 180]"] = 0.0
    shift: Annotated[float, "[0, 1]"] = 0.0
    crop: Annotated[float, "[0, 1]"] = 0.0
    color_jitter: Annotated[float, "[0, 1)"] = 0.0
    policy: Literal["none", "trivialaugment", "randaugment"] = "none"
    erase: Annotated[float, "[0, 1]"] = 0.0
    mixup: Annotated[float, "[0, inf)"] = 0.0
    cutmix: Annotated[float, "[0, inf)"] = 0.0
    views: Annotated[int, "[0, inf)"] = 0
    start_size: Annotated[Size, f"[0, {MAX_IMAGE_SIZE}]"] = 0

    @property
    def is_affine(self) -> bool:
        """Whether images are resampled."""
        return any((self.shear, self.zoom, self.rotate, self.shift, self.crop, self.policy != "none"))

    @property
    def is_random(self) -> bool:
        """Whether training images differ between epochs."""
        return any((self.flip, self.is_affine, self.color_jitter, self.erase, self.mixup, self.cutmix))

    @property
    def is_finite(self) -> bool:
        """Whether what a layer computes of an image can be kept: it is not mixed, and has a limited number of views."""
        return not self.is_random or (self.views > 0 and not self.mixup and not self.cutmix)


@dataclass(frozen=True, kw_only=True)
class Data(_Checked):
    """Where the images are and how they become arrays.

    mean, std: per channel, of pixels scaled to 0..1; by default measured on the training images.
    resize: how images of another shape get that of the recipe: squashed, cropped at the centre, or padded with black.
    bits: per channel of the decoded images; 0 for those of the data, which training fills in.
    valid_fraction, test_fraction: the share of the training images, stratified by class, for a missing split. A test
    split is made only where the data has no split at all.
    classes: a file of class names, one per line, each alone or behind the id that the data calls it by.
    class_names: names for classes that the data only numbers.
    images: the folder of the images that a CSV file names, if it is not the CSV file's own.
    folds: cross-validation: so many runs, each without a fold of the images, which it is validated on; 0 for one run.
    fold: the fold that this run is validated on, from 1 to `folds`; 0 for all of them, a run each.
    group_column: a column of a CSV file; images with the same entry, such as those of a patient, share a fold.
    file_column, label_column: the columns of a CSV or Parquet file by their names, or the features of a TFRecord file;
    several columns of labels in a CSV file are separated by commas.
    label_pattern: a regular expression whose group `label`, or only group, is the class in the name of an image file.
    label_mean, label_std: by which the numbers of a regression are standardised; a label_std of 0: measured on the
    training images.
    max_bad_share: the largest share of unreadable images that `skip` accepts.
    stored_size: of the decoded images, if they are to be larger than `image_size`: evaluation takes the centre,
    `augment.crop` any part.
    eval_size: of the images in evaluation and prediction; 0 for `image_size`.
    placement: where the decoded images are during training.
    order: how training images are shuffled: all, or in blocks that a disk reads fast. auto: as the file cache of the
    host suggests; the run's recipe has the choice.
    decode: when image files are decoded: before training, or during the first epoch, which then follows in blocks.
    auto: during it, if they are large together; the run's recipe has the choice.
    """

    section = "data."
    path: str = ""
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    resize: Literal["squash", "crop", "pad"] = "squash"
    bits: Literal[0, 8, 16] = 0
    valid_fraction: Annotated[float, "[0, 1)"] = 0.1
    test_fraction: Annotated[float, "[0, 1)"] = 0.1
    classes: str = ""
    class_names: tuple[str, ...] = ()
    images: str = ""
    file_column: str = ""
    label_column: str = ""
    group_column: str = ""
    folds: Annotated[int, "[0, inf)"] = 0
    fold: Annotated[int, "[0, inf)"] = 0
    label_pattern: str = ""
    label_mean: float = 0.0
    label_std: Annotated[float, "[0, inf)"] = 0.0
    on_bad_image: Literal["stop", "skip"] = "stop"
    max_bad_share: Annotated[float, "[0, 1)"] = 0.05
    stored_size: Annotated[Size, f"[0, {MAX_IMAGE_SIZE}]"] = 0
    eval_size: Annotated[Size, f"[0, {MAX_IMAGE_SIZE}]"] = 0
    placement: Literal["auto", "device", "memory", "disk"] = "auto"
    order: Literal["auto", "full", "blocks"] = "auto"
    decode: Literal["auto", "before", "during"] = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        need = f"leaves no training images beside data.test_fraction = {self.test_fraction}"
        self._require(
            (all(s > 0 for s in self.std), "std", "every value must be greater than 0"),
            (len(self.mean) == len(self.std), "std", f"must have as many values as data.mean ({self.mean})"),
            (self.valid_fraction + self.test_fraction < 1, "valid_fraction", need),
            (self.folds != 1, "folds", "must be 0 or at least 2"),
            (self.fold <= self.folds, "fold", f"must be at most data.folds ({self.folds})"),
            (
                self.decode != "during" or self.on_bad_image == "stop",
                "decode",
                'needs data.on_bad_image = "stop": unreadable images are not known when training starts',
            ),
            (_finds_a_label(self.label_pattern), "label_pattern", "must be a regular expression with one group, (...)"),
        )


def _finds_a_label(pattern: str) -> bool:
    try:
        expression = re.compile(pattern)
    except re.error:
        return False
    return not pattern or expression.groups == 1 or "label" in expression.groupindex


@dataclass(frozen=True, kw_only=True)
class Recipe(_Checked):
    """A training run.

    image_size: of the images that the model is trained on: height and width in pixels, or one number if they are equal.
    channels: 1 for grey, 3 for RGB, 4 for RGBA, any number for images of so many bands.
    batch_size: the global batch, on any number of devices.
    max_steps: the steps of the whole run, if they are fewer than those of all epochs; 0 for all.
    micro_batch: the largest number of samples that a device computes at once (gradient accumulation); 0 is automatic.
    shard: whether each device keeps all parameters and optimizer state, or a slice (full).
    norm: whether batch normalisation uses the global batch.
    exact_sums: whether the weights have the same bits on any number of CPU devices, at the cost of speed.
    task: what the labels are: one class, any number of classes, or a number. auto: as the data shows.
    loss: by the task; the default stands for that of the task.
    dropout: the rate of every dropout layer; -1 for the model's own.
    class_weights: of the classes in the loss: balanced, inverse to their number of images; or a number for each.
    clip_norm: the largest norm of all gradients together; larger ones are scaled down. 0 for no limit.
    ema: the decay of an exponential moving average of the weights, which is evaluated and kept; 0 for none.
    drop_last: leave out a short last batch instead of padding it.
    pretrained: start from published weights. weights: from this file or folder instead.
    linear_probe: fit the head to the output of the layers before it, before the first step.
    freeze: `all-but-last-N` layers, or comma-separated patterns of parameter names.
    keep: whether the run's weights are those of the best epoch by validation, or of the last.
    early_stopping: epochs without improvement in validation before training ends; 0 for never.
    log_every: steps between printed losses; 0 for none.
    tta: whether the evaluation at the end averages over views of each image (test-time augmentation).
    """

    job: str = "custom"
    model: str
    image_size: Annotated[Size, f"[1, {MAX_IMAGE_SIZE}]"]
    channels: Annotated[int, f"[1, {MAX_CHANNELS}]"] = 3
    epochs: Annotated[int, "[1, inf)"]
    batch_size: Annotated[int, "[1, inf)"]
    max_steps: Annotated[int, "[0, inf)"] = 0
    micro_batch: Annotated[int, "[0, inf)"] = 0
    shard: Literal["none", "full"] = "none"
    seed: int = 1
    norm: Literal["global", "per-device"] = "global"
    exact_sums: bool = False
    task: Literal["auto", "single-label", "multi-label", "regression"] = "auto"
    loss: Literal["cross-entropy", "binary-cross-entropy", "mse", "huber"] = "cross-entropy"
    label_smoothing: Annotated[float, "[0, 1)"] = 0.0
    dropout: float = -1.0
    clip_norm: Annotated[float, "[0, inf)"] = 0.0
    ema: Annotated[float, "[0, 1)"] = 0.0
    class_weights: Literal["none", "balanced"] | tuple[float, ...] = "none"
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
        weights = self.class_weights if isinstance(self.class_weights, tuple) else ()
        positive = "must be at least 0, and not all 0"
        need = f"must have 1 value or one for each of the {self.channels} channels"
        self._require(
            (bool(self.model), "model", "must name a model"),
            (all(weight >= 0 for weight in weights) and (not weights or any(weights)), "class_weights", positive),
            (0 <= self.seed < 2**63, "seed", "must be at least 0 and less than 2^63"),
        )
        largest = self._largest_sides
        larger = f"must be at least {shown(one_or_both(largest))}, the largest of image_size and data.eval_size, or 0 "
        larger += "for that"
        smaller = f"must be at most image_size ({shown(self.image_size)})"
        is_smaller = all(map(operator.le, sides(self.augment.start_size), self.image_sides))
        of_pictures = f"needs images of 1 or 3 channels and 8 bits; these have {self.channels} channels"
        of_pictures += f" and {self.data.bits} bits" * bool(self.data.bits)
        is_picture = self.channels in (1, 3) and self.data.bits != 16
        self.augment._require(
            (is_smaller, "start_size", smaller),
            (is_picture or self.augment.policy == "none", "policy", of_pictures),
        )
        self.data._require(
            (len(self.data.mean) in (0, 1, self.channels), "mean", need),
            (all(map(operator.ge, self.stored_sides, largest)), "stored_size", larger),
        )

    def total_steps(self, steps_per_epoch: int) -> int:
        """Return the steps of the whole run."""
        every = self.epochs * steps_per_epoch
        return min(every, self.max_steps or every)

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
    def start_sides(self) -> tuple[int, int]:
        """Height and width of the training images in the first epoch."""
        return sides(self.augment.start_size or self.image_size)

    @property
    def is_cacheable(self) -> bool:
        """Whether what a frozen layer computes of an image can be kept for training and evaluation."""
        sizes = {self.image_sides, self.eval_sides, self.start_sides}
        return self.augment.is_finite and len(sizes) == 1

    def override(self, changes: Mapping[str, Any]) -> "Recipe":
        """Return a recipe with dotted keys changed, such as `{"epochs": 3, "optimizer.lr": 0.1}`.

        Another `optimizer.name` or `schedule.name` resets the rest of that section to its defaults, except the learning
        rate, its base batch, its decay by layer and weight decay.

        Raises:
            InputError: a key is unknown, or a value has the wrong type or is impossible.
        """
        table = self.to_dict()
        for key in ("optimizer", "schedule"):
            name = changes.get(f"{key}.name", table[key]["name"])
            if name != table[key]["name"]:
                kept = {k: v for k, v in table[key].items() if k in KEPT_OF_OPTIMIZER}
                table[key] = {"name": name, **kept}
        for key, value in changes.items():
            section, _, name = key.partition(".")
            if name and isinstance(table.get(section), dict):
                table[section][name] = value
            else:
                table[key] = value
        return from_dict(table)

    def to_dict(self) -> dict[str, Any]:
        """Return the recipe as nested plain values, in the order of the file."""
        return dataclasses.asdict(self)

    def flat(self) -> dict[str, Any]:
        """Return the recipe as one level of dotted keys."""
        table = {}
        for key, value in self.to_dict().items():
            table |= {f"{key}.{inner}": v for inner, v in value.items()} if isinstance(value, dict) else {key: value}
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
    """Return a recipe of which only `changes`, dotted keys, mean something.

    Raises:
        InputError: as `Recipe.override`.
    """
    return Recipe(model="any", image_size=1, epochs=1, batch_size=1).override(changes)


# What runs are that were begun before these keys were written: those had no choice.
EARLIER = {"data.bits": 8, "data.order": "full", "data.decode": "before", "task": "single-label"}


def of_run(recipe: Recipe) -> Recipe:
    """Return a recipe from a run's files with what earlier versions did not write."""
    flat = recipe.flat()
    return recipe.override({key: value for key, value in EARLIER.items() if flat[key] in (0, "auto")})


def load_recipe(path: Path) -> Recipe:
    """Read a recipe file.

    Raises:
        InputError: the file cannot be read or parsed, or its content is no recipe.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"{path}: cannot be read as a recipe: {error}") from None
    return from_dict({"job": path.stem, **table}, where=str(path))
