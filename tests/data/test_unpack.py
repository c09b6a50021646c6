"""Every format gives one pack; archives are unpacked once; damaged and hostile ones leave nothing."""

import os
import stat
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from flatout.config import Data
from flatout.data.build import build_pack, load_pack
from flatout.data.detect import recognise
from flatout.data.pack import Pack
from flatout.utils.errors import DiskFull, InputError
from tests.conftest import Command
from tests.data import containers as c
from tests.data.packs import Silent, settings

pytestmark = pytest.mark.usefixtures("cache")

SETTINGS = settings(size=c.SIZE)
# Format -> writer, and the kind of the data.
FORMATS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "class folders with ids": (c.class_ids, "class folders"),
    "tar": (c.in_tar("w"), "class folders in an archive"),
    "tar.gz": (c.in_tar("w:gz"), "class folders in an archive"),
    "tar.bz2": (c.in_tar("w:bz2"), "class folders in an archive"),
    "tar.xz": (c.in_tar("w:xz"), "class folders in an archive"),
    "zip": (c.in_zip(zipfile.ZIP_DEFLATED), "class folders in an archive"),
    "CSV": (c.csv_files, "CSV manifest"),
    "CSV in zip": (c.in_zip(zipfile.ZIP_DEFLATED, c.csv_files), "CSV manifest in an archive"),
    "metadata.csv": (c.metadata("metadata.csv"), "CSV manifest"),
    "metadata.jsonl": (c.metadata("metadata.jsonl"), "CSV manifest"),
    "PaddleClas": (c.paddle_lists, "PaddleClas lists"),
    "file names": (c.named_files, "images with classes in their names"),
    "WebDataset, cls": (c.fixture("webdataset-cls"), "WebDataset shards"),
    "WebDataset, json": (c.fixture("webdataset-json"), "WebDataset shards"),
    "TFRecord": (c.fixture("tfrecord"), "TFRecord files"),
    "TFRecord in zip": (c.in_zip(zipfile.ZIP_STORED, c.fixture("tfrecord")), "TFRecord files in an archive"),
    "Parquet": (c.fixture("parquet"), "Parquet files"),
    "Parquet in tar": (c.in_tar("w", c.fixture("parquet")), "Parquet files in an archive"),
    "saved data set": (c.fixture("saved-dataset"), "saved Hugging Face data set"),
    "npz": (c.npz, "NumPy arrays"),
    "npy in tar": (c.in_tar("w:gz", c.npy), "NumPy arrays in an archive"),
    "IDX": (c.idx, "IDX files"),
    "CIFAR-10": (c.cifar10, "CIFAR binaries"),
    "CIFAR-100": (c.cifar100, "CIFAR binaries"),
}


def pack_of(path: Path, cache: Path | None = None) -> Pack:
    names = path.parent / "names.txt"
    options = Data(
        classes=str(names) if names.is_file() else "",
        label_pattern=r"^(\w+)\.\d" if list(path.glob("*/cat.000.*")) else "",
    )
    return load_pack(recognise(path, options), SETTINGS, cache=cache, report=Silent())


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Pack:
    return pack_of(c.class_folders(tmp_path_factory.mktemp("expected")))


@pytest.mark.parametrize("name", FORMATS)
def test_the_same_images_give_the_same_pack_in_any_format(name: str, tmp_path: Path, cache: Path, expected: Pack):
    write, kind = FORMATS[name]
    path = write(tmp_path)
    for _ in range(2):
        pack = pack_of(path, cache)
        assert (pack.kind, pack.classes, pack.splits) == (kind, c.CLASSES, expected.splits)
        assert pack.fingerprint == expected.fingerprint
    assert pack.was_cached


def test_an_archive_is_unpacked_once_and_removed_when_its_pack_is_made(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, command: Command
):
    path = c.in_tar("w:gz")(tmp_path)
    first, second = recognise(path).read(), recognise(path).read()
    assert first.files and second.files and first.files[0] == second.files[0]
    assert Path(str(first.files[0])).is_relative_to(cache / "unpacked")
    assert str(path) in command("cache")
    pack = pack_of(path, cache)
    # Another user keeps it.
    assert first.files[0].read_bytes() == c.SAMPLES[0].data
    del first, second
    assert build_pack(recognise(path), SETTINGS, tmp_path / "pack", Silent()).fingerprint == pack.fingerprint
    assert not list(cache.glob("unpacked/*/*"))
    monkeypatch.setattr("flatout.data.detect.unpack", lambda *_: pytest.fail("unpacked though the pack is cached"))
    assert pack_of(path, cache).was_cached


