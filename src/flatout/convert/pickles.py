"""Pickles of arrays, interpreted without Python's unpickler: nothing in a file can name, call or change an object.

`pickletools.genops` splits the bytes into instructions, and those that arrays in dicts need are carried out here. What
a pickle calls is looked up by its exact module and name in a table of functions of this file. Attributes are never
looked up, objects never made, and numbers are taken from bytes only where their count agrees with the shape.
"""

import math
import pickletools
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from flatout.convert.problems import damaged

# The instructions of all protocols together are few for a file of weights: about 30 for a tensor.
MAX_INSTRUCTIONS = 2_000_000
_KINDS = frozenset(f"{kind}{size}" for kind in "fiu" for size in (1, 2, 4, 8)) - {"f1"} | {"b1"}
_MAX_DIMS = 32


class _Refused(ValueError):
    pass


class _Array:
    """An array to be: its state follows."""

    def __init__(self) -> None:
        self.value: np.ndarray | None = None


class _DType:
    def __init__(self, kind: str) -> None:
        self.kind, self.order = kind, "<"


def _dtype(kind: Any, *_: Any) -> _DType:
    name = kind.lstrip("<>|=") if isinstance(kind, str) else ""
    if name not in _KINDS:
        raise _Refused(f"an array of type {kind!r:.40}")
    made = _DType(name)
    made.order = ">" if kind[0] == ">" else "<"
    return made


def _array_from(raw: Any, dtype: Any, shape: Any, order: Any = "C") -> np.ndarray:
    if isinstance(raw, str):
        raw = raw.encode("latin1")  # as Python 2 wrote bytes
    if not isinstance(raw, bytes | bytearray) or not isinstance(dtype, _DType) or not isinstance(shape, tuple):
        raise _Refused("an array that is no numbers")
    if len(shape) > _MAX_DIMS or not all(type(size) is int and 0 <= size < 2**48 for size in shape):
        raise _Refused("an array of an impossible shape")
    kind = np.dtype(dtype.order + dtype.kind)
    if math.prod(shape) * kind.itemsize != len(raw):
        raise _Refused(f"an array of shape {shape} with {len(raw):,} bytes")
    return np.frombuffer(raw, kind).reshape(shape, order="F" if order == "F" else "C")


def _reconstruct(*_: Any) -> _Array:
    return _Array()


def _encode(text: Any, encoding: Any) -> bytes:
    # Bytes in protocol 2.
    if not isinstance(text, str) or encoding != "latin1":
        raise _Refused("text that is no bytes")
    return text.encode("latin1")


def _scalar(dtype: Any, raw: Any) -> Any:
    return _array_from(raw, dtype, ())[()]


def _make_tuple(items: Any = ()) -> tuple[Any, ...]:
    if not isinstance(items, tuple | list):
        raise _Refused("a tuple of something else")
    return tuple(items)


def _no_bytes() -> bytes:
    # Those of an empty array in protocol 2.
    return b""


def _make_dict() -> dict[Any, Any]:
    return {}


class _NdArray:
    """The class of arrays, which pickles name as an argument."""


_CALLS: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): _make_dict,
    ("_codecs", "encode"): _encode,
    ("numpy", "ndarray"): _NdArray,
    ("numpy", "dtype"): _dtype,
}
for _package in ("numpy.core", "numpy._core"):
    _CALLS[f"{_package}.multiarray", "_reconstruct"] = _reconstruct
    _CALLS[f"{_package}.multiarray", "scalar"] = _scalar
    _CALLS[f"{_package}.numeric", "_frombuffer"] = _array_from
for _package in ("builtins", "__builtin__"):
    _CALLS[_package, "tuple"] = _make_tuple
    _CALLS[_package, "bytes"] = _no_bytes

