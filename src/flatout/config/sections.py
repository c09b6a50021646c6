"""The sections of a recipe, which check their fields: optimizer, schedule, augmentation and data."""

import functools
import math
import re
import typing
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from flatout.config.settings import Size, nearest
from flatout.utils.errors import InputError


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
        if value is None:
            return
        # In a pair (height, width), neither may be 0.
        for number in value if isinstance(value, tuple) else (value,):
            is_end = (number == low and interval[0] == "[") or (number == high and interval[-1] == "]")
            is_inside = (is_end or low < number < high) and not (isinstance(value, tuple) and number < 1)
            self._require((is_inside, name, need))

    def _require(self, *rules: tuple[bool, str, str]) -> None:
        """Check rules: a condition, its field, and the message if it is violated."""
        for condition, name, need in rules:
            if not condition:
                raise InputError(f"{self.section}{name} = {getattr(self, name)!r}: {need}")


# The optimizers of both engines; torch and timm have more.
OPTIMIZERS = ("sgd", "momentum", "adagrad", "adam", "adamw")
MOMENTUM_DEFAULT = 0.9
MAX_IMAGE_SIZE = 8192
ImageSize = Annotated[Size, f"[1, {MAX_IMAGE_SIZE}]"]
SizeOrZero = Annotated[Size, f"[0, {MAX_IMAGE_SIZE}]"]


@dataclass(frozen=True, kw_only=True)
class Optimizer(Checked):
    """An optimizer and its hyper-parameters, as torch defines them.

    Attributes:
        name: one of `OPTIMIZERS`, or `torch:NAME` or `timm:NAME`, whose own defaults apply to fields that are None.
            `momentum` is SGD with a default momentum of 0.9; that of `sgd` is 0.
        lr: the base learning rate of the schedule.
        lr_base_batch: the batch size that `lr` was chosen for; `lr` is scaled from it to `batch_size`. 0: no scaling.
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
        """Whether the name is a class of torch or timm."""
        return self.name.startswith(("torch:", "timm:"))


SGD = functools.partial(Optimizer, name="sgd")
Momentum = functools.partial(Optimizer, name="momentum")
Adagrad = functools.partial(Optimizer, name="adagrad")
Adam = functools.partial(Optimizer, name="adam")
AdamW = functools.partial(Optimizer, name="adamw")


@dataclass(frozen=True, kw_only=True)
class Schedule(Checked):
    """The learning rate over time; the formulas are in `engine/schedule.py`.

    Attributes:
        corrections: changes of the run's length by `--minutes`: `STEP:STEPS` for the planned steps of the whole run
            before that step, such as `204:1171 409:1290`.
    """

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
    corrections: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        need = "must be pairs STEP:STEPS in the order of the first, such as 204:1171 409:1290"
        self._require((bool(re.fullmatch(r"([1-9]\d*:[1-9]\d*( |$))*", self.corrections)), "corrections", need))
        ends = [end for end, _ in self.earlier_lengths]
        self._require((ends == sorted(set(ends)), "corrections", need))

    @functools.cached_property
    def earlier_lengths(self) -> tuple[tuple[int, int], ...]:
        """Steps, and the planned length of the whole run before each."""
        pairs = (pair.split(":") for pair in self.corrections.split())
        return tuple((int(end), int(total)) for end, total in pairs)


@dataclass(frozen=True, kw_only=True)
class Augment(Checked):
    """Random changes to training images; the geometry is in `engine/augment.py`. Zero or false means none.

    Attributes:
        flip: mirror left-right with probability 1/2.
        shear: the largest shear in either direction, as a fraction of the image size.
        zoom: the largest change of the scale in either direction, as a fraction.
        rotate: the largest angle in either direction, in degrees.
        shift: the largest shift in either direction, as a fraction of the image size.
        crop: the smallest area of a random resized crop, as a fraction of the image; its aspect ratio is between 3/4
            and 4/3.
        color_jitter: the largest change of brightness, contrast and saturation, as a factor.
        policy: one random operation of TrivialAugment, or two of RandAugment.
        erase: the probability that a random rectangle gets the mean colour.
        mixup: the parameter of the Beta distribution by which images are mixed with others.
        cutmix: the same for pasted rectangles; with `mixup`, each applies to half of the images.
        views: the number of augmented versions of each image, which repeat after as many epochs. 0: no limit.
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
    """The location of the images and their conversion to arrays.

    Attributes:
        path: a file, a folder or a URL.
        mean: per channel, of pixels scaled to 0..1; by default measured on the training images.
        std: the standard deviation, likewise.
        resize: how images of another shape get that of the recipe: squashed, cropped at the centre, or padded with
            black.
        bits: bits per channel of the decoded images; 0 for those of the data, which training fills in.
        valid_fraction: the share of the training images, stratified by class, for a missing validation split.
        test_fraction: the same for a test split, which is made only if the data has no split at all.
        classes: a file of class names, one per line, each alone or after the id used in the data.
        class_names: names for classes that are only numbered in the data.
        images: the folder of the images that a CSV file names, if it is not the CSV file's own.
        folds: cross-validation: this many runs, each validated on one fold and trained on the others; 0: one run.
        fold: the fold that this run is validated on, from 1 to `folds`; 0 for all of them, a run each.
        group_column: a column of a CSV file; images with the same entry, such as those of a patient, share a fold.
        file_column: the column of a CSV or Parquet file by its name, or the feature of a TFRecord file.
        label_column: the same for labels; several columns of a CSV file are separated by commas.
        label_pattern: a regular expression whose group `label`, or only group, is the class in the name of an image
            file.
        label_mean: the mean by which regression labels are standardised.
        label_std: the standard deviation, likewise; 0: both are measured on the training images.
        max_bad_share: the largest share of unreadable images that `skip` accepts.
        stored_size: of the decoded images, if they are to be larger than `image_size`: evaluation takes the centre,
            `augment.crop` any part.
        eval_size: of the images in evaluation and prediction; 0 for `image_size`.
        placement: where the decoded images are during training.
        order: how training images are shuffled: all, or in blocks that a disk reads fast. auto: as the file cache of
            the host suggests; the run's recipe has the choice.
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
    stored_size: SizeOrZero = 0
    eval_size: SizeOrZero = 0
    placement: Literal["auto", "device", "memory", "disk"] = "auto"
    order: Literal["auto", "full", "blocks"] = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        need = f"leaves no training images beside data.test_fraction = {self.test_fraction}"
        self._require(
            (all(s > 0 for s in self.std), "std", "every value must be greater than 0"),
            (len(self.mean) == len(self.std), "std", f"must have as many values as data.mean ({self.mean})"),
            (self.valid_fraction + self.test_fraction < 1, "valid_fraction", need),
            (self.folds != 1, "folds", "must be 0 or at least 2"),
            (self.fold <= self.folds, "fold", f"must be at most data.folds ({self.folds})"),
            (_finds_a_label(self.label_pattern), "label_pattern", "must be a regular expression with one group, (...)"),
        )


def _finds_a_label(pattern: str) -> bool:
    try:
        expression = re.compile(pattern)
    except re.error:
        return False
    return not pattern or expression.groups == 1 or "label" in expression.groupindex
