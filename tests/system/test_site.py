"""The documentation site: it builds without warnings, fetches nothing, and the output in its tutorials is real."""

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.consoles import Command, difference, run, steps
from tests.system.conftest import draw_small_pictures

ROOT = Path(__file__).resolve().parents[2]
TUTORIALS = sorted(path for path in (ROOT / "docs" / "tutorials").glob("*.md") if ".zh-CN" not in path.name)

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_the_output_in_tutorials_is_real(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    draw_small_pictures(monkeypatch)
    found = list(steps(page.read_text(encoding="utf-8")))
    assert any(isinstance(step, Command) for step in found)
    for step in found:
        printed = run(step)
        if isinstance(step, Command):
            assert not (differs := difference(step.expected, printed)), f"{step.words}: {differs}"


class _Fetched(HTMLParser):
    """Collects the addresses that a browser fetches by itself."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag in ("script", "img", "iframe", "source", "video", "audio"):
            self.found.append(given.get("src") or "")
        if tag == "link" and (given.get("rel") or "").strip() not in ("canonical", "alternate", "next", "prev"):
            self.found.append(given.get("href") or "")


@pytest.fixture(scope="module")
def site() -> Path:
    """Build it as `make docs` does."""
    for command in ([sys.executable, ".ci/pages.py"], [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
    return ROOT / "build" / "site"


def test_pages_fetch_nothing_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 40
    for page in pages:
        addresses = _Fetched(page.read_text(encoding="utf-8")).found
        assert addresses
        assert not [a for a in addresses if re.match(r"(https?:)?//", a)], page
    for style in site.rglob("*.css"):
        assert not re.findall(r"url\([\"']?(?:https?:)?//", style.read_text(encoding="utf-8")), style


def test_the_reference_has_all_names_and_commands(site: Path) -> None:
    import flatout
    from flatout.cli.commands import COMMANDS

    python = (site / "docs" / "reference" / "python.html").read_text(encoding="utf-8")
    assert not [name for name in flatout.__all__ if f'id="flatout.{name}"' not in python]
    commands = (site / "docs" / "reference" / "commands.html").read_text(encoding="utf-8")
    assert not [name for name in COMMANDS if f'id="flatout-{name}"' not in commands]
