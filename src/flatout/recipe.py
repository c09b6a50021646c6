"""A recipe describes a training run completely, except the devices: frozen dataclasses that check themselves.

It comes from a built-in job, a TOML file or code, is changed by `Recipe.override` only, and is written into the run
folder, so that the file alone repeats the run.
"""

import dataclasses
import functools
import math
import tomllib
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from flatout.errors import InputError
from flatout.settings import nearest, typed

MOMENTUM_DEFAULT = 0.9
MAX_IMAGE_SIZE = 8192
# These keys may differ when a run is resumed: they set its length, or change no result.
FREE_KEYS = ("epochs", "early_stopping", "log_every", "micro_batch", "shard", "data.path", "data.placement")


class _Checked:
    """Fields that are checked: `section` is the first part of their dotted keys."""

    section = ""

    def _require(self, condition: bool, name: str, need: str) -> None:
        if not condition:
            raise InputError(f"{self.section}{name} = {getattr(self, name)!r}: {need}")

    def _check_ranges(self, intervals: Mapping[str, str]) -> None:
        """Check the fields named for each interval, such as `[0, 1)` or `(0, inf)`; a bracket includes its end."""
        for interval, names in intervals.items():
            low, high = map(float, interval[1:-1].split(","))
            need = f"must be at least {low:g}" if interval[0] == "[" else f"must be greater than {low:g}"
            if high < math.inf:
                need += f" and at most {high:g}" if interval[-1] == "]" else f" and less than {high:g}"
            for name in names.split():
                value = getattr(self, name)
                is_end = (value == low and interval[0] == "[") or (value == high and interval[-1] == "]")
                self._require(is_end or low < value < high, name, need)


@dataclass(frozen=True, kw_only=True)
class Optimizer(_Checked):
    """An optimizer and its hyper-parameters, as torch defines them.

    name: `momentum` is SGD with a default momentum of 0.9; that of `sgd` is 0.
    lr_base_batch: the batch size that `lr` was chosen for; `lr` is scaled from it to `batch_size`. 0 for no scaling.
    lr_scaling: by the batch size or its square root; by default linear, and sqrt for Adam and AdamW.
    eps: by default torch's value for the optimizer.
    """

    section = "optimizer."
    name: Literal["sgd", "momentum", "adagrad", "adam", "adamw"] = "sgd"
    lr: float = 0.01
    lr_base_batch: int = 0
    lr_scaling: Literal["linear", "sqrt"] | None = None
    momentum: float | None = None
    dampening: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    betas: tuple[float, ...] = (0.9, 0.999)
    eps: float | None = None

    def __post_init__(self) -> None:
        is_sgd = self.name in ("sgd", "momentum")
        if self.momentum is None:
            object.__setattr__(self, "momentum", MOMENTUM_DEFAULT if self.name == "momentum" else 0.0)
        if self.eps is None:
            object.__setattr__(self, "eps", 1e-10 if self.name == "adagrad" else 1e-8)
        if self.lr_scaling is None:
            object.__setattr__(self, "lr_scaling", "sqrt" if self.name in ("adam", "adamw") else "linear")
        momentum = self.momentum or 0.0
        self._check_ranges(
            {"(0, inf)": "lr eps", "[0, inf)": "lr_base_batch weight_decay", "[0, 1)": "momentum dampening"},
        )
        self._require(is_sgd or momentum == 0, "momentum", f"{self.name} has none; set it to 0")
        self._require(
            self.name != "momentum" or momentum > 0,
            "momentum",
            "must be greater than 0 for the momentum optimizer; or use optimizer.name = 'sgd'",
        )
        self._require(self.dampening == 0 or momentum > 0, "dampening", "has no effect without momentum")
        self._require(
            not self.nesterov or (momentum > 0 and self.dampening == 0),
            "nesterov",
            "needs a momentum greater than 0 and no dampening",
        )
        self._require(
            len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas),
            "betas",
            "must be two numbers, each at least 0 and less than 1",
        )


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
    warmup_epochs: float = 0.0
    step_epochs: int = 30
    factor: float = 0.1
    patience: int = 10
    threshold: float = 1e-4
    final_factor: float = 0.0
    rise: float = 0.3
    start_factor: float = 0.04

    def __post_init__(self) -> None:
        self._check_ranges(
            {
                "[0, inf)": "warmup_epochs patience threshold",
                "[1, inf)": "step_epochs",
                "(0, 1)": "factor rise",
                "[0, 1]": "final_factor",
                "(0, 1]": "start_factor",
            },
        )


