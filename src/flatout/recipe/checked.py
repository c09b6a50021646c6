"""Dataclasses that check their fields."""

import dataclasses
import html
import math
import typing

from flatout.errors import InputError


class Checked:
    """Checks fields annotated with an interval, such as `[0, 1)`; `section` is the first part of their dotted keys."""

    section = ""

    def __post_init__(self) -> None:
        for name, hint in typing.get_type_hints(type(self), include_extras=True).items():
            for interval in getattr(hint, "__metadata__", ()):
                self._check_range(name, interval)

    def _repr_html_(self) -> str:
        """Return the keys with their values, for notebooks; those that differ from their defaults are bold."""
        rows = ""
        for one in dataclasses.fields(self):  # pyright: ignore[reportArgumentType]
            value = getattr(self, one.name)
            text = value._repr_html_() if isinstance(value, Checked) else html.escape(repr(value))
            plain = one.default if one.default_factory is dataclasses.MISSING else one.default_factory()
            name = one.name if value == plain else f"<b>{one.name}</b>"
            rows += f'<tr><th style="text-align:left">{name}</th><td style="text-align:left">{text}</td></tr>'
        return f"<table>{rows}</table>"

    def _check_range(self, name: str, interval: str) -> None:
        low, high = map(float, interval[1:-1].split(","))
        need = f"must be at least {low:g}" if interval[0] == "[" else f"must be greater than {low:g}"
        if high < math.inf:
            need += f" and at most {high:g}" if interval[-1] == "]" else f" and less than {high:g}"
        value = getattr(self, name)
        if value is None:
            return
        # Of a pair, height and width, neither may be 0.
        for number in value if isinstance(value, tuple) else (value,):
            is_end = (number == low and interval[0] == "[") or (number == high and interval[-1] == "]")
            is_inside = (is_end or low < number < high) and not (isinstance(value, tuple) and number < 1)
            self._require((is_inside, name, need))

    def _require(self, *rules: tuple[bool, str, str]) -> None:
        """Check rules of a condition, the field that it is about, and the message where it does not hold."""
        for condition, name, need in rules:
            if not condition:
                raise InputError(f"{self.section}{name} = {getattr(self, name)!r}: {need}")
