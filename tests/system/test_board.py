"""The board in a browser: what a user sees and does, on runs that were written for the test, and on one that trains."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flatout.cli import main
from flatout.report import run_files
from tests.unit.runs import epoch_line, write_run
from tests.unit.test_board import CLASSES, HOSTILE, with_pack

pytestmark = pytest.mark.slow
pytest.importorskip("starlette")
sync_api = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="needs a browser: apt-get install chromium")


class Served:
    """A board in a process of its own."""

    def __init__(self, folder: Path, *flags: str) -> None:
        command = [sys.executable, "-m", "flatout", "board", str(folder), *flags]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr
        self.said: list[str] = []
        for line in self.process.stderr:
            self.said.append(line.strip())
            if "http://" in line:
                break
        match = re.search(r"http://127\.0\.0\.1:(\d+)/\?token=\S+", self.said[-1])
        assert match, self.said
        self.url, self.port = match[0], int(match[1])

    def end(self, number: int = signal.SIGINT) -> tuple[int, str]:
        self.process.send_signal(number)
        _, errors = self.process.communicate(timeout=60)
        return self.process.returncode, errors


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    """Start boards that end with the test, however it ends."""
    started: list[Served] = []

    def start(folder: Path, *flags: str) -> Served:
        started.append(Served(folder, *flags))
        return started[-1]

    yield start
    for board in started:
        if board.process.poll() is None:
            board.end(signal.SIGKILL)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("board") / "runs"
    folder.mkdir()
    with_pack(write_run(folder / "packed", CLASSES), folder.parent)
    write_run(folder / "other", CLASSES, job="another", test_accuracy=0.5)
    # A result with a long name.
    write_run(folder / "numbers", CLASSES, task="regression", test_mae=1234.5, test_r2=0.5)
    write_run(folder / HOSTILE, CLASSES, notes=["<b>bold</b>"])
    write_run(folder / "broken", CLASSES).joinpath("summary.json").write_text("{ this is cut")
    write_run(folder / "newer", CLASSES, versions={"flatout": "99.0"})
    text = (folder / "other" / "recipe.toml").read_text()
    (folder / "other" / "recipe.toml").write_text(text.replace("lr = 0.05", "lr = 0.5"))
    return folder


@pytest.fixture(scope="module")
def served(runs: Path) -> Iterator[Served]:
    board = Served(runs, "--port", "0")
    yield board
    code, errors = board.end()
    assert code == 130
    assert errors.strip().splitlines()[-1] == "flatout: interrupted"
    assert "Traceback" not in errors


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
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


@needs_browser
def test_the_table_is_searched_filtered_and_sorted(page: Any) -> None:
    assert "token" not in page.url
    assert set(names(page)) == {"packed", "other", "numbers", HOSTILE, "broken", "newer"}
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
    page.wait_for_function("document.querySelectorAll('tr[data-id]').length == 2")
    assert set(names(page)) == {"broken", "newer"}
    assert "newer than this one" in page.get_attribute('tr[data-id="newer"] .status', "title")
    page.select_option("select[aria-label=Job]", "another")
    assert "No run matches" in page.inner_text("main")


@needs_browser
def test_a_cell_opens_its_images(page: Any) -> None:
    page.click('tr[data-id="packed"]')
    page.wait_for_selector(".curve .uplot")
    page.keyboard.press("2")
    page.click(".confusion button.miss >> nth=0")
    page.wait_for_selector(".tile img")
    title = page.get_attribute(".confusion button.miss >> nth=0", "title")
    actual, rest = title.split(" taken for ")
    predicted, number = rest.rsplit(": ", 1)
    assert page.inner_text(".gallery-tools .total") == f"{number} images"
    labels = page.eval_on_selector_all(".tile .label", "all => all.map(one => one.textContent)")
    assert set(labels) == {f"{actual} / {predicted}"}
    assert page.evaluate(
        "[...document.querySelectorAll('.tile img')].every(i => i.complete ? i.naturalWidth == 8 : true)"
    )
    page.click(".tile >> nth=0")
    page.wait_for_selector("dialog[open] .bars li")
    first = page.inner_text("dialog .quiet")
    page.keyboard.press("ArrowRight")
    page.wait_for_function("text => document.querySelector('dialog .quiet').textContent != text", arg=first)
    page.keyboard.press("Escape")
    assert not page.query_selector("dialog[open]")


@needs_browser
def test_runs_are_compared(page: Any) -> None:
    for name in ("packed", "other"):
        page.check(f'tr[data-id="{name}"] input')
    page.keyboard.press("c")
    page.wait_for_selector(".curve .uplot")
    page.wait_for_selector("text=optimizer.lr")
    row = page.inner_text("tr:has(code:text-is('optimizer.lr'))").split()
    assert row == ["optimizer.lr", "0.05", "0.5"]


@needs_browser
def test_broken_and_hostile_runs_have_pages(page: Any) -> None:
    page.click('tr[data-id="broken"]')
    page.wait_for_selector("text=summary.json cannot be read")
    page.keyboard.press("Escape")
    page.click(f'tr[data-id="{HOSTILE}"]')
    page.wait_for_selector("text=<b>bold</b>")
    page.keyboard.press("3")
    page.wait_for_selector("pre.recipe")
    page.evaluate("location.hash = '#/run/nowhere'")
    page.wait_for_selector("text=There is no such run")


@needs_browser
def test_what_a_run_writes_appears(page: Any, runs: Path) -> None:
    run = write_run(runs / "training", CLASSES, metrics=[epoch_line(1)])
    (run / "summary.json").unlink()
    (run / ".lock").write_text(f"{os.getpid()}\n")
    (run / "logs").mkdir()
    page.wait_for_selector('tr[data-id="training"] .is-running')
    page.click('tr[data-id="training"]')
    run_files.write_metrics(run / "metrics.jsonl", [epoch_line(1), epoch_line(2, train_loss=0.1234)])
    page.wait_for_selector("text=epoch 3 of 4")
    page.wait_for_selector(".u-legend >> text=0.1234")
    page.keyboard.press("4")
    with (run / "logs" / "rank-0.log").open("a") as log:
        log.write("2026-01-01T12:00:00+00:00 rank 0 (cpu)  hello <i>log</i>\n")
    page.wait_for_selector("text=hello <i>log</i>")
    (run / ".lock").unlink()
    shutil.rmtree(run)
    page.wait_for_selector("text=This run has been removed")


@needs_browser
@pytest.mark.parametrize("cell", [".c-name a", ".c-loss"])
def test_a_click_counts_while_figures_change(page: Any, runs: Path, cell: str) -> None:
    run = write_run(runs / "clicked", CLASSES, metrics=[epoch_line(1)])
    (run / "summary.json").unlink()
    (run / ".lock").write_text(f"{os.getpid()}\n")
    page.wait_for_selector('tr[data-id="clicked"] .is-running')
    page.hover(f'tr[data-id="clicked"] {cell}')
    page.mouse.down()
    run_files.write_metrics(run / "metrics.jsonl", [epoch_line(1), epoch_line(2, valid_loss=0.4321)])
    page.wait_for_selector('tr[data-id="clicked"] >> text=0.432')
    page.mouse.up()
    page.wait_for_selector("text=epoch 3 of 4")
    (run / ".lock").unlink()
    shutil.rmtree(run)


# Views, and what is on them when they are complete.
VIEWS = {
    "": "tr[data-id=packed]",
    "#/run/packed": ".curve canvas",
    "#/run/packed/predictions": ".confusion",
    "#/run/packed/recipe": ".recipe",
    "#/run/packed/log": ".log",
    "#/run/packed/classify": ".drop",
    "#/compare/packed/other": "table.compare code",
    "#/charts": ".empty",
}


@needs_browser
@pytest.mark.parametrize("width", [390, 1280])
def test_it_fits_and_can_be_read(browser: Any, served: Served, width: int) -> None:
    """Nothing is wider than the window, nothing moves while a page loads, and all text has a contrast of 4.5."""
    context = browser.new_context(viewport={"width": width, "height": 844})
    page = context.new_page()
    page.add_init_script(
        "window.moved = 0; new PerformanceObserver(l => l.getEntries().forEach(e => moved += e.value))"
        ".observe({type: 'layout-shift', buffered: true})"
    )
    page.goto(served.url)
    for view, content in VIEWS.items():
        page.goto(served.url.split("?")[0] + view)
        page.reload()
        page.wait_for_selector(content)
        page.wait_for_load_state("load")
        page.wait_for_timeout(200)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), view
        assert page.evaluate("moved") < 0.05, view
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            assert page.evaluate(CONTRAST) == [], (view, scheme)
    context.close()


@needs_browser
def test_the_colours_are_chosen_and_remembered(page: Any) -> None:
    def ground() -> str:
        return page.evaluate("getComputedStyle(document.documentElement).backgroundColor")

    light, button = ground(), page.locator("#colours")
    page.emulate_media(color_scheme="dark")
    dark = ground()
    assert dark != light
    assert button.inner_text() == "Auto"
    button.focus()
    for name, shown in (("Light", light), ("Dark", dark)):
        page.keyboard.press("Enter")
        assert (button.inner_text(), ground()) == (name, shown)
    page.emulate_media(color_scheme="light")
    page.reload()
    page.wait_for_selector("table.runs tbody tr[data-id]")
    assert (button.inner_text(), ground()) == ("Dark", dark)
    # The canvas of a chart is drawn again.
    page.goto(f"{page.url.split('#')[0]}#/run/packed")
    axis = "document.querySelector('canvas').toDataURL()"
    page.wait_for_selector(".curve canvas")
    before = page.evaluate(axis)
    page.keyboard.press("t")
    assert (button.inner_text(), ground()) == ("Auto", light)
    assert page.evaluate(axis) != before


# The text of elements that hold text of their own, where its contrast with the background is below WCAG's AA.
CONTRAST = """() => {
  const rgb = text => {
    const canvas = new OffscreenCanvas(1, 1).getContext("2d", {willReadFrequently: true});
    canvas.fillStyle = text; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = ([r, g, b]) => [r, g, b].map(v => v / 255).map(v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
  const ground = e => { for (; e; e = e.parentElement) { const c = rgb(getComputedStyle(e).backgroundColor); if (c[3] > 250) return c; } return [255, 255, 255]; };
  const bad = new Set();
  for (const e of document.querySelectorAll("main *, header *")) {
    const own = [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
    const box = e.getBoundingClientRect();
    if (!own || !box.width || getComputedStyle(e).visibility !== "visible") continue;
    const [a, b] = [light(rgb(getComputedStyle(e).color)), light(ground(e))].sort((x, y) => y - x);
    if ((a + .05) / (b + .05) < 4.5) bad.add(`${e.tagName}.${e.className}: ${e.textContent.slice(0, 20)} ${((a + .05) / (b + .05)).toFixed(2)}`);
  }
  return [...bad];
}"""  # noqa: E501


@needs_browser
def test_a_thousand_runs(browser: Any, tmp_path: Path, serve: Callable[..., Served]) -> None:
    """Only the rows in the window exist, and all can be reached."""
    source = write_run(tmp_path / "one", CLASSES)
    for number in range(1000):
        shutil.copytree(source, tmp_path / "runs" / f"run-{number:04}", ignore=shutil.ignore_patterns("*.npz"))
    board = serve(tmp_path / "runs", "--port", "0")
    context = browser.new_context(viewport={"width": 1280, "height": 860})
    page = context.new_page()
    page.goto(board.url)
    page.wait_for_selector("text=1,000 in ")
    page.click("thead .c-name button")
    page.wait_for_selector('tr[data-id="run-0000"]')
    assert len(names(page)) < 60
    page.keyboard.press("j")
    page.keyboard.press("j")
    assert page.evaluate("document.activeElement.dataset.id") == "run-0002"
    page.keyboard.press("End")
    page.wait_for_selector('tr[data-id="run-0999"]')
    # Columns that a phone does not show take no room, with rows above and below that do not exist.
    page.set_viewport_size({"width": 390, "height": 844})
    # Rows come and go after a change of the size, so that one found before may be gone.
    page.wait_for_function("document.querySelector('td.c-name').getBoundingClientRect().width > 100")
    context.close()
    assert board.end(signal.SIGTERM)[0] == 143


def test_a_port_in_use(served: Served, tmp_path: Path, serve: Callable[..., Served]) -> None:
    board = serve(tmp_path, "--port", str(served.port))
    assert board.port > served.port
    assert f"port {served.port} is in use: using {board.port}" in board.said
    assert board.end()[0] == 130


@needs_browser
def test_the_first_run_appears_and_answers_an_image(
    browser: Any, tmp_path: Path, serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page is open before there is a folder; then one of the run's images is classified."""
    from PIL import Image
    from sklearn.datasets import load_digits

    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path / "cache"))
    board = serve(tmp_path / "runs", "--port", "0")
    context = browser.new_context()
    page = context.new_page()
    page.goto(board.url)
    page.wait_for_selector("text=This folder does not exist yet.")
    out = tmp_path / "runs" / "digits"
    assert main(["train", "digits", "--epochs", "1", "--devices", "cpu", "--out", str(out)]) == 0
    page.wait_for_selector('tr[data-id="digits"] .is-finished')
    summary = json.loads((out / "summary.json").read_text())
    assert page.inner_text('tr[data-id="digits"] .c-score').strip() == f"{summary['test_accuracy']:.4f}"
    digits: Any = load_digits()
    Image.fromarray((digits.images[0] * 255 / 16).round().astype("uint8")).save(tmp_path / "zero.png")
    page.click('tr[data-id="digits"]')
    page.click("#tab-classify")
    page.set_input_files("input[type=file]", str(tmp_path / "zero.png"))
    page.wait_for_selector(".bars li", timeout=120_000)
    assert len(page.query_selector_all(".bars li")) == 5
    page.set_input_files("input[type=file]", str(out / "recipe.toml"))
    page.wait_for_selector(".asked .stopped")
    context.close()
    assert board.end()[0] == 130