@dataclass(frozen=True, kw_only=True)
class Augment(_Checked):
    """Random changes to training images; the geometry is in `numerics/augment.py`. Zero or false means none.

    flip: mirror left-right with probability 1/2. shear, zoom, shift: the largest amount in either direction, as a
    fraction of the image size. rotate: the largest angle in either direction, in degrees. crop: the smallest area of a
    random resized crop, as a fraction of the image; its aspect ratio is between 3/4 and 4/3.
    """

    section = "augment."
    flip: bool = False
    shear: float = 0.0
    zoom: float = 0.0
    rotate: float = 0.0
    shift: float = 0.0
    crop: float = 0.0

    def __post_init__(self) -> None:
        self._check_ranges({"[0, 1]": "shear shift crop", "[0, 1)": "zoom", "[0, 180]": "rotate"})

    @property
    def is_affine(self) -> bool:
        """Whether images are resampled."""
        return any((self.shear, self.zoom, self.rotate, self.shift, self.crop))

    @property
    def is_random(self) -> bool:
        """Whether training images differ between epochs."""
        return self.flip or self.is_affine


@dataclass(frozen=True, kw_only=True)
class Data(_Checked):
    """Where the images are and how they become arrays.

    mean, std: per channel, of pixels scaled to 0..1; by default measured on the training images.
    resize: to a square, by stretching or by cropping the longer side.
    valid_fraction, test_fraction: the share of the training images, stratified by class, for a missing split. A test
    split is made only where the data has no split at all.
    classes: a file of class names, one per line. class_names: names for classes that the data only numbers.
    images: the folder of the images that a CSV file names, if it is not the CSV file's own.
    file_column, label_column: the columns of a CSV file, by their names in its header.
    max_bad_share: the largest share of unreadable images that `skip` accepts.
    placement: where the decoded images are during training.
    """

    section = "data."
    path: str = ""
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    resize: Literal["stretch", "crop"] = "stretch"
    valid_fraction: float = 0.1
    test_fraction: float = 0.1
    classes: str = ""
    class_names: tuple[str, ...] = ()
    images: str = ""
    file_column: str = ""
    label_column: str = ""
    on_bad_image: Literal["stop", "skip"] = "stop"
    max_bad_share: float = 0.05
    placement: Literal["auto", "device", "memory", "disk"] = "auto"

    def __post_init__(self) -> None:
        self._require(all(s > 0 for s in self.std), "std", "every value must be greater than 0")
        self._require(len(self.mean) == len(self.std), "std", f"must have as many values as data.mean ({self.mean})")
        self._check_ranges({"[0, 1)": "valid_fraction test_fraction max_bad_share"})
        self._require(
            self.valid_fraction + self.test_fraction < 1,
            "valid_fraction",
            f"leaves no training images beside data.test_fraction = {self.test_fraction}",
        )


