"""Look for problems in a data set before training: counts, sizes, unreadable, duplicate and leaked images."""

import hashlib
import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from statistics import median_low
from typing import Any

import numpy as np

from flatout.data import near
from flatout.data.image_bytes import ImageBytes
from flatout.data.source import Source, describe
from flatout.data.splits import SPLITS
from flatout.data.survey import EXTREME, extremes
from flatout.files import printable
from flatout.host import usable_cores

_LISTED, _SHAPES = 20, 5
# Classes with fewer training images are listed.
FEW_IMAGES = 10
_IMAGES_AT_ONCE = 500


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One image of the data set: its file, or split[index] for arrays; `class_name` is its label in words."""

    name: str
    split: str
    class_name: str


@dataclass(frozen=True, kw_only=True)
class Unreadable:
    """A file that is no usable image, and the reason."""

    name: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Smallest, median and largest, in pixels."""

    smallest: int
    median: int
    largest: int


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """The result of `check`; `kind`, `path` and `notes` as in `Source`.

    Attributes:
        images: split -> number of images.
        counts: split -> class -> number of images; without classes in regression.
        numbers: split -> smallest, median and largest label of a regression; empty otherwise.
        widths, heights: of the readable images; None without any.
        shapes: height x width, such as 480x640 -> number of images.
        modes: Pillow's mode (L, RGB, CMYK and so on), or bands and their type (5 x uint16) -> number of images.
        unreadable: the files that are no usable images.
        duplicates: groups of identical images, by bytes for files and by pixels for arrays.
        across_splits, conflicts: those groups that have images in more than one split, or of more than one class.
        near_duplicates: pairs of images in different splits that look the same but are not identical; see `near`.
        divided_groups: group -> split -> number of images, for those of `data.group_column` in more than one split.
        extreme: images of an extreme shape or size, as "name (WIDTHxHEIGHT)".
        small_classes: class -> number of training images, where these are few.
    """

    kind: str
    path: str | None
    task: str
    images: dict[str, int]
    numbers: dict[str, tuple[float, float, float]]
    counts: dict[str, dict[str, int]]
    widths: Sizes | None
    heights: Sizes | None
    shapes: dict[str, int]
    modes: dict[str, int]
    unreadable: tuple[Unreadable, ...]
    duplicates: tuple[tuple[Sample, ...], ...]
    across_splits: tuple[tuple[Sample, ...], ...]
    conflicts: tuple[tuple[Sample, ...], ...]
    near_duplicates: tuple[tuple[Sample, Sample], ...]
    divided_groups: dict[str, dict[str, int]]
    extreme: tuple[str, ...]
    small_classes: dict[str, int]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values, for JSON."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Return everything as lines of text; long lists are cut, with a count."""
        classes = tuple(next(iter(self.counts.values())))
        spans = {split: (0, count) for split, count in self.images.items()}
        lines = [describe(self.kind, classes, spans, self.task), *(f"note: {note}" for note in self.notes)]
        shown = classes[:_LISTED]
        if shown:
            width = max(len(name) for name in ("class", *shown))
            lines.append(f"{'class':{width}}" + "".join(f"{split:>10}" for split in self.counts))
            lines += [f"{name:{width}}" + "".join(f"{n[name]:>10,}" for n in self.counts.values()) for name in shown]
            if len(classes) > len(shown):
                lines.append(f"and {len(classes) - len(shown):,} more classes")
            for split, counts in self.counts.items():
                lines.append(f"images per class in {split}: {min(counts.values()):,} to {max(counts.values()):,}")
        for split, (smallest, median, largest) in self.numbers.items():
            lines.append(f"labels in {split}: {smallest:g} to {largest:g}, median {median:g}")
        for name, sizes in (("width: ", self.widths), ("height:", self.heights)):
            if sizes:
                lines.append(f"{name} {sizes.smallest} to {sizes.largest} pixels, median {sizes.median}")
        if self.shapes:
            shown = list(self.shapes.items())[:_SHAPES]
            more = f" and {len(self.shapes) - _SHAPES:,} more" if len(self.shapes) > _SHAPES else ""
            lines.append("shapes: " + ", ".join(f"{shape} {count:,}" for shape, count in shown) + more)
        lines.append("modes: " + (", ".join(f"{mode} {count:,}" for mode, count in self.modes.items()) or "none"))
        sections = {"unreadable files": [f"{bad.name}: {bad.reason}" for bad in self.unreadable]}
        for title, groups in (
            ("groups of identical images", self.duplicates),
            ("identical images in more than one split", self.across_splits),
            (f"identical images with different {'classes' if classes else 'labels'}", self.conflicts),
            ("nearly identical images in different splits", self.near_duplicates),
        ):
            sections[title] = [" = ".join(f"{s.name} ({s.split}, {s.class_name})" for s in group) for group in groups]
        # The rest is said only where there is something to say.
        divided = [
            f"{name} ({', '.join(f'{n} {count:,}' for n, count in of.items())})"
            for name, of in self.divided_groups.items()
        ]
        small = [f"{name} ({count:,})" for name, count in self.small_classes.items()]
        more = {
            "groups in more than one split": divided,
            f"images with a side {EXTREME:g} times the other, or {EXTREME:g} times as large or small as usual": [
                *self.extreme
            ],
            f"classes with fewer than {FEW_IMAGES} training images": small,
        }
        sections |= {title: items for title, items in more.items() if items}
        for title, items in sections.items():
            lines.append(f"{title}: {f'{len(items):,}' if items else 'none'}")
            lines += [f"  {item}" for item in items[:_LISTED]]
            if len(items) > _LISTED:
                lines.append(f"  and {len(items) - _LISTED:,} more")
        return lines


