"""Writers of every format from one set of images, each a second implementation of what the readers parse."""

import gzip
import io
import json
import struct
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from flatout.data.decode import decode_image

CLASSES = ("cat", "dog", "owl")
SIZE = 32


@dataclass(frozen=True)
class Sample:
    """One image: its split, class, file name and encoded bytes."""

    split: str
    label: int
    name: str
    data: bytes

    @property
    def class_name(self) -> str:
        return CLASSES[self.label]

    @property
    def pixels(self) -> np.ndarray:
        return decode_image(self.data, size=SIZE, channels=3, resize="stretch")


def make_samples() -> list[Sample]:
    """Return train and test images, JPEG and PNG, in the order of class folders."""
    rng = np.random.default_rng(0)
    samples = []
    for split, count in (("train", 5), ("test", 3)):
        for label in range(len(CLASSES)):
            for i in range(count):
                stream = io.BytesIO()
                suffix = ("jpg", "png")[i % 2]
                image = Image.fromarray(rng.integers(0, 256, (SIZE, SIZE, 3), np.uint8))
                image.save(stream, {"jpg": "JPEG", "png": "PNG"}[suffix])
                samples.append(Sample(split, label, f"{i:03}.{suffix}", stream.getvalue()))
    return samples


SAMPLES = make_samples()
BY_SPLIT = {split: [sample for sample in SAMPLES if sample.split == split] for split in ("train", "test")}


def write(path: Path, content: str | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)


def class_folders(folder: Path) -> Path:
    for sample in SAMPLES:
        write(folder / "photos" / sample.split / sample.class_name / sample.name, sample.data)
    return folder / "photos"


def class_ids(folder: Path) -> Path:
    """Class folders named by ids, with a class list of ids and names."""
    for sample in SAMPLES:
        write(folder / "photos" / sample.split / f"n{sample.label:04}" / sample.name, sample.data)
    lines = [f"n{label:04} {name}" for label, name in enumerate(CLASSES)]
    write(folder / "names.txt", "\n".join(lines))
    return folder / "photos"


def in_tar(mode: str, write_inside: Callable[[Path], Path] = class_folders) -> Callable[[Path], Path]:
    def build(folder: Path) -> Path:
        inside = write_inside(folder / "inside")
        path = folder / ("set.tar" + mode.replace("w:", ".").replace("w", ""))
        with tarfile.open(path, mode) as archive:  # pyright: ignore[reportCallIssue, reportArgumentType]
            archive.add(inside, "set" if inside.is_dir() else inside.name)
        return path

    return build


def in_zip(method: int, write_inside: Callable[[Path], Path] = class_folders) -> Callable[[Path], Path]:
    def build(folder: Path) -> Path:
        inside = write_inside(folder / "inside")
        with zipfile.ZipFile(folder / "set.zip", "w", method) as archive:
            for file in sorted(inside.rglob("*")) if inside.is_dir() else [inside]:
                archive.write(file, file.relative_to(inside.parent))
        return folder / "set.zip"

    return build


def csv_files(folder: Path) -> Path:
    for split, samples in BY_SPLIT.items():
        rows = ["id;who;class;file"]
        for i, sample in enumerate(samples):
            write(folder / "pictures" / f"{split}{i:03}-{sample.name}", sample.data)
            rows.append(f"{i};me;{sample.class_name};pictures\\{split}{i:03}-{sample.name}")
        write(folder / f"{split}.csv", "\n".join(rows))
    return folder


def metadata(name: str) -> Callable[[Path], Path]:
    """Hugging Face image folders."""

    def build(folder: Path) -> Path:
        for split, samples in BY_SPLIT.items():
            rows = []
            for i, sample in enumerate(samples):
                write(folder / split / f"{i:03}-{sample.name}", sample.data)
                rows.append({"file_name": f"{i:03}-{sample.name}", "label": sample.class_name})
            if name == "metadata.jsonl":
                text = "\n".join(map(json.dumps, rows))
            else:
                text = "\n".join(["file_name,label", *(",".join(row.values()) for row in rows)])
            write(folder / split / name, text)
        return folder

    return build


