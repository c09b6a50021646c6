"""Files written by Paddle, TensorFlow, Keras, torch and Lightning (`fixtures/make_fixtures.py`) give their logits."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from flatout.models.build import build_model
from flatout.models.convert.convert import Shape, convert
from flatout.models.convert.readers import find_file
from flatout.models.pretrained import load_pretrained
from flatout.models.weights import read_weights
from flatout.recipe import Recipe
from tests.convert.networks import FIXTURES, MODELS

pytestmark = pytest.mark.usefixtures("keras_in_this_process")
NAME = re.compile(r"(?P<net>\w+?-(?P<model>small|fashion-cnn|keras-resnet))(?P<form>.*)")
FILES = sorted(
    path.name
    for path in FIXTURES.iterdir()
    if path.suffix not in (".npz", ".py") and not path.name.startswith(("_", "."))
)


def matched(name: str) -> re.Match[str]:
    match = NAME.fullmatch(name)
    assert match, name
    return match


def test_every_format_has_fixtures():
    forms = {matched(name)["form"] for name in FILES}
    wanted = {
        ".pdparams",
        "-protocol2.pdparams",
        "-nested.pdparams",
        "-checkpoint",
        "-estimator",
        "-objects",
        "-saved",
        "-exported",
    }
    assert forms >= wanted | {".h5", "-weights.h5", ".weights.h5", ".keras", ".pth", ".ckpt", ".safetensors"}


@pytest.mark.parametrize("name", FILES)
def test_a_converted_file_gives_the_frameworks_logits(name: str, tmp_path: Path):
    match, said = matched(name), list[str]()
    answers = FIXTURES / f"{match['net']}.npz"
    out = tmp_path / "weights.safetensors"
    options = {"mapping": None, "check": answers, "epsilon": None, "report": said.append}
    result = convert(FIXTURES / name, MODELS[match["model"]], out, shape=Shape(), **options)  # pyright: ignore
    assert result["difference"] < 1e-5
    assert said
    # The file alone, in a fresh model.
    arrays = np.load(answers)
    shape = {"image_size": result["image_size"], "channels": result["channels"]}
    recipe = Recipe(model=MODELS[match["model"]], epochs=1, batch_size=1, **shape)
    model = build_model(recipe, arrays["logits"].shape[1], allow_code=True)
    model.load_state_dict(read_weights(out)[0])
    with torch.no_grad():
        logits = model.eval()(torch.from_numpy(arrays["images"])).numpy()
    assert np.abs(logits - arrays["logits"]).max() < 1e-5 * np.abs(arrays["logits"]).max()


@pytest.mark.parametrize("name", [name for name in FILES if "fashion" in name])
def test_sizes_are_those_of_the_file(name: str, tmp_path: Path):
    """Without arrays to check: the flattened map is 2 x 2, so images of 20 to 23 pixels have equal weights."""
    options = {"mapping": None, "check": None, "epsilon": None, "report": lambda text: None}
    out = tmp_path / "weights.safetensors"
    result = convert(FIXTURES / name, "fashion-cnn", out, shape=Shape(), **options)  # pyright: ignore
    assert (result["image_size"], result["channels"], result["classes"]) == (20, 1, 3)


@pytest.mark.parametrize("name", ["keras2-fashion-cnn.h5", "paddle-fashion-cnn.pdparams", "tf-fashion-cnn-saved"])
def test_training_starts_from_such_files(name: str):
    """Four classes instead of three: the head starts fresh, the rest is that of the file."""
    recipe = Recipe(
        model="fashion-cnn", image_size=20, channels=1, epochs=1, batch_size=1, weights=str(FIXTURES / name)
    )
    equal, other = (build_model(recipe, classes) for classes in (3, 4))
    said: list[str] = []
    load_pretrained(equal, recipe, said.append)
    load_pretrained(other, recipe, said.append)
    assert "the head included" in said[0]
    assert "starts fresh" in said[1]
    own, theirs = equal.state_dict(), other.state_dict()
    assert all(torch.equal(own[key], theirs[key]) for key in own if not key.startswith("classifier.2"))


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("tf-small-estimator", "tf-small-estimator/model.ckpt-100.index"),
        ("tf-small-estimator/model.ckpt-100", "tf-small-estimator/model.ckpt-100.index"),
        ("tf-small-estimator/model.ckpt-100.data-00000-of-00001", "tf-small-estimator/model.ckpt-100.index"),
        ("tf-small-saved", "tf-small-saved/variables/variables.index"),
        ("tf-small-saved/variables", "tf-small-saved/variables/variables.index"),
        ("keras-small.h5", "keras-small.h5"),
    ],
)
def test_a_checkpoint_is_named_by_its_folder_its_prefix_or_a_file(given: str, found: str):
    assert find_file(FIXTURES / given) == FIXTURES / found
