"""The recipe of a training run: sections that check their fields, conversion from plain values, and recipe files."""

import dataclasses
import functools
import math
import operator
import re
import tomllib
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from flatout.config.settings import Size, collapse_size, nearest, shown, sides, typed
from flatout.utils.errors import InputError

T = TypeVar("T")

# The optimizers of both engines; torch and timm have more.
OPTIMIZERS = ("sgd", "momentum", "adagrad", "adam", "adamw")
MAX_CHANNELS, MAX_IMAGE_SIZE = 1024, 8192
ImageSize = Annotated[Size, f"[1, {MAX_IMAGE_SIZE}]"]
SizeOrZero = Annotated[Size, f"[0, {MAX_IMAGE_SIZE}]"]
# Keys of earlier versions: the values that are ignored, and what replaced the others.
REMOVED = {
    "data.decode": (("auto", "before"), "images are decoded before training"),
    "augment.start_size": ((0,), "all epochs train on images of image_size"),
    "exact_sums": ((False,), "weights on several devices agree up to floating-point summation order"),
}
# Keys that survive a change of the optimizer's name.
KEPT_OF_OPTIMIZER = ("lr", "lr_base_batch", "layer_decay", "weight_decay")
# These keys may differ when a run is resumed: they set its length, or affect only rounding.
FREE_KEYS = (
    *("epochs", "max_steps", "schedule.corrections", "early_stopping", "log_every"),
    *("micro_batch", "precision", "tune", "shard", "data.path", "data.images", "data.classes", "data.placement"),
)


class Checked:
    """Checks fields annotated with an interval, such as `[0, 1)`; `section` is the first part of their dotted keys."""

    section = ""

    def __post_init__(self) -> None:
        for name, hint in typing.get_type_hints(type(self), include_extras=True).items():
            for interval in getattr(hint, "__metadata__", ()):
                self._check_range(name, interval)

    def _check_range(self, name: str, interval: str) -> None:
        low, high = map(float, interval[1:-1].split(","))
        need = f"must be at least {low:g}" if interval[0] == "[" else f"must be greater than {low:g}"
        if high < math.inf:
            need += f" and at most {high:g}" if interval[-1] == "]" else f" and less than {high:g}"
        value = getattr(self, name)
        is_pair = isinstance(value, tuple)  # height and width, of which neither may be 0
        numbers = value if is_pair else () if value is None else (value,)
        above = operator.ge if interval[0] == "[" else operator.gt
        below = operator.le if interval[-1] == "]" else operator.lt
        low = max(low, 1) if is_pair else low
        self._require((all(above(n, low) and below(n, high) for n in numbers), name, need))

    def _require(self, *rules: tuple[bool, str, str]) -> None:
        """Check rules: a condition, its field, and the message if it is violated."""
        for condition, name, need in rules:
            if not condition:
                raise InputError(f"{self.section}{name} = {getattr(self, name)!r}: {need}")


