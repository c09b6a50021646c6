"""ARCHITECTURE.md says how a folder of images comes to a gradient: its table is compared with a run."""

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from flatout.cli.main import main
from tests.system.run_files import write_class_folders

PAGE = Path(__file__).resolve().parents[2] / "ARCHITECTURE.md"
CALLS = re.findall(r"^\| \d+ \| `([\w.]+)` \|", PAGE.read_text(encoding="utf-8"), re.M)


def test_a_run_takes_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_class_folders(tmp_path / "photos", per_class=20, size=32)
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path / "cache"))
    # The measurement for a generated recipe builds models, too.
    monkeypatch.setattr("flatout.engine.factory.speeds_on", lambda spec, engine: None)
    monkeypatch.setattr("flatout.report.page.draw_all", lambda run: None)
    # Imported before the calls are watched, which makes imports slow.
    for name in CALLS[:-1]:
        importlib.import_module("flatout." + re.split(r"\.\w+$|\.[A-Z]", name)[0])
    seen: list[str] = []
    # Those that call one another when the format is chosen and when the gradient is computed; and the format.
    modules = {"flatout.data.formats.folders"}

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            module = frame.f_globals.get("__name__", "").removeprefix("flatout.")
            name = f"{module}.{frame.f_code.co_qualname}".replace("torch._tensor.Tensor", "torch.Tensor")
            if name in CALLS and name not in seen:
                seen.append(name)
                if name in ("data.detect.recognise", CALLS[-1]):
                    modules.update(on_stack(frame))
            if name == CALLS[-1]:
                sys.setprofile(None)

    sys.setprofile(note)
    try:
        # Number formats would be measured by steps before training.
        flags = ["--epochs", "1", "--devices", "cpu", "--out", str(tmp_path / "run")]
        flags += ["--set", "precision=fp32"]
        code = main(["train", str(tmp_path / "photos"), *flags])
    finally:
        sys.setprofile(None)
    assert code == 0
    assert seen == CALLS
    assert len(modules) <= 10, sorted(modules)


def on_stack(frame: FrameType | None) -> Iterator[str]:
    """Yield flatout's modules among the callers of a frame."""
    while frame:
        if (name := frame.f_globals.get("__name__", "")).startswith("flatout."):
            yield name
        frame = frame.f_back
