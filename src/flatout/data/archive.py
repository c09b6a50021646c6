"""ZIP and tar archives as trees of members, which are read in place: nothing is unpacked.

A member has the methods of `pathlib.Path` that data formats use, so a format reads a folder or an archive alike.
Names that lead out of the archive, links, devices, repeated names and decompression bombs are refused when the archive
is opened.

tar: POSIX.1-2017, pax, "ustar Interchange Format" and "pax Interchange Format", with the long names of GNU tar.
"""

import errno
import io
import os
import stat
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from flatout.data.members import Container, Slice, ZipPart, refuse_bomb
from flatout.errors import InputError
from flatout.files import printable

TAR_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz")
SUFFIXES = (".zip", *TAR_SUFFIXES)

_BLOCK = 512
_READ_BYTES = 4 * _BLOCK
_MAX_HEADER_BYTES = 1 << 20
_MAX_DEPTH = 100
_REGULAR = (b"\0", b"0", b"7")
_FOLDER, _LONG_NAME, _PAX = b"5", b"L", b"x"
_EXTENDED = (_LONG_NAME, _PAX)
_SKIPPED = (b"g", b"K")  # defaults for the whole archive; long names of links
_KINDS = {b"1": "a hard link", b"2": "a symbolic link", b"S": "a sparse file"}
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_ENCRYPTED = 0x1


class Member:
    """A file or folder in an archive, or the name of nothing there; a folder's `children` are by name.

    Formats are given it as a `Path`, whose methods it has as far as they use them.
    """

    __slots__ = ("children", "inner", "parent", "part")

    def __init__(self, parent: "Member | Path", name: str, part: Slice | ZipPart | None = None) -> None:
        self.parent: Any = parent  # of the root, the archive
        self.inner = f"{parent.inner}/{name}".lstrip("/") if isinstance(parent, Member) else ""
        self.part = part
        self.children: dict[str, Member] | None = None

    def __str__(self) -> str:
        return f"{self._archive}: member {self.inner}" if self.inner else str(self._archive)

    def __truediv__(self, name: str) -> "Member":
        member = self
        for part in PurePosixPath(name).parts:
            child = (member.children or {}).get(part)
            member = child or Member(member, part)
        return member

    @property
    def _archive(self) -> Path:
        return self.parent._archive if isinstance(self.parent, Member) else self.parent

    @property
    def name(self) -> str:
        """The last part of the name."""
        return self.inner.rpartition("/")[2] or self.parent.name

    @property
    def stem(self) -> str:
        """The name without its suffix."""
        return PurePosixPath(self.name).stem

    @property
    def suffix(self) -> str:
        """The suffix of the name, with its dot."""
        return PurePosixPath(self.name).suffix

    @property
    def path(self) -> Any:
        """The member itself, as that of an entry of a folder."""
        return self

    def is_dir(self) -> bool:
        """Whether it is a folder."""
        return self.children is not None

    def is_file(self) -> bool:
        """Whether it is a file."""
        return self.part is not None

    def is_symlink(self) -> bool:
        """Whether it is a symbolic link: never, as archives with links are refused."""
        return False

    def resolve(self) -> "Member":
        """Return the member itself: there are no links."""
        return self

    def is_relative_to(self, folder: "Member") -> bool:
        """Whether it is in or below a folder of the archive, which all are: names that lead out are of nothing."""
        return True

    def read_bytes(self) -> bytes:
        """Return the bytes of the file; raises OSError."""
        if self.part is None:
            raise OSError(errno.ENOENT, "there is no such file")
        return self.part.read_bytes()

    def open(self, mode: str = "rb") -> io.BytesIO:
        """Open the file for reading bytes; raises OSError."""
        assert mode == "rb"
        return io.BytesIO(self.read_bytes())


def is_archive(path: Path) -> bool:
    """Whether a path is a ZIP or tar archive, by its name."""
    return path.name.lower().endswith(SUFFIXES) and path.is_file()


