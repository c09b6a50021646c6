"""Settings from TOML, `--set` or Python: parsed, checked and converted to their type."""

import difflib
import math
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from flatout.utils.errors import InputError

# Height and width in pixels; one number if they are equal.
Size = int | tuple[int, int]

# Other libraries' names of our recipe keys, flags and devices.
_ALIASES = {
    "learning_rate": "lr",
    "bs": "batch_size",
    "wd": "weight_decay",
    "arch": "model",
    "random_state": "seed",
    "validation_split": "valid_fraction",
    "gpus": "devices",
    "workers": "devices",
    "gpu": "cuda",
}


def parse_setting(text: str) -> tuple[str, object]:
    """Split one `--set KEY=VALUE`; the value is read as TOML, else as a list of numbers, else as plain text."""
    key, equals, raw = text.partition("=")
    if not equals or not key.strip():
        raise InputError(f"--set {text}: must be KEY=VALUE, such as --set optimizer.lr=0.1")
    raw = raw.strip()
    for candidate in (raw, f"[{raw}]" if "," in raw else raw):
        try:
            return key.strip(), tomllib.loads(f"value = {candidate}")["value"]
        except tomllib.TOMLDecodeError:
            continue
    return key.strip(), raw


def typed(value: Any, hint: Any, key: str) -> Any:
    """Return `value` as the annotated type, or raise an InputError that names the key."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        if value in args and not isinstance(value, bool):
            return args[args.index(value)]  # 8 for 8.0
        raise InputError(f"{key} = {value!r}: {nearest(str(value), map(str, args))}")
    if hint == Size:
        both = value if isinstance(value, list | tuple) else (value, value)
        if len(both) != 2 or any(type(side) is not int for side in both):
            raise InputError(f"{key} = {value!r}: must be a whole number of pixels, or [height, width]")
        return collapse_size((both[0], both[1]))
    if origin in (types.UnionType, typing.Union):
        if types.NoneType not in args:
            # A choice of words, numbers, or numbers by name.
            place = 0 if isinstance(value, str) else 2 if isinstance(value, Mapping) and len(args) > 2 else 1
            return typed(value, args[place], key)
        return None if value is None else typed(value, args[0], key)
    if origin is tuple:
        if isinstance(value, str):
            value = [part.strip() for part in value.split(",")] if value else []
        values = value if isinstance(value, list | tuple) else [value]
        return tuple(typed(v, args[0], key) for v in values)
    if origin is dict:
        return {str(name): typed(number, args[1], f"{key}.{name}") for name, number in value.items()}
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) is not hint or (hint is float and not math.isfinite(value)):
        names = {int: "a whole number", float: "a finite number", bool: "true or false", str: "text in quotes"}
        raise InputError(f"{key} = {value!r}: must be {names[hint]}")
    return value


def sides(size: Size) -> tuple[int, int]:
    """Return the height and width of a size."""
    return size if isinstance(size, tuple) else (size, size)


def collapse_size(pair: tuple[int, int]) -> Size:
    """Return the size of a height and width."""
    return pair[0] if pair[0] == pair[1] else pair


def shown(size: Size) -> str:
    """Return a size in the form of a recipe."""
    return str(list(size) if isinstance(size, tuple) else size)


def nearest(word: str, known: Iterable[str]) -> str:
    """Return a hint: the known word that `word` abbreviates, is another name of, or resembles; else all known words."""
    by_name = {name.lstrip("-").replace("-", "_").lower(): name for name in known}
    plain = word.lstrip("-").replace("-", "_").lower()
    last = plain.rpartition(".")[2]
    meant = (last, _ALIASES.get(last))
    close = [name for name in by_name if name.rpartition(".")[2] in meant]
    close = close or difflib.get_close_matches(plain, by_name, n=1, cutoff=0.6)
    return f"did you mean {by_name[close[0]]!r}?" if close else "known: " + ", ".join(by_name.values())


def nearest_path(path: Path) -> str:
    """Return a hint with the file or folder next to a missing path that resembles its name; else ""."""
    try:
        names = [entry.name for entry in path.absolute().parent.iterdir()]
    except OSError:
        return ""
    close = difflib.get_close_matches(path.name, names, n=1, cutoff=0.7)
    return f"did you mean '{path.parent / close[0]}'?" if close else ""
