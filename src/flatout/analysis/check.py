"""`flatout check`: counts, sizes, and unreadable, duplicate and leaked images of a data set.

Shape letters: N images, H height, W width, C channels.
"""

import hashlib
import math
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import median_low
from typing import TypeVar

import numpy as np

from flatout.data.cache import Progress
from flatout.data.decode import STRICT_PILLOW, ImageBytes, ImageHeader, decode_image, read_file, read_header
from flatout.data.pixels import BadImage
from flatout.data.source import ImageDataset, describe
from flatout.utils.console import aligned
from flatout.utils.files import printable
from flatout.utils.host import usable_cores
from flatout.utils.run_files import JsonObject

T = TypeVar("T")

# Images are extreme if one side is this many times the other, or the size this many times the median or less.
EXTREME = 4.0
# Classes with fewer training images are listed.
FEW_IMAGES = 10
_MAX_LISTED, _MAX_SHAPES = 20, 5
# Height and width to which files are decoded, and the standard deviation, of 255, below which an image is blank.
_DECODED, _MIN_CONTRAST = (72, 72), 4.0
# Files per task of a thread.
_FILES_AT_ONCE = 16


# --- headers, names and labels ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class Headers:
    """Sizes and modes of N images."""

    widths: np.ndarray  # in pixels, int32 [N]; 0 for unreadable images
    heights: np.ndarray
    modes: dict[str, int]  # Pillow's mode, or bands and their type -> number of images, the most frequent first
    unreadable: dict[int, str]  # index -> reason

    def extreme(self) -> np.ndarray:
        """Return the indices of images with an extreme aspect ratio or size (root of the area), the worst first."""
        readable = np.flatnonzero(self.widths)
        if not len(readable):
            return readable
        widths, heights = (sides[readable].astype(np.float64) for sides in (self.widths, self.heights))
        sizes = np.sqrt(widths * heights)
        usual = np.quantile(sizes, 0.5, method="lower")
        deviation = np.maximum(np.abs(np.log(widths / heights)), np.abs(np.log(sizes / usual)))
        found = np.flatnonzero(deviation >= math.log(EXTREME) * (1 - 1e-12))
        return readable[found[np.argsort(-deviation[found], kind="stable")]]


def format_sizes(figures: JsonObject) -> list[str]:
    """Return the widths and heights of `figures` as lines of text."""
    named = {"width: ": figures["widths"], "height:": figures["heights"]}
    return [f"{name} {s['smallest']} to {s['largest']} pixels, median {s['median']}" for name, s in named.items() if s]


def _range_of(values: np.ndarray) -> dict[str, int] | None:
    if not len(values):
        return None
    median = np.quantile(values, 0.5, method="lower")
    return {"smallest": int(values.min()), "median": int(median), "largest": int(values.max())}


def _headers_of_arrays(source: ImageDataset) -> Headers:
    assert source.images is not None
    count, height, width, channels = source.images.shape
    modes = {(1, 1): "L", (3, 1): "RGB"}
    mode = modes.get((channels, source.images.itemsize), f"{channels} x {source.images.dtype}")
    widths, heights = np.full(count, width, np.int32), np.full(count, height, np.int32)
    return Headers(widths=widths, heights=heights, modes={mode: count}, unreadable={})


def scan(
    files: Sequence[ImageBytes], inspect: Callable[[ImageBytes], tuple[ImageHeader, T]], report: Progress
) -> tuple[Headers, dict[int, T]]:
    """Inspect files on all cores; return their headers, and index -> the other result of `inspect`.

    A file for which `inspect` raises BadImage or OSError is unreadable.
    """

    def inspect_one(file: ImageBytes) -> tuple[ImageHeader, T] | str:
        try:
            return inspect(file)
        except BadImage as error:
            return str(error)
        except OSError as error:
            return f"cannot be read: {error.strerror}"

    def inspect_part(part: range) -> list[tuple[ImageHeader, T] | str]:
        return [inspect_one(files[i]) for i in part]

    count = len(files)
    widths, heights = np.zeros(count, np.int32), np.zeros(count, np.int32)
    modes, unreadable, found = Counter[str](), dict[int, str](), dict[int, T]()
    parts = [range(start, min(start + _FILES_AT_ONCE, count)) for start in range(0, count, _FILES_AT_ONCE)]
    with STRICT_PILLOW, ThreadPoolExecutor(usable_cores()) as pool:
        for part, results in zip(parts, pool.map(inspect_part, parts), strict=True):
            for i, result in zip(part, results, strict=True):
                if isinstance(result, str):
                    unreadable[i] = result
                else:
                    header, found[i] = result
                    widths[i], heights[i] = header.width, header.height
                    modes[header.mode] += 1
            report.update(part.stop, count)
    return Headers(widths=widths, heights=heights, modes=dict(modes.most_common()), unreadable=unreadable), found


