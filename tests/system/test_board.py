"""The board: runs found below a folder, answered over HTTP, and the page in a browser."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Command

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from starlette.testclient import TestClient

from flatout.analysis import board
from flatout.analysis.board import RunStore
from flatout.train import monitor
from flatout.train.request import Progress
from flatout.utils import run_files
from tests.unit.runs import epoch_line, write_run

CLASSES = ["cat", "<script>alert(1)</script>", "dog"]
HOSTILE = "<script>alert(1)"
TOKEN = "secret"
HOST = "http://127.0.0.1:80"


def ids(store: RunStore) -> dict[str, str]:
    return {row["id"]: row["status"] for row in store.content()["runs"]}


@pytest.fixture(scope="module")
def every_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of each kind."""
    folder = tmp_path_factory.mktemp("board") / "runs"
    for name in ("sweep", "empty", "scaled"):
        (folder / name).mkdir(parents=True)
    write_run(folder / "plain", CLASSES)
    write_run(folder / HOSTILE, CLASSES, notes=["<b>bold</b>"])
    other = write_run(folder / "other", CLASSES, job="another", test_accuracy=0.5) / "recipe.toml"
    other.write_text(other.read_text().replace("lr = 0.05", "lr = 0.5") + '\n[future]\nkey = "new"\n')
    write_run(folder / "diverged", CLASSES, stopped="failed: training diverged")
    # A result with a long name.
    write_run(folder / "numbers", CLASSES, task="regression", test_mae=1234.5, test_r2=0.5)
    write_run(folder / "sweep" / "damaged", CLASSES).joinpath("summary.json").write_text("{ this is cut")
    write_run(folder / "sweep" / "typed", CLASSES, epochs="many")
    write_run(folder / "sweep" / "unfinished", CLASSES).joinpath("summary.json").unlink()
    for name in ("empty", "scaled"):
        (folder / name / "recipe.toml").write_text('job = "mine"')
    (folder / "scaled" / "scaling.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def store(every_run: Path) -> RunStore:
    return RunStore(every_run)


@pytest.fixture(scope="module")
def client(store: RunStore) -> Iterator[TestClient]:
    with TestClient(board.make_app(store, TOKEN), base_url=HOST, raise_server_exceptions=False) as client:
        assert client.get("/", params={"token": TOKEN}).status_code == 200
        yield client


# --- runs -------------------------------------------------------------------------------------------------------------


def test_runs_are_found_and_judged(store: RunStore) -> None:
    rows = {row["id"]: row for row in store.content()["runs"]}
    expected = {
        "plain": ("finished", ""),
        HOSTILE: ("finished", ""),
        "other": ("finished", ""),
        "numbers": ("finished", ""),
        "diverged": ("failed", ""),
        "sweep/damaged": ("broken", "summary.json cannot be read"),
        "sweep/typed": ("broken", "epochs has a wrong type"),
        "sweep/unfinished": ("incomplete", "the run did not finish"),
        "empty": ("incomplete", "no epoch was finished"),
    }
    assert rows.keys() == expected.keys()
    for name, (status, problem) in expected.items():
        assert rows[name]["status"] == status
        assert problem in " ".join(rows[name]["problems"])
        assert bool(problem) == bool(rows[name]["problems"])
    assert rows["plain"]["score"] == pytest.approx(0.8)
    assert rows["plain"]["spark"] == [0.8] * 4


def test_only_changes_are_read_and_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    original = run_files.read_run
    monkeypatch.setattr(run_files, "read_run", lambda run, **flags: read.append(run.name) or original(run, **flags))
    runs = tmp_path / "runs"
    store = RunStore(runs)
    assert ids(store) == {}
    assert store.content()["exists"] is False
    runs.mkdir()
    for name in "abc":
        write_run(runs / name, CLASSES)
    assert set(ids(store)) == {"a", "b", "c"}
    # A folder that has just changed is read again.
    for path in (*runs.glob("*"), runs):
        os.utime(path, (0, time.time() - 60))
    version = store.content()["version"]
    read.clear()
    assert store.content(version) == {"version": version}
    assert not read
    run_files.write_metrics(runs / "b" / "metrics.jsonl", [epoch_line(e) for e in range(1, 7)])
    rows = store.content(version)["runs"]
    assert set(read) == {"b"}
    assert {row["id"]: row["epochs_trained"] for row in rows} == {"a": 4, "b": 6, "c": 4}


def test_a_killed_run_is_over_at_once(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "a"
    store, hold = RunStore(tmp_path / "runs"), "from pathlib import Path; from flatout.train import run_dir\n"
    hold += f"with run_dir.claimed(Path({str(run)!r}), 'a', resume=True, overwrite=False): print(flush=True); input()"
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
        assert ids(RunStore(tmp_path / "runs")) == {"a": status}


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


# --- requests ---------------------------------------------------------------------------------------------------------


def test_strangers_other_hosts_and_other_sites_are_refused(store: RunStore, client: TestClient) -> None:
    with TestClient(board.make_app(store, TOKEN), base_url=HOST) as stranger:
        for path in ("/api/runs", "/", "/static/main.js", "/?token=wrong", "/api/report"):
            answer = stranger.get(path, headers={"cookie": "x=y"})
            assert (answer.status_code, "token" in answer.text) == (403, True), path
    for value, status in {"cross-site": 403, "same-site": 403, "same-origin": 200, "none": 200}.items():
        assert client.get("/api/runs", headers={"sec-fetch-site": value}).status_code == status
    assert client.get("/api/runs", headers={"host": "evil.example"}).status_code == 400
    assert "script-src 'self'" in client.get("/").headers["content-security-policy"]


def test_runs_and_differences_over_http(client: TestClient) -> None:
    found = client.get("/api/runs").json()
    assert len(found["runs"]) == 9
    assert "lr = 0.05" in client.get("/api/run", params={"run": "plain"}).json()["recipe"]
    assert 'model = "cnn"' in client.get("/api/run", params={"run": "sweep/typed"}).json()["recipe"]
    found = client.get("/api/compare", params={"run": ["plain", "other"]}).json()
    rows = {row["key"]: row["values"] for row in found["differences"]}
    assert rows == {"optimizer.lr": [0.05, 0.5], "future.key": [None, "new"]}
    assert len(found["metrics"]["plain"]) == 4
    # Only changed files of a run are sent.
    first = client.get("/api/changes", params={"run": "plain"}).json()
    assert [line["epoch"] for line in first["metrics"]] == [1, 2, 3, 4]
    again = client.get("/api/changes", params={"run": "plain", **first["stamps"]}).json()
    assert again == {"stamps": first["stamps"]}


def test_a_wrong_request_gets_a_message(client: TestClient) -> None:
    for path, run, message in (
        ("run", "nowhere", "nowhere: there is no such run"),
        ("changes", "../runs/plain", "there is no such run"),
        ("report", "empty", "report.html: does not exist"),
    ):
        answer = client.get(f"/api/{path}", params={"run": run})
        assert answer.status_code == 404
        assert message in answer.json()["error"]


def test_wrong_words_of_the_command(tmp_path: Path, command: Command) -> None:
    (tmp_path / "file").write_text("")
    for words, message in ((["file"], "is a file"), ([".", "--port", "70000"], "must be from 0 to 65535")):
        assert message in command("board", tmp_path / words[0], *words[1:], code=2)


# --- in a browser -----------------------------------------------------------------------------------------------------


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def in_browser(test: Callable[..., None]) -> Any:
    """Mark a test that needs a browser."""
    return pytest.mark.slow(
        pytest.mark.skipif(BROWSER is None, reason="needs a browser: apt-get install chromium")(test)
    )


class Served(subprocess.Popen[str]):
    """A board in a process of its own."""

    def __init__(self, folder: Path, *flags: str) -> None:
        command = [sys.executable, "-m", "flatout", "board", str(folder), *flags]
        super().__init__(command, stderr=subprocess.PIPE, text=True)
        self.said: list[str] = []
        for line in self.stderr or ():
            self.said.append(line.strip())
            if "http://" in line:
                break
        match = re.search(r"http://127\.0\.0\.1:(\d+)/\?token=\S+", self.said[-1])
        assert match, self.said
        self.url, self.port = match[0], int(match[1])

    def __exit__(self, *error: Any) -> None:
        self.kill()
        super().__exit__(*error)

    def end(self, number: int) -> tuple[int, str]:
        self.send_signal(number)
        _, errors = self.communicate(timeout=60)
        return self.returncode, errors


@pytest.fixture(scope="module")
def served(every_run: Path) -> Iterator[Served]:
    with Served(every_run, "--port", "0") as board:
        yield board
        code, errors = board.end(signal.SIGINT)
    assert code == 130
    assert errors.strip().splitlines()[-1] == "flatout: interrupted"
    assert "Traceback" not in errors


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any, served: Served) -> Iterator[Any]:
    """The board, which must neither fail nor load anything from elsewhere."""
    context = browser.new_context(viewport={"width": 1280, "height": 860})
    page, wrong = context.new_page(), list[str]()
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("dialog", lambda dialog: (wrong.append("a script of the data ran"), dialog.dismiss()))
    page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    hosts = set[str]()
    page.on("request", lambda request: hosts.add(request.url.split("/")[2] if "://" in request.url else ""))
    page.goto(served.url)
    page.wait_for_selector("table.runs tbody tr[data-id]")
    yield page
    context.close()
    assert not wrong
    assert hosts <= {f"127.0.0.1:{served.port}", ""}


def names(page: Any) -> list[str]:
    return page.eval_on_selector_all("tr[data-id]", "rows => rows.map(row => row.dataset.id)")


@in_browser
def test_the_table_is_searched_filtered_and_sorted(page: Any) -> None:
    assert "token" not in page.url
    page.wait_for_function("document.querySelectorAll('tr[data-id]').length == 9")
    assert page.inner_text(f'tr[data-id="{HOSTILE}"] .c-name').strip() == HOSTILE
    page.click("thead .c-score button")
    assert page.get_attribute("thead .c-score", "aria-sort") == "descending"
    page.click("thead .c-score button")
    assert names(page)[0] == "other"
    page.keyboard.press("/")
    page.keyboard.type("another")
    assert names(page) == ["other"]
    page.keyboard.press("Escape")
    page.click("text=Attention")
    page.wait_for_function("document.querySelectorAll('tr[data-id]').length < 9")
    assert set(names(page)) >= {"sweep/damaged", "diverged"}
    assert "plain" not in names(page)
    assert "training diverged" in page.get_attribute('tr[data-id="diverged"] .status', "title")
    page.select_option("select[aria-label=Job]", "another")
    assert "No run matches" in page.inner_text("main")


@in_browser
def test_runs_are_compared_and_broken_and_hostile_ones_have_pages(page: Any) -> None:
    for name in ("plain", "other"):
        page.check(f'tr[data-id="{name}"] input')
    page.keyboard.press("c")
    page.wait_for_selector(".curve .uplot")
    page.wait_for_selector("text=optimizer.lr")
    row = page.inner_text("tr:has(code:text-is('optimizer.lr'))").split()
    assert row == ["optimizer.lr", "0.05", "0.5"]
    page.goto(page.url.split("#")[0])
    page.click('tr[data-id="sweep/damaged"]')
    page.wait_for_selector("text=summary.json cannot be read")
    page.keyboard.press("Escape")
    page.click(f'tr[data-id="{HOSTILE}"]')
    page.wait_for_selector("text=<b>bold</b>")
    page.keyboard.press("2")
    page.wait_for_selector("pre.recipe")
    page.evaluate("location.hash = '#/run/nowhere'")
    page.wait_for_selector("text=There is no such run")


@in_browser
def test_what_a_run_writes_appears(page: Any, every_run: Path, request: pytest.FixtureRequest) -> None:
    request.addfinalizer(lambda: shutil.rmtree(every_run / "training", ignore_errors=True))
    run = write_run(every_run / "training", CLASSES, metrics=[epoch_line(1)])
    (run / "summary.json").unlink()
    (run / ".lock").write_text("1 1.0 elsewhere/")
    (run / "logs").mkdir()
    page.wait_for_selector('tr[data-id="training"] .is-running')
    page.click('tr[data-id="training"]')
    run_files.write_metrics(run / "metrics.jsonl", [epoch_line(1), epoch_line(2, train_loss=0.1234)])
    page.wait_for_selector("text=epoch 3 of 4")
    page.wait_for_selector(".u-legend >> text=0.1234")
    page.keyboard.press("3")
    with (run / "logs" / "rank-0.log").open("a") as log:
        log.write("2026-01-01T12:00:00+00:00 rank 0 (cpu)  hello <i>log</i>\n")
    page.wait_for_selector("text=hello <i>log</i>")
    (run / ".lock").unlink()
    shutil.rmtree(run)
    page.wait_for_selector("text=This run has been removed")


# Views, and what is on them when they are complete.
VIEWS = {
    "": "tr[data-id=plain]",
    "#/run/plain": ".curve canvas",
    "#/run/plain/log": ".log",
    "#/compare/plain/other": "table.compare code",
}


@in_browser
def test_nothing_is_wider_than_a_phone(browser: Any, served: Served) -> None:
    context = browser.new_context(viewport={"width": 390, "height": 844})
    page = context.new_page()
    page.goto(served.url)
    for view, content in VIEWS.items():
        page.goto(served.url.split("?")[0] + view)
        page.reload()
        page.wait_for_selector(content)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), view
    colour, button = "getComputedStyle(document.documentElement).backgroundColor", page.locator("#colours")
    before = page.evaluate(colour)
    page.emulate_media(color_scheme="dark")
    assert page.evaluate(colour) != before
    button.click()
    assert (button.inner_text(), page.evaluate(colour)) == ("Light", before)
    context.close()


@pytest.mark.slow
def test_a_port_in_use(served: Served, tmp_path: Path) -> None:
    with Served(tmp_path, "--port", str(served.port)) as board:
        assert board.port > served.port
        assert f"port {served.port} is in use: using {board.port}" in board.said
        assert board.end(signal.SIGTERM)[0] == 143
