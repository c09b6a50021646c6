"""Damaged and hostile files: each gives tensors or one message that names it, and nothing is run or followed."""

import json
import os
import pickle
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from flatout.models.convert.readers import find_file, read_file
from flatout.utils.errors import InputError
from tests.convert.networks import FIXTURES
from tests.data.test_fuzz import read_damaged

SECRET = np.arange(6.0, dtype=np.float32)


class Call:
    """Pickles to a call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self._call


# --- damage of every kind ---


@pytest.mark.parametrize(
    "name",
    [
        *("paddle-small.pdparams", "paddle-small-protocol2.pdparams"),
        *("tf-small-objects/ckpt-1.index", "tf-small-objects/ckpt-1.data-00000-of-00001"),
        *("torch-small.pth", "torch-small-legacy.pt", "torch-small.ckpt", "torch-small.safetensors"),
    ],
)
def test_damaged_bytes(name: str, tmp_path: Path):
    """Not of HDF5: its library may crash on them."""
    source = FIXTURES / name
    file = tmp_path / source.name
    if "/" in name:
        shutil.copytree(source.parent, tmp_path, dirs_exist_ok=True)

    def read(content: bytes) -> None:
        file.write_bytes(content)
        try:
            assert read_file(find_file(file)).tensors
        except InputError as error:
            assert str(tmp_path) in str(error)
            assert "\n" not in str(error)
            assert len(str(error)) < 1000

    read_damaged(100, source.read_bytes(), read)


@pytest.mark.parametrize("name", ["keras2-small.h5", "keras-small.weights.h5", "keras-small.keras"])
def test_files_of_keras_that_are_cut_off(name: str, tmp_path: Path):
    content = (FIXTURES / name).read_bytes()
    for share in (0, 0.01, 0.2, 0.5, 0.9):
        (tmp_path / name).write_bytes(content[: int(share * len(content))])
        with pytest.raises(InputError, match=rf"{name}: cannot be read as a Keras model"):
            read_file(tmp_path / name)


# --- pickles ---


def pickled(module: str, name: str, arguments: bytes = b")", build: bytes = b"") -> bytes:
    """Return `{"w": module.name(*arguments)}` in protocol 4, in which names may have dots."""
    names = b"".join(b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, name))
    return b"\x80\x04}\x8c\x01w" + names + b"\x93" + arguments + b"R" + build + b"s."


def with_length(code: bytes, size: int) -> bytes:
    """Return a pickle with an instruction for 2**31 or 2**40 bytes, or entries of the memo."""
    return b"\x80\x04}" + code + struct.pack("<Q" if size == 8 else "<I", 2 ** (40 if size == 8 else 31)) + b"."


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (pickled("os", "getcwd"), r"code \(os\.getcwd\)"),
        (pickled("builtins", "eval", b"\x8c\x041+1 \x85"), r"code \(builtins\.eval\)"),
        # Through an admitted module, by a dotted name.
        (pickled("numpy", "core.multiarray.os.system", b"\x8c\x04true\x85"), r"code \(numpy\.core\.multiarray"),
        (pickled("numpy.core.multiarray", "_reconstruct.__globals__"), r"code \(numpy\.core\.multiarray"),
        (pickle.dumps({"w": np.array([{}], object)}, 4), "an array of type"),
        (pickle.dumps({"w": 1}), "holds no parameters"),
        (b"", "cannot be read"),
        *((with_length(code, size), "cannot be read") for code, size in ((b"\x8d", 8), (b"\x8e", 8), (b"r", 4))),
    ],
)
def test_pickles_that_are_more_than_arrays(content: bytes, reason: str, tmp_path: Path):
    (tmp_path / "a.pdparams").write_bytes(content)
    with pytest.raises(InputError, match=rf"a\.pdparams: .*{reason}"):
        read_file(tmp_path / "a.pdparams")


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_arrays_of_every_protocol_and_type(protocol: int, tmp_path: Path):
    rng = np.random.default_rng(0)
    arrays = {
        f"layer{i}.weight": (100 * rng.normal(size=(2, 3))).astype(kind)
        for i, kind in enumerate(("f2", "<f4", ">f4", "f8", "i1", "i2", "i8", "u1", "u4", "?"))
    }
    arrays["fortran.weight"] = np.asfortranarray(rng.normal(size=(2, 3)))
    arrays["empty.weight"] = np.zeros((0, 3))
    arrays["one.weight"] = np.array(3.5)
    half = torch.tensor([1.5, -2.0]).bfloat16()
    uint16 = {"half.weight": half.view(torch.int16).numpy().view(np.uint16)}
    (tmp_path / "a.pdparams").write_bytes(pickle.dumps(arrays | uint16, protocol))
    read = read_file(tmp_path / "a.pdparams").tensors
    assert torch.equal(read.pop("half.weight"), half), "uint16 is Paddle's bfloat16"
    assert read.keys() == arrays.keys()
    assert all(np.array_equal(read[name].numpy(), array) for name, array in arrays.items())


def test_torch_files_with_code(tmp_path: Path):
    marker = tmp_path / "canary"
    for name, legacy in (("a.pt", False), ("a.ckpt", True)):
        content = {"state_dict": {"w": torch.zeros(1)}, "x": Call(os.mkdir, str(marker))}
        torch.save(content, tmp_path / name, _use_new_zipfile_serialization=not legacy)
        with pytest.raises(InputError, match=r"holds code \(\w+\.mkdir\)"):
            read_file(tmp_path / name)
    (tmp_path / "b.pt").write_bytes(pickle.dumps(Call(os.mkdir, str(marker)), 4))  # of which torch warns
    with pytest.raises(InputError, match=r"b\.pt: cannot be read as a torch checkpoint \(UnpicklingError\)"):
        read_file(tmp_path / "b.pt")
    assert not marker.exists()
    torch.save({"epoch": 3, "loss": 0.5}, tmp_path / "c.pt")
    with pytest.raises(InputError, match=r"c\.pt: holds no state dict.*\['epoch', 'loss'\]"):
        read_file(tmp_path / "c.pt")


# --- HDF5 and zip files ---


def external_numbers(group: h5py.Group) -> None:
    group.create_dataset("0", (6,), "f4", external=[("secret.bin", 0, 24)])


def virtual_numbers(group: h5py.Group) -> None:
    layout = h5py.VirtualLayout((6,), "f4")
    layout[:] = h5py.VirtualSource("secret.h5", "numbers", (6,))
    group.create_virtual_dataset("0", layout)


def listed_names(group: h5py.Group) -> None:
    file = group.file
    file.attrs["layer_names"] = np.array([b"dense"])
    file.create_group("dense").attrs["weight_names"] = np.array([b"out/kernel:0"])
    file["dense/out"] = h5py.ExternalLink("secret.h5", "/")


@pytest.mark.parametrize(
    ("fill", "reason"),
    [
        (lambda group: group.__setitem__("0", h5py.ExternalLink("secret.h5", "numbers")), "holds no weights"),
        (lambda group: group.__setitem__("0", h5py.SoftLink("/layers")), "holds no weights"),
        (external_numbers, "must be plain numbers"),
        (virtual_numbers, "must be plain numbers"),
        (listed_names, "the weight 'dense/out/kernel:0' is missing"),
        (lambda group: group.create_dataset("0", data=np.zeros((9, 9)), compression="gzip"), "must be plain numbers"),
        (lambda group: group.create_dataset("0", data=["text"]), "must be plain numbers"),
        (lambda group: group.create_dataset("0", (2**20, 2**20), "f4", chunks=(2**10, 2**10)), "more numbers than"),
    ],
)
def test_hdf5_files_that_lead_elsewhere(
    fill: Callable[[h5py.Group], None], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    SECRET.tofile("secret.bin")
    with h5py.File("secret.h5", "w") as file:
        file["numbers"] = SECRET
    with h5py.File("a.weights.h5", "w") as file:
        fill(file.create_group("layers/dense/vars"))
    with pytest.raises(InputError, match=rf"a\.weights\.h5: .*{reason}"):
        read_file(Path("a.weights.h5"))


def test_descriptions_are_not_trusted(tmp_path: Path):
    """Lambda layers are not looked at."""
    with zipfile.ZipFile(FIXTURES / "keras-small.keras") as archive:
        text, weights = archive.read("config.json"), archive.read("model.weights.h5")
    marker, config = tmp_path / "canary", json.loads(text)
    code = {"class_name": "__lambda__", "config": {"code": f"open({str(marker)!r}, 'w')", "defaults": None}}
    layer = {"module": "keras.layers", "class_name": "Lambda", "config": {"name": "lambda", "function": code}}
    config["config"]["layers"].append(layer)
    for name, description in (("a.keras", json.dumps(config)), ("c.keras", "[" * 100_000)):
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            archive.writestr("config.json", description)
            archive.writestr("model.weights.h5", weights)
    assert read_file(tmp_path / "a.keras").tensors.keys() == read_file(FIXTURES / "keras-small.keras").tensors.keys()
    assert not marker.exists()
    with pytest.raises(InputError, match=r"c\.keras: cannot be read as a Keras model \(RecursionError\)"):
        read_file(tmp_path / "c.keras")


def test_files_that_unpack_to_more(tmp_path: Path):
    with zipfile.ZipFile(tmp_path / "a.keras", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("config.json", "{}")
        archive.writestr("model.weights.h5", bytes(50_000_000))
    with pytest.raises(InputError, match=r"a\.keras: model\.weights\.h5 unpacks to 50,000,000 bytes"):
        read_file(tmp_path / "a.keras")
    with zipfile.ZipFile(tmp_path / "a.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", bytes(1_000_000))
    with pytest.raises(InputError, match=r"a\.pt: its members are compressed"):
        read_file(tmp_path / "a.pt")
    torch.save({"w": torch.zeros(1).expand(2**20, 2**20)}, tmp_path / "c.pt")
    with pytest.raises(InputError, match=r"c\.pt: its tensors have more numbers than the file"):
        read_file(tmp_path / "c.pt")


# --- TensorFlow ---


@pytest.mark.parametrize(
    ("file", "change", "reason"),
    [
        ("ckpt-1.data-00000-of-00001", lambda content: content[:100], "it ends before"),
        ("ckpt-1.data-00000-of-00001", lambda content: content[:40] + b"\0\1\2\3" + content[44:], "the checksum of"),
        ("ckpt-1.data-00000-of-00001", None, r"cannot be read .*a checkpoint is the files ckpt-1\.\*"),
        ("ckpt-1.index", lambda content: content[:9] + b"x" + content[10:], "a checksum is wrong"),
    ],
)
def test_damaged_checkpoints(file: str, change: Callable[[bytes], bytes] | None, reason: str, tmp_path: Path):
    shutil.copytree(FIXTURES / "tf-small-objects", tmp_path / "saved")
    damaged = tmp_path / "saved" / file
    content = damaged.read_bytes()
    damaged.unlink()
    if change:
        damaged.write_bytes(change(content))
    with pytest.raises(InputError, match=reason):
        read_file(find_file(tmp_path / "saved"))