@dataclass(frozen=True)
class _Look:
    digest: bytes
    width: int
    height: int
    mode: str
    near: near.Looks


def check(source: Source) -> CheckResult:
    """Return what is in a data set and what is wrong with it; every image file is decoded, nothing is changed."""
    if source.files is not None:
        with ThreadPoolExecutor(usable_cores()) as pool:
            looks = list(pool.map(_look_at, source.files))
    else:
        assert source.images is not None
        height, width, channels = source.images.shape[1:]
        mode = {(1, 1): "L", (3, 1): "RGB"}.get((channels, source.images.itemsize))
        mode = mode or f"{channels} x {source.images.dtype}"
        looks = [
            _Look(_digest(image.tobytes()), width, height, mode, seen)
            for image, seen in zip(source.images, _look_at_arrays(source.images), strict=True)
        ]
    readable = [look for look in looks if isinstance(look, _Look)]
    groups: dict[bytes, list[Sample]] = defaultdict(list)
    unreadable: list[Unreadable] = []
    samples = list(_samples(source))
    for sample, look in zip(samples, looks, strict=True):
        if isinstance(look, _Look):
            groups[look.digest].append(sample)
        else:
            unreadable.append(Unreadable(name=sample.name, reason=look))
    duplicates = tuple(tuple(group) for group in groups.values() if len(group) > 1)
    return CheckResult(
        kind=source.kind,
        path=str(source.path) if source.path is not None else None,
        task=source.task,
        images={split: stop - start for split, (start, stop) in source.splits.items()},
        numbers=numbers_of(source) if source.task == "regression" else {},
        counts={split: source.class_counts(split) for split in source.splits},
        widths=sizes_of(np.array([look.width for look in readable])),
        heights=sizes_of(np.array([look.height for look in readable])),
        shapes=dict(Counter(f"{look.height}x{look.width}" for look in readable).most_common()),
        modes=dict(Counter(look.mode for look in readable).most_common()),
        unreadable=tuple(unreadable),
        duplicates=duplicates,
        across_splits=tuple(group for group in duplicates if len({sample.split for sample in group}) > 1),
        conflicts=tuple(group for group in duplicates if len({sample.class_name for sample in group}) > 1),
        near_duplicates=_near_duplicates(samples, looks),
        divided_groups=_divided_groups(source),
        extreme=tuple(_extreme(samples, looks)),
        small_classes={name: n for name, n in source.class_counts("train").items() if n < FEW_IMAGES},
        notes=source.notes,
    )


