"""`flatout check`: counts, sizes, and unreadable, duplicate and leaked images of a data set.

Nearly identical images, such as one photo saved twice, are found without comparing every image with every other.

Shape letters: N images, H height, W width, C channels, P pairs.
"""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np

from flatout.analysis.images import (
    EXTREME,
    Headers,
    figures,
    format_sizes,
    headers_of_arrays,
    label_of,
    name_of,
    scan,
)
from flatout.data.cache import Progress
from flatout.data.decode import ImageBytes, ImageHeader, decode_image, read_file, read_header
from flatout.data.pixels import resize_images
from flatout.data.source import ImageDataset, describe
from flatout.data.splits import SPLITS
from flatout.utils.console import aligned

# Classes with fewer training images are listed.
FEW_IMAGES = 10
_MAX_LISTED, _MAX_SHAPES = 20, 5

# Hashes of a pair differ in at most 3 of 64 bits, so that at least 3 of 6 bands are equal. The bits of a band are
# spread over the image: the borders of many images are alike.
MAX_BITS, BANDS, EQUAL_BANDS = 3, 6, 3
_MASKS = np.array([sum(1 << bit for bit in range(band, 64, BANDS)) for band in range(BANDS)], np.uint64)
# Height and width to which images are reduced to compare them, and images of arrays reduced at once.
COMPARED_SIZE, _ARRAYS_AT_ONCE = 72, 500
_REDUCED: dict[str, Any] = {"size": COMPARED_SIZE, "resize": "squash"}
# The standard deviation of grey values below which an image is blank.
MIN_CONTRAST = 4.0
# Neighbouring blocks that differ by less than this, of 255, count as equal: JPEG noise in a flat area.
_MARGIN = 2.0
# Hashes of different images are often equal if a class has one outline. Of copies at half the size and JPEG quality 40,
# 99 of 100 reach this correlation; of MNIST's test and training images not one pair does.
_MIN_CORRELATION = 0.998
_PAIRS_AT_ONCE, _COMPARED_AT_ONCE = 2**20, 2**14


class PerceptualHashes(NamedTuple):
    """Perceptual hashes of N images: difference hashes, uint64 [N], and grey thumbnails, uint8 [N, 324]."""

    hashes: np.ndarray
    thumbnails: np.ndarray

    def are_blank(self) -> np.ndarray:
        """Return which images have one brightness, bool [N]."""
        return self.thumbnails.std(axis=1, dtype=np.float32) < MIN_CONTRAST


def check(source: ImageDataset, report: Progress) -> dict[str, Any]:
    """Return the contents and the flaws of a data set; every image file is decoded, nothing is changed.

    An image is `{name, split, class_name}`: its file, or split[index] for arrays, and its label in words.

    Returns:
        Those of `figures`, and:
        unreadable: `{name, reason}` of the files that cannot be used as images.
        duplicates: groups of identical images, by bytes for files and by pixels for arrays.
        across_splits, conflicts: those groups that have images in more than one split, or of more than one class.
        near_duplicates: pairs of images in different splits that look the same but are not identical.
        divided_groups: group -> split -> number of images, for those of `data.group_column` in more than one split.
        blank: names of images of one brightness.
        extreme: images of an extreme shape or size, as "name (WIDTHxHEIGHT)".
        small_classes: class -> number of training images, if small.
    """
    headers, digests, hashes = _inspect(source, report)

    def sample(index: int) -> dict[str, str]:
        split = source.split_of(index)
        return {"name": name_of(source, index), "split": split, "class_name": label_of(source, index)}

    def differ(group: list[dict[str, str]], key: str) -> bool:
        return len({image[key] for image in group}) > 1

    groups: dict[bytes, list[int]] = defaultdict(list)
    for index, digest in digests.items():
        groups[digest].append(index)
    duplicates = [[sample(i) for i in group] for group in groups.values() if len(group) > 1]
    extreme = sorted(headers.extreme().tolist())
    return {
        **figures(source, headers),
        "unreadable": [{"name": name_of(source, i), "reason": reason} for i, reason in headers.unreadable.items()],
        "duplicates": duplicates,
        "across_splits": [group for group in duplicates if differ(group, "split")],
        "conflicts": [group for group in duplicates if differ(group, "class_name")],
        "near_duplicates": [[sample(i), sample(j)] for i, j in _near_duplicates(source, digests, hashes)],
        "divided_groups": _divided_groups(source),
        "blank": [name_of(source, i) for i, blank in zip(digests, hashes.are_blank(), strict=True) if blank],
        "extreme": [f"{name_of(source, i)} ({headers.widths[i]}x{headers.heights[i]})" for i in extreme],
        "small_classes": {name: n for name, n in source.class_counts("train").items() if n < FEW_IMAGES},
    }


def _inspect(source: ImageDataset, report: Progress) -> tuple[Headers, dict[int, bytes], PerceptualHashes]:
    """Return the headers, and digests and perceptual hashes of the readable images, in the order of the digests."""
    if source.files is not None:
        headers, found = scan(source.files, _hash_file, report)
        digests, hashes = {i: digest for i, (digest, _) in found.items()}, [one for _, one in found.values()]
    else:
        assert source.images is not None
        headers = headers_of_arrays(source.images)
        digests = {i: _digest(image.tobytes()) for i, image in enumerate(source.images)}
        how = {"channels": source.images.shape[-1], "bits": 8 * source.images.itemsize, **_REDUCED}
        starts = range(0, len(source.images), _ARRAYS_AT_ONCE)
        parts = (source.images[start : start + _ARRAYS_AT_ONCE] for start in starts)
        hashes = [hash_images(resize_images(part, **how)) for part in parts]
    hashes = hashes or [PerceptualHashes(np.empty(0, np.uint64), np.empty((0, 324), np.uint8))]
    return headers, digests, PerceptualHashes(*map(np.concatenate, zip(*hashes, strict=True)))


