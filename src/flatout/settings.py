"""Settings as people write them, in TOML or after `--set`: taken apart, checked and made into the type asked for."""

import difflib
import math
import tomllib
import types
import typing
from collections.abc import Iterable
from typing import Any, Literal

from flatout.errors import InputError


def parse_setting(text: str) -> tuple[str, Any]:
    """Split one `--set KEY=VALUE`; the value is read as TOML, as a comma-separated list, or else as plain text."""
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
            return value
        raise InputError(f"{key} = {value!r}: {nearest(str(value), map(str, args))}")
    if origin in (types.UnionType, typing.Union):
        return None if value is None else typed(value, args[0], key)
    if origin is tuple:
        values = value if isinstance(value, list | tuple) else [value]
        return tuple(typed(v, args[0], key) for v in values)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) is not hint or (hint is float and not math.isfinite(value)):
        names = {int: "a whole number", float: "a finite number", bool: "true or false", str: "text in quotes"}
        raise InputError(f"{key} = {value!r}: must be {names[hint]}")
    return value


def nearest(word: str, known: Iterable[str]) -> str:
    """Return a hint that names the known word closest to `word`, or the known words."""
    known = list(known)
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else "known: " + ", ".join(known)