@dataclass(frozen=True, kw_only=True)
class Recipe(_Checked):
    """A training run.

    batch_size: the global batch, on any number of devices.
    micro_batch: the largest number of samples that a device computes at once (gradient accumulation); 0 is automatic.
    shard: whether each device keeps all parameters and optimizer state, or a slice (full).
    norm: whether batch normalisation uses the global batch.
    exact_sums: whether the weights have the same bits on any number of CPU devices, at the cost of speed.
    dropout: the rate of every dropout layer; -1 for the model's own.
    drop_last: leave out a short last batch instead of padding it.
    pretrained: start from published weights. weights: from this file or folder instead.
    freeze: `all-but-last-N` layers, or comma-separated patterns of parameter names.
    keep: whether the run's weights are those of the best epoch by validation, or of the last.
    early_stopping: epochs without improvement in validation before training ends; 0 for never.
    log_every: steps between printed losses; 0 for none.
    """

    job: str = "custom"
    model: str
    image_size: int
    channels: Literal[1, 3] = 3
    epochs: int
    batch_size: int
    micro_batch: int = 0
    shard: Literal["none", "full"] = "none"
    seed: int = 1
    norm: Literal["global", "per-device"] = "global"
    exact_sums: bool = False
    loss: Literal["cross-entropy", "binary-cross-entropy"] = "cross-entropy"
    label_smoothing: float = 0.0
    dropout: float = -1.0
    class_weights: Literal["none", "balanced"] = "none"
    drop_last: bool = False
    pretrained: bool = False
    weights: str = ""
    freeze: str = ""
    precision: Literal["auto", "fp32", "tf32", "bf16"] = "auto"
    keep: Literal["best", "last"] = "best"
    early_stopping: int = 0
    log_every: int = 0
    optimizer: Optimizer = field(default_factory=Optimizer)
    schedule: Schedule = field(default_factory=Schedule)
    augment: Augment = field(default_factory=Augment)
    data: Data = field(default_factory=Data)

    def __post_init__(self) -> None:
        self._require(bool(self.model), "model", "must name a model")
        self._check_ranges(
            {
                f"[1, {MAX_IMAGE_SIZE}]": "image_size",
                "[1, inf)": "epochs batch_size",
                "[0, inf)": "micro_batch early_stopping log_every",
                "[0, 1)": "label_smoothing",
            },
        )
        self._require(0 <= self.seed < 2**63, "seed", "must be at least 0 and less than 2^63")
        if self.dropout != -1:
            self._check_ranges({"[0, 1)": "dropout"})
        if len(self.data.mean) not in (0, 1, self.channels):
            need = f"must have 1 value or one for each of the {self.channels} channels"
            raise InputError(f"data.mean = {self.data.mean!r}: {need}")

    def override(self, changes: Mapping[str, Any]) -> "Recipe":
        """Return a recipe with dotted keys changed, such as `{"epochs": 3, "optimizer.lr": 0.1}`.

        Another `optimizer.name` or `schedule.name` resets the rest of that section to its defaults, except the learning
        rate, its base batch and weight decay.

        Raises:
            InputError: a key is unknown, or a value has the wrong type or is impossible.
        """
        table = self.to_dict()
        for key in ("optimizer", "schedule"):
            name = changes.get(f"{key}.name", table[key]["name"])
            if name != table[key]["name"]:
                kept = {k: v for k, v in table[key].items() if k in ("lr", "lr_base_batch", "weight_decay")}
                table[key] = {"name": name, **kept}
        for key, value in changes.items():
            section = table
            *parents, last = key.split(".")
            for parent in parents:
                inner = section.get(parent)
                if not isinstance(inner, dict):
                    raise InputError(f"unknown recipe key {key!r}; {nearest(key, known_keys())}")
                section = inner
            section[last] = value
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
        """Return the complete recipe as TOML, every line of `comment` above it."""
        import tomli_w

        head = "".join(f"# {line}".rstrip() + "\n" for line in comment.splitlines())
        return head + ("\n" if head else "") + tomli_w.dumps(_without_tuples(self.to_dict()))


def _without_tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_tuples(inner) for key, inner in value.items()}
    return list(value) if isinstance(value, tuple) else value


def known_keys() -> list[str]:
    """Return every dotted recipe key."""
    keys = []
    for f in dataclasses.fields(Recipe):
        if f.name in _SECTIONS:
            keys += [f"{f.name}.{inner.name}" for inner in dataclasses.fields(_SECTIONS[f.name])]
        else:
            keys.append(f.name)
    return keys


_SECTIONS: dict[str, type] = {"optimizer": Optimizer, "schedule": Schedule, "augment": Augment, "data": Data}


def from_dict(table: Mapping[str, Any], where: str = "") -> Recipe:
    """Build a recipe from nested plain values, as read from TOML.

    Raises:
        InputError: a key is unknown or missing, or a value has the wrong type or is impossible; `where` comes first.
    """
    try:
        sections = {}
        for name, cls in _SECTIONS.items():
            inner = table.get(name, {})
            first = dataclasses.fields(cls)[0].name
            if not isinstance(inner, Mapping):
                raise InputError(f"{name} = {inner!r}: is a section; give one of its keys, such as {name}.{first}")
            sections[name] = cls(**_checked(cls, inner, prefix=f"{name}."))
        top = {key: value for key, value in table.items() if key not in _SECTIONS}
        checked = _checked(Recipe, top, prefix="")
        for f in dataclasses.fields(Recipe):
            required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
            if required and f.name not in checked:
                raise InputError(f"recipe key {f.name!r} is missing")
        return Recipe(**checked, **sections)
    except InputError as error:
        raise InputError(f"{where}: {error}" if where else str(error)) from None


def _checked(cls: type, table: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    checked = {}
    for key, value in table.items():
        if key not in hints or key in _SECTIONS:
            raise InputError(f"unknown recipe key {prefix + key!r}; {nearest(prefix + key, known_keys())}")
        checked[key] = typed(value, hints[key], prefix + key)
    return checked


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
