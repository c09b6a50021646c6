"""Look for problems in a data set before training: counts, sizes, unreadable and duplicate images."""

import hashlib
import os
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from statistics import median_low
from typing import Any

from flatout.data.members import Encoded
from flatout.data.source import Source, describe
from flatout.files import printable
from flatout.host import usable_cores

_LISTED, _SHAPES = 20, 5
# Decoding to a small image lets JPEG skip work, but still reads the file to its end.
_DECODED_SIZE = 64


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
        ):
            sections[title] = [" = ".join(f"{s.name} ({s.split}, {s.class_name})" for s in group) for group in groups]
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
        looks = [_Look(_digest(image.tobytes()), width, height, mode) for image in source.images]
    readable = [look for look in looks if isinstance(look, _Look)]
    groups: dict[bytes, list[Sample]] = defaultdict(list)
    unreadable: list[Unreadable] = []
    for sample, look in zip(_samples(source), looks, strict=True):
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
        numbers=_numbers(source) if source.task == "regression" else {},
        counts={split: source.class_counts(split) for split in source.splits},
        widths=_sizes([look.width for look in readable]),
        heights=_sizes([look.height for look in readable]),
        shapes=dict(Counter(f"{look.height}x{look.width}" for look in readable).most_common()),
        modes=dict(Counter(look.mode for look in readable).most_common()),
        unreadable=tuple(unreadable),
        duplicates=duplicates,
        across_splits=tuple(group for group in duplicates if len({sample.split for sample in group}) > 1),
        conflicts=tuple(group for group in duplicates if len({sample.class_name for sample in group}) > 1),
        notes=source.notes,
    )


def _look_at(path: Encoded) -> _Look | str:
    """Return what is known of an image file, or the reason why it is unreadable."""
    from flatout.data.decode import BadImage, decode_image, read_file, read_header

    try:
        data = read_file(path)
        header = read_header(data)
        decode_image(data, size=_DECODED_SIZE, channels=header.channels, resize="squash", bits=header.bits)
    except BadImage as error:
        return str(error)
    return _Look(_digest(data), header.width, header.height, header.mode)


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()


def _samples(source: Source) -> Iterator[Sample]:
    folder = source.path if source.path is None or source.path.is_dir() else source.path.parent
    for split, (start, stop) in source.splits.items():
        for i in range(start, stop):
            name = f"{split}[{i - start}]"
            if source.files is not None:
                name = printable(str(source.files[i]).removeprefix(f"{folder}{os.sep}"))
            yield Sample(name=name, split=split, class_name=_in_words(source, i))


def _in_words(source: Source, index: int) -> str:
    """Return the label of an image."""
    label = source.labels[index]
    if source.task == "regression":
        return f"{label:g}"
    if source.task == "multi-label":
        return "|".join(source.classes[i] for i in label.nonzero()[0]) or "none"
    return source.classes[label]


def _numbers(source: Source) -> dict[str, tuple[float, float, float]]:
    parts = {split: sorted(source.labels[start:stop].tolist()) for split, (start, stop) in source.splits.items()}
    return {split: (values[0], median_low(values), values[-1]) for split, values in parts.items()}


def _sizes(values: list[int]) -> Sizes | None:
    return Sizes(smallest=min(values), median=median_low(values), largest=max(values)) if values else None