_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_VALUES = frozenset(
    (
        *("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "INT", "LONG", "FLOAT", "BINFLOAT"),
        *("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "STRING", "BINSTRING", "SHORT_BINSTRING"),
        *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"),
    )
)
_IGNORED = frozenset(("PROTO", "FRAME"))
_MARK = object()
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": (), "MARK": _MARK}
_EMPTY = {"EMPTY_LIST": list, "EMPTY_DICT": dict}


def load(path: Path, file: IO[bytes]) -> Any:
    """Return the content of a pickle: dicts, lists, tuples, text, numbers and arrays.

    Raises:
        InputError: it is damaged, or holds anything else.
    """
    machine = _Machine()
    try:
        with warnings.catch_warnings():
            # pickletools has Python warn of what damaged text looks like.
            warnings.simplefilter("ignore", DeprecationWarning)
            for count, (opcode, argument, _) in enumerate(pickletools.genops(file)):
                if count > MAX_INSTRUCTIONS:
                    raise _Refused(f"more than {MAX_INSTRUCTIONS:,} instructions")
                if opcode.name == "STOP":
                    return finished(machine.pop())
                machine.step(opcode.name, argument)
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, MemoryError, RecursionError) as error:
        reason = f"holds {error}" if isinstance(error, _Refused) else f"{type(error).__name__}"
        raise damaged(path, "a pickle of arrays", reason) from None
    raise damaged(path, "a pickle of arrays", "it has no end")


def finished(value: Any) -> Any:
    """Return an element of a tuple or a list, which may be an array."""
    return value.value if isinstance(value, _Array) else value


class _Machine:
    """The stack and the memo of a pickle."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def pop(self) -> Any:
        if not self.stack or self.stack[-1] is _MARK:
            raise _Refused("an instruction without its values")
        return self.stack.pop()

    def pop_mark(self) -> list[Any]:
        items: list[Any] = []
        while (item := self.stack.pop()) is not _MARK:
            items.append(item)
        return items[::-1]

    def top(self, kind: type) -> Any:
        if not isinstance(self.stack[-1], kind):
            raise _Refused("an instruction for another kind of object")
        return self.stack[-1]

    def step(self, name: str, argument: Any) -> None:
        """Carry out one instruction."""
        if name in _VALUES:
            self.stack.append(argument)
        elif name in _CONSTANTS:
            self.stack.append(_CONSTANTS[name])
        elif name in _EMPTY:
            self.stack.append(_EMPTY[name]())
        elif name in _TUPLES:
            self.stack.append(tuple([self.pop() for _ in range(_TUPLES[name])][::-1]))
        elif name in ("GLOBAL", "STACK_GLOBAL"):
            self._name(argument)
        elif name in ("MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT"):
            self.memo[len(self.memo) if argument is None else int(argument)] = self.stack[-1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            self.stack.append(self.memo[int(argument)])
        elif (do := getattr(self, f"do_{name.lower()}", None)) is not None:
            do()
        elif name not in _IGNORED:
            raise _Refused(f"the instruction {name}")

    def _name(self, argument: Any) -> None:
        second = None if argument else self.pop()
        module, name = argument.split(" ", 1) if argument else (self.pop(), second)
        if not isinstance(module, str) or not isinstance(name, str) or (module, name) not in _CALLS:
            raise _Refused(f"code ({str(module)[:60]}.{str(name)[:60]}), which is not run")
        self.stack.append(_CALLS[module, name])

    def do_reduce(self) -> None:
        arguments, function = self.pop(), self.pop()
        if not isinstance(arguments, tuple) or function not in _FUNCTIONS:
            raise _Refused("a call of something else than a known function")
        self.stack.append(function(*map(finished, arguments)))

    def do_build(self) -> None:
        state, target = self.pop(), self.stack[-1]
        if isinstance(target, _DType) and isinstance(state, tuple) and len(state) > 1:
            target.order = ">" if state[1] == ">" else "<"
        elif isinstance(target, _Array) and isinstance(state, tuple) and len(state) == 5:
            _, shape, dtype, is_fortran, raw = state
            target.value = _array_from(raw, dtype, shape, "F" if is_fortran else "C")
        else:
            raise _Refused("an object with a state of its own")

    def do_pop(self) -> None:
        self.stack.pop()

    def do_tuple(self) -> None:
        self.stack.append(tuple(self.pop_mark()))

    def do_list(self) -> None:
        self.stack.append(self.pop_mark())

    def do_dict(self) -> None:
        items = self.pop_mark()
        self.stack.append({})
        self._set(items)

    def do_append(self) -> None:
        item = self.pop()
        self.top(list).append(item)

    def do_appends(self) -> None:
        items = self.pop_mark()
        self.top(list).extend(items)

    def do_setitem(self) -> None:
        value, key = self.pop(), self.pop()
        self._set([key, value])

    def do_setitems(self) -> None:
        self._set(self.pop_mark())

    def _set(self, items: list[Any]) -> None:
        target = self.top(dict)
        for key, value in _pairs(items):
            target[key] = value


_FUNCTIONS: frozenset[Callable[..., Any]] = frozenset(call for call in _CALLS.values() if call is not _NdArray)


def _pairs(items: list[Any]) -> Iterator[tuple[Any, Any]]:
    if len(items) % 2:
        raise _Refused("a key without a value")
    for key, value in zip(items[::2], items[1::2], strict=True):
        # Other keys could take for ever to hash.
        if type(key) not in (str, int):
            raise _Refused(f"a key that is a {type(key).__name__}")
        yield key, finished(value)
