"""Protocol buffers, parsed field by field: https://protobuf.dev/programming-guides/encoding/.

Their libraries copy the values of a message and do not give their places; parsed here, bytes stay where they are.
"""

from collections.abc import Iterator
from typing import Any

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def inside(record: bytes, place: slice, wanted: int) -> Iterator[slice]:
    """Yield the places of the length-delimited fields of one number."""
    for number, value in fields(record, place):
        if number == wanted and isinstance(value, slice):
            yield value


def fields(record: bytes, place: slice) -> Iterator[tuple[int, Any]]:
    """Yield number and value of each field: a number, or the place of bytes.

    Raises:
        ValueError: this is no message.
    """
    position, stop = place.start, place.stop
    while position < stop:
        tag, position = varint(record, position, stop)
        wire_type = tag & 7
        if wire_type == _BYTES:
            length, position = varint(record, position, stop)
        elif wire_type == _VARINT:
            value, position = varint(record, position, stop)
            yield tag >> 3, value
            continue
        elif wire_type in (_FIXED64, _FIXED32):
            length = 8 if wire_type == _FIXED64 else 4
        else:
            raise ValueError(f"unknown wire type {wire_type}")
        if position + length > stop:
            raise ValueError("a field ends after its message")
        yield tag >> 3, slice(position, position + length)
        position += length


def varint(record: bytes, position: int, stop: int) -> tuple[int, int]:
    """Return a number of up to ten bytes, the lowest seven bits first, and the position behind it."""
    if position < stop and (number := record[position]) < 0x80:  # nearly all
        return number, position + 1
    number = 0
    for shift in range(0, 70, 7):
        if position >= stop:
            raise ValueError("a number is cut off")
        byte = record[position]
        position += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, position
    raise ValueError("a number has more than ten bytes")


def signed(number: int) -> int:
    """Return what an unsigned number of 64 bits means as a signed one."""
    number &= (1 << 64) - 1
    return number - (1 << 64) if number >> 63 else number
