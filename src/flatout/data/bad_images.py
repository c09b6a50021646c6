"""What happens to images that cannot be used: the run stops and names all, or they are left out up to a share."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from flatout.data.source import Source
from flatout.errors import InputError

_EXAMPLES = 20


def judge(reasons: Mapping[str, str], total: int, *, on_bad_image: str, max_bad_share: float) -> None:
    """Accept bad images (file -> reason) among `total`: none for "stop", up to `max_bad_share` for "skip".

    Raises:
        InputError: they are not acceptable; "stop" names every one.
    """
    lines = [f"{file}: {reason}" for file, reason in reasons.items()]
    if lines and on_bad_image == "stop":
        raise InputError(
            f"{len(lines):,} of {total:,} images cannot be used; repair or remove them, or leave them out with "
            "--on-bad-image skip:\n" + "\n".join(lines)
        )
    share = len(lines) / total
    if share > max_bad_share:
        more = [f"and {len(lines) - _EXAMPLES:,} more"] if len(lines) > _EXAMPLES else []
        raise InputError(
            f"{len(lines):,} of {total:,} images ({share:.2%}) cannot be used, more than data.max_bad_share = "
            f"{max_bad_share} ({max_bad_share:.2%}) allows; repair them or raise it:\n"
            + "\n".join([*lines[:_EXAMPLES], *more])
        )


def without(source: Source, bad: Mapping[int, str]) -> Source:
    """Return a source of image files without its bad images (index -> reason); a split except "train" may vanish.

    Raises:
        InputError: a class has no training images left.
    """
    assert source.files is not None
    is_good = np.ones(len(source), bool)
    is_good[list(bad)] = False
    start, stop = source.splits["train"]
    in_train = source.labels[start:stop]
    had = np.bincount(in_train, minlength=len(source.classes))
    has = np.bincount(in_train[is_good[start:stop]], minlength=len(source.classes))
    for index in np.flatnonzero((had > 0) & (has == 0)):
        example = next(i for i in sorted(bad) if start <= i < stop and source.labels[i] == index)
        raise InputError(
            f"{source.path}: all {had[index]:,} training images of class {source.classes[index]!r} are bad; repair "
            f"them (such as {source.files[example]}: {bad[example]})"
        )
    good_before = np.concatenate([[0], np.cumsum(is_good)])
    splits = {name: (int(good_before[a]), int(good_before[b])) for name, (a, b) in source.splits.items()}
    emptied = [name for name, (a, b) in splits.items() if a == b]
    return replace(
        source,
        files=[file for file, good in zip(source.files, is_good, strict=True) if good],
        labels=source.labels[is_good],
        splits={name: span for name, span in splits.items() if name not in emptied},
        notes=(*source.notes, *(f"All {name} images are bad, so there is no {name} split." for name in emptied)),
    )
