"""A copy of a run without what belongs to one computer: paths, and the secrets of URLs."""

import re
import shutil
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from flatout.files import write_atomically
from flatout.report.run_files import (
    FOLD,
    KNOWN,
    METRICS,
    PICTURES,
    PREDICTIONS,
    RECIPE,
    REPORT,
    SUMMARY,
    WEIGHTS,
    read_run,
    write_json,
)
from flatout.run.folder import Run

# Class names that people read, in the form that the report looks for in a run folder.
NAMES = "class_names.csv"
# What a path cannot have inside where it is a part of a sentence.
_NAME = r"[^\s/'\"`,;:()<>|\\]+"
# From the root or a home folder on; not the path of a URL, not a fraction, not two words with a slash between.
_LOCAL = re.compile(rf"(?:file:/+|(?<![\w:/.~])(?:~\w*)?/)(?:{_NAME}/)*({_NAME})/?")
_LOGIN, _QUERY = re.compile(r"(\w+://)[^/\s@'\"]+@"), re.compile(r"(\w+://[^\s?#'\"]+)[?#][^\s'\"]*")
# Keys of summary.json whose values are words of the data.
_OF_THE_DATA = ("class", "classes", "actual", "predicted")


def copy_run(run: Run, folder: Path, *, pictures: bool) -> list[str]:
    """Write the files of a run that are worth publishing into a new folder, and return their names there.

    Checkpoints, logs and answers stay behind. Local paths keep their last part, URLs lose login and query. The report
    is drawn again from such files.

    Args:
        run: a finished run or cross-validation.
        folder: does not exist yet; its name is that of the report.
        pictures: whether report and pictures, which show test images, are wanted.

    Raises:
        InputError: a file of the run is damaged, or cannot be written.
    """
    data = [run.recipe.data.path] if run.recipe.data.path else []
    places = (run.path.resolve(), *(Path(path).absolute() for path in data if "://" not in path))
    clean = cleaner(run.classes, {Path.home(), Path.cwd(), *(place.parent for place in places)})
    _copy_files(run, folder, clean, pictures=pictures)
    for number, member in enumerate(run.members if len(run.members) > 1 else (), start=1):
        _copy_files(member, folder / FOLD.format(number), clean, pictures=pictures)
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def is_of_a_run(name: str) -> bool:
    """Return whether `copy_run` writes files of this name."""
    own = (RECIPE, SUMMARY, WEIGHTS, KNOWN, NAMES, REPORT, *PICTURES)
    return re.sub(rf"^{FOLD.format('[0-9]+')}/", "", name) in own


def cleaner(words: Iterable[str], folders: Iterable[Path] = ()) -> Callable[[Any], Any]:
    """Return a function that cuts local paths to their last part, in a text or in all texts of lists and dicts.

    Args:
        words: of the data, such as class names; they are kept, though they may look like paths.
        folders: known ones, whose names may have spaces, unlike those of others.
    """
    known = sorted((f"{folder}/" for folder in folders if folder.name), key=len, reverse=True)
    kept = {match[0] for word in words for match in _LOCAL.finditer(word)}

    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            return {clean(key): inner if key in _OF_THE_DATA else clean(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [clean(inner) for inner in value]
        if not isinstance(value, str):
            return value
        for folder in known:
            value = value.replace(folder, "")
        local = _LOCAL.sub(lambda match: match[0] if match[0] in kept else match[1], value)
        return _QUERY.sub(r"\1", _LOGIN.sub(r"\1", local))

    return clean


def _copy_files(run: Run, folder: Path, clean: Callable[[Any], Any], *, pictures: bool) -> None:
    from flatout.models.weights import read_weights, save_tensors
    from flatout.report.page import draw_all, readable_names

    folder.mkdir(parents=True)
    text = clean((run.path / RECIPE).read_text(encoding="utf-8"))
    tomllib.loads(text)  # cutting paths leaves a recipe a recipe
    write_atomically(folder / RECIPE, text.encode())
    # The decoded images stay in the cache of the computer that trained.
    write_json(folder / SUMMARY, clean({**run.summary, "pack": None}))
    for name in (WEIGHTS, KNOWN):
        if not (path := run.path / name).is_file():
            continue
        tensors, metadata = read_weights(path)  # which finds damage
        cleaned = {key: value if key == "classes" else clean(value) for key, value in metadata.items()}
        if cleaned == metadata:
            shutil.copyfile(path, folder / name)
        else:
            save_tensors(folder / name, tensors, cleaned)
    names = readable_names(read_run(run.path, predictions=False))
    if tuple(names) != run.classes:
        lines = (f"{name}, {readable}\n" for name, readable in zip(run.classes, names, strict=True))
        write_atomically(folder / NAMES, "".join(lines).encode())
    if pictures:
        sources = [name for name in (METRICS, PREDICTIONS) if (run.path / name).is_file()]
        for name in sources:
            shutil.copyfile(run.path / name, folder / name)
        draw_all(folder)
        for name in sources:
            (folder / name).unlink()
