"""Runs published on a hub and used from there. The hub is a server on loopback (`hub_server`)."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from huggingface_hub import constants
from PIL import Image

import flatout
from flatout.cli import main
from flatout.models.weights import read_weights, save_tensors
from tests.hubs import using_hub
from tests.system import hub_server
from tests.system.hub_server import TOKEN, Hub, Repository

pytestmark = [
    pytest.mark.slow,
    # huggingface_hub's own, of httpx2.
    pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning"),
]

URL, NAME = "hf://ann/shapes", "ann/shapes"
PUBLISHED = {"README.md", "recipe.toml", "summary.json", "weights.safetensors", "known.safetensors", "report.html"}
PICTURES = {"predictions.png", "curves.png", "confusion.png"}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home of ann")


@pytest.fixture(scope="module")
def run(home: Path) -> flatout.Run:
    """Train on pictures in a folder whose name has a space; one of them cannot be read."""
    rng = np.random.default_rng(0)
    for index in range(240):
        label = ("round|flat", "angular")[index % 2]
        path = home / "my photos" / label / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        level = 60 if index % 2 else 180
        Image.fromarray(rng.integers(level - 40, level + 40, (16, 16), dtype=np.uint8)).save(path)
    (home / "my photos" / "angular" / "torn.png").write_bytes(b"\x89PNG")
    return flatout.fit(
        "parallel-cnn",
        home / "my photos",
        image_size=16,
        channels=1,
        epochs=2,
        batch_size=32,
        lr=0.01,
        on_bad_image="skip",
        out=home / "runs" / "shapes",
        devices="cpu",
        quiet=True,
    )


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Give this process a hub, a token and an empty cache."""
    with hub_server.running() as server, using_hub(server.url, tmp_path / "hf", monkeypatch):
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield server


def upload(run: flatout.Run, *flags: str, url: str = URL) -> int:
    return main(["upload", str(run.path), url, *flags])


def message(capsys: pytest.CaptureFixture[str]) -> str:
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("uploading ")]
    assert len(lines) == 1, lines
    return lines[0]


