"""A recipe: everything that decides a training run, in frozen dataclasses that check themselves.

A recipe comes from a built-in job, a TOML file or code, is changed only by `Recipe.override`, and is written
into the run folder complete, so that the file alone repeats the run.
"""

import dataclasses
import functools
import tomllib
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from flatout.errors import InputError
from flatout.settings import nearest, typed

MOMENTUM_DEFAULT = 0.9
MAX_IMAGE_SIZE = 8192


def _require(condition: bool, key: str, value: object, need: str) -> None:
    if not condition:
        raise InputError(f"{key} = {value!r}: {need}")


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """An optimizer with its hyper-parameters, as torch defines them, and how its learning rate follows the batch.

    `momentum` is SGD with a momentum that defaults to 0.9; `sgd` takes any momentum, 0 by default.
    `eps` defaults to torch's value for the optimizer.
    lr_base_batch: the batch size that `lr` was chosen for; training then uses a rate scaled to its own. 0 for never.
    lr_scaling: with the batch size or with its square root; by default linear, sqrt for Adam and AdamW.
    """

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
        momentum, eps = self.momentum, self.eps
        assert momentum is not None
        assert eps is not None
        _require(self.lr > 0, "optimizer.lr", self.lr, "must be greater than 0")
        _require(self.lr_base_batch >= 0, "optimizer.lr_base_batch", self.lr_base_batch, "must not be negative")
        _require(0 <= momentum < 1, "optimizer.momentum", momentum, "must be at least 0 and less than 1")
        _require(is_sgd or momentum == 0, "optimizer.momentum", momentum, f"{self.name} has none; set it to 0")
        _require(
            self.name != "momentum" or momentum > 0,
            "optimizer.momentum",
            momentum,
            "must be greater than 0 for the momentum optimizer; or use optimizer.name = 'sgd'",
        )
        _require(0 <= self.dampening < 1, "optimizer.dampening", self.dampening, "must be at least 0 and less than 1")
        _require(
            self.dampening == 0 or momentum > 0, "optimizer.dampening", self.dampening, "has no effect without momentum"
        )
        _require(
            not self.nesterov or (momentum > 0 and self.dampening == 0),
            "optimizer.nesterov",
            self.nesterov,
            "needs a momentum greater than 0 and no dampening",
        )
        _require(self.weight_decay >= 0, "optimizer.weight_decay", self.weight_decay, "must not be negative")
        _require(
            len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas),
            "optimizer.betas",
            self.betas,
            "must be two numbers, each at least 0 and less than 1",
        )
        _require(eps > 0, "optimizer.eps", eps, "must be greater than 0")