def test_without_a_cache_or_room(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch):
    path = c.in_zip(zipfile.ZIP_DEFLATED)(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda _: os.statvfs_result)
        patch.setattr("os.statvfs_result.free", 1000, raising=False)
        with pytest.raises(DiskFull, match=r"disk is full.*: unpacking .*set\.zip needs [\d,]+ bytes and 1,000 are"):
            recognise(path).read()
    assert not list(cache.glob("unpacked/*/*"))
    monkeypatch.setenv("FLATOUT_CACHE", str(path))
    with pytest.raises(InputError, match=r"unpacked: cannot be written .*set FLATOUT_CACHE"):
        recognise(path).read()


def test_messages_name_the_archive_and_no_file_of_the_cache(tmp_path: Path, cache: Path, command: Command):
    folder = c.class_folders(tmp_path / "inside")
    (folder / "train" / "cat" / "0.png").write_bytes(b"no image")
    (folder / "train" / "empty").mkdir()
    (tmp_path / "inside" / "README.md").touch()
    path = c.in_zip(zipfile.ZIP_DEFLATED, lambda _: tmp_path / "inside")(tmp_path)
    shown = command("check", path)
    assert "class folders in an archive: train 6 images of 2 classes, test 4" in shown
    assert "  inside/photos/train/cat/0.png: is not an image" in shown
    assert f"no images: empty in {path}/inside/photos/train" in shown
    assert str(cache) not in shown


def test_options_are_part_of_the_key(tmp_path: Path, cache: Path):
    path = c.in_zip(zipfile.ZIP_STORED, c.named_files)(tmp_path)
    for pattern, classes in ((r"^(\w+)\.\d", c.CLASSES), (r"^(\w)", ("c", "d"))):
        found = recognise(path, Data(label_pattern=pattern))
        assert load_pack(found, SETTINGS, cache=cache, report=Silent()).classes == classes


def test_the_folder_of_images_is_in_the_archive(tmp_path: Path):
    def write(folder: Path) -> Path:
        c.csv_files(folder / "set")
        (folder / "set" / "pictures").rename(folder / "set" / "photos")
        for file in (folder / "set").glob("*.csv"):
            file.write_text(file.read_text().replace("pictures\\", ""))
        return folder / "set"

    path = c.in_tar("w", write)(tmp_path)
    assert len(recognise(path, Data(images="photos")).read()) == len(c.SAMPLES)


def test_windows_separators_and_clutter_are_understood(tmp_path: Path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as out:
        for sample in c.SAMPLES:
            info = zipfile.ZipInfo("x")
            info.filename = f"photos\\{sample.split}\\{sample.class_name}\\{sample.name}"
            out.writestr(info, sample.data)
        out.writestr("__MACOSX/photos/._x.jpg", b"x")
    source = recognise(tmp_path / "a.zip").read()
    assert (len(source), source.classes) == (len(c.SAMPLES), c.CLASSES)


# --- what is refused ---


def tar_with(folder: Path, name: str, **fields: object) -> Path:
    """Write a tar archive of class folders and one more member."""
    path, member = c.in_tar("w")(folder), tarfile.TarInfo(name.replace("photos/", "set/"))
    for field, value in fields.items():
        setattr(member, field, value)
    with tarfile.open(path, "a") as out:
        out.addfile(member)
    return path


def zip_with(folder: Path, name: str, mode: int = stat.S_IFREG, content: bytes = b"x") -> Path:
    path, info = c.in_zip(zipfile.ZIP_DEFLATED)(folder), zipfile.ZipInfo(name)
    info.external_attr = mode << 16
    with zipfile.ZipFile(path, "a") as out:
        out.writestr(info, content, zipfile.ZIP_DEFLATED)
    return path


def assert_refused(path: Path, cache: Path, words: str) -> None:
    before = {file for file in path.parent.rglob("*") if not file.is_relative_to(cache)}
    with pytest.raises(InputError, match=words) as caught:
        recognise(path).read()
    assert str(path) in str(caught.value)
    assert before == {file for file in path.parent.rglob("*") if not file.is_relative_to(cache)}
    assert not list(cache.glob("unpacked/*/*"))


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("make", [tar_with, zip_with])
@pytest.mark.parametrize(
    ("name", "words"),
    [
        *((name, "leads out of the archive") for name in ("../x.jpg", "/etc/x.jpg", "photos/../../x.jpg", "C:/x.jpg")),
        *((f"photos/train/cat{end}", "is there twice") for end in ("/0.png", "/./0.png", "", "/0.png/x.jpg")),
        ("a/" * 5000 + "x.jpg", "File name too long"),
    ],
)
def test_names_that_lead_out_or_are_there_twice(tmp_path: Path, cache: Path, make, name: str, words: str):
    assert_refused(make(tmp_path, name), cache, f"member .*: .*{words}")


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE, None])
def test_links_devices_and_encryption(tmp_path: Path, cache: Path, kind: bytes | None):
    if kind:
        path = tar_with(tmp_path, "set/evil.jpg", type=kind, linkname="set/train/cat/0.png")
        assert_refused(path, cache, r"member set/evil\.jpg: is a link, device or sparse file")
        return
    path = zip_with(tmp_path, "evil.jpg", stat.S_IFLNK)
    assert_refused(path, cache, r"member evil\.jpg: is a link, device or encrypted")
    content = bytearray(path.read_bytes())
    content[content.index(b"PK\1\2") + 8] |= 1
    path.write_bytes(content)
    assert_refused(path, cache, "member photos/test/: is a link, device or encrypted")