def _look_at(path: ImageBytes) -> _Look | str:
    """Return what is known of an image file, or the reason why it is unreadable."""
    from flatout.data.decode import BadImage, decode_image, read_file, read_header

    try:
        data = read_file(path)
        header = read_header(data)
        # Decoding to a small image lets JPEG skip work, but still reads the file to its end.
        image = decode_image(data, size=near.SIZE, channels=header.channels, resize="squash", bits=header.bits)
    except BadImage as error:
        return str(error)
    return _Look(_digest(data), header.width, header.height, header.mode, near.look(image[None]))


def _look_at_arrays(images: np.ndarray) -> Iterator[near.Looks]:
    from flatout.data.resize import resize_images

    how = {"size": near.SIZE, "channels": images.shape[-1], "resize": "squash", "bits": 8 * images.itemsize}
    for start in range(0, len(images), _IMAGES_AT_ONCE):
        seen = near.look(resize_images(images[start : start + _IMAGES_AT_ONCE], **how))
        yield from map(near.Looks, seen.hashes[:, None], seen.thumbnails[:, None])


def _near_duplicates(samples: list[Sample], looks: Sequence[_Look | str]) -> tuple[tuple[Sample, Sample], ...]:
    """Return the pairs across splits; of identical images in one split the first one stands for all."""
    first: dict[tuple[bytes, str], int] = {}
    for i, look in enumerate(looks):
        if isinstance(look, _Look):
            first.setdefault((look.digest, samples[i].split), i)
    places = list(first.values())
    chosen = [look for i in places if isinstance(look := looks[i], _Look)]
    if not chosen:
        return ()
    seen = near.Looks(
        *(np.concatenate([getattr(look.near, key) for look in chosen]) for key in ("hashes", "thumbnails"))
    )
    found = near.pairs_across(seen, np.array([SPLITS.index(samples[i].split) for i in places])).tolist()
    return tuple((samples[places[i]], samples[places[j]]) for i, j in found if chosen[i].digest != chosen[j].digest)


def _divided_groups(source: Source) -> dict[str, dict[str, int]]:
    if source.groups is None:
        return {}
    counts = {split: Counter(source.groups[start:stop].tolist()) for split, (start, stop) in source.splits.items()}
    found = {
        name: {s: of[name] for s, of in counts.items() if name in of} for name in np.unique(source.groups).tolist()
    }
    return {name: of for name, of in found.items() if len(of) > 1}


def _extreme(samples: list[Sample], looks: Sequence[_Look | str]) -> Iterator[str]:
    """Yield images of an extreme shape or size."""
    sizes = np.array([(look.width, look.height) if isinstance(look, _Look) else (0, 0) for look in looks])
    for i in sorted(extremes(sizes[:, 0], sizes[:, 1]).tolist()):
        yield f"{samples[i].name} ({sizes[i, 0]}x{sizes[i, 1]})"


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()


def _samples(source: Source) -> Iterator[Sample]:
    for split, (start, stop) in source.splits.items():
        for i in range(start, stop):
            yield Sample(name=name_of(source, i, split), split=split, class_name=label_of(source, i))


def name_of(source: Source, index: int, split: str) -> str:
    """Return the name of an image: its file, below the folder of the data, or split[position] in an array."""
    if source.files is None:
        return f"{split}[{index - source.splits[split][0]}]"
    folder = source.path if source.path is None or source.path.is_dir() else source.path.parent
    return printable(str(source.files[index]).removeprefix(f"{folder}{os.sep}"))


def label_of(source: Source, index: int) -> str:
    """Return the label of an image in words."""
    label = source.labels[index]
    if source.task == "regression":
        return f"{label:g}"
    if source.task == "multi-label":
        return "|".join(source.classes[i] for i in label.nonzero()[0]) or "none"
    return source.classes[label]


def numbers_of(source: Source) -> dict[str, tuple[float, float, float]]:
    """Return the smallest, median and largest label of each split of a regression."""
    parts = {split: sorted(source.labels[start:stop].tolist()) for split, (start, stop) in source.splits.items()}
    return {split: (values[0], median_low(values), values[-1]) for split, values in parts.items()}


def sizes_of(values: np.ndarray) -> Sizes | None:
    """Return smallest, median and largest of some lengths; None without any."""
    if not len(values):
        return None
    middle = np.partition(values, (len(values) - 1) // 2)[(len(values) - 1) // 2]
    return Sizes(smallest=int(values.min()), median=int(middle), largest=int(values.max()))