def read_headers(source: ImageDataset, report: Progress) -> Headers:
    """Return the headers of all images; files are not read further."""
    if source.files is None:
        return _headers_of_arrays(source)
    return scan(source.files, lambda file: (read_header(file), None), report)[0]


def name_of(source: ImageDataset, index: int) -> str:
    """Return the name of an image: its file, below the folder of the data, or split[position] in an array."""
    if source.files is None:
        split = source.split_of(index)
        return f"{split}[{index - source.splits[split][0]}]"
    return printable(str(source.files[index]).removeprefix(f"{source.folder}{os.sep}"))


def label_of(source: ImageDataset, index: int) -> str:
    """Return the label of an image in words."""
    label = source.labels[index]
    if source.task == "regression":
        return f"{label:g}"
    if source.task == "multi-label":
        return "|".join(source.classes[i] for i in label.nonzero()[0]) or "none"
    return source.classes[label]


def dataset_figures(source: ImageDataset, headers: Headers) -> JsonObject:
    """Return the figures that `check` and `look` share: numbers of images, labels, sizes and modes."""
    numbers = {}
    if source.task == "regression":
        values = {split: sorted(source.labels[start:stop].tolist()) for split, (start, stop) in source.splits.items()}
        numbers = {split: (part[0], median_low(part), part[-1]) for split, part in values.items()}
    sides = np.stack([headers.heights, headers.widths], axis=1)[headers.widths > 0]
    shapes, counts = np.unique(sides, axis=0, return_counts=True)
    order = np.argsort(-counts, kind="stable")
    return {
        "kind": source.kind,
        "path": None if source.path is None else str(source.path),
        "task": source.task,
        "images": {split: stop - start for split, (start, stop) in source.splits.items()},
        "numbers": numbers,
        "counts": {split: source.class_counts(split) for split in source.splits},
        "widths": _range_of(sides[:, 1]),
        "heights": _range_of(sides[:, 0]),
        "shapes": {f"{shapes[i][0]}x{shapes[i][1]}": int(counts[i]) for i in order},
        "modes": headers.modes,
        "notes": list(source.notes),
    }


def check(source: ImageDataset, report: Progress) -> JsonObject:
    """Return the contents and the flaws of a data set; every image file is decoded, nothing is changed.

    Images are named by their files below the folder of the data, or as split[index] in arrays. Identical images are
    those with equal bytes of files, or pixels of arrays.
    """
    if source.files is None:
        assert source.images is not None
        headers = _headers_of_arrays(source)
        inspected = {i: _judge(image.tobytes(), image) for i, image in enumerate(source.images)}
    else:
        headers, inspected = scan(source.files, _inspect, report)

    def sample(index: int) -> dict[str, str]:
        split = source.split_of(index)
        return {"name": name_of(source, index), "split": split, "class_name": label_of(source, index)}

    def differing(key: str) -> list[list[dict[str, str]]]:
        return [group for group in duplicates if len({image[key] for image in group}) > 1]

    groups: dict[bytes, list[int]] = defaultdict(list)
    for index, (digest, _) in inspected.items():
        groups[digest].append(index)
    duplicates = [[sample(i) for i in group] for group in groups.values() if len(group) > 1]
    extreme = sorted(headers.extreme().tolist())
    return {
        **dataset_figures(source, headers),
        "unreadable": [{"name": name_of(source, i), "reason": reason} for i, reason in headers.unreadable.items()],
        "duplicates": duplicates,
        "across_splits": differing("split"),
        "conflicts": differing("class_name"),
        "divided_groups": _divided_groups(source),
        "blank": [name_of(source, i) for i, (_, is_blank) in inspected.items() if is_blank],
        "extreme": [f"{name_of(source, i)} ({headers.widths[i]}x{headers.heights[i]})" for i in extreme],
        "small_classes": {name: n for name, n in source.class_counts("train").items() if n < FEW_IMAGES},
    }


