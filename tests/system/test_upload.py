"""Runs published on a hub and used from there. The hub is a server on loopback (`hub_server`)."""

import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from huggingface_hub import constants
from PIL import Image

import flatout
from flatout.cli.main import main
from flatout.models.weights import read_weights, save_tensors
from tests.conftest import Command
from tests.hubs import using_hub
from tests.system.hub_server import TOKEN, Hub, Repository

pytestmark = [
    pytest.mark.slow,
    # huggingface_hub's own, of httpx2.
    pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning"),
]

URL, NAME = "hf://ann/shapes", "ann/shapes"
PICTURES = {"curves.png", "confusion.png"}
PUBLISHED = {"README.md", "recipe.toml", "summary.json", "weights.safetensors", "known.safetensors"} | PICTURES


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home of ann")


@pytest.fixture(scope="module")
def run(home: Path) -> flatout.Run:
    """Train on pictures in a folder whose name has a space; one of them cannot be read."""
    rng = np.random.default_rng(0)
    for index in range(240):
        label = ("round|flat", "angular")[index % 2]
        path = home / "my photos" / label / f"patient-{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        level = 60 if index % 2 else 180
        Image.fromarray(rng.integers(level - 40, level + 40, (16, 16), dtype=np.uint8)).save(path)
    (home / "my photos" / "angular" / "torn.png").write_bytes(b"\x89PNG")
    options: dict[str, Any] = {"image_size": 16, "channels": 1, "epochs": 2, "batch_size": 32, "lr": 0.01}
    options |= {"out": home / "runs" / "shapes", "devices": "cpu", "quiet": True, "on_bad_image": "skip"}

    def draw(run: Path) -> None:
        for name in PICTURES:
            Image.new("L", (3, 2)).save(run / name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flatout.report.page.draw_all", draw)
        return flatout.fit("parallel-cnn", home / "my photos", **options)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Give this process a hub, a token and an empty cache."""
    with Hub() as server, using_hub(server.url(), tmp_path / "hf", monkeypatch):
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setattr("time.sleep", lambda seconds: None)  # between attempts
        yield server


@pytest.fixture
def plain_hub(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """Give this process a hub, and leave out what makes ONNX files, which takes seconds."""
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    return hub


def upload(run: flatout.Run, *flags: str) -> int:
    return main(["upload", str(run.path), URL, *flags])


@pytest.fixture
def assert_refused(command: Command) -> Callable[[list[Any], str], None]:
    """Return a function that runs a command, and compares its one message."""

    def check(words: list[Any], expected: str) -> None:
        lines = command(*words, code=2).splitlines()
        (message,) = (line for line in lines if not line.startswith("uploading "))
        assert expected in message

    return check


def test_what_is_published_answers_as_the_run_does(
    run: flatout.Run, home: Path, hub: Hub, tmp_path: Path, command: Command, capsys: Any, monkeypatch: Any
) -> None:
    """From the cache too; the card has its figures, and code that runs."""
    result = json.loads(command("upload", run.path, URL, "--json"))
    repository = hub.repositories[NAME]
    assert set(result["files"]) == PUBLISHED | {"model.onnx"} == set(repository.files) - {".gitattributes"}
    assert (result["commit"], repository.private) == (repository.sha(), False)
    photos = sorted((home / "my photos").rglob("*.png"))[:6]
    answers, expected = (json.loads(command("predict", at, *photos, "--json")) for at in (URL, run.path))
    assert answers["predictions"] == expected["predictions"]
    published = flatout.load(URL)
    torch.testing.assert_close(published.model.state_dict(), run.model.state_dict(), rtol=0, atol=0)

    card = repository.files["README.md"].decode()
    front = yaml.safe_load(card.split("---\n")[1])
    assert (front["library_name"], front["pipeline_tag"]) == ("flatout", "image-classification")
    assert f"{run.summary['test_accuracy']:.4f}" in card
    rows = re.findall(r"^\| (?:angular|round\\\|flat) \| (\d+) \| ([\d.]+) \|", card, re.M)
    assert rows == [(str(row["support"]), f"{row['precision']:.3f}") for row in run.summary["per_class"]]
    assert set(re.findall(r"!\[[^]]+\]\((\S+)\)", card)) == PICTURES
    shutil.copy(photos[0], tmp_path / "photo.jpg")
    monkeypatch.chdir(tmp_path)
    code = card.split("## Use it with ONNX Runtime")[1].split("```python\n")[1].split("```")[0]
    assert "flatout" not in code
    exec(code, {})
    probabilities = [float(number) for number in re.findall(r"[\d.]+(?:e[-+]\d+)?", capsys.readouterr().out)]
    expected = run.probabilities(np.array(Image.open("photo.jpg"))[None, ..., None])[0]
    assert probabilities == pytest.approx(expected, abs=1e-5)

    hub.requests.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert main(["evaluate", f"{URL}@main", str(home / "my photos"), "--devices", "cpu"]) == 0
    assert hub.requests == []


def test_nothing_names_the_computer_a_file_or_a_secret(run: flatout.Run, home: Path, hub: Hub, tmp_path: Path) -> None:
    copy = shutil.copytree(run.path, tmp_path / "shapes")
    recipe = (copy / "recipe.toml").read_text()
    assert str(home) in recipe
    (copy / "recipe.toml").write_text(recipe.replace('model = "parallel-cnn"', f'model = "{home}/nets.py:Net"'))
    tensors, metadata = read_weights(copy / "weights.safetensors")
    save_tensors(copy / "weights.safetensors", tensors, {**metadata, "model": f"{home}/nets.py:Net"})
    summary = json.loads((copy / "summary.json").read_text())
    assert str(home) in json.dumps(summary["skipped_images"])
    summary["notes"] += [
        f"weights of {home}/other run/weights.safetensors",
        "from https://ann:password-one@host.test/a?key=password-two",
    ]
    (copy / "summary.json").write_text(json.dumps(summary))
    assert upload(flatout.load(copy)) == 0
    files = hub.repositories[NAME].files
    secrets = (str(home), home.name, str(tmp_path), "home of", "password-", "/flatout-upload", "patient-")
    for name, content in files.items():
        assert not [secret for secret in secrets if secret.encode() in content], name
    assert b'path = "my photos"' in files["recipe.toml"]
    assert b"https://host.test/a" in files["summary.json"]
    assert json.loads(files["summary.json"])["classes"] == ["angular", "round|flat"]
    # What a factory of the user's builds is not run to publish it; the card says how it is loaded.
    assert "model.onnx" not in files
    assert f'flatout.load("{URL}", allow_code=True)' in files["README.md"].decode()


@pytest.mark.usefixtures("no_pictures")
def test_a_cross_validation_of_several_labels(hub: Hub, tmp_path: Path) -> None:
    rng, classes = np.random.default_rng(0), np.arange(3).repeat(30)
    images, labels = rng.integers(0, 255, (90, 8, 8, 3), dtype=np.uint8), np.eye(3, dtype=np.uint8)[classes]
    options: dict[str, Any] = {"image_size": 8, "epochs": 1, "batch_size": 30, "folds": 2}
    run = flatout.fit("parallel-cnn", images, labels, out=tmp_path / "run", devices="cpu", quiet=True, **options)
    assert upload(run) == 0
    assert "model.onnx" in hub.repositories[NAME].files
    found = flatout.load(URL).predict(images[:3])
    assert [one.to_dict() for one in found] == [one.to_dict() for one in run.predict(images[:3])]


# --- repositories that exist ---

DENIED = "access is denied (HTTP {}): check the name, and run hf auth login or set HF_TOKEN"


def test_files_are_replaced_only_when_asked(run: flatout.Run, plain_hub: Hub, assert_refused: Any) -> None:
    repository = plain_hub.repositories[NAME] = Repository()
    theirs = {"weights.safetensors": b"theirs", "train.py": b"theirs", "model.onnx": b"stale"}
    repository.commits.append({**repository.files, **theirs})
    files = "(model.onnx, train.py, weights.safetensors)"
    wanted = f"flatout: {URL}: exists and has files {files}; give --overwrite, or choose another name"
    assert_refused(["upload", run.path, URL], wanted)
    assert len(repository.commits) == 2
    assert upload(run, "--overwrite") == 0
    assert set(repository.files) == PUBLISHED | {".gitattributes", "train.py"}
    assert repository.files["train.py"] == b"theirs"
    assert repository.files["weights.safetensors"] == (run.path / "weights.safetensors").read_bytes()


def test_private_repositories(
    run: flatout.Run, plain_hub: Hub, assert_refused: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert upload(run, "--private") == 0
    assert plain_hub.repositories[NAME].private
    monkeypatch.delenv("HF_TOKEN")
    assert_refused(["predict", URL, "x.png"], DENIED.format(401))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    plain_hub.repositories[NAME].private = False
    public = f"exists and is public; make it private on {plain_hub.url()}/{NAME}/settings"
    assert_refused(["upload", run.path, URL, "--private"], public)


# --- failures: one message, exit code 2, nothing half ---


@pytest.mark.parametrize(
    ("where", "trouble", "expected"),
    [
        ("/api/repos/create", 401, DENIED.format(401)),
        ("/preupload/", 403, DENIED.format(403)),
        ("/commit/", 412, "the repository was changed in the meantime (HTTP 412); run the command again"),
        ("/commit/", "cut", "nothing was published: the hub did not answer"),
    ],
)
def test_a_failure_leaves_nothing_half(
    run: flatout.Run, plain_hub: Hub, assert_refused: Any, where: str, trouble: int | str, expected: str
) -> None:
    plain_hub.trouble[where] = trouble
    assert_refused(["upload", run.path, URL], expected)
    assert all(len(repository.commits) == 1 for repository in plain_hub.repositories.values())
    plain_hub.trouble.clear()
    assert upload(run) == 0


def test_no_token_no_network_no_cache(
    run: flatout.Run, plain_hub: Hub, assert_refused: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish, use = ["upload", run.path, URL], ["predict", URL, "x.png"]
    for token in ("hf_wrong", ""):
        monkeypatch.setenv("HF_TOKEN", token)
        assert_refused(publish, DENIED.format(401))
    assert plain_hub.repositories == {}
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    for words in (publish, use):
        assert_refused(words, "the hub did not answer ([Errno 111] Connection refused); check the network")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for words in (publish, use):
        assert_refused(words, "HF_HUB_OFFLINE is set, so that only runs in the Hugging Face cache can be used")


def test_addresses_and_runs_that_are_refused(run: flatout.Run, hub: Hub, assert_refused: Any, tmp_path: Path) -> None:
    copy = shutil.copytree(run.path, tmp_path / "shapes")
    (copy / "summary.json").unlink()
    hub.repositories["ann/other"] = Repository()
    for words, expected in (
        (["predict", "hf://ann/other", "x.png"], "holds no run of flatout: recipe.toml is missing"),
        (["predict", "hf://ann/none", "x.png"], "hf://ann/none: there is no such repository or revision"),
        (["predict", "hf://datasets/ann/x", "x.png"], "hf://datasets/ann/x: is not the address of a run"),
        (["predict", "hf://a/../x", "x.png"], "hf://a/../x: is not the address of a run; give hf://USER/NAME"),
        (["report", URL], "run folder"),
        (["upload", run.path, f"{URL}@v1"], "uploads go to the main branch"),
        (["upload", copy, URL], f"the run has not finished; continue it with: flatout train --resume --out {copy}"),
    ):
        assert_refused(words, expected)
    assert NAME not in hub.repositories
