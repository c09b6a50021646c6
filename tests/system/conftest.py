"""Every system test keeps its packs in a cache of the test session's own."""

import pytest


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out pictures and report, which take longer than a small run."""
    monkeypatch.setattr("flatout.report.page.draw_all", lambda run: None)
