"""Archives that are damaged or hostile are refused with one message, and nothing is written."""

import os
import stat
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from flatout.cli import main
from flatout.data import archive, members
from flatout.data.detect import recognise
from flatout.errors import InputError
from tests.data.containers import SAMPLES, add_member, class_folders, in_tar, in_zip

Change = Callable[[tarfile.TarInfo], None]


def tar_with(path: Path, name: str, **fields: object) -> Path:
    """Write a tar archive of class folders and one more member."""
    with tarfile.open(path, "w") as out:
        for sample in SAMPLES:
            add_member(out, f"{sample.split}/{sample.class_name}/{sample.name}", sample.data)
        member = tarfile.TarInfo(name)
        for field, value in fields.items():
            setattr(member, field, value)
        out.addfile(member)
    return path


def zip_with(path: Path, name: str, mode: int = stat.S_IFREG, content: bytes = b"x") -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as out:
        for sample in SAMPLES:
            out.writestr(f"{sample.split}/{sample.class_name}/{sample.name}", sample.data)
        info = zipfile.ZipInfo(name)
        info.external_attr = mode << 16
        info.compress_type = zipfile.ZIP_DEFLATED
        out.writestr(info, content)
    return path


@pytest.mark.parametrize("make", [tar_with, zip_with])
@pytest.mark.parametrize("name", ["../evil.jpg", "/etc/evil.jpg", "train/../../evil.jpg", "C:/evil.jpg"])
def test_names_that_lead_out_are_refused(tmp_path: Path, make: Callable[[Path, str], Path], name: str):
    path = make(tmp_path / ("a.tar" if make is tar_with else "a.zip"), name)
    with pytest.raises(InputError, match=rf"a\.(tar|zip): member {name}: leads out of the archive"):
        recognise(path).read()
    assert os.listdir(tmp_path) == [path.name]  # noqa: PTH208


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"}, "is a symbolic link"),
        ({"type": tarfile.LNKTYPE, "linkname": "train/cat/000.jpg"}, "is a hard link"),
        ({"type": tarfile.CHRTYPE}, "is a device or other special file"),
        ({"type": tarfile.FIFOTYPE}, "is a device or other special file"),
    ],
)
def test_links_and_devices_in_tar_are_refused(tmp_path: Path, fields: dict[str, object], what: str):
    path = tar_with(tmp_path / "a.tar", "train/cat/evil.jpg", **fields)
    with pytest.raises(InputError, match=f"member train/cat/evil.jpg: {what}"):
        recognise(path).read()


@pytest.mark.parametrize(("mode", "what"), [(stat.S_IFLNK, "a symbolic link"), (stat.S_IFCHR, "a device")])
def test_links_and_devices_in_zip_are_refused(tmp_path: Path, mode: int, what: str):
    with pytest.raises(InputError, match=f"member train/cat/evil.jpg: is {what}"):
        recognise(zip_with(tmp_path / "a.zip", "train/cat/evil.jpg", mode)).read()


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("name", ["train/cat/000.jpg", "./train/cat/000.jpg", "train/cat", "train/cat/000.jpg/x.jpg"])
def test_a_name_cannot_be_there_twice(tmp_path: Path, name: str):
    for path in (tar_with(tmp_path / "a.tar", name), zip_with(tmp_path / "a.zip", name)):
        with pytest.raises(InputError, match=f"member {name}: is (there twice|below a file)"):
            recognise(path).read()


def test_folders_may_not_be_too_deep(tmp_path: Path):
    with pytest.raises(InputError, match="is more than 100 folders deep"):
        recognise(zip_with(tmp_path / "a.zip", "a/" * 5000 + "x.jpg")).read()


