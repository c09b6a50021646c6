"""Draw damaged bytes, and read many of them."""

import os
import resource
import struct
import time
from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

MAX_GROWTH_BYTES = 1 << 30
# What texts and headers trip over: quotes, ends, other encodings, numbers out of range, depth, paths that lead out.
PIECES = (
    *(b'"', b"'", b"\0", b"\r", b"\n", b"\xff", b"\xef\xbb\xbf", b",", b";", b"\t", b" ", b"|", b"\\", b"{", b"}"),
    *(b"nan", b"-inf", b"1e999", b"-1", b"0.5", b"9" * 30, b"9" * 5000, b"[" * 3000, b"(" * 300, b'{"a":' * 1500),
    *(b"../", b"/dev/zero", b"null", b"true", b"[]", b'""', b"a" * 300, b"x/" * 200, b"\xf0\x9f\x90\x88"),
)


@st.composite
def damage(draw: st.DrawFn, content: bytes) -> bytes:
    """Draw changes of bytes and of 32-bit numbers, pieces put in, parts left out or repeated, and an end cut off."""
    changed = bytearray(content)
    # Most of what a format says is at its beginning and end.
    places = st.integers(0, len(content) - 1) | st.integers(0, 600) | st.integers(len(content) - 600, len(content) - 1)
    for _ in range(draw(st.integers(1, 4))):
        place = min(max(draw(places), 0), len(changed) - 1)
        kind = draw(st.sampled_from(["byte", "number", "piece", "cut", "repeat", "leave out"]))
        if kind == "byte":
            changed[place] = draw(st.integers(0, 255))
        elif kind == "number":
            number = draw(st.sampled_from([0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, len(content)]))
            changed[place : place + 4] = struct.pack(draw(st.sampled_from(["<I", ">I"])), number)
        elif kind == "piece":
            piece = draw(st.sampled_from(PIECES))
            changed[place : place + draw(st.sampled_from([0, len(piece)]))] = piece
        elif kind == "cut":
            del changed[max(place, 1) :]
        elif kind == "repeat":
            changed[place:place] = changed[place : place + draw(st.sampled_from([1, 30, 512]))]
        elif len(changed) > 600:
            del changed[place : place + draw(st.sampled_from([1, 4, 512]))]
        elif len(changed) > 4:
            del changed[place : place + draw(st.sampled_from([1, 4]))]
    return bytes(changed)


def read_damaged(name: str, examples: int, content: bytes, read: Callable[[bytes], None]) -> None:
    """Call `read` with damaged contents, the same in every run; or new ones, for FLATOUT_FUZZ_SECONDS of CPU time.

    Raises:
        AssertionError: reading them takes much memory.
    """

    seconds = float(os.environ.get("FLATOUT_FUZZ_SECONDS", "0"))

    @settings(max_examples=examples, database=None, derandomize=not seconds)
    @given(damage(content))
    def run(content: bytes) -> None:
        read(content)

    read(content)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start, rounds = time.process_time(), 1
    run()
    while time.process_time() - start < seconds:
        run()
        rounds += 1
    if seconds:
        print(f"{name}: {rounds * examples:,} examples in {time.process_time() - start:.0f} s", flush=True)
    # In KiB on Linux and bytes on macOS, where this is never reached.
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < MAX_GROWTH_BYTES