def open_archive(path: Path) -> Member:
    """Return the root of an archive.

    Raises:
        InputError: the archive is damaged, cut off, or holds what is refused; names the member.
        DiskFull: there is no room to decompress it.
    """
    container = Container(path, decompress=path.suffix.lower() != ".zip")
    root = Member(path, path.name)
    root.children = {}
    parts = _zip_parts(container) if path.suffix.lower() == ".zip" else tar_parts(container)
    for name, part in parts:
        _add(root, name, part)
    if not root.children:
        raise InputError(f"{path}: is an empty archive")
    return root


def _add(root: Member, name: str, part: Slice | ZipPart | None) -> None:
    """Add a file, or with no part a folder, to the tree."""
    folders = [piece for piece in name.split("/") if piece not in ("", ".")]
    if name.startswith("/") or ".." in folders or (folders and folders[0][1:] == ":") or "\0" in name:
        raise InputError(
            f"{root}: member {printable(name)}: leads out of the archive; get the archive from a source that you trust"
        )
    if len(folders) > _MAX_DEPTH:
        raise InputError(f"{root}: member {printable(name)[:80]}...: is more than {_MAX_DEPTH} folders deep")
    last = folders.pop() if part is not None and folders else None
    member = root
    for piece in folders:
        assert member.children is not None
        child = member.children.get(piece)
        if child is None:
            child = member.children[piece] = Member(member, piece)
            child.children = {}
        if child.children is None:
            raise InputError(f"{root}: member {printable(name)}: is below a file; get the archive again")
        member = child
    if part is not None:
        assert member.children is not None
        if last is None or last in member.children:
            what = "is there twice; remove one, or unpack the archive and give the folder"
            raise InputError(f"{root}: member {printable(name)}: {what}")
        member.children[last] = Member(member, last, part)


# ZIP


def _zip_parts(container: Container) -> Iterator[tuple[str, ZipPart | None]]:
    path = container.path
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, struct.error) as error:
        raise InputError(f"{path}: is damaged or no ZIP archive ({error}); get it again") from None
    are_inside = all(0 <= info.header_offset < container.size for info in members)
    if not are_inside or sum(info.compress_size for info in members) > container.size:
        raise InputError(f"{path}: is damaged: its members overlap, or it is cut off; get it again")
    for info in members:
        name = info.filename.replace("\\", "/")
        where = f"{path}: member {printable(name)}"
        kind = stat.S_IFMT(info.external_attr >> 16)
        if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
            raise InputError(f"{where}: is {_kind_of(kind)}; pack regular files and folders only")
        if info.flag_bits & _ENCRYPTED:
            raise InputError(f"{where}: is encrypted; unpack the archive and give the folder")
        if info.compress_type not in _METHODS:
            raise InputError(f"{where}: is compressed by a method other than Deflate; unpack it and give the folder")
        refuse_bomb(where, info.compress_size, info.file_size)
        part = ZipPart(
            container=container,
            name=f"member {name}",
            header=info.header_offset,
            compressed_size=info.compress_size,
            size=info.file_size,
            crc32=info.CRC,
            is_deflated=info.compress_type == zipfile.ZIP_DEFLATED,
        )
        yield name, None if name.endswith("/") else part


def _kind_of(kind: int) -> str:
    return "a symbolic link" if kind == stat.S_IFLNK else "a device or other special file"


# tar


def tar_parts(container: Container) -> Iterator[tuple[str, Slice | None]]:
    """Yield name and place of each file of a tar archive in its order; folders have no place.

    Not by `tarfile`, which takes a damaged header after the first for the end, so that the rest of the images would be
    missing without a message, and which is several times as slow: shards of small images would be listed more slowly
    than many cores decode them.

    Raises:
        InputError: the archive is damaged, cut off, or holds links or devices.
    """
    with container.opened() as descriptor:
        yield from _tar_parts(container, descriptor)


