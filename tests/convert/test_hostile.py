"""Files that are made to harm: each gives one message, and nothing is run, followed or taken."""

import io
import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from flatout.convert import keras_arrays

from flatout.errors import InputError
from flatout.models.convert.readers import find_file
from flatout.models.pretrained import read_file
from tests.convert.networks import FIXTURES

SECRET = np.arange(6.0, dtype=np.float32)


class Call:
    """What pickles to a call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self._call


def pickled(module: str, name: str, arguments: bytes = b")", build: bytes = b"") -> bytes:
    """Return `{"w": module.name(*arguments)}` in protocol 4, in which names may have dots."""
    names = b"".join(b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, name))
    return b"\x80\x04}\x8c\x01w" + names + b"\x93" + arguments + b"R" + build + b"s."


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (pickled("os", "getcwd"), r"code \(os\.getcwd\)"),
        (pickled("builtins", "eval", b"\x8c\x041+1 \x85"), r"code \(builtins\.eval\)"),
        # Through an admitted module, by a dotted name.
        (pickled("numpy", "core.multiarray.os.system", b"\x8c\x04true\x85"), r"code \(numpy\.core\.multiarray"),
        (pickled("numpy.core.multiarray", "_reconstruct.__globals__"), r"code \(numpy\.core\.multiarray"),
        (pickled("collections", "OrderedDict.__init__"), "code"),
        (pickled("numpy", "load"), r"code \(numpy\.load\)"),
        # State for what is no array.
        (pickled("collections", "OrderedDict", b")", b"}b"), "a state of its own"),
        (b"\x80\x02}U\x01wcnumpy\nndarray\n)\x81s.", "NEWOBJ"),
        (b"\x80\x02}U\x01wcnumpy\nndarray\n)Rs.", "known function"),
        (b"\x80\x02}U\x01wU\x01xQs.", "BINPERSID"),
        (b"\x80\x02}U\x01w\x82\x01s.", "EXT1"),
        # Keys that take for ever to hash.
        (b"\x80\x02}(" + b")" + b"q\x01h\x01\x86" * 40 + b"K\x01u.", "a key that is a tuple"),
        (pickle.dumps({"w": np.array([{}], object)}, 4), "an array of type"),
        (pickle.dumps({"w": np.array(["text"])}, 4), "an array of type"),
        (pickle.dumps({"w": np.zeros(3, "datetime64[s]")}, 4), "an array of type"),
        (pickle.dumps({"w": 1}), "holds no parameters"),
        (pickle.dumps([1]), "holds no parameters"),
        (pickle.dumps({"w": SECRET}, 4)[:-20], "cannot be read"),
        (b"", "it is empty"),
        (b".", "cannot be read"),
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
    (tmp_path / "a.pdparams").write_bytes(pickle.dumps(arrays, protocol))
    read = read_file(tmp_path / "a.pdparams").tensors
    assert read.keys() == arrays.keys()
    assert all(np.array_equal(read[name].numpy(), array) for name, array in arrays.items())


def test_large_parameters_in_parts_and_bfloat16(tmp_path: Path):
    """As Paddle splits what has more than 4 GB in protocols 2 and 3; its bfloat16 is NumPy's uint16."""
    whole = np.arange(12, dtype=np.float32).reshape(3, 4)
    content = {
        "fc.weight@@.0": whole.reshape(-1)[:5],
        "fc.weight@@.1": whole.reshape(-1)[5:],
        "UnpackBigParamInfor@@": {"fc.weight": {"OriginShape": (3, 4), "slices": ["fc.weight@@.0", "fc.weight@@.1"]}},
        "half.weight": torch.tensor([1.5, -2.0]).bfloat16().view(torch.int16).numpy().view(np.uint16),
    }
    (tmp_path / "a.pdparams").write_bytes(pickle.dumps(content, 2))
    read = read_file(tmp_path / "a.pdparams").tensors
    assert read.keys() == {"fc.weight", "half.weight"}
    assert np.array_equal(read["fc.weight"].numpy(), whole)
    assert read["half.weight"].dtype == torch.bfloat16
    assert read["half.weight"].tolist() == [1.5, -2.0]