@dataclass(frozen=True, kw_only=True)
class Optimizer(Checked):
    """An optimizer and its hyper-parameters, as torch defines them; `docs/recipes.md` describes them.

    `torch:NAME` and `timm:NAME` have defaults of their own for the fields that are None.
    """

    section = "optimizer."
    name: str = "sgd"  # one of `OPTIMIZERS`, `torch:NAME` or `timm:NAME`; `momentum` is SGD with a momentum of 0.9
    lr: Annotated[float, "(0, inf)"] = 0.01  # the base of the schedule
    lr_base_batch: Annotated[int, "[0, inf)"] = 0  # the batch size `lr` is for, scaled to `batch_size`; 0: not scaled
    lr_scaling: Literal["linear", "sqrt"] | None = None  # by default linear, and sqrt for Adam and AdamW
    momentum: Annotated[float | None, "[0, 1)"] = None
    dampening: Annotated[float, "[0, 1)"] = 0.0
    nesterov: bool | None = None
    weight_decay: Annotated[float, "[0, inf)"] = 0.0
    betas: tuple[float, ...] | None = None
    eps: Annotated[float | None, "(0, inf)"] = None
    layer_decay: Annotated[float, "(0, 1]"] = 1.0  # the rate of a group of layers, as a share of the next one's

    def __post_init__(self) -> None:
        known = (*OPTIMIZERS, "torch:NAME", "timm:NAME")
        self._require((self.name in OPTIMIZERS or self.is_of_library, "name", nearest(self.name, known)))
        defaults: dict[str, object] = {"lr_scaling": "sqrt" if self.name in ("adam", "adamw") else "linear"}
        if not self.is_of_library:
            defaults |= {"momentum": 0.9 if self.name == "momentum" else 0.0, "nesterov": False, "betas": (0.9, 0.999)}
            defaults |= {"eps": 1e-10 if self.name == "adagrad" else 1e-8}
        for name, value in defaults.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        super().__post_init__()
        betas = self.betas or ()
        are_betas = all(0 <= beta < 1 for beta in betas) and (self.is_of_library or len(betas) == 2)
        count = "" if self.is_of_library else "two "
        self._require((are_betas, "betas", f"must be {count}numbers, each at least 0 and less than 1"))
        if self.is_of_library:
            return
        momentum, is_sgd = self.momentum or 0.0, self.name in ("sgd", "momentum")
        can_nesterov = momentum > 0 and self.dampening == 0
        self._require(
            (is_sgd or momentum == 0, "momentum", f"{self.name} has none; set it to 0"),
            (self.name != "momentum" or momentum > 0, "momentum", "must be greater than 0; or use the optimizer sgd"),
            (self.dampening == 0 or momentum > 0, "dampening", "has no effect without momentum"),
            (can_nesterov or not self.nesterov, "nesterov", "needs a momentum greater than 0 and no dampening"),
        )

    @property
    def is_of_library(self) -> bool:
        """Whether the name is a class of torch or timm."""
        return self.name.startswith(("torch:", "timm:"))


SGD = functools.partial(Optimizer, name="sgd")
Momentum = functools.partial(Optimizer, name="momentum")
Adagrad = functools.partial(Optimizer, name="adagrad")
Adam = functools.partial(Optimizer, name="adam")
AdamW = functools.partial(Optimizer, name="adamw")


@dataclass(frozen=True, kw_only=True)
class Schedule(Checked):
    """The learning rate over time; the formulas are in `engine/schedule.py`."""

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
    corrections: str = ""  # of the run's length by `--minutes`: `STEP:STEPS`, the planned steps of all before that step

    def __post_init__(self) -> None:
        super().__post_init__()
        are_pairs = bool(re.fullmatch(r"([1-9]\d*:[1-9]\d*( |$))*", self.corrections))
        ends = [end for end, _ in self.earlier_lengths]
        need = "must be pairs STEP:STEPS in the order of the first, such as 204:1171 409:1290"
        self._require((are_pairs and ends == sorted(set(ends)), "corrections", need))

    @functools.cached_property
    def earlier_lengths(self) -> tuple[tuple[int, int], ...]:
        """Steps, and the planned length of the whole run before each."""
        return tuple((int(end), int(total)) for end, total in re.findall(r"(\d+):(\d+)", self.corrections))


@dataclass(frozen=True, kw_only=True)
class Augment(Checked):
    """Random changes to training images; the geometry is in `engine/augment.py`. Zero or false means none."""

    section = "augment."
    flip: bool = False  # left-right, with probability 1/2
    shear: Annotated[float, "[0, 1]"] = 0.0  # the largest in either direction, as a fraction of the image size
    zoom: Annotated[float, "[0, 1)"] = 0.0  # the largest change of the scale in either direction, as a fraction
    rotate: Annotated[float, "[0, 180]"] = 0.0  # the largest angle in either direction, in degrees
    shift: Annotated[float, "[0, 1]"] = 0.0  # the largest in either direction, as a fraction of the image size
    crop: Annotated[float, "[0, 1]"] = 0.0  # the smallest area of a random crop of aspect 3/4 to 4/3, as a fraction
    color_jitter: Annotated[float, "[0, 1)"] = 0.0  # the largest change of brightness, contrast and saturation
    policy: Literal["none", "trivialaugment", "randaugment"] = "none"  # one random operation, or two
    erase: Annotated[float, "[0, 1]"] = 0.0  # the probability that a random rectangle gets the mean colour
    mixup: Annotated[float, "[0, inf)"] = 0.0  # the parameter of the Beta distribution
    cutmix: Annotated[float, "[0, inf)"] = 0.0  # likewise; with `mixup`, each applies to half of the images
    views: Annotated[int, "[0, inf)"] = 0  # versions of each image, repeated after as many epochs; 0: no limit

    @property
    def is_affine(self) -> bool:
        """Whether images are resampled."""
        return any((self.shear, self.zoom, self.rotate, self.shift, self.crop, self.policy != "none"))

    @property
    def only_shifts(self) -> bool:
        """Whether shifts are the only geometric change besides mirroring."""
        return self.shift > 0 and not replace(self, shift=0.0).is_affine

    @property
    def is_random(self) -> bool:
        """Whether training images differ between epochs."""
        return any((self.flip, self.is_affine, self.color_jitter, self.erase, self.mixup, self.cutmix))

    @property
    def is_finite(self) -> bool:
        """Whether a layer's output can be cached: images are not mixed, and have a limited number of views."""
        return not self.is_random or (self.views > 0 and not self.mixup and not self.cutmix)


