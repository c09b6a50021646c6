"""Pack the images of class folders from the folders and from containers, alternately in one go; prints JSON.

    python benchmarks/formats.py FOLDER [--size 128] [--repeats 5] [--out FILE]

The containers hold the same files and are written into a temporary folder first. A rate covers everything from the path
to the finished pack. Rates are medians over the repeats; ratios are medians of the ratios within a repeat. Those of CPU
time (a folder's over a container's) hold on a busy machine too, but do not show what runs on one core only.
"""

import functools
import io
import json
import shutil
import statistics
import struct
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import google_crc32c
import pyarrow
import pyarrow.parquet

from common import about, image_files, in_turn, make_parser, median_ratio, write
from flatout.data.build import build_pack
from flatout.data.detect import recognise
from flatout.data.pack import PackSettings
from flatout.utils.console import Console

Images = list[tuple[str, Path]]


def write_folder(images: Images, out: Path) -> Path:
    for i, (name, file) in enumerate(images):
        (out / "photos" / name).mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, out / "photos" / name / f"{i:08}{file.suffix}")
    return out / "photos"


def write_tar(images: Images, out: Path, mode: str = "w") -> Path:
    path = out / f"photos.tar{mode.replace('w:', '.').removeprefix('w')}"
    with tarfile.open(path, mode) as archive:  # pyright: ignore[reportCallIssue, reportArgumentType]
        for i, (name, file) in enumerate(images):
            archive.add(file, f"{name}/{i:08}{file.suffix}")
    return path


def write_zip(images: Images, out: Path, method: int) -> Path:
    path = out / "photos.zip"
    with zipfile.ZipFile(path, "w", method) as archive:
        for i, (name, file) in enumerate(images):
            archive.write(file, f"{name}/{i:08}{file.suffix}")
    return path


def write_webdataset(images: Images, out: Path) -> Path:
    for start in range(0, len(images), 1000):
        with tarfile.open(out / f"train-{start // 1000:06}.tar", "w") as archive:
            for i, (name, file) in enumerate(images[start : start + 1000], start):
                for suffix, content in ((".cls", name.encode()), (file.suffix, file.read_bytes())):
                    member = tarfile.TarInfo(f"{i:08}{suffix}")
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))
    return out


def write_tfrecord(images: Images, out: Path) -> Path:
    def varint(number: int) -> bytes:
        return bytes([number]) if number < 128 else bytes([number & 127 | 128]) + varint(number >> 7)

    def field(number: int, content: bytes) -> bytes:
        return bytes([number << 3 | 2]) + varint(len(content)) + content

    def masked(data: bytes) -> bytes:
        crc = google_crc32c.value(data)
        return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)

    with (out / "train-00000-of-00001").open("wb") as records:
        for name, file in images:
            pairs = ((b"image/encoded", file.read_bytes()), (b"label", name.encode()))
            entries = (field(1, field(1, key) + field(2, field(1, field(1, value)))) for key, value in pairs)
            data, length = field(1, b"".join(entries)), b""
            length = struct.pack("<Q", len(data))
            records.write(length + masked(length) + data + masked(data))
    return out


def write_parquet(images: Images, out: Path) -> Path:
    cells = [{"bytes": file.read_bytes(), "path": file.name} for _, file in images]
    table = pyarrow.table({"image": cells, "label": [name for name, _ in images]})
    pyarrow.parquet.write_table(table, out / "train.parquet", row_group_size=100)
    return out


WRITERS: dict[str, Callable[[Images, Path], Path]] = {
    "folder": write_folder,
    "tar": write_tar,
    "tar.gz": lambda images, out: write_tar(images, out, "w:gz"),
    "zip, stored": lambda images, out: write_zip(images, out, zipfile.ZIP_STORED),
    "zip, deflated": lambda images, out: write_zip(images, out, zipfile.ZIP_DEFLATED),
    "WebDataset": write_webdataset,
    "TFRecord": write_tfrecord,
    "Parquet": write_parquet,
}


def pack(data: Path, settings: PackSettings, out: Path) -> tuple[float, float, str]:
    """Return images per second, images per second of CPU time, and the pack's fingerprint."""
    start, start_cpu = time.perf_counter(), time.process_time()
    made = build_pack(recognise(data), settings, out, Console())
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - start_cpu
    shutil.rmtree(out)
    return len(made.labels) / seconds, len(made.labels) / cpu_seconds, made.fingerprint


def main() -> None:
    parser = make_parser(__doc__, "formats")
    parser.add_argument("folder", type=Path, help="a folder of class folders")
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--images", type=int, default=2000, help="how many files at most")
    arguments = parser.parse_args()
    found = image_files(arguments.folder, ".jpg", ".jpeg", ".png")
    found = found[:: -(-len(found) // arguments.images)]
    images = [(file.parent.name, file) for file in sorted(found, key=lambda file: (file.parent.name, file))]
    settings = PackSettings(size=arguments.size, channels=3, resize="squash", on_bad_image="stop", max_bad_share=0.0)
    with tempfile.TemporaryDirectory(prefix="flatout-formats-") as folder:
        data = {}
        for i, (name, write_data) in enumerate(WRITERS.items()):
            (Path(folder) / str(i)).mkdir()
            data[name] = write_data(images, Path(folder) / str(i))
        made = {name: functools.partial(pack, path, settings, Path(folder) / "pack") for name, path in data.items()}
        fingerprints = {name: one()[2] for name, one in made.items()}
        assert len(set(fingerprints.values())) == 1, fingerprints
        rates = in_turn(made, arguments.repeats)

    def over_folder(of: int) -> dict[str, float]:
        values = {name: [one[:2][of] for one in packs] for name, packs in rates.items()}
        return {name: round(median_ratio(own, values["folder"]), 3) for name, own in values.items()}

    result = {
        **about("flatout", "torch", "numpy", "pillow", "simplejpeg", "pyarrow"),
        "images": len(images),
        "mean_kilobytes": round(statistics.mean(file.stat().st_size for _, file in images) / 1000, 1),
        "size": arguments.size,
        "repeats": arguments.repeats,
        "images_per_second": {name: round(statistics.median(one[0] for one in some)) for name, some in rates.items()},
        "over_folder": over_folder(0),
        "over_folder_in_cpu_time": over_folder(1),
    }
    write(result, arguments.out)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