def h5_of(path: Path, fill: Callable[[h5py.Group], None]) -> Path:
    """Write a `.weights.h5` whose layer has what `fill` puts into it."""
    with h5py.File(path, "w") as file:
        group = file.create_group("layers/dense/vars")
        fill(group)
    return path


def external_numbers(group: h5py.Group) -> None:
    group.create_dataset("0", (6,), "f4", external=[("secret.bin", 0, 24)])


def virtual_numbers(group: h5py.Group) -> None:
    layout = h5py.VirtualLayout((6,), "f4")
    layout[:] = h5py.VirtualSource("secret.h5", "numbers", (6,))
    group.create_virtual_dataset("0", layout)


def huge_numbers(group: h5py.Group) -> None:
    group.create_dataset("0", (2**20, 2**20), "f4", chunks=(2**10, 2**10))


def texts(group: h5py.Group) -> None:
    group.create_dataset("0", data=["text"])


def references(group: h5py.Group) -> None:
    group.create_dataset("0", data=[group.ref], dtype=h5py.ref_dtype)


@pytest.mark.parametrize(
    ("fill", "reason"),
    [
        (lambda group: group.__setitem__("0", h5py.ExternalLink("secret.h5", "numbers")), "is a link"),
        (lambda group: group.__setitem__("0", h5py.SoftLink("/layers")), "is a link"),
        (lambda group: group.__setitem__("0", h5py.SoftLink("/layers/dense")), "is a link"),
        (lambda group: group.parent.__setitem__("again", group.parent.parent), "too many or nested too deeply"),
        (external_numbers, "in another file"),
        (virtual_numbers, "in another file"),
        (huge_numbers, "more numbers than the file"),
        (lambda group: group.create_dataset("0", data=np.zeros((99, 99)), compression="gzip"), "is compressed"),
        (texts, "no array of numbers"),
        (references, "no array of numbers"),
        (lambda group: group.create_dataset("0", data=np.zeros(3, "c16")), "no array of numbers"),
        (lambda group: None, "holds no weights"),
    ],
)
def test_hdf5_files_that_lead_elsewhere(
    fill: Callable[[h5py.Group], None], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    SECRET.tofile("secret.bin")
    with h5py.File("secret.h5", "w") as file:
        file["numbers"] = SECRET
    with pytest.raises(InputError, match=rf"a\.weights\.h5: .*{reason}"):
        keras_arrays.read(h5_of(tmp_path / "a.weights.h5", fill))


def test_a_h5_file_whose_names_lead_out_of_it(tmp_path: Path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.attrs["layer_names"] = np.array([b"dense"])
        file.create_group("dense").attrs["weight_names"] = np.array([b"out/kernel:0"])
        file["dense/out"] = h5py.ExternalLink("secret.h5", "/")
    with pytest.raises(InputError, match=r"a\.h5: out is a link"):
        keras_arrays.read(tmp_path / "a.h5")


def test_lambda_layers_are_not_looked_at(tmp_path: Path):
    marker = tmp_path / "canary"
    code = {"class_name": "__lambda__", "config": {"code": f"open({str(marker)!r}, 'w')", "defaults": None}}
    layer = {"module": "keras.layers", "class_name": "Lambda", "config": {"name": "lambda", "function": code}}
    with zipfile.ZipFile(FIXTURES / "keras-small.keras") as old, zipfile.ZipFile(tmp_path / "a.keras", "w") as new:
        config = json.loads(old.read("config.json"))
        config["config"]["layers"].append(layer)
        new.writestr("config.json", json.dumps(config))
        new.writestr("model.weights.h5", old.read("model.weights.h5"))
    names = keras_arrays.read(FIXTURES / "keras-small.keras").arrays.keys()
    assert keras_arrays.read(tmp_path / "a.keras").arrays.keys() == names
    assert not marker.exists()


def test_zip_files_that_unpack_to_more(tmp_path: Path):
    with zipfile.ZipFile(tmp_path / "a.keras", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("config.json", "{}")
        archive.writestr("model.weights.h5", bytes(50_000_000))
    with pytest.raises(InputError, match=r"a\.keras: model\.weights\.h5 unpacks to 50,000,000 bytes"):
        keras_arrays.read(tmp_path / "a.keras")
    torch.save({"w": torch.zeros(1_000_000)}, tmp_path / "b.pt")
    with (
        zipfile.ZipFile(tmp_path / "b.pt") as old,
        zipfile.ZipFile(tmp_path / "a.pt", "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for info in old.infolist():
            new.writestr(info.filename, old.read(info))
    with pytest.raises(InputError, match=r"a\.pt: its members are compressed"):
        read_file(tmp_path / "a.pt")


def test_a_tensor_that_repeats_one_number(tmp_path: Path):
    torch.save({"w": torch.zeros(1).expand(2**20, 2**20)}, tmp_path / "a.pt")
    with pytest.raises(InputError, match=r"a\.pt: its tensors have more numbers than the file"):
        read_file(tmp_path / "a.pt")


def test_a_deeply_nested_description(tmp_path: Path):
    with zipfile.ZipFile(FIXTURES / "keras-small.keras") as old, zipfile.ZipFile(tmp_path / "a.keras", "w") as new:
        new.writestr("config.json", "[" * 100_000)
        new.writestr("model.weights.h5", old.read("model.weights.h5"))
    with pytest.raises(InputError, match=r"a\.keras: .*config\.json is no JSON"):
        keras_arrays.read(tmp_path / "a.keras")


@pytest.mark.parametrize(
    ("file", "change", "reason"),
    [
        ("ckpt-1.data-00000-of-00001", lambda content: content[:100], "it ends before"),
        ("ckpt-1.data-00000-of-00001", lambda content: content[:40] + b"\0\1\2\3" + content[44:], "the checksum of"),
        ("ckpt-1.index", lambda content: content[:9] + b"x" + content[10:], "a checksum is wrong"),
        ("ckpt-1.index", lambda content: content[:100], "does not end as one"),
    ],
)
def test_damaged_checkpoints(file: str, change: Callable[[bytes], bytes], reason: str, tmp_path: Path):
    shutil.copytree(FIXTURES / "tf-small-objects", tmp_path / "saved")
    damaged = tmp_path / "saved" / file
    damaged.write_bytes(change(damaged.read_bytes()))
    with pytest.raises(InputError, match=reason):
        read_file(find_file(tmp_path / "saved"))


def test_a_checkpoint_without_its_data(tmp_path: Path):
    shutil.copy(FIXTURES / "tf-small-objects" / "ckpt-1.index", tmp_path)
    with pytest.raises(InputError, match=r"data-00000-of-00001: cannot be read .*a checkpoint is the files ckpt-1\.\*"):
        read_file(tmp_path / "ckpt-1.index")


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


def test_numbers_of_a_description_are_not_trusted(tmp_path: Path):
    stream = io.BytesIO()
    with zipfile.ZipFile(FIXTURES / "keras-small.keras") as old, zipfile.ZipFile(stream, "w") as new:
        text = old.read("config.json").decode().replace('"epsilon": 0.001', '"epsilon": 1e400')
        new.writestr("config.json", text.replace("[null, 12, 12, 3]", "[null, -1, true, 1e30]"))
        new.writestr("model.weights.h5", old.read("model.weights.h5"))
    (tmp_path / "a.keras").write_bytes(stream.getvalue())
    read = keras_arrays.read(tmp_path / "a.keras")
    assert read.image is None
    assert not read.epsilons


def test_files_of_keras_are_read_in_a_process_of_their_own():
    expected = keras_arrays.read(FIXTURES / "keras-small.keras").arrays
    found = read_file(FIXTURES / "keras-small.keras").tensors
    assert list(found) == list(expected)
    assert all(np.array_equal(found[name].numpy(), array) for name, array in expected.items())


@pytest.mark.parametrize(("end", "reason"), [("SIGSEGV", "crashes on it"), ("SIGKILL", "does not end on it")])
def test_a_file_on_which_hdf5_ends_its_process(end: str, reason: str, monkeypatch: pytest.MonkeyPatch):
    """Whatever the library does, the command goes on: here, the process that reads is ended by a signal."""
    monkeypatch.setattr("flatout.convert.keras_files._CODE", f"import os, signal; os.kill(os.getpid(), signal.{end})")
    with pytest.raises(InputError, match=rf"keras-small\.h5: cannot be read as a file of Keras \(HDF5 {reason}\)"):
        read_file(FIXTURES / "keras-small.h5")