@dataclass(frozen=True, kw_only=True)
class Data(Checked):
    """The location of the images and their conversion to arrays; `docs/recipes.md` describes the fields."""

    section = "data."
    path: str = ""  # a file, a folder or a URL
    mean: tuple[float, ...] = ()  # per channel, of pixels in 0..1; by default measured on the training images
    std: tuple[float, ...] = ()
    resize: Literal["squash", "crop", "pad"] = "squash"  # images of another shape
    bits: Literal[0, 8, 16] = 0  # per channel of the decoded images; 0: as the data has, which training fills in
    valid_fraction: Annotated[float, "[0, 1)"] = 0.1  # of the training images, for a missing validation split
    test_fraction: Annotated[float, "[0, 1)"] = 0.1  # likewise, if the data has no split at all
    classes: str = ""  # a file of class names, one per line, each alone or after the id used in the data
    class_names: tuple[str, ...] = ()  # for classes that are only numbered in the data
    images: str = ""  # the folder of the images that a CSV file names; by default that of the file
    file_column: str = ""  # of a CSV or Parquet file, or the feature of a TFRecord file
    label_column: str = ""  # likewise; several columns of a CSV file are separated by commas
    group_column: str = ""  # of a CSV file: images with the same entry, such as a patient, share a fold
    folds: Annotated[int, "[0, inf)"] = 0  # cross-validation; 0: one run
    fold: Annotated[int, "[0, inf)"] = 0  # that this run is validated on, from 1; 0: all of them, a run each
    label_pattern: str = ""  # a regular expression whose group is the class in the name of an image file
    label_mean: float = 0.0  # by which regression labels are standardised
    label_std: Annotated[float, "[0, inf)"] = 0.0  # likewise; 0: both are measured on the training images
    on_bad_image: Literal["stop", "skip"] = "stop"
    max_bad_share: Annotated[float, "[0, 1)"] = 0.05  # of the unreadable images that `skip` accepts
    stored_size: SizeOrZero = 0  # of decoded images, if larger: evaluation takes the centre, `augment.crop` any part
    eval_size: SizeOrZero = 0  # in evaluation and prediction; 0 for `image_size`
    placement: Literal["auto", "device", "memory", "disk"] = "auto"  # of the decoded images during training
    order: Literal["auto", "full", "blocks"] = "auto"  # shuffled all, or in blocks that a disk reads fast

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            pattern = re.compile(self.label_pattern)
            finds_label = not self.label_pattern or pattern.groups == 1 or "label" in pattern.groupindex
        except re.error:
            finds_label = False
        need = f"leaves no training images beside data.test_fraction = {self.test_fraction}"
        self._require(
            (all(s > 0 for s in self.std), "std", "every value must be greater than 0"),
            (len(self.mean) == len(self.std), "std", f"must have as many values as data.mean ({self.mean})"),
            (self.valid_fraction + self.test_fraction < 1, "valid_fraction", need),
            (self.folds != 1, "folds", "must be 0 or at least 2"),
            (self.fold <= self.folds, "fold", f"must be at most data.folds ({self.folds})"),
            (finds_label, "label_pattern", "must be a regular expression with one group, (...)"),
        )


