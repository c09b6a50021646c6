"""The sorted table of keys and values that a TensorFlow checkpoint's `.index` file is.

It has the format of LevelDB's tables: https://github.com/google/leveldb/blob/main/doc/table_format.md.
"""

from collections.abc import Iterator
from pathlib import Path

from flatout.convert.problems import damaged
from flatout.data.formats.shards import masked_crc32c, varint
from flatout.errors import InputError

WHAT = "a TensorFlow checkpoint"
FOOTER_BYTES = 48
MAGIC = (0xDB4775248B80FB57).to_bytes(8, "little")


def masked(data: bytes) -> bytes:
    """Return the checksum that checkpoints have.

    Raises:
        InputError: google-crc32c is not installed.
    """
    try:
        return masked_crc32c(data)
    except ImportError:
        need = "need the package google-crc32c for their checksums: pip install 'flatout[convert]'"
        raise InputError(f"TensorFlow checkpoints {need}") from None


def read_table(path: Path) -> dict[bytes, bytes]:
    """Return keys and values of a table, in their order; checksums are verified.

    Raises:
        InputError: the file is no such table, or damaged.
    """
    try:
        content = path.read_bytes()
        if len(content) < FOOTER_BYTES or content[-8:] != MAGIC:
            raise ValueError("it does not end as one")
        footer, position = len(content) - FOOTER_BYTES, len(content) - FOOTER_BYTES
        for _ in range(2):  # the handle of the meta index, which is not needed
            _, position = varint(content, position, len(content))
        table: dict[bytes, bytes] = {}
        for _, handle in _entries(_block(content, content, position, footer)):
            # Every entry takes three bytes at least, so a table that repeats its blocks grows no further.
            if len(table) > len(content):
                raise ValueError("more entries than bytes")
            table |= dict(_entries(_block(content, handle, 0, footer)))
        return table
    except OSError as error:
        raise damaged(path, WHAT, error.strerror) from None
    except (ValueError, IndexError) as error:
        raise damaged(path, WHAT, error) from None


def _block(content: bytes, handle: bytes, position: int, end: int) -> bytes:
    """Return the block whose offset and size a handle has; a byte for compression and a checksum follow it."""
    offset, position = varint(handle, position, len(handle))
    size, _ = varint(handle, position, len(handle))
    if offset + size + 5 > end:
        raise ValueError("a block ends after the file")
    block = content[offset : offset + size + 1]
    if masked(block) != content[offset + size + 1 : offset + size + 5]:
        raise ValueError("a checksum is wrong")
    if block[-1]:
        raise ValueError("a block is compressed; TensorFlow writes none")
    return block[:-1]


def _entries(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the entries: each key has so many bytes of the one before, then its own."""
    if len(block) < 4:
        raise ValueError("a block is cut off")
    stop = len(block) - 4 * (int.from_bytes(block[-4:], "little") + 1)
    position, key = 0, b""
    while position < stop:
        shared, position = varint(block, position, stop)
        own, position = varint(block, position, stop)
        size, position = varint(block, position, stop)
        if shared > len(key) or position + own + size > stop:
            raise ValueError("an entry ends after its block")
        key = key[:shared] + block[position : position + own]
        yield key, block[position + own : position + own + size]
        position += own + size