def _inspect(file: ImageBytes) -> tuple[ImageHeader, tuple[bytes, bool]]:
    data = read_file(file)
    header = read_header(data)
    # Decoding to a small image lets JPEG skip work, but still reads the file to its end.
    image = decode_image(data, size=_DECODED, channels=header.channels, bits=header.bits, resize="squash")
    return header, _judge(data, image)


def _judge(content: bytes, image_HWC: np.ndarray) -> tuple[bytes, bool]:
    """Return a digest, and whether the image is blank."""
    # Images of 16 bits often use only a part of their range.
    white = 255 if image_HWC.dtype == np.uint8 else max(1, int(image_HWC.max()))
    is_blank = float(image_HWC.mean(axis=2, dtype=np.float32).std()) < _MIN_CONTRAST / 255 * white
    return hashlib.blake2b(content, digest_size=16).digest(), is_blank


def _divided_groups(source: ImageDataset) -> dict[str, dict[str, int]]:
    """Return group -> split -> number of images, for groups in more than one split."""
    found: dict[str, dict[str, int]] = defaultdict(dict)
    for split, (start, stop) in source.splits.items():
        for name, number in Counter([] if source.groups is None else source.groups[start:stop].tolist()).items():
            found[name][split] = number
    return {name: found[name] for name in sorted(found) if len(found[name]) > 1}


def format_check(result: JsonObject) -> list[str]:
    """Return a result of `check` as lines of text; long lists are shortened, with a count."""
    classes = tuple(next(iter(result["counts"].values())))
    spans = {split: (0, count) for split, count in result["images"].items()}
    lines = [describe(result["kind"], classes, spans, result["task"]), *(f"note: {note}" for note in result["notes"])]
    lines += _format_classes(result["counts"], classes) if classes else []
    for split, (smallest, median, largest) in result["numbers"].items():
        lines.append(f"labels in {split}: {smallest:g} to {largest:g}, median {median:g}")
    lines += format_sizes(result)
    for key, most in (("shapes", _MAX_SHAPES), ("modes", len(result["modes"]))):
        counts = [f"{name} {count:,}" for name, count in result[key].items()]
        more = f" and {len(counts) - most:,} more" if len(counts) > most else ""
        lines.append(f"{key}: {', '.join(counts[:most]) or 'none'}{more}")
    for title, items in _sections(result, "classes" if classes else "labels"):
        lines += [f"{title}: {f'{len(items):,}' if items else 'none'}", *(f"  {item}" for item in items[:_MAX_LISTED])]
        lines += [f"  and {len(items) - _MAX_LISTED:,} more"] * (len(items) > _MAX_LISTED)
    return lines


def _format_classes(counts: dict[str, dict[str, int]], classes: tuple[str, ...]) -> Iterator[str]:
    shown = classes[:_MAX_LISTED]
    yield from aligned([["class", *counts], *([name, *(f"{of[name]:,}" for of in counts.values())] for name in shown)])
    if len(classes) > len(shown):
        yield f"and {len(classes) - len(shown):,} more classes"
    for split, of in counts.items():
        yield f"images per class in {split}: {min(of.values()):,} to {max(of.values()):,}"


def _sections(result: JsonObject, labels: str) -> Iterator[tuple[str, list[str]]]:
    """Yield titles and items; rare sections are omitted if empty."""
    yield "unreadable files", [f"{bad['name']}: {bad['reason']}" for bad in result["unreadable"]]
    for title, key in (
        ("groups of identical images", "duplicates"),
        ("identical images in more than one split", "across_splits"),
        (f"identical images with different {labels}", "conflicts"),
    ):
        images = [[f"{image['name']} ({image['split']}, {image['class_name']})" for image in g] for g in result[key]]
        yield title, [" = ".join(group) for group in images]
    groups = {name: [f"{s} {n:,}" for s, n in counts.items()] for name, counts in result["divided_groups"].items()}
    divided = [f"{name} ({', '.join(counts)})" for name, counts in groups.items()]
    for title, items in (
        ("groups in more than one split", divided),
        ("blank images", result["blank"]),
        (f"images with a side {EXTREME:g} times the other, or {EXTREME:g} times as large or small as usual",
         result["extreme"]),
        (f"classes with fewer than {FEW_IMAGES} training images",
         [f"{name} ({count:,})" for name, count in result["small_classes"].items()]),
    ):  # fmt: skip
        if items:
            yield title, items