@dataclass(frozen=True, kw_only=True)
class Recipe(Checked):
    """A training run; `docs/recipes.md` describes the fields."""

    job: str = "custom"
    model: str
    image_size: ImageSize  # of training: height and width in pixels, or one number if they are equal
    channels: Annotated[int, f"[1, {MAX_CHANNELS}]"] = 3  # 1 for grey, 3 for RGB, 4 for RGBA, or any number of bands
    epochs: Annotated[int, "[0, inf)"]  # 0 with `linear_probe` fits the head and trains nothing
    batch_size: Annotated[int, "[1, inf)"]  # on all devices together
    max_steps: Annotated[int, "[0, inf)"] = 0  # of the whole run, if fewer than those of all epochs; 0 for all
    micro_batch: Annotated[int, "[0, inf)"] = 0  # samples that a device computes at once; 0 is automatic
    shard: Literal["none", "full"] = "none"  # each device has all parameters and optimizer state, or a slice
    seed: int = 1
    norm: Literal["global", "per-device", "frozen"] = "global"  # the statistics of batch norm in training
    task: Literal["auto", "single-label", "multi-label", "regression"] = "auto"
    loss: Literal["cross-entropy", "binary-cross-entropy", "mse", "huber"] = "cross-entropy"  # the default: the task's
    label_smoothing: Annotated[float, "[0, 1)"] = 0.0
    dropout: float = -1.0  # of every dropout layer; -1 for the model's own
    clip_norm: Annotated[float, "[0, inf)"] = 0.0  # the largest norm of all gradients together; 0 for no limit
    ema: Annotated[float, "[0, 1)"] = 0.0  # decay of the average of the weights that is evaluated and kept; 0: none
    class_weights: Literal["none", "balanced"] | tuple[float, ...] | dict[str, float] = "none"
    drop_last: bool = False  # leave out a short last batch instead of padding it
    pretrained: bool = False
    weights: str = ""  # a file or folder to start from
    linear_probe: bool = False  # fit the head to the features before the first step
    freeze: str = ""  # `all-but-last-N` layers, or comma-separated patterns of parameter names
    precision: Literal["auto", "fp32", "tf32", "bf16"] = "auto"
    tune: Literal["auto", "always", "never"] = "auto"  # on NVIDIA GPUs, make steps faster before the first one
    keep: Literal["best", "last"] = "best"  # the weights of the best epoch by validation, or of the last
    early_stopping: Annotated[int, "[0, inf)"] = 0  # epochs without improvement before training ends; 0 for never
    log_every: Annotated[int, "[0, inf)"] = 0  # steps between printed losses; 0 for none
    tta: bool = False  # whether the evaluation at the end averages over views of each image
    optimizer: Optimizer = field(default_factory=Optimizer)
    schedule: Schedule = field(default_factory=Schedule)
    augment: Augment = field(default_factory=Augment)
    data: Data = field(default_factory=Data)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dropout != -1:
            self._check_range("dropout", "[0, 1)")
        given = self.class_weights
        weights = tuple(given.values()) if isinstance(given, dict) else given if isinstance(given, tuple) else (1.0,)
        frozen = '"frozen" keeps the statistics of pre-trained weights: set pretrained = true or weights'
        self._require(
            (bool(self.model), "model", "must name a model"),
            (self.epochs > 0 or self.linear_probe, "epochs", "must be at least 1, or linear_probe must be true"),
            (all(w >= 0 for w in weights) and any(weights), "class_weights", "must be at least 0, and not all 0"),
            (self.norm != "frozen" or self.pretrained or bool(self.weights), "norm", frozen),
            (0 <= self.seed < 2**63, "seed", "must be at least 0 and less than 2^63"),
        )
        bits, largest = self.data.bits, self._largest_sides
        is_picture = self.channels in (1, 3) and bits != 16
        pictures = f"needs images of 1 or 3 channels and 8 bits; these have {self.channels} channels"
        pictures += f" and {bits} bits" * bool(bits)
        values = f"must have 1 value or one for each of the {self.channels} channels"
        larger = f"must be at least {shown(collapse_size(largest))}, the largest of image_size and data.eval_size, or 0"
        self.augment._require((is_picture or self.augment.policy == "none", "policy", pictures))
        self.data._require(
            (len(self.data.mean) in (0, 1, self.channels), "mean", values),
            (all(map(operator.ge, self.stored_sides, largest)), "stored_size", larger),
        )

    @property
    def averaged_steps(self) -> int:
        """The initial step count of the average of the weights, which forgets random ones soon, but not pre-trained."""
        is_pretrained = self.pretrained or bool(self.weights)
        return math.ceil((10 * self.ema - 1) / (1 - self.ema)) if is_pretrained and self.ema > 0.1 else 0

    def total_steps(self, steps_per_epoch: int) -> int:
        """Return the steps of the whole run."""
        every = self.epochs * steps_per_epoch
        return min(every, self.max_steps or every)

    def length_at(self, step: int, steps_per_epoch: int) -> tuple[int, int]:
        """Return the planned epochs and steps of the whole run at a step, counted from 0."""
        earlier = (total for end, total in self.schedule.earlier_lengths if step < end)
        total = next(earlier, self.total_steps(steps_per_epoch))
        return -(-total // steps_per_epoch), total

    @property
    def image_sides(self) -> tuple[int, int]:
        """Height and width of the images in training."""
        return sides(self.image_size)

    @property
    def stored_sides(self) -> tuple[int, int]:
        """Height and width of the decoded images."""
        return sides(self.data.stored_size) if self.data.stored_size else self._largest_sides

    @property
    def _largest_sides(self) -> tuple[int, int]:
        height, width = map(max, self.image_sides, self.eval_sides)
        return height, width

    @property
    def eval_sides(self) -> tuple[int, int]:
        """Height and width of the images in evaluation and prediction."""
        return sides(self.data.eval_size or self.image_size)

    @property
    def is_cacheable(self) -> bool:
        """Whether the output of frozen layers can be cached for training and evaluation."""
        return self.augment.is_finite and self.image_sides == self.eval_sides

    def override(self, changes: Mapping[str, object]) -> "Recipe":
        """Return a recipe with dotted keys changed, such as `{"epochs": 3, "optimizer.lr": 0.1}`; raises InputError.

        Another `optimizer.name` or `schedule.name` resets the rest of that section to its defaults, except
        `KEPT_OF_OPTIMIZER`. Another length or batch size resets `schedule.corrections`.
        """
        table = self.to_dict()
        for key in ("optimizer", "schedule"):
            if changes.get(f"{key}.name", table[key]["name"]) != table[key]["name"]:
                table[key] = {k: v for k, v in table[key].items() if k in KEPT_OF_OPTIMIZER}
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
        table = self.to_dict()
        for key in ("optimizer", "schedule", "augment", "data"):
            table |= {f"{key}.{inner}": value for inner, value in table.pop(key).items()}
        return table

    def to_toml(self, comment: str = "") -> str:
        """Return the complete recipe as TOML, but for defaults of torch's and timm's optimizers, below a comment."""
        import tomli_w

        table = self.to_dict()
        table["optimizer"] = {key: value for key, value in table["optimizer"].items() if value is not None}
        head = "".join(f"# {line}".rstrip() + "\n" for line in comment.splitlines())
        return head + "\n" * bool(head) + tomli_w.dumps(table)


def known_keys() -> list[str]:
    """Return every dotted recipe key."""
    return list(with_settings({}).flat())


def from_dict(table: Mapping[str, object], where: str = "") -> Recipe:
    """Build a recipe from nested plain values, as read from TOML; `where` begins messages of InputError."""
    try:
        return _build(Recipe, table)
    except InputError as error:
        raise InputError(f"{where}: {error}" if where else str(error)) from None


def _build(cls: type[T], table: Mapping[str, object], prefix: str = "") -> T:
    hints, values = typing.get_type_hints(cls), {}
    for name, value in table.items():
        key = prefix + name
        if key in REMOVED:
            ignored, reason = REMOVED[key]
            if value not in ignored:
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


def with_settings(changes: Mapping[str, object]) -> Recipe:
    """Return a recipe in which only `changes`, dotted keys, are meaningful."""
    return Recipe(model="any", image_size=1, epochs=1, batch_size=1).override(changes)


# The fixed values of runs from before these keys existed.
EARLIER = {"data.bits": 8, "data.order": "full", "task": "single-label"}


def of_run(recipe: Recipe) -> Recipe:
    """Return a recipe from a run's files, completed with keys that earlier versions did not write."""
    flat = recipe.flat()
    return recipe.override({key: value for key, value in EARLIER.items() if flat[key] in (0, "auto")})


def load_recipe(path: Path) -> Recipe:
    """Read a recipe file."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"{path}: cannot be read as a recipe: {error}") from None
    return from_dict({"job": path.stem, **table}, where=str(path))