def test_what_is_published_answers_as_the_run_does(
    run: flatout.Run, home: Path, hub: Hub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert upload(run, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert set(result["files"]) == PUBLISHED | PICTURES == set(hub.repositories[NAME].files) - {".gitattributes"}
    assert result["commit"] == hub.repositories[NAME].sha()
    assert not hub.repositories[NAME].private
    photos = [str(path) for path in sorted((home / "my photos").rglob("*.png"))[:6]]
    assert main(["predict", URL, *photos, "--json"]) == 0
    theirs = json.loads(capsys.readouterr().out)
    assert theirs["run"] == URL
    assert main(["predict", str(run.path), *photos, "--json"]) == 0
    assert theirs["predictions"] == json.loads(capsys.readouterr().out)["predictions"]
    assert all(torch.equal(a, b) for a, b in zip(*(_weights(one) for one in (run, flatout.load(URL))), strict=True))
    # From the cache alone.
    hub.requests.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert main(["predict", URL, photos[0]]) == 0
    assert main(["evaluate", f"{URL}@main", str(home / "my photos"), "--devices", "cpu"]) == 0
    assert hub.requests == []
    assert upload(run) == 2
    assert "HF_HUB_OFFLINE is set; unset it to upload" in capsys.readouterr().err


def _weights(run: flatout.Run) -> list[torch.Tensor]:
    return [*run.model.state_dict().values()]


def test_nothing_names_the_computer_or_a_secret(run: flatout.Run, home: Path, hub: Hub, tmp_path: Path) -> None:
    copy = tmp_path / "shapes"
    shutil.copytree(run.path, copy)
    recipe = (copy / "recipe.toml").read_text()
    assert str(home) in recipe
    named = recipe.replace('model = "parallel-cnn"', f'model = "{home}/nets.py:Net"')
    assert named != recipe
    (copy / "recipe.toml").write_text(named)
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
    for name, content in files.items():
        for secret in (
            str(home),
            home.name,
            str(tmp_path),
            "home of",
            "password-one",
            "password-two",
            "/flatout-upload",
        ):
            assert secret.encode() not in content, (name, secret)
    assert b'path = "my photos"' in files["recipe.toml"]
    assert b"https://host.test/a" in files["summary.json"]
    assert json.loads(files["summary.json"])["classes"] == ["angular", "round|flat"]
    # What a factory of the user's builds is not run to publish it; the card says how it is loaded.
    assert f'flatout.load("{URL}", allow_code=True)' in files["README.md"].decode()


def test_the_card_has_the_figures_and_code_that_runs(
    run: flatout.Run,
    home: Path,
    hub: Hub,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert upload(run) == 0
    card = hub.repositories[NAME].files["README.md"].decode()
    front = yaml.safe_load(card.split("---\n")[1])
    assert front["library_name"] == "flatout"
    metric = front["model-index"][0]["results"][0]["metrics"][0]
    assert metric == {"type": "accuracy", "name": "test accuracy", "value": round(run.summary["test_accuracy"], 6)}
    rows = re.findall(r"^\| (?:angular|round\\\|flat) \| (\d+) \| ([\d.]+) \|", card, re.M)
    assert rows == [(str(row["support"]), f"{row['precision']:.3f}") for row in run.summary["per_class"]]
    pictures = re.findall(r"!\[[^]]+\]\((\S+)\)", card)
    assert set(pictures) == PICTURES
    photo = next((home / "my photos" / "angular").glob("*.png"))
    shutil.copy(photo, tmp_path / "photo.jpg")
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    code = card.split("## Use it with torch alone")[1].split("```python\n")[1].split("```")[0]
    assert "flatout" not in code
    exec(code, {})
    name, probability = capsys.readouterr().out.split()
    (expected,) = run.predict(photo, top=1)
    assert name == expected.classes[0]
    assert float(probability) == pytest.approx(expected.probabilities[0], abs=1e-5)


@pytest.mark.parametrize("task", ["timm", "multi-label", "regression", "folds", "views"])
def test_the_code_of_the_card_for_other_tasks(
    task: str, hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 255, (90, 32, 32, 3), dtype=np.uint8)
    images[:, :16] //= np.arange(1, 4).repeat(30).astype(np.uint8)[:, None, None, None]
    classes = np.arange(3).repeat(30)
    labels = {
        "multi-label": np.eye(3, dtype=np.uint8)[classes] | np.eye(3, dtype=np.uint8)[(classes // 2)],
        "regression": classes * 1.5 + 7,
    }.get(task, classes)
    model = {"timm": "timm:test_resnet", "regression": "fast-cnn-16"}.get(task, "caltech-cnn")
    folds = {"folds": 2} if task == "folds" else {}
    run = flatout.fit(
        model,
        images,
        labels,
        image_size=32,
        epochs=1,
        batch_size=30,
        devices="cpu",
        quiet=True,
        pretrained=False,
        tta=task == "views",
        out=tmp_path / "run",
        **folds,  # pyright: ignore[reportArgumentType]
    )
    assert upload(run, "--no-pictures") == 0
    Image.fromarray(images[0]).save(tmp_path / "photo.png")
    (tmp_path / "photo.png").rename(tmp_path / "photo.jpg")
    monkeypatch.chdir(tmp_path)
    card = hub.repositories[NAME].files["README.md"].decode()
    assert ("averages over 3 views" in card) == run.recipe.tta
    capsys.readouterr()
    exec(card.split("## Use it with torch alone")[1].split("```python\n")[1].split("```")[0], {})
    printed = capsys.readouterr().out
    (answer,) = run.members[0].predict("photo.jpg", top=3)
    expected = dict(zip(answer.classes, answer.probabilities, strict=True))
    if task == "regression":
        assert float(re.findall(r"[-\d.]+", printed)[0]) == pytest.approx(answer.value, abs=1e-3)
    elif task == "multi-label":
        assert eval(printed) == pytest.approx(expected, abs=1e-5)
    elif task != "views":
        assert float(printed.split()[-1]) == pytest.approx(max(expected.values()), abs=1e-5)
    assert flatout.load(URL).predict("photo.jpg")[0].probabilities == run.predict("photo.jpg")[0].probabilities


# --- repositories that exist ---


def test_the_same_content_is_not_uploaded_again(run: flatout.Run, hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    assert upload(run, "--no-pictures") == upload(run, "--no-pictures") == 0
    assert "unchanged: the repository already has these" in capsys.readouterr().out
    assert len(hub.repositories[NAME].commits) == 2


def test_other_content_is_replaced_only_when_asked(
    run: flatout.Run, hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    repository = hub.repositories[NAME] = Repository()
    repository.commits.append({**repository.files, "weights.safetensors": b"theirs", "train.py": b"theirs"})
    assert upload(run) == 2
    assert message(capsys) == (
        f"flatout: {URL}: exists with other content (train.py, weights.safetensors); "
        "give --overwrite, or choose another name"
    )
    assert len(repository.commits) == 2
    assert upload(run, "--overwrite") == 0
    assert set(repository.files) >= PUBLISHED | PICTURES
    assert repository.files["train.py"] == b"theirs"
    assert repository.files["weights.safetensors"] == (run.path / "weights.safetensors").read_bytes()
    assert upload(run, "--overwrite", "--no-pictures") == 0
    assert set(repository.files) == {*PUBLISHED - {"report.html"}, ".gitattributes", "train.py"}
    assert "![" not in repository.files["README.md"].decode()


def test_private_repositories(
    run: flatout.Run, hub: Hub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert upload(run, "--private", "--no-pictures") == 0
    assert hub.repositories[NAME].private
    monkeypatch.delenv("HF_TOKEN")
    capsys.readouterr()
    assert main(["predict", URL, str(tmp_path)]) == 2
    assert message(capsys).endswith(
        "access is denied (HTTP 401): check the name; for a private run, run hf auth login or set HF_TOKEN"
    )
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.repositories[NAME].private = False
    assert upload(run, "--private") == 2
    assert f"exists and is public; make it private on {hub.url}/{NAME}/settings" in message(capsys)


# --- failures: one message, exit code 2, nothing half ---


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize("where", ["/api/repos/create", "/preupload/", "/commit/"])
def test_a_refusal(run: flatout.Run, hub: Hub, capsys: pytest.CaptureFixture[str], where: str, status: int) -> None:
    hub.trouble[where] = status
    assert upload(run, "--no-pictures") == 2
    assert message(capsys) == (
        f"flatout: {URL}: access is denied (HTTP {status}): use a token with write permission for ann (HF_TOKEN)"
    )
    assert all(len(repository.commits) == 1 for repository in hub.repositories.values())


def test_a_wrong_token_and_none(
    run: flatout.Run, hub: Hub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert upload(run, "--no-pictures") == 2
    assert "access is denied (HTTP 401)" in message(capsys)
    monkeypatch.delenv("HF_TOKEN")
    assert upload(run, "--no-pictures") == 2
    assert "no access token; run hf auth login or set HF_TOKEN" in message(capsys)
    assert hub.repositories == {}


def test_an_interrupted_upload_is_continued(
    run: flatout.Run, hub: Hub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # between attempts
    hub.trouble["/commit/"] = "cut"
    assert upload(run, "--no-pictures") == 2
    assert re.search(
        r"the upload failed \(.+\); nothing was published, and the same command continues it", message(capsys)
    )
    assert len(hub.repositories[NAME].commits) == 1
    hub.trouble.clear()
    hub.requests.clear()
    assert upload(run, "--no-pictures") == 0
    assert not [path for method, path in hub.requests if method == "PUT"], "the weights were there already"
    assert "weights.safetensors" in hub.repositories[NAME].files


def test_somebody_else_commits_meanwhile(
    run: flatout.Run, hub: Hub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repositories[NAME] = Repository()
    hub.trouble["/commit/"] = 412
    assert upload(run, "--no-pictures") == 2
    assert "the repository was changed meanwhile (HTTP 412); run the command again" in message(capsys)


def test_no_network(
    run: flatout.Run, hub: Hub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    assert upload(run, "--no-pictures") == 2
    assert "Connection refused); nothing was published" in message(capsys)
    assert main(["predict", URL, str(tmp_path)]) == 2
    assert "could not be downloaded ([Errno 111] Connection refused); check the network" in message(capsys)


def test_offline_with_an_empty_cache(
    hub: Hub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert main(["predict", URL, str(tmp_path)]) == 2
    assert "is not in the Hugging Face cache, and HF_HUB_OFFLINE is set" in message(capsys)


def test_what_is_no_published_run(hub: Hub, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    hub.repositories["ann/other"] = Repository()
    assert main(["predict", "hf://ann/other", str(tmp_path)]) == 2
    assert "hf://ann/other: holds no run of flatout: recipe.toml is missing" in message(capsys)
    assert main(["predict", "hf://ann/none", str(tmp_path)]) == 2
    assert "hf://ann/none: there is no such repository or revision" in message(capsys)
    for url in ("hf://ann", "hf://datasets/ann/x", "hf://ann/x/y", "hf://ann/../x"):
        assert main(["predict", url, str(tmp_path)]) == 2
        assert message(capsys) == f"flatout: {url}: is not the address of a run; give hf://USER/NAME"
    for command in (["report", URL], ["compare", URL, URL], ["upload", URL, URL]):
        assert main(command) == 2
        assert "this command needs a run folder on this computer" in message(capsys)


def test_unfinished_runs_and_revisions_are_refused(
    run: flatout.Run, hub: Hub, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    copy = tmp_path / "shapes"
    shutil.copytree(run.path, copy)
    assert upload(run, url=f"{URL}@v1") == 2
    assert "uploads go to the main branch" in message(capsys)
    (copy / "summary.json").unlink()
    assert upload(flatout.load(copy)) == 2
    assert f"the run has not finished; continue it with: flatout train --resume --out {copy}" in message(capsys)
    assert hub.requests == []
