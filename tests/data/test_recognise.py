"""What a path is taken for, and what is refused before anything is read."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from flatout.data.detect import from_python, is_pack, recognise
from flatout.errors import InputError
from flatout.recipe import Data


def write_image(path: Path, value: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", (4, 4), value).save(path)


@pytest.mark.parametrize(
    ("name", "kind", "counts", "classes", "has_inputs"),
    [
        ("caltech101", "CSV manifest", {"train": 2848, "valid": 944, "test": 930}, 101, False),
        ("cats-dogs", "class folders", {"train": 1200, "test": 400}, 2, False),
        ("oct", "class folders", {"train": 142, "test": 46}, 2, False),
        ("fashion-mnist", "IDX files", {"train": 60000, "test": 10000}, 10, True),
        ("mnist", "IDX files", {"train": 60000, "test": 10000}, 10, True),
    ],
)
def test_real_data(shared_data: Path, name, kind, counts, classes, has_inputs):
    found = recognise(shared_data / name)
    source = found.read()
    assert (found.kind, source.kind) == (kind, kind)
    assert {split: stop - start for split, (start, stop) in source.splits.items()} == counts
    assert len(source.classes) == classes
    assert bool(found.inputs) == has_inputs
    if source.files is not None:
        assert all(isinstance(path, Path) and path.is_file() for path in source.files)


def test_real_caltech_has_its_class_names(shared_data: Path):
    source = recognise(shared_data / "caltech101").read()
    assert source.files is not None
    # The files lie in folders named after the classes, which the reader does not look at.
    assert all(
        Path(str(path)).parent.name == source.classes[label]
        for path, label in zip(source.files, source.labels, strict=True)
    )


def test_digits_need_no_file():
    source = recognise(Path("sklearn:digits")).read()
    assert source.images is not None
    assert source.images.shape == (1797, 8, 8, 1)
    assert (source.images.min(), source.images.max()) == (0, 255)
    assert source.splits == {"train": (0, 1797)}
    assert source.classes == tuple("0123456789")


def test_nothing_there(tmp_path: Path):
    with pytest.raises(InputError, match=r"missing: there is no such file"):
        recognise(tmp_path / "missing")


def test_empty_folder_and_empty_file(tmp_path: Path):
    (tmp_path / ".DS_Store").touch()
    with pytest.raises(InputError, match="is an empty folder"):
        recognise(tmp_path)
    (tmp_path / "a.csv").touch()
    with pytest.raises(InputError, match="is an empty file"):
        recognise(tmp_path / "a.csv")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("notes.md", "nothing recognisable; flatout reads a folder for each class"),
        ("train/a.txt", "nothing recognisable; flatout reads a folder for each class"),
        ("train/a.png", "holds images but nothing that names their classes; sort them"),
        ("photo.png", "holds images but nothing that names their classes; sort them"),
        ("photos.zip", r"holds the archive photos\.zip; give its path, or unpack it"),
        ("photos.tar.gz", r"holds the archive photos\.tar\.gz; give its path, or unpack it"),
    ],
)
def test_what_cannot_be_trained_on_is_named_with_the_way_out(tmp_path: Path, name: str, message: str):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("x")
    with pytest.raises(InputError, match=message):
        recognise(tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [("a.rar", "is an archive; unpack it"), ("a.png", "is a single image"), ("a.bin", "nothing recognisable")],
)
def test_file_of_unknown_kind(tmp_path: Path, name: str, message: str):
    (tmp_path / name).write_text("x")
    with pytest.raises(InputError, match=message):
        recognise(tmp_path / name)


def test_file_of_an_idx_set_points_to_the_folder(shared_data: Path):
    with pytest.raises(InputError, match="give its folder"):
        recognise(shared_data / "mnist" / "train-images-idx3-ubyte.gz")


def test_pack_is_told_from_arrays(tmp_path: Path):
    np.save(tmp_path / "images.npy", np.zeros((2, 4, 4), np.uint8))
    np.save(tmp_path / "labels.npy", np.arange(2))
    assert recognise(tmp_path).kind == "NumPy arrays"
    (tmp_path / "pack.json").write_text("{}")
    assert is_pack(tmp_path)
    found = recognise(tmp_path)
    assert (found.kind, found.inputs) == ("pack", ())


def test_manifest_beside_one_folder_of_images_wins(tmp_path: Path):
    for name in ("a", "b"):
        write_image(tmp_path / "images" / f"{name}.png")
    (tmp_path / "labels.csv").write_text("images/a.png,x\nimages/b.png,y\n")
    assert recognise(tmp_path).kind == "CSV manifest"


def test_csv_of_something_else_beside_class_folders_is_ignored(tmp_path: Path):
    write_image(tmp_path / "cats" / "a.png")
    write_image(tmp_path / "dogs" / "b.png")
    (tmp_path / "weights.csv").write_text("animal,kg\ncat,4\n")
    found = recognise(tmp_path)
    assert found.kind == "class folders"
    assert found.read().notes == ("ignored files that are no images: 1 (.csv 1)",)


def test_class_list_must_exist(tmp_path: Path):
    write_image(tmp_path / "cats" / "a.png")
    with pytest.raises(InputError, match=r"names\.txt: no such class list"):
        recognise(tmp_path, Data(classes=str(tmp_path / "names.txt")))


class Items:
    """A map-style data set of two items."""

    def __len__(self):
        return 2

    def __getitem__(self, i):
        return np.full((4, 4), i * 0.5, np.float32), i


def test_from_python_tells_arrays_from_data_sets():
    images, labels = np.zeros((2, 4, 4), np.uint8), [0, 1]
    assert from_python((images, labels)).kind == "arrays"
    assert from_python({"train": (images, labels), "test": (images, labels)}).kind == "arrays"
    assert from_python(((images, labels), (images, labels))).splits == {"train": (0, 2), "test": (2, 4)}
    assert from_python(Items()).kind == "torch data sets"
    assert from_python((Items(), Items())).splits == {"train": (0, 2), "test": (2, 4)}
    assert from_python([(images[0], 0), (images[1], 1)]).kind == "torch data sets"


@pytest.mark.parametrize("data", [3, None, "text", (1, 2), {}, {"train": 3}, np.zeros((2, 4, 4))])
def test_from_python_refuses_the_rest(data):
    with pytest.raises(InputError, match="data"):
        from_python(data)