def _tar_parts(container: Container, descriptor: int) -> Iterator[tuple[str, Slice | None]]:
    path, offset = container.path, 0
    # Headers of small files and the extended ones before them lie close together.
    start, near = 0, b""
    extended: dict[str, str] = {}  # what headers before that of a file say of it
    is_ended = False
    while True:
        if not start <= offset <= start + len(near) - _BLOCK:
            start, near = offset, os.pread(descriptor, _READ_BYTES, offset)
        if not (header := near[offset - start : offset - start + _BLOCK]):
            break
        if is_ended := not any(header):  # another archive may follow: tar files can be concatenated
            offset += _BLOCK
            continue
        name, size, kind = _parse_header(header, path, offset)
        if kind not in _EXTENDED + _SKIPPED:
            name, size = extended.get("path", name), int(extended.get("size", size))
        place, offset = offset + _BLOCK, offset + _BLOCK + -(-size // _BLOCK) * _BLOCK
        if place + size > container.size:
            raise InputError(f"{path}: member {printable(name)}: is cut off; get the archive again")
        if kind in _EXTENDED:
            if size > _MAX_HEADER_BYTES:
                raise InputError(f"{path}: is damaged (header at byte {place:,} of {size:,} bytes); get it again")
            within = place - start
            is_near = within + size <= len(near)
            content = near[within : within + size] if is_near else os.pread(descriptor, size, place)
            extended |= {"path": _text(content)} if kind == _LONG_NAME else _pax_records(content, path, place)
        elif kind == _FOLDER or (kind in _REGULAR and name.endswith("/")):
            yield name, None
        elif kind in _SKIPPED:
            continue
        elif kind not in _REGULAR or any(key.startswith("GNU.sparse") for key in extended):
            what = _KINDS.get(kind, "a sparse file" if kind in _REGULAR else "a device or other special file")
            raise InputError(f"{path}: member {printable(name)}: is {what}; unpack the archive and give the folder")
        else:
            yield name, Slice(container, f"member {name}", place, size)
        if kind not in _EXTENDED:
            extended = {}
    if not is_ended:
        raise InputError(f"{path}: is cut off or no tar archive: it has no end marker; get it again")


def _parse_header(header: bytes, path: Path, offset: int) -> tuple[str, int, bytes]:
    """Return name, size and type of a 512-byte header."""
    size = _number(header[124:136])
    # The checksum is computed with spaces in its place.
    unsigned = sum(header) - sum(header[148:156]) + 8 * ord(" ")
    if len(header) < _BLOCK or _number(header[148:156]) != unsigned or size is None:
        raise InputError(f"{path}: is damaged or no tar archive (header at byte {offset:,}); get it again")
    name = _text(header[:100])
    # GNU tar, whose magic differs, has other fields in place of the prefix.
    if header[257:263] == b"ustar\0" and (prefix := _text(header[345:500])):
        name = f"{prefix}/{name}"
    return name, size, header[156:157]


def _number(field: bytes) -> int | None:
    """Return a number in octal digits or, with the first bit set, in base 256; None for neither."""
    if field[:1] == b"\x80":
        return int.from_bytes(field[1:], "big")
    digits = field.partition(b"\0")[0].strip(b" ")
    is_octal = digits.isdigit() and b"8" not in digits and b"9" not in digits
    return int(digits, 8) if is_octal else None if digits else 0


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode("utf-8", "surrogateescape")


def _pax_records(content: bytes, path: Path, offset: int) -> dict[str, str]:
    """Return the `length key=value` lines of an extended header."""
    records: dict[str, str] = {}
    place = 0
    while place < len(content):
        digits = content[place : place + 20].partition(b" ")[0]
        length = int(digits) if digits.isdigit() else 0
        record = content[place + len(digits) + 1 : place + length]
        key, mark, value = record[:-1].partition(b"=")
        is_size = key != b"size" or (value.isdigit() and len(value) < 20)
        if not mark or not record.endswith(b"\n") or not is_size:
            raise InputError(f"{path}: is damaged (extended header at byte {offset + place:,}); get it again")
        records[key.decode("utf-8", "replace")] = value.decode("utf-8", "surrogateescape")
        place += length
    return records