def test_bombs_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(members, "_EXPANSION_SLACK_BYTES", 1 << 16)
    path = zip_with(tmp_path / "a.zip", "train/cat/x.bmp", content=bytes(1 << 24))
    with pytest.raises(InputError, match=r"member train/cat/x\.bmp: expands from \d\d,\d{3} to 16,777,216 bytes"):
        recognise(path).read()
    with tarfile.open(tmp_path / "a.tar.bz2", "w:bz2") as out:
        add_member(out, "train/cat/x.bmp", bytes(1 << 24))
    with pytest.raises(InputError, match=r"a\.tar\.bz2: expands from \d+ to 1,048,576 bytes or more"):
        recognise(tmp_path / "a.tar.bz2").read()


def test_a_member_larger_than_declared_is_a_bad_image(tmp_path: Path):
    """The declared size bounds what is decompressed."""
    path = zip_with(tmp_path / "a.zip", "train/cat/x.jpg", content=bytes(1 << 20))
    content = bytearray(path.read_bytes())
    place = content.rindex(struct.pack("<I", 1 << 20))
    content[place : place + 4] = struct.pack("<I", 100)
    path.write_bytes(content)
    files = recognise(path).read().files
    assert files is not None
    (bad,) = [file for file in files if str(file).endswith("x.jpg")]
    with pytest.raises(OSError, match="it is damaged"):
        bad.read_bytes()


def test_members_that_overlap_are_refused(tmp_path: Path):
    """As in zip bombs that use the same bytes for every member."""
    path = in_zip(zipfile.ZIP_STORED)(tmp_path)
    content = bytearray(path.read_bytes())
    place = content.index(b"PK\1\2")
    content[place + 20 : place + 24] = content[place + 24 : place + 28] = struct.pack("<I", len(content))
    path.write_bytes(content)
    with pytest.raises(InputError, match="its members overlap"):
        recognise(path).read()


def test_an_encrypted_member_and_an_unusual_method_are_named(tmp_path: Path):
    with zipfile.ZipFile(tmp_path / "lzma.zip", "w", zipfile.ZIP_LZMA) as out:
        out.writestr("cat/a.jpg", b"x")
    with pytest.raises(InputError, match=r"member cat/a\.jpg: is compressed by a method other than Deflate"):
        recognise(tmp_path / "lzma.zip").read()
    path = zip_with(tmp_path / "a.zip", "train/cat/x.jpg")
    content = bytearray(path.read_bytes())
    content[content.index(b"PK\1\2") + 8] |= 1
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"member train/cat/000\.jpg: is encrypted"):
        recognise(path).read()