def _hash_file(file: ImageBytes) -> tuple[ImageHeader, tuple[bytes, PerceptualHashes]]:
    data = read_file(file)
    header = read_header(data)
    # Decoding to a small image lets JPEG skip work, but still reads the file to its end.
    image_HWC = decode_image(data, channels=header.channels, bits=header.bits, **_REDUCED)
    return header, (_digest(data), hash_images(image_HWC[None]))


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()


def _divided_groups(source: ImageDataset) -> dict[str, dict[str, int]]:
    if source.groups is None:
        return {}
    counts = {split: Counter(source.groups[start:stop].tolist()) for split, (start, stop) in source.splits.items()}
    found = {
        name: {split: of[name] for split, of in counts.items() if name in of}
        for name in np.unique(source.groups).tolist()
    }
    return {name: of for name, of in found.items() if len(of) > 1}


def hash_images(images_NHWC: np.ndarray) -> PerceptualHashes:
    """Hash reduced images, uint8 or uint16 [N, 72, 72, C]: a bit is 1 if a block is brighter than its left one."""
    count = len(images_NHWC)
    grey = images_NHWC.mean(axis=3, dtype=np.float32)
    if images_NHWC.dtype == np.uint16:
        # Many use only a part of their range.
        grey *= np.float32(255) / np.maximum(grey.max(axis=(1, 2), keepdims=True), 1)
    blocks = grey.reshape(count, 8, COMPARED_SIZE // 8, 9, COMPARED_SIZE // 9).mean(axis=(2, 4))
    is_brighter = blocks[:, :, 1:] > blocks[:, :, :-1] + _MARGIN
    hashes = np.packbits(is_brighter.reshape(count, 64), axis=1).view(np.uint64)[:, 0]
    thumbnails = grey.reshape(count, 18, COMPARED_SIZE // 18, 18, COMPARED_SIZE // 18).mean(axis=(2, 4))
    return PerceptualHashes(hashes, thumbnails.reshape(count, -1).round().astype(np.uint8))


def _near_duplicates(
    source: ImageDataset, digests: dict[int, bytes], hashes: PerceptualHashes
) -> Iterator[tuple[int, int]]:
    """Yield pairs of indices across splits; identical images in one split are represented by the first."""
    first: dict[tuple[bytes, str], tuple[int, int]] = {}
    for row, (index, digest) in enumerate(digests.items()):
        first.setdefault((digest, source.split_of(index)), (index, row))
    keys, places = list(first), list(first.values())
    rows = np.array([row for _, row in places], np.int64)
    splits = np.array([SPLITS.index(split) for _, split in keys], np.int64)
    chosen = PerceptualHashes(hashes.hashes[rows], hashes.thumbnails[rows])
    for i, j in find_pairs(chosen, splits).tolist():
        if keys[i][0] != keys[j][0]:
            yield places[i][0], places[j][0]


def find_pairs(images: PerceptualHashes, splits: np.ndarray) -> np.ndarray:
    """Return the pairs of nearly identical images in different splits, int64 [P, 2], sorted; blank ones are in none.

    Args:
        splits: the split index of each image, int64 [N].
    """
    shown = np.flatnonzero(~images.are_blank())
    found = [np.empty((0, 2), np.int64)]
    for split in np.unique(splits)[1:].tolist():
        earlier, own = shown[splits[shown] < split], shown[splits[shown] == split]
        found += _candidates(images.hashes, earlier, own)
    pairs = np.unique(np.concatenate(found), axis=0)
    parts = [pairs[start : start + _COMPARED_AT_ONCE] for start in range(0, len(pairs), _COMPARED_AT_ONCE)]
    return np.concatenate([found[0], *(part[_are_alike(images.thumbnails, part)] for part in parts)])


def _candidates(hashes: np.ndarray, earlier: np.ndarray, own: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the pairs of an image in `earlier` and one in `own` with similar hashes, some twice, int64 [P, 2]."""
    for bands in combinations(range(BANDS), EQUAL_BANDS):
        mask = np.bitwise_or.reduce(_MASKS[list(bands)])
        keys = hashes[earlier] & mask
        order = np.argsort(keys, kind="stable")
        first, last = (np.searchsorted(keys[order], hashes[own] & mask, side) for side in ("left", "right"))
        counts = last - first
        batch = np.cumsum(counts) // _PAIRS_AT_ONCE
        for number in np.unique(batch[counts > 0]).tolist():
            here = np.flatnonzero((batch == number) & (counts > 0))
            times = counts[here]
            within = np.arange(times.sum()) - np.repeat(np.cumsum(times) - times, times)
            pairs = np.stack([earlier[order[np.repeat(first[here], times) + within]], np.repeat(own[here], times)], 1)
            different = hashes[pairs[:, 0]] ^ hashes[pairs[:, 1]]
            bits = np.unpackbits(different.view(np.uint8).reshape(-1, 8), axis=1).sum(axis=1)
            yield pairs[bits <= MAX_BITS]


def _are_alike(thumbnails: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    one, other = (thumbnails[pairs[:, side]].astype(np.float32) for side in (0, 1))
    one, other = (values - values.mean(axis=1, keepdims=True) for values in (one, other))
    norms = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
    return (one * other).sum(axis=1) >= _MIN_CORRELATION * norms


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
        ("nearly identical images in different splits", "near_duplicates"),
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