def paddle_lists(folder: Path) -> Path:
    for split, samples in BY_SPLIT.items():
        lines = []
        for i, sample in enumerate(samples):
            write(folder / "jpg" / split / f"{i:03} {sample.name}", sample.data)
            lines.append(f"jpg/{split}/{i:03} {sample.name} {sample.label}\n")
        write(folder / f"{split}_list.txt", "".join(lines))
    write(folder / "label_list.txt", "".join(f"{label} {name}\n" for label, name in enumerate(CLASSES)))
    return folder


def named_files(folder: Path) -> Path:
    for split, samples in BY_SPLIT.items():
        for i, sample in enumerate(samples):
            write(folder / split / f"{sample.class_name}.{i:03}.{sample.name}", sample.data)
    return folder


def add_member(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


def webdataset(label: str) -> Callable[[Path], Path]:
    """Shards of eight samples, with the class as `.cls` or in `.json`."""

    def build(folder: Path) -> Path:
        for split, samples in BY_SPLIT.items():
            for shard in range(0, len(samples), 8):
                with tarfile.open(folder / f"{split}-{shard // 8:06}.tar", "w") as archive:
                    for i, sample in enumerate(samples[shard : shard + 8], start=shard):
                        number, text = str(sample.label).encode(), json.dumps({"label": sample.label, "x": [1]})
                        add_member(archive, f"{i:06}.{label}", number if label == "cls" else text.encode())
                        add_member(archive, f"{i:06}.{sample.name[-3:]}", sample.data)
                        add_member(archive, f"{i:06}.txt", b"a caption")
        write(folder / "classes.txt", "\n".join(CLASSES))
        return folder

    return build


# TFRecord: https://www.tensorflow.org/tutorials/load_data/tfrecord


def crc32c(data: bytes) -> int:
    """Return the CRC-32C (Castagnoli), bit by bit."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def masked(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def tf_record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + masked(length) + data + masked(data)


def varint(number: int) -> bytes:
    number &= (1 << 64) - 1
    content = b""
    while number > 0x7F:
        content += bytes([number & 0x7F | 0x80])
        number >>= 7
    return content + bytes([number])


def field(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def example(features: dict[str, bytes | int]) -> bytes:
    """Return a serialised tf.train.Example."""
    entries = b""
    for name, value in features.items():
        kind, values = (1, field(1, value)) if isinstance(value, bytes) else (3, field(1, varint(value)))
        entries += field(1, field(1, name.encode()) + field(2, field(kind, values)))
    return field(1, entries)


def tf_encoded(sample: Sample) -> dict[str, bytes | int]:
    """As Slim writes it: labels from 1, and their texts."""
    return {
        "image/class/label": sample.label + 1,
        "image/class/text": sample.class_name.encode(),
        "image/encoded": sample.data,
        "image/height": SIZE,
        "image/width": SIZE,
    }


def tf_records(folder: Path) -> Path:
    for split, samples in BY_SPLIT.items():
        for shard in range(2):
            half = samples[: len(samples) // 2] if shard == 0 else samples[len(samples) // 2 :]
            content = b"".join(tf_record(example(tf_encoded(sample))) for sample in half)
            write(folder / f"{split}-{shard:05}-of-00002", content)
    write(folder / "labels.txt", "\n".join(f"{label}:{name}" for label, name in enumerate(CLASSES, start=1)))
    return folder


def tf_texts(folder: Path) -> Path:
    tf_records(folder)
    (folder / "labels.txt").unlink()
    return folder


def huggingface_features() -> dict[str, object]:
    return {"image": {"_type": "Image"}, "label": {"names": list(CLASSES), "_type": "ClassLabel"}}


def table_of(samples: list[Sample]):
    import pyarrow

    image = pyarrow.array(
        [{"bytes": sample.data, "path": sample.name} for sample in samples],
        pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())]),
    )
    table = pyarrow.table({"image": image, "label": pyarrow.array([sample.label for sample in samples])})
    about = json.dumps({"info": {"features": huggingface_features()}})
    return table.replace_schema_metadata({"huggingface": about})


def parquet(folder: Path) -> Path:
    import pyarrow.parquet

    (folder / "data").mkdir()
    for split, samples in BY_SPLIT.items():
        pyarrow.parquet.write_table(
            table_of(samples), folder / "data" / f"{split}-00000-of-00001.parquet", row_group_size=4
        )
    return folder


def plain_parquet(folder: Path) -> Path:
    """Columns of bytes and text, without the metadata of Hugging Face."""
    import pyarrow
    import pyarrow.parquet

    folder.mkdir(exist_ok=True)
    for split, samples in BY_SPLIT.items():
        columns = {"jpg": [s.data for s in samples], "n": range(len(samples)), "class": [s.class_name for s in samples]}
        pyarrow.parquet.write_table(pyarrow.table(columns), folder / f"{split}.parquet")
    return folder


def saved_dataset(folder: Path) -> Path:
    """As `DatasetDict.save_to_disk` writes it."""
    import pyarrow

    write(folder / "dataset_dict.json", json.dumps({"splits": list(BY_SPLIT)}))
    for split, samples in BY_SPLIT.items():
        names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
        write(folder / split / "dataset_info.json", json.dumps({"features": huggingface_features()}))
        write(folder / split / "state.json", json.dumps({"_data_files": [{"filename": name} for name in names]}))
        for name, half in zip(names, (samples[:4], samples[4:]), strict=True):
            table = table_of(half)
            with pyarrow.ipc.new_stream(str(folder / split / name), table.schema) as writer:
                writer.write_table(table, max_chunksize=3)
    return folder


def arrays() -> dict[str, np.ndarray]:
    return {
        f"{role}_{split}": np.stack([sample.pixels for sample in samples])
        if role == "x"
        else np.array([sample.label for sample in samples])
        for split, samples in BY_SPLIT.items()
        for role in ("x", "y")
    }


def npz(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    np.savez_compressed(folder / "set.npz", **arrays())  # pyright: ignore[reportArgumentType]
    write(folder / "classes.txt", "\n".join(CLASSES))
    return folder / "set.npz"


def npy(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    for name, array in arrays().items():
        np.save(folder / f"{name}.npy", array)
    write(folder / "classes.txt", "\n".join(CLASSES))
    return folder


def idx(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    for name, array in arrays().items():
        role = "images" if name[0] == "x" else "labels"
        header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
        content = gzip.compress(header + array.astype(np.uint8).tobytes())
        write(folder / f"{name[2:]}-{role}-idx{array.ndim}-ubyte.gz", content)
    write(folder / "classes.txt", "\n".join(CLASSES))
    return folder


def cifar(label: Callable[[int], list[int]], names: dict[str, list[str]], class_list: str) -> Callable[[Path], Path]:
    def build(folder: Path) -> Path:
        for file in (file for files in names.values() for file in files):
            split = "test" if "test" in file else "train"
            number, count = names[split].index(file), len(names[split])
            size = len(BY_SPLIT[split]) // count
            samples = BY_SPLIT[split][number * size : None if number + 1 == count else (number + 1) * size]
            content = b"".join(bytes(label(s.label)) + s.pixels.transpose(2, 0, 1).tobytes() for s in samples)
            write(folder / file, content)
        write(folder / class_list, "\n".join(CLASSES) + "\n\n")
        return folder

    return build


cifar10 = cifar(
    lambda label: [label],
    {"train": ["data_batch_1.bin", "data_batch_2.bin"], "test": ["test_batch.bin"]},
    "batches.meta.txt",
)
cifar100 = cifar(lambda label: [9, label], {"train": ["train.bin"], "test": ["test.bin"]}, "fine_label_names.txt")
