"""Look for problems in a data set before training: counts, sizes, unreadable and duplicate images."""

import hashlib
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median_low
from typing import Any

from flatout.data.source import Source, describe
from flatout.files import printable
from flatout.host import usable_cores

_LISTED = 20
# Decoding to a small image lets JPEG skip work, but still reads the file to its end.
_DECODED_SIZE = 64


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One image of the data set: its file, or split[index] for arrays."""

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
        counts: split -> class -> number of images.
        widths, heights: of the readable images; None without any.
        modes: Pillow's mode (L, RGB, CMYK and so on) -> number of images.
        unreadable: the files that are no usable images.
        duplicates: groups of identical images, by bytes for files and by pixels for arrays.
        across_splits, conflicts: those groups that have images in more than one split, or of more than one class.
    """

    kind: str
    path: str | None
    counts: dict[str, dict[str, int]]
    widths: Sizes | None
    heights: Sizes | None
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
        sizes = {split: sum(counts.values()) for split, counts in self.counts.items()}
        classes = tuple(next(iter(self.counts.values())))
        lines = [describe(self.kind, classes, {split: (0, size) for split, size in sizes.items()})]
        lines += [f"note: {note}" for note in self.notes]
        lines += self._count_lines(classes)
        for name, extent in (("width: ", self.widths), ("height:", self.heights)):
            if extent:
                lines.append(f"{name} {extent.smallest} to {extent.largest} pixels, median {extent.median}")
        lines.append("modes: " + (", ".join(f"{mode} {count:,}" for mode, count in self.modes.items()) or "none"))
        lines += _section("unreadable files", [f"{bad.name}: {bad.reason}" for bad in self.unreadable])
        for title, groups in (
            ("groups of identical images", self.duplicates),
            ("identical images in more than one split", self.across_splits),
            ("identical images with different classes", self.conflicts),
        ):
            shown = [" = ".join(f"{s.name} ({s.split}, {s.class_name})" for s in group) for group in groups]
            lines += _section(title, shown)
        return lines

    def _count_lines(self, classes: Sequence[str]) -> list[str]:
        shown = classes[:_LISTED]
        width = max(len(name) for name in ("class", *shown))
        lines = [f"{'class':{width}}" + "".join(f"{split:>10}" for split in self.counts)]
        lines += [f"{name:{width}}" + "".join(f"{n[name]:>10,}" for n in self.counts.values()) for name in shown]
        if len(classes) > len(shown):
            lines.append(f"and {len(classes) - len(shown):,} more classes")
        for split, counts in self.counts.items():
            least, most = min(counts.values()), max(counts.values())
            lines.append(f"images per class in {split}: {least:,} to {most:,}")
        return lines


def _section(title: str, items: list[str]) -> list[str]:
    lines = [f"{title}: {len(items):,}" if items else f"{title}: none"]
    lines += [f"  {item}" for item in items[:_LISTED]]
    if len(items) > _LISTED:
        lines.append(f"  and {len(items) - _LISTED:,} more")
    return lines


@dataclass(frozen=True, kw_only=True)
class _Look:
    digest: bytes | None
    width: int = 0
    height: int = 0
    mode: str = ""
    reason: str = ""


def check(source: Source, *, decode: bool = True) -> CheckResult:
    """Return what is in a data set and what is wrong with it; nothing is changed.

    Args:
        source: the data.
        decode: whether to decode every image file, which finds damaged ones; otherwise only headers are read.
    """
    if source.files is not None:
        with ThreadPoolExecutor(usable_cores()) as pool:
            looks = list(pool.map(lambda path: _look_at_file(path, decode), source.files))
    else:
        looks = list(_look_at_arrays(source))
    readable = [look for look in looks if not look.reason]
    samples = _samples(source)
    groups: dict[bytes, list[Sample]] = defaultdict(list)
    for sample, look in zip(samples, looks, strict=True):
        if look.digest is not None:
            groups[look.digest].append(sample)
    duplicates = tuple(tuple(group) for group in groups.values() if len(group) > 1)
    bad = ((sample.name, look.reason) for sample, look in zip(samples, looks, strict=True) if look.reason)
    return CheckResult(
        kind=source.kind,
        path=str(source.path) if source.path is not None else None,
        counts={split: source.class_counts(split) for split in source.splits},
        widths=_sizes([look.width for look in readable]),
        heights=_sizes([look.height for look in readable]),
        modes=dict(Counter(look.mode for look in readable).most_common()),
        unreadable=tuple(Unreadable(name=name, reason=reason) for name, reason in bad),
        duplicates=duplicates,
        across_splits=tuple(group for group in duplicates if len({sample.split for sample in group}) > 1),
        conflicts=tuple(group for group in duplicates if len({sample.class_name for sample in group}) > 1),
        notes=source.notes,
    )


def _look_at_file(path: Path, decode: bool) -> _Look:
    from flatout.data.decode import BadImage, decode_image, read_header

    try:
        header = read_header(path)
        if decode:
            decode_image(path, size=_DECODED_SIZE, channels=3, resize="stretch")
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).digest()
    except OSError as error:
        return _Look(digest=None, reason=f"cannot be read: {error.strerror}")
    except BadImage as error:
        return _Look(digest=None, reason=error.reason)
    return _Look(digest=digest, width=header.width, height=header.height, mode=header.mode)


def _look_at_arrays(source: Source) -> Iterable[_Look]:
    assert source.images is not None
    height, width, channels = source.images.shape[1:]
    for image in source.images:
        digest = hashlib.blake2b(image.tobytes(), digest_size=16).digest()
        yield _Look(digest=digest, width=width, height=height, mode="L" if channels == 1 else "RGB")


def _samples(source: Source) -> list[Sample]:
    folder = source.path if source.path is None or source.path.is_dir() else source.path.parent
    samples: list[Sample] = []
    for split, (start, stop) in source.splits.items():
        for i in range(start, stop):
            name = f"{split}[{i - start}]"
            if source.files is not None:
                name = printable(str(source.files[i]).removeprefix(f"{folder}{os.sep}"))
            samples.append(Sample(name=name, split=split, class_name=source.classes[source.labels[i]]))
    return samples


def _sizes(values: list[int]) -> Sizes | None:
    return Sizes(smallest=min(values), median=median_low(values), largest=max(values)) if values else None