@pytest.mark.parametrize("name", ["set.tar", "set.tar.gz", "set.tar.bz2", "set.tar.xz", "set.zip"])
def test_a_truncated_archive_is_named_and_the_exit_code_is_2(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
):
    write = in_zip(zipfile.ZIP_DEFLATED) if name.endswith("zip") else in_tar(f"w:{name[8:]}" if name[8:] else "w")
    path = write(tmp_path)
    content = path.read_bytes()
    for length in (len(content) * 9 // 10, len(content) // 2, 700, 100, 3):
        path.write_bytes(content[:length])
        assert main(["check", str(path)]) == 2
        message = capsys.readouterr().err
        assert str(path) in message
        assert len(message.splitlines()) == 1


def test_a_member_that_changed_is_a_bad_image_with_its_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = in_zip(zipfile.ZIP_STORED)(tmp_path)
    content = path.read_bytes()
    path.write_bytes(content.replace(SAMPLES[0].data, SAMPLES[0].data[::-1], 1))
    code = main(["pack", str(path), "--size", "8", "--out", str(tmp_path / "pack")])
    assert code == 2
    message = capsys.readouterr().err
    assert f"{path}: member photos/train/cat/000.jpg: cannot be read: it is damaged: its checksum is wrong" in message
    assert not (tmp_path / "pack").exists()


@pytest.mark.parametrize("kind", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_tar_of_every_kind_is_listed_as_tarfile_does(tmp_path: Path, kind: int):
    names = ["a/b.jpg", "Bücher/ö.jpg", "x" * 90 + "/" + "y" * 60 + ".jpg"]
    if kind != tarfile.USTAR_FORMAT:
        names += ["d/" * 60 + "z" * 200 + ".jpg"]
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w", format=kind) as out:
        for i, name in enumerate(names):
            add_member(out, name, bytes([i]) * (500 + 100 * i))
    with tarfile.open(path) as reference:
        expected = [(m.name, reference.extractfile(m).read()) for m in reference]  # pyright: ignore[reportOptionalMemberAccess]
    found = archive.tar_parts(members.Container(path))
    assert [(name, part.read_bytes() if part else b"") for name, part in found] == expected


def test_sizes_in_base_256_are_understood(tmp_path: Path):
    info = tarfile.TarInfo("a.jpg")
    info.size = 5
    header = bytearray(info.tobuf())
    header[124:136] = b"\x80" + (5).to_bytes(11, "big")
    header[148:156] = b"%06o\0 " % (sum(header) - sum(header[148:156]) + 8 * 32)
    (tmp_path / "a.tar").write_bytes(bytes(header) + b"hello".ljust(512, b"\0") + bytes(1024))
    ((name, part),) = archive.tar_parts(members.Container(tmp_path / "a.tar"))
    assert part is not None
    assert (name, part.read_bytes()) == ("a.jpg", b"hello")


def test_what_is_decompressed_has_no_name_and_goes_with_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    source = recognise(in_tar("w:gz")(tmp_path)).read()
    assert source.files is not None
    assert source.files[0].read_bytes() == SAMPLES[0].data
    assert list(temporary.iterdir()) == []


def test_windows_separators_and_clutter_are_understood(tmp_path: Path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as out:
        for sample in SAMPLES:
            info = zipfile.ZipInfo("x")
            info.filename = f"photos\\{sample.split}\\{sample.class_name}\\{sample.name}"
            out.writestr(info, sample.data)
        out.writestr("__MACOSX/photos/._x.jpg", b"x")
        out.writestr(".DS_Store", b"x")
    source = recognise(tmp_path / "a.zip").read()
    assert (len(source), source.classes) == (24, ("cat", "dog", "owl"))


def test_an_archive_of_one_folder_or_one_file_is_entered(tmp_path: Path):
    folder = class_folders(tmp_path / "one" / "two")
    (tmp_path / "one" / "two" / "empty" / "inner").mkdir(parents=True)
    (tmp_path / "one" / "README.md").touch()
    path = in_tar("w", lambda _: tmp_path / "one")(tmp_path)
    assert recognise(path).read().splits == recognise(folder).read().splits
    with pytest.raises(InputError, match=r"holds images in one folder only, photos, .* give .*two/photos$"):
        recognise(tmp_path / "one" / "two").read()


def test_an_empty_archive_is_refused(tmp_path: Path):
    zipfile.ZipFile(tmp_path / "a.zip", "w").close()
    with tarfile.open(tmp_path / "a.tar", "w"):
        pass
    for name in ("a.zip", "a.tar"):
        with pytest.raises(InputError, match="is an empty archive"):
            recognise(tmp_path / name).read()


def test_a_list_returns_the_images_that_were_put_in(tmp_path: Path) -> None:
    file = class_folders(tmp_path / "data") / "one.jpg"
    file.write_bytes(b"0123456789")
    one, other = (members.Container(file) for _ in range(2))
    parts = [
        members.Slice(one, "member \udcff.jpg", 2, 3),
        members.ZipPart(other, "member \u20ac.jpg", 1, 2**33, 3, 2**32 - 1, 1),
        members.Slice(other, "", 0, 2**40),
    ]
    images = members.EncodedList([parts[0], file, parts[1]], [SAMPLES[0], parts[2]])  # pyright: ignore[reportArgumentType]
    assert list(images) == [parts[0], file, parts[1], SAMPLES[0], parts[2]]
    assert images[1:3] == [file, parts[1]]
    assert images[0].read_bytes() == b"234"
