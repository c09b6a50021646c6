"""The board: runs found below a folder, answered over HTTP. The page itself is tested in a browser, in tests/system."""

import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from starlette.testclient import TestClient

from flatout.board import app as board_app
from flatout.board.details import Watch
from flatout.board.store import Store
from flatout.cli import main
from flatout.data.pack import IMAGES, open_pack
from flatout.errors import InputError
from flatout.report import run_files
from flatout.train import monitor
from flatout.train.progress import Progress
from tests.unit.runs import epoch_line, write_run

CLASSES = ["cat", "<script>alert(1)</script>", "dog"]
HOSTILE = "<script>alert(1)"
TOKEN = "secret"


def ids(store: Store) -> dict[str, str]:
    store.refresh()
    return {row["id"]: row["status"] for row in store.since(0)["runs"]}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of each kind; images are in a pack for one of them."""
    folder = tmp_path_factory.mktemp("board") / "runs"
    folder.mkdir()
    write_run(folder / "plain", CLASSES)
    write_run(folder / HOSTILE, CLASSES, notes=["<b>"])
    write_run(folder / "newer", CLASSES, versions={"flatout": "99.0"})
    write_run(folder / "diverged", CLASSES, stopped="failed: training diverged")
    (folder / "sweep").mkdir()
    write_run(folder / "sweep" / "damaged", CLASSES).joinpath("summary.json").write_text("{ this is cut")
    write_run(folder / "sweep" / "typed", CLASSES, epochs="many")
    unfinished = write_run(folder / "sweep" / "unfinished", CLASSES)
    (unfinished / "summary.json").unlink()
    (folder / "empty").mkdir()
    (folder / "empty" / "recipe.toml").write_text('job = "mine"')
    (folder / "scaled").mkdir()
    (folder / "scaled" / "scaling.json").write_text(json.dumps({"job": "digits", "findings": ["Twice as fast."]}))
    (folder / "scaled" / "scaling.png").write_bytes(b"\x89PNG")
    with_pack(write_run(folder / "packed", CLASSES), folder.parent)
    return folder


def with_pack(run: Path, folder: Path) -> None:
    """Give a run a pack with an image of its own colour for each row, in the opposite order."""
    photos = folder / "photos"
    for name in "ab":
        (photos / name).mkdir(parents=True)
        for i in range(30):
            Image.new("RGB", (8, 8), (4 * i, 0, 0)).save(photos / name / f"{i:02}.png")
    assert main(["pack", str(photos), "--size", "8", "--out", str(folder / "the.pack")]) == 0
    pack = open_pack(folder / "the.pack")
    arrays = dict(np.load(run / "predictions.npz"))
    np.savez(run / "predictions.npz", **arrays, row=np.arange(60)[::-1])
    summary = json.loads((run / "summary.json").read_text())
    summary |= {"pack": str(pack.folder), "pack_fingerprint": pack.fingerprint}
    (run / "summary.json").write_text(json.dumps(summary))


@pytest.fixture(scope="module")
def store(runs: Path) -> Store:
    store = Store(runs)
    store.refresh()
    return store


@pytest.fixture(scope="module")
def client(store: Store) -> Iterator[TestClient]:
    made = board_app.make_app(store, TOKEN, classify=lambda run, content: {"predictions": [], "size": len(content)})
    with TestClient(made, base_url="http://127.0.0.1:80", raise_server_exceptions=False) as client:
        assert client.get("/", params={"token": TOKEN}).status_code == 200
        yield client


def test_runs_are_found_and_judged(store: Store) -> None:
    assert ids(store) == {
        "plain": "finished",
        HOSTILE: "finished",
        "newer": "finished",
        "diverged": "failed",
        "packed": "finished",
        "sweep/damaged": "broken",
        "sweep/typed": "broken",
        "sweep/unfinished": "incomplete",
        "empty": "incomplete",
    }
    problems = {name: " ".join(store.row(name)["problems"]) for name in ids(store)}
    assert "newer than this one" in problems["newer"]
    assert "summary.json cannot be read" in problems["sweep/damaged"]
    assert "epochs is text" in problems["sweep/typed"]
    assert "the run did not finish" in problems["sweep/unfinished"]
    assert "no epoch was finished" in problems["empty"]
    assert not problems["plain"]
    assert store.row("plain")["score"] == pytest.approx(0.8)
    assert store.row("plain")["spark"] == [0.8] * 4


def test_only_changes_are_read_and_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []
    original = run_files.read_run

    def counted(run: Path, **options: Any) -> Any:
        read.append(run)
        return original(run, **options)

    monkeypatch.setattr(run_files, "read_run", counted)
    store = Store(tmp_path / "runs")
    assert ids(store) == {}
    assert store.since(0)["exists"] is False
    (tmp_path / "runs").mkdir()
    for name in "abc":
        write_run(tmp_path / "runs" / name, CLASSES)
    assert set(ids(store)) == {"a", "b", "c"}
    _settle(tmp_path / "runs")
    store.refresh()
    store.refresh()
    version = store.version
    read.clear()
    store.refresh()
    assert not read
    assert store.since(version)["runs"] == []
    lines = [epoch_line(e) for e in range(1, 7)]
    run_files.write_metrics(tmp_path / "runs" / "b" / "metrics.jsonl", lines)
    store.refresh()
    assert {path.name for path in read} == {"b"}
    assert [row["epochs_trained"] for row in store.since(version)["runs"]] == [6]
    for path in sorted((tmp_path / "runs" / "c").iterdir()):
        path.unlink()
    (tmp_path / "runs" / "c").rmdir()
    version = store.version
    store.refresh()
    assert store.since(version)["removed"] == ["c"]


def _settle(folder: Path) -> None:
    """Make folders old: one that has just changed is listed again."""
    for path in (*folder.rglob("*"), folder):
        if path.is_dir():
            os.utime(path, (0, time.time() - 60))


def test_a_run_is_running_while_its_process_lives(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", CLASSES)
    (run / "summary.json").unlink()
    (run / ".lock").write_text(f"{os.getpid()}\n")
    store = Store(tmp_path)
    assert ids(store) == {"a": "running"}
    assert store.row("a")["problems"] == []
    # The file of a killed process stays; without a change elsewhere for minutes, the run is over.
    (run / ".lock").write_text("4000000\n")
    for path in run.iterdir():
        os.utime(path, (0, time.time() - 600))
    assert ids(store) == {"a": "incomplete"}


def test_a_killed_run_is_over_at_once(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "a"
    store, hold = Store(tmp_path / "runs"), "import time; from pathlib import Path; from flatout.train import claim\n"
    hold += f"with claim.claimed(Path({str(run)!r}), 'a', resume=True, overwrite=False): print(flush=True); input()"
    run.parent.mkdir()
    write_run(run, CLASSES).joinpath("summary.json").unlink()
    process = subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout
    process.stdout.readline()
    assert ids(store) == {"a": "running"}
    lock = (run / ".lock").read_text()
    process.kill()
    process.communicate()
    assert (run / ".lock").read_text() == lock, "the file of a killed process stays"
    assert ids(store) == {"a": "incomplete"}
    # Another process with the same number, and a process of another host, of which the files tell.
    number, _, place = lock.split()
    for holder, status in ((f"{os.getpid()} 1.0 {place}", "incomplete"), (f"{number} 1.0 elsewhere/", "running")):
        (run / ".lock").write_text(holder)
        assert ids(Store(tmp_path / "runs")) == {"a": status}


def test_what_a_run_writes_is_sent_once(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", CLASSES)
    (run / "logs").mkdir()
    watch = Watch(run)
    assert [line["epoch"] for line in watch.news()["metrics"]] == [1, 2, 3, 4]
    assert watch.news() == {}
    with (run / "logs" / "rank-0.log").open("a") as log, (run / run_files.LIVE).open("a") as live:
        log.write("first\nsecond\nhalf a li")
        live.write('{"epoch": 0.5, "loss": NaN}\nnot JSON\n')
        log.flush()
        live.flush()
        news = watch.news()
        assert news["log"] == {"lines": ["first", "second"], "replace": True}
        assert news["live"]["lines"] == [{"epoch": 0.5, "loss": None}]
        log.write("ne\n")
        log.flush()
        assert watch.news() == {"log": {"lines": ["half a line"], "replace": False}}


@pytest.mark.parametrize(
    ("headers", "path"),
    [({}, "/api/runs"), ({}, "/"), ({}, "/static/main.js"), ({}, "/?token=wrong"), ({"cookie": "x=y"}, "/api/image")],
)
def test_nothing_without_the_token(store: Store, headers: dict[str, str], path: str) -> None:
    with TestClient(board_app.make_app(store, TOKEN), base_url="http://127.0.0.1:80") as stranger:
        answer = stranger.get(path, headers=headers)
    assert answer.status_code == 403
    assert "token" in answer.text


def test_other_hosts_and_sites_are_refused(client: TestClient) -> None:
    assert client.get("/api/runs", headers={"host": "evil.example"}).status_code == 400
    assert client.get("/api/runs", headers={"sec-fetch-site": "cross-site"}).status_code == 403
    assert "script-src 'self'" in client.get("/").headers["content-security-policy"]


def test_runs_and_charts_over_http(client: TestClient) -> None:
    found = client.get("/api/runs").json()
    assert len(found["runs"]) == 9
    assert [(chart["id"], chart["kind"], chart["findings"]) for chart in found["charts"]] == [
        ("scaled", "scaling", ["Twice as fast."])
    ]
    details = client.get("/api/run", params={"run": "plain"}).json()
    assert details["flat"]["optimizer.lr"] == 0.05
    assert client.get("/api/run", params={"run": "sweep/typed"}).json()["flat"]["model"] == "cnn"
    assert client.get("/api/file", params={"run": "scaled", "name": "scaling.png"}).content == b"\x89PNG"


def test_the_difference_of_recipes(client: TestClient, runs: Path) -> None:
    recipe = runs / "newer" / "recipe.toml"
    recipe.write_text(recipe.read_text().replace("lr = 0.05", "lr = 0.5") + '\n[future]\nkey = "new"\n')
    found = client.get("/api/compare", params={"run": ["plain", "newer"]}).json()
    rows = {row["key"]: row["values"] for row in found["differences"]}
    assert rows == {"optimizer.lr": [0.05, 0.5], "future.key": [None, "new"]}
    assert len(found["metrics"]["plain"]) == 4


def test_cells_of_the_confusion_matrix_lead_to_images(client: TestClient) -> None:
    answers = client.get("/api/answers", params={"run": "packed"}).json()
    assert answers["classes"] == CLASSES
    assert sum(n for _, _, n in answers["cells"]) == answers["count"] == 60
    assert answers["wrong"] == sum(n for a, p, n in answers["cells"] if a != p) == 20
    for actual, predicted, number in answers["cells"]:
        query = {"run": "packed", "actual": actual, "predicted": predicted, "limit": 7}
        page = client.get("/api/samples", params=query).json()
        assert page["total"] == number
        assert len(page["samples"]) == min(7, number)
        assert {s["actual"] for s in page["samples"]} == {CLASSES[actual]}
        assert {s["predicted"] for s in page["samples"]} == {CLASSES[predicted]}
    wrong = client.get("/api/samples", params={"run": "packed", "show": "wrong", "order": "unsure"}).json()
    assert wrong["total"] == 20
    assert not any(s["right"] for s in wrong["samples"])


def test_images_are_those_of_the_packs_rows(client: TestClient) -> None:
    for index in (0, 10, 59):
        answer = client.get("/api/image", params={"run": "packed", "index": index})
        row = 59 - index
        with Image.open(io.BytesIO(answer.content)) as image:
            assert image.getpixel((0, 0)) == (4 * (row % 30), 0, 0)


def test_without_the_pack_only_the_kept_images_are_there(client: TestClient, runs: Path) -> None:
    answers = client.get("/api/answers", params={"run": "plain"}).json()
    assert "Only the 50 images of the report" in answers["images"]
    page = client.get("/api/samples", params={"run": "plain", "order": "data"}).json()
    assert [s["image"] for s in page["samples"]] == [True] * 50 + [False] * 10
    assert client.get("/api/image", params={"run": "plain", "index": 3}).headers["content-type"] == "image/png"
    assert client.get("/api/image", params={"run": "plain", "index": 55}).status_code == 404


def test_a_pack_that_is_gone_or_another_is_named(runs: Path, tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", CLASSES)
    arrays = dict(np.load(run / "predictions.npz"))
    np.savez(run / "predictions.npz", **arrays, row=np.arange(60))
    summary = json.loads((run / "summary.json").read_text())
    for pack, reason in (
        (tmp_path / "none", "no longer in the cache"),
        (runs.parent / "the.pack", "not those of this"),
    ):
        content = summary | {"pack": str(pack), "pack_fingerprint": "0"}
        (run / "summary.json").write_text(json.dumps(content))
        os.utime(run / "predictions.npz", ns=(0, len(reason)))  # as a new one
        assert reason in board_app.answers_of(run).why
    assert (runs.parent / "the.pack" / IMAGES).is_file()


@pytest.mark.parametrize(
    ("path", "values", "message"),
    [
        ("run", {"run": "nowhere"}, "nowhere: there is no such run"),
        ("run", {"run": "../.."}, "there is no such run"),
        ("file", {"run": "plain", "name": "../plain/summary.json"}, "there is no"),
        ("file", {"run": "plain", "name": "summary.json"}, "there is no summary.json"),
        ("events", {"run": "plain", "log": "../../x"}, "is no log"),
        ("samples", {"run": "packed", "actual": "one"}, "must be a whole number"),
        ("samples", {"run": "packed", "show": "some"}, "show is all, wrong or right"),
        ("image", {"run": "packed", "index": 60}, "there is no image 60"),
        ("answers", {"run": "empty"}, "no epoch was finished"),
        ("answers", {"run": "sweep/typed"}, "epochs is text"),
    ],
)
def test_a_wrong_request_gets_a_message(client: TestClient, path: str, values: dict[str, Any], message: str) -> None:
    answer = client.get(f"/api/{path}", params=values)
    assert answer.status_code == 404
    assert message in answer.json()["error"]


def test_an_image_is_classified(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = client.post("/api/classify", params={"run": "plain"}, content=b"12345")
    assert answer.json() == {"predictions": [], "size": 5}
    assert "empty" in client.post("/api/classify", params={"run": "plain"}, content=b"").json()["error"]
    monkeypatch.setattr(board_app, "MOST_UPLOAD_BYTES", 4)
    assert "has more than" in client.post("/api/classify", params={"run": "plain"}, content=b"12345").json()["error"]
    assert client.get("/api/classify", params={"run": "plain"}).status_code == 405


def test_a_run_without_weights_answers_nothing(runs: Path) -> None:
    with pytest.raises(InputError, match=r"weights\.safetensors is missing"):
        board_app.predictions_of(runs / "plain", b"no image")


def test_wrong_words_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["board", str(tmp_path / "file")]) == 2
    assert "is a file" in capsys.readouterr().err
    assert main(["board", str(tmp_path), "--port", "70000"]) == 2
    assert "must be from 0 to 65535" in capsys.readouterr().err


def test_a_run_writes_figures_within_epochs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line once so much time has passed, with what has happened since the last one; training survives a full disk."""
    now = [0.0]
    monkeypatch.setattr(monitor.time, "perf_counter", lambda: now[0])
    progress = Progress()
    files = [monitor.LiveFile(path, progress, 10, lambda: 7) for path in (tmp_path / "live.jsonl", Path("/dev/full"))]
    for step in range(1, 8):
        progress.step, progress.images_trained, progress.train_seconds = step, 100 * step, 0.5 * step
        now[0] = 0.5 * step
        for file in files:
            file.step(1 / step)
    lines = [json.loads(line) for line in (tmp_path / "live.jsonl").read_text().splitlines()]
    assert [(line["epoch"], line["loss"], line["images_per_second"]) for line in lines] == [(0.4, 0.25, 200.0)]
    assert lines[0]["device_bytes"] == 7
