"""`flatout check`: counts, sizes, and unreadable, duplicate and leaked images of a data set."""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np

from flatout.analysis.images import EXTREME, Headers, figures, format_sizes, headers_of_arrays, label_of, name_of, scan
from flatout.data.cache import Progress
from flatout.data.decode import ImageBytes, ImageHeader, decode_image, read_file, read_header
from flatout.data.source import ImageDataset, describe
from flatout.utils.console import aligned

# Classes with fewer training images are listed.
FEW_IMAGES = 10
_MAX_LISTED, _MAX_SHAPES = 20, 5
# Height and width to which files are decoded, and the standard deviation, of 255, below which an image is blank.
_DECODED, _MIN_CONTRAST = (72, 72), 4.0


def check(source: ImageDataset, report: Progress) -> dict[str, Any]:
    """Return the contents and the flaws of a data set; every image file is decoded, nothing is changed.

    An image is `{name, split, class_name}`: its file, or split[index] for arrays, and its label in words.

    Returns:
        Those of `figures`, and:
        unreadable: `{name, reason}` of the files that cannot be used as images.
        duplicates: groups of identical images, by bytes for files and by pixels for arrays.
        across_splits, conflicts: those groups that have images in more than one split, or of more than one class.
        divided_groups: group -> split -> number of images, for those of `data.group_column` in more than one split.
        blank: names of images of one brightness.
        extreme: images of an extreme shape or size, as "name (WIDTHxHEIGHT)".
        small_classes: class -> number of training images, if small.
    """
    headers, inspected = _inspect(source, report)

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
        **figures(source, headers),
        "unreadable": [{"name": name_of(source, i), "reason": reason} for i, reason in headers.unreadable.items()],
        "duplicates": duplicates,
        "across_splits": differing("split"),
        "conflicts": differing("class_name"),
        "divided_groups": _divided_groups(source),
        "blank": [name_of(source, i) for i, (_, is_blank) in inspected.items() if is_blank],
        "extreme": [f"{name_of(source, i)} ({headers.widths[i]}x{headers.heights[i]})" for i in extreme],
        "small_classes": {name: n for name, n in source.class_counts("train").items() if n < FEW_IMAGES},
    }


def _inspect(source: ImageDataset, report: Progress) -> tuple[Headers, dict[int, tuple[bytes, bool]]]:
    """Return the headers, and for each readable image a digest and whether it is blank."""
    if source.files is not None:
        return scan(source.files, _inspect_file, report)
    assert source.images is not None
    inspected = {i: (_digest(image.tobytes()), _is_blank(image)) for i, image in enumerate(source.images)}
    return headers_of_arrays(source.images), inspected


def _inspect_file(file: ImageBytes) -> tuple[ImageHeader, tuple[bytes, bool]]:
    data = read_file(file)
    header = read_header(data)
    # Decoding to a small image lets JPEG skip work, but still reads the file to its end.
    image = decode_image(data, size=_DECODED, channels=header.channels, bits=header.bits, resize="squash")
    return header, (_digest(data), _is_blank(image))


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()


def _is_blank(image_HWC: np.ndarray) -> bool:
    # Images of 16 bits often use only a part of their range.
    white = 255 if image_HWC.dtype == np.uint8 else max(1, int(image_HWC.max()))
    return float(image_HWC.mean(axis=2, dtype=np.float32).std()) < _MIN_CONTRAST / 255 * white


def _divided_groups(source: ImageDataset) -> dict[str, dict[str, int]]:
    if source.groups is None:
        return {}
    counts = {split: Counter(source.groups[start:stop].tolist()) for split, (start, stop) in source.splits.items()}
    found = {
        name: {split: of[name] for split, of in counts.items() if name in of}
        for name in np.unique(source.groups).tolist()
    }
    return {name: of for name, of in found.items() if len(of) > 1}


def format_check(result: dict[str, Any]) -> list[str]:
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
        lines.append(f"{title}: {f'{len(items):,}' if items else 'none'}")
        lines += [f"  {item}" for item in items[:_MAX_LISTED]]
        if len(items) > _MAX_LISTED:
            lines.append(f"  and {len(items) - _MAX_LISTED:,} more")
    return lines


def _format_classes(counts: dict[str, dict[str, int]], classes: tuple[str, ...]) -> Iterator[str]:
    shown = classes[:_MAX_LISTED]
    yield from aligned([["class", *counts], *([name, *(f"{of[name]:,}" for of in counts.values())] for name in shown)])
    if len(classes) > len(shown):
        yield f"and {len(classes) - len(shown):,} more classes"
    for split, of in counts.items():
        yield f"images per class in {split}: {min(of.values()):,} to {max(of.values()):,}"


def _sections(result: dict[str, Any], labels: str) -> Iterator[tuple[str, list[str]]]:
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
