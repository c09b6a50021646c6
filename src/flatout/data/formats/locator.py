"""Where the image files are that the rows of a list name."""

import os
import unicodedata
from functools import cache
from pathlib import Path

from flatout.data.formats.folders import entries_of, is_image_name, visible, without_arrays
from flatout.data.source import ReadOptions
from flatout.data.splits import split_of
from flatout.errors import InputError

_IMAGE_FOLDERS = ("images", "imgs", "img")


def _alike(name: str) -> str:
    """Return a name without the differences that Windows and macOS ignore: case, and how accents are composed."""
    return unicodedata.normalize("NFC", name).casefold()


class Locator:
    """Finds the image files that rows name, with or without suffix, and in upper or lower case if only one fits.

    Paths are relative to `data.images`, the folder of the CSV file, or the folders in it that are named after the split
    (Kaggle's train.csv beside train_images/) or `images`. Folders are listed once each and links resolved only where
    there are any: 100,000 rows do not cost 100,000 system calls.
    """

    def __init__(self, folder: Path, options: ReadOptions) -> None:
        self._folder, self._images = folder, None
        if options.images:
            self._images = Path(os.path.expanduser(options.images))  # noqa: PTH111 - Path drops a leading "./"
            if not self._images.is_dir():
                raise InputError(f"data.images = {options.images!r}: there is no such folder")
        self._bases, self._folders = cache(self._bases), cache(self._folders)
        self._files, self._suffixes = cache(self._files), cache(self._suffixes)
        self._is_inside, self._alike = cache(self._is_inside), cache(self._alike)
        self.outside = False

    def find(self, name: str, split: str) -> Path | None:
        """Return the file that a cell names; None with `outside` set where it exists but leads out of the folders."""
        parent, last = os.path.split(name)
        self.outside = False
        for folder in self._folders(parent, split):
            files = self._files(folder)
            named = [last] if last in files else [last + s for s in self._suffixes(folder) if last + s in files]
            named = named or self._alike(folder).get(_alike(last), [])
            if len(named) != 1:
                continue
            found = named[0]
            if self._is_inside(folder, split) and not (files[found] and not self._is_inside(folder / found, split)):
                return folder / found
            self.outside = True
        return None

    def _bases(self, split: str) -> list[Path]:
        if self._images:
            return [self._images, self._folder]
        named = [e for e in visible(self._folder) if split_of(e.name) == split or e.name.lower() in _IMAGE_FOLDERS]
        return [self._folder, *(entry.path for entry in named if entry.is_dir())]

    def _folders(self, parent: str, split: str) -> list[Path]:
        return [base / parent for base in self._bases(split)]

    def _is_inside(self, path: Path, split: str) -> bool:
        return any(path.resolve().is_relative_to(base.resolve()) for base in self._bases(split))

    def _files(self, folder: Path) -> dict[str, bool]:
        """Return the files in a folder, and whether each is a link."""
        try:
            return {entry.name: entry.is_symlink() for entry in entries_of(folder) if entry.is_file()}
        except (InputError, ValueError):
            return {}

    def _alike(self, folder: Path) -> dict[str, list[str]]:
        """Return the files in a folder whose names other systems take for the same, by what these have in common."""
        alike: dict[str, list[str]] = {}
        for name in self._files(folder):
            alike.setdefault(_alike(name), []).append(name)
        return alike

    def _suffixes(self, folder: Path) -> list[str]:
        """Return the suffixes of the images in a folder."""
        return without_arrays(list({name[name.rindex(".") :] for name in self._files(folder) if is_image_name(name)}))