SGD = functools.partial(Optimizer, name="sgd")
Momentum = functools.partial(Optimizer, name="momentum")
Adagrad = functools.partial(Optimizer, name="adagrad")
Adam = functools.partial(Optimizer, name="adam")
AdamW = functools.partial(Optimizer, name="adamw")


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How the learning rate moves; `schedule.py` holds the formulas. Epoch counts may be fractions where a float."""

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
        _require(self.warmup_epochs >= 0, "schedule.warmup_epochs", self.warmup_epochs, "must not be negative")
        _require(self.step_epochs >= 1, "schedule.step_epochs", self.step_epochs, "must be at least 1")
        _require(0 < self.factor < 1, "schedule.factor", self.factor, "must lie between 0 and 1")
        _require(self.patience >= 0, "schedule.patience", self.patience, "must not be negative")
        _require(self.threshold >= 0, "schedule.threshold", self.threshold, "must not be negative")
        _require(0 <= self.final_factor <= 1, "schedule.final_factor", self.final_factor, "must be from 0 to 1")
        _require(0 < self.rise < 1, "schedule.rise", self.rise, "must lie between 0 and 1")
        _require(0 < self.start_factor <= 1, "schedule.start_factor", self.start_factor, "must be from 0 to 1, not 0")


@dataclass(frozen=True, kw_only=True)
class Augment:
    """Random changes to training images; `augment.py` holds the geometry. Zero or false means none.

    flip: mirror left-right with probability 1/2. shear, zoom, shift: largest amount either way, as a fraction of
    the image size. rotate: largest angle either way, in degrees. crop: random resized crop, the smallest area kept as a
    fraction of the image, its aspect ratio between 3/4 and 4/3.
    """

    flip: bool = False
    shear: float = 0.0
    zoom: float = 0.0
    rotate: float = 0.0
    shift: float = 0.0
    crop: float = 0.0

    def __post_init__(self) -> None:
        _require(0 <= self.shear <= 1, "augment.shear", self.shear, "must be from 0 to 1")
        _require(0 <= self.zoom < 1, "augment.zoom", self.zoom, "must be at least 0 and less than 1")
        _require(0 <= self.rotate <= 180, "augment.rotate", self.rotate, "must be from 0 to 180 degrees")
        _require(0 <= self.shift <= 1, "augment.shift", self.shift, "must be from 0 to 1")
        _require(0 <= self.crop <= 1, "augment.crop", self.crop, "must be from 0 (none) to 1")

    @property
    def is_affine(self) -> bool:
        """Whether images are resampled, rather than mirrored at most."""
        return any((self.shear, self.zoom, self.rotate, self.shift, self.crop))

    @property
    def is_random(self) -> bool:
        """Whether training images differ between epochs at all."""
        return self.flip or self.is_affine


@dataclass(frozen=True, kw_only=True)
class Data:
    """Where the images are and how they become arrays.

    mean, std: per channel, of pixels scaled to 0..1; empty means measured on the training images.
    resize: to a square, out of proportion (stretch) or by cutting the longer side (crop).
    valid_fraction, test_fraction: the stratified share of the training images set aside where the data has no such
    split (a test split only where it has no split at all).
    classes: a file of class names, one a line. class_names: names for classes that the data only numbers.
    max_bad_share: the largest share of unreadable images that `skip` accepts.
    placement: where the decoded images live during training.
    """

    path: str = ""
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    resize: Literal["stretch", "crop"] = "stretch"
    valid_fraction: float = 0.1
    test_fraction: float = 0.1
    classes: str = ""
    class_names: tuple[str, ...] = ()
    on_bad_image: Literal["stop", "skip"] = "stop"
    max_bad_share: float = 0.05
    placement: Literal["auto", "device", "memory", "disk"] = "auto"

    def __post_init__(self) -> None:
        _require(all(s > 0 for s in self.std), "data.std", self.std, "every value must be greater than 0")
        _require(
            len(self.mean) == len(self.std),
            "data.std",
            self.std,
            f"must have as many values as data.mean ({self.mean})",
        )
        for key in ("valid_fraction", "test_fraction", "max_bad_share"):
            value = getattr(self, key)
            _require(0 <= value < 1, f"data.{key}", value, "must be at least 0 and less than 1")
        _require(
            self.valid_fraction + self.test_fraction < 1,
            "data.valid_fraction",
            self.valid_fraction,
            f"leaves no training images beside data.test_fraction = {self.test_fraction}",
        )


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides a training run.

    batch_size: the global batch, on however many devices.
    micro_batch: the most samples that a device computes at once, the batch staying what it is; 0 is automatic.
    shard: whether each device keeps everything that training changes, or a slice of it.
    norm: whether batch normalisation sees the global batch.
    dropout: the share that every dropout layer drops; -1 leaves each as the model has it.
    drop_last: leave out a short last batch instead of padding it.
    pretrained: start from published weights; weights: from this file or folder instead.
    freeze: `all-but-last-N` layers, or comma-separated patterns of parameter names.
    keep: whether the run's weights are the best by validation or the last.
    early_stopping: epochs without a better validation result before training ends, 0 for never.
    log_every: steps between printed losses, 0 for none.
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
        _require(bool(self.model), "model", self.model, "must name a model")
        size = self.image_size
        _require(1 <= size <= MAX_IMAGE_SIZE, "image_size", size, f"must be from 1 to {MAX_IMAGE_SIZE} pixels")
        _require(self.epochs >= 1, "epochs", self.epochs, "must be at least 1")
        _require(self.batch_size >= 1, "batch_size", self.batch_size, "must be at least 1")
        _require(self.micro_batch >= 0, "micro_batch", self.micro_batch, "must not be negative")
        _require(0 <= self.seed < 2**63, "seed", self.seed, "must be from 0 to 2^63 - 1")
        _require(0 <= self.label_smoothing < 1, "label_smoothing", self.label_smoothing, "must be from 0 to 1, not 1")
        _require(
            self.dropout == -1 or 0 <= self.dropout < 1, "dropout", self.dropout, "must be from 0 to 1, not 1; or -1"
        )
        _require(self.early_stopping >= 0, "early_stopping", self.early_stopping, "must not be negative")
        _require(self.log_every >= 0, "log_every", self.log_every, "must not be negative")
        _require(
            len(self.data.mean) in (0, 1, self.channels),
            "data.mean",
            self.data.mean,
            f"must have 1 value or one for each of the {self.channels} channels",
        )

    def override(self, changes: Mapping[str, Any]) -> "Recipe":
        """Return a recipe with dotted keys changed, such as `{"epochs": 3, "optimizer.lr": 0.1}`.

        Choosing another `optimizer.name` or `schedule.name` also puts that section's other values back to their
        defaults, since they were chosen for the old one; the learning rate, its base batch and weight decay stay.

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
                    raise _unknown_key(key, known_keys())
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


def _unknown_key(key: str, known: Iterable[str]) -> InputError:
    known = list(known)
    by_last_part = [k for k in known if k.rpartition(".")[2] == key]
    hint = f"did you mean {by_last_part[0]!r}?" if by_last_part else nearest(key, known)
    return InputError(f"unknown recipe key {key!r}; {hint}")


def from_dict(table: Mapping[str, Any], where: str = "") -> Recipe:
    """Build a recipe from nested plain values, as read from TOML.

    Raises:
        InputError: a key is unknown or missing, or a value has the wrong type or is impossible; `where` comes first.
    """
    try:
        sections = {}
        for name, cls in _SECTIONS.items():
            inner = table.get(name, {})
            _require(isinstance(inner, Mapping), name, inner, f"must be a section, written [{name}]")
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
            raise _unknown_key(prefix + key, known_keys())
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