def test_bombs(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("flatout.data.unpack._EXPANSION_SLACK_BYTES", 1 << 16)
    path = zip_with(tmp_path, "x.bmp", content=bytes(1 << 24))
    assert_refused(path, cache, r"set\.zip: expands from \d\d,\d{3} to 16,\d{3},\d{3} bytes")
    with tarfile.open(tmp_path / "a.tar.bz2", "w:bz2") as out:
        c.add_member(out, "train/cat/x.bmp", bytes(1 << 24))
    assert_refused(tmp_path / "a.tar.bz2", cache, r"a\.tar\.bz2.*: expands from \d+ to [\d,]+ bytes or more")
    with tarfile.open(tmp_path / "b.tar.bz2", "w:bz2", format=tarfile.PAX_FORMAT) as out:
        out.addfile(tarfile.TarInfo("x" * (1 << 24)))
    assert_refused(tmp_path / "b.tar.bz2", cache, r"is damaged \(a header of 16,\d{3},\d{3} bytes\)")


def test_archives_of_archives(tmp_path: Path):
    path = c.in_zip(zipfile.ZIP_STORED, c.in_tar("w"))(tmp_path)
    with pytest.raises(InputError, match=r"set\.zip/set\.tar: holds nothing that flatout recognises"):
        recognise(path).read()


@pytest.mark.parametrize("name", ["set.tar", "set.tar.gz", "set.tar.bz2", "set.tar.xz", "set.zip"])
def test_an_archive_that_is_cut_off(tmp_path: Path, cache: Path, name: str):
    write = c.in_zip(zipfile.ZIP_DEFLATED) if name.endswith("zip") else c.in_tar(f"w:{name[8:]}" if name[8:] else "w")
    path = write(tmp_path)
    content = path.read_bytes()
    for length in (len(content) // 2, 700, 100, 3):
        path.write_bytes(content[:length])
        assert_refused(path, cache, "damaged or cut off")


@pytest.mark.parametrize("damage", ["cut between members", "damaged header"])
def test_an_end_that_tarfile_does_not_notice(tmp_path: Path, cache: Path, damage: str):
    path = c.in_tar("w")(tmp_path)
    with tarfile.open(path) as archive:
        place = [member.offset for member in archive if member.isfile()][5]
    content = bytearray(path.read_bytes())
    if damage == "cut between members":
        del content[place:]
    else:
        content[place + 148] ^= 1
    path.write_bytes(content)
    assert_refused(path, cache, f"is damaged or cut off: no header or end at byte {place:,}")


def test_a_damaged_member_is_named(tmp_path: Path, cache: Path):
    path = c.in_zip(zipfile.ZIP_STORED)(tmp_path)
    path.write_bytes(path.read_bytes().replace(c.SAMPLES[0].data, c.SAMPLES[0].data[::-1], 1))
    assert_refused(path, cache, r"member photos/train/cat/0\.png: is damaged or cut off \(Bad CRC-32")
    path = zip_with(tmp_path / "a", "x.jpg", content=bytes(1 << 20))
    declared = struct.pack("<I", 1 << 20)
    path.write_bytes(struct.pack("<I", 100).join(path.read_bytes().rsplit(declared, 1)))
    assert_refused(path, cache, r"member x\.jpg: is damaged or cut off")
