"""The page of a run folder. Its pictures: `test_pictures`; its verdict: `test_verdict`."""

import base64
import hashlib
import json
import math
import re
from html import unescape
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest

from flatout.report.page import draw_all
from flatout.utils.errors import InputError
from tests.conftest import Command
from tests.system.conftest import draw_small_pictures
from tests.unit.runs import RECIPE, epoch_line, summary_of, write_run

HOSTILE = [
    "<script>alert(1)</script>",
    "x^2 costs $5 and $6",
    "狗 in Chinese",
    'quote"&amp;',
    "a_very_long_name_that_goes_on_and_on_one",
]


@pytest.fixture
def page_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the PNG files out: they take seconds, and the page has pictures of its own."""
    draw_small_pictures(monkeypatch)


class Page:
    """The tags of a page, its addresses and ids, and the text under each heading."""

    def __init__(self, run: Path) -> None:
        draw_all(run)
        html = (run / "report.html").read_text(encoding="utf-8")
        body = re.sub(r"<style>.*?</style>|<!--.*?-->", "", html, flags=re.S)
        self.tags = re.findall(r"<(\w+)", body)
        self.addresses = re.findall(r'\s(?:src|href|xlink:href|srcset|action)="([^"]*)"', body)
        self.ids = re.findall(r'\sid="([^"]*)"', body)
        cells = re.sub(r"</t[dh]>", " | ", body)
        top, *parts = re.split(r"<h2>(.*?)</h2>", cells)
        texts = (" ".join(unescape(re.sub(r"<[^>]+>", "", part)).split()) for part in (top, *parts[1::2]))
        self.sections = dict(zip(("", *parts[::2]), texts, strict=True))


def test_page_holds_every_section_in_order_and_is_self_contained(tmp_path: Path):
    extras = {"skipped_images": {"a/b.jpg": "truncated"}, "verdict": ["Too low."], "notes": ["using 2 processes"]}
    run = write_run(tmp_path / "run", ["cat", "dog", "owl"], size=128, channels=3, **extras)
    before = dict(matplotlib.rcParams)
    page = Page(run)
    assert dict(matplotlib.rcParams) == before
    assert list(page.sections)[1:] == [
        "Verdict", "Curves", "25 predictions", "Most confident mistakes", "Confusion matrix", "Results of each class",
        "Where the time went", "Recipe", "Environment", "Skipped images",
    ]  # fmt: skip
    assert "80 of 100 right" in page.sections[""]
    assert "Too low." in page.sections["Verdict"]
    assert "processes" not in page.sections["Verdict"]
    assert "using 2 processes" in page.sections["Environment"]
    assert "a/b.jpg" in page.sections["Skipped images"]
    assert "evaluation" in page.sections["Where the time went"]
    assert "everything else" in page.sections["Where the time went"]  # 65 s in all, 62 s accounted for
    assert page.tags.count("img") == 25 + 17 + 1
    assert page.tags.count("svg") == 2
    assert {"predictions.png", "curves.png", "confusion.png", "report.html"} <= {path.name for path in run.iterdir()}
    assert not list(run.glob(".*"))
    assert all(address.startswith(("data:image/", "#")) for address in page.addresses)
    assert not {"script", "link", "iframe", "object", "form"} & set(page.tags)  # the filter is for many classes
    assert len(page.ids) == len(set(page.ids))


@pytest.mark.usefixtures("page_alone")
def test_names_from_data_are_escaped(tmp_path: Path):
    run = write_run(tmp_path / "run", HOSTILE, skipped_images={"<img src=x onerror=alert(1)>": "<b>bad</b>"})
    page = Page(run)
    assert "script" not in page.tags
    assert "b" not in page.tags
    assert "<b>bad</b>" in page.sections["Skipped images"]
    for name in HOSTILE:
        assert name in page.sections["Results of each class"]


@pytest.mark.usefixtures("page_alone")
def test_class_table_is_worst_first_and_short(tmp_path: Path):
    classes = [f"class {i:02}" for i in range(30)]
    sections = Page(write_run(tmp_path / "run", classes, count=90)).sections
    assert re.search(r"class \d\d \| class \d\d \| 3 \| 3 \|", sections["Most confused classes"])
    table = sections["Results of each class"]
    shown = re.findall(r"class \d\d(?= \| 3 \|)", table)
    # A third is always taken for the next class, whose precision is 1/2.
    assert shown == [*classes[::3], *classes[1::3], *classes]
    assert "the worst 20 of 30 classes" in table
    assert "All 30 classes" in table
    assert "class 00 | 3 | 0.000 | 0.000 | 0.000 |" in table
    assert "class 01 | 3 | 0.500 | 1.000 | 0.667 |" in table


@pytest.mark.usefixtures("page_alone")
def test_a_failed_run_still_has_a_page(tmp_path: Path):
    metrics = [epoch_line(1), epoch_line(2, train_loss=math.nan, valid_accuracy=None)]
    run = write_run(
        tmp_path / "run", ["a", "b"], metrics=metrics, test_accuracy=None, test_correct=None, valid_accuracy=math.nan,
        stopped="the loss was not a number in epoch 2", images_per_second=math.nan, time_seconds=None,
        epochs_trained=2,
    )  # fmt: skip
    with np.load(run / "predictions.npz") as arrays:
        content: dict[str, Any] = dict(arrays)
    content["probabilities"] = np.full((60, 2), np.nan, np.float32)
    np.savez(run / "predictions.npz", **content)
    page = Page(run)
    assert "Stopped: the loss was not a number in epoch 2" in page.sections[""]
    assert "training accuracy, epoch 2" in page.sections[""]
    assert "2 of 4" in page.sections[""]
    assert "For 60 images the model's answer was not a number" in page.sections["Verdict"]
    assert "a / none" in page.sections["25 predictions"]
    assert "nan" not in page.sections[""]


@pytest.mark.parametrize(
    ("name", "content", "section", "sentence"),
    [
        ("predictions.npz", None, "Predictions", "There was no test data"),
        ("predictions.npz", b"PK garbage", "Predictions", "predictions.npz cannot be read"),
        ("metrics.jsonl", None, "Verdict", "Without a finished epoch the run cannot be judged"),
        ("metrics.jsonl", b'{"epoch": 1, "train_loss": 0.5}\n{"epo', "Curves", "Line 2 of metrics.jsonl is damaged"),
        ("summary.json", None, "", "validation accuracy, epoch 4"),
        ("summary.json", b"{", "", "summary.json cannot be read"),
    ],
)
@pytest.mark.usefixtures("page_alone")
def test_a_missing_or_damaged_piece_is_named(
    tmp_path: Path, name: str, content: bytes | None, section: str, sentence: str
):
    run = write_run(tmp_path / "run", ["a", "b"])
    (run / name).unlink()
    if content is not None:
        (run / name).write_bytes(content)
    assert sentence in Page(run).sections[section]


@pytest.mark.usefixtures("page_alone")
def test_curves_of_a_killed_run_have_the_metric_of_its_task(tmp_path: Path):
    run = write_run(tmp_path / "run", ["a", "b"], metrics=[epoch_line(1, valid_mae=2.5)])
    (run / "summary.json").unlink()
    (run / "predictions.npz").unlink()
    (run / "recipe.toml").write_text(RECIPE.override({"task": "regression", "loss": "mse"}).to_toml())
    draw_all(run)
    assert "<!-- Mean absolute error -->" in (run / "report.html").read_text(encoding="utf-8")


def test_what_cannot_be_drawn_is_refused_and_leaves_nothing(tmp_path: Path):
    with pytest.raises(InputError, match=r"recipe\.toml"):
        draw_all(tmp_path)
    (tmp_path / "recipe.toml").write_text(RECIPE.to_toml())
    with pytest.raises(InputError, match=r"summary\.json nor metrics\.jsonl"):
        draw_all(tmp_path)
    run = write_run(tmp_path / "run", ["a", "b"])
    (run / "report.html").mkdir()
    with pytest.raises(InputError, match=r"report\.html: cannot be written"):
        draw_all(run)
    assert not list(run.glob(".*"))


@pytest.mark.usefixtures("page_alone")
def test_the_only_script_filters_the_classes_and_is_allowed_by_its_hash(tmp_path: Path):
    draw_all(write_run(tmp_path / "run", [f"</script>{i}" for i in range(30)]))
    html = (tmp_path / "run" / "report.html").read_text()
    (script,) = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    allowed = re.findall(r"script-src 'sha256-([^']*)'", html)
    assert allowed == [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()]


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("test_accuracy", "high", "has a wrong type"),
        ("notes", "cat", "has a wrong type"),
        ("versions", [""], "has a wrong type"),
        ("trust", {"unknown": {"known_share": 0.95}}, "is incomplete"),
        ("trust", {"unknown": None}, "is incomplete"),
        ("trust", {"prediction_sets": [{"coverage": 0.9}]}, "is incomplete"),
        ("trust", {"reliability_after": []}, "is incomplete"),
    ],
)
@pytest.mark.usefixtures("page_alone")
def test_a_wrong_value_is_named(tmp_path: Path, command: Command, key: str, value: Any, problem: str):
    run = write_run(tmp_path / "run", ["cat", "dog"], **{key: value})
    fix, said = f"restore the file, or remove {key} from it", command("report", run, code=2)
    assert re.fullmatch(rf"flatout: .*summary\.json: {key} {problem}: {fix}\n", said)


@pytest.mark.usefixtures("page_alone")
def test_stages_of_a_run_from_published_weights(tmp_path: Path):
    times = {"features": 12.0, "head": 1.5, "train": 60.0, "evaluate": 2.0}
    figures: dict[str, Any] = {"parameters": 5000, "trained_parameters": 1000, "epochs_trained": 4, "kept_epoch": 3}
    given = {"pretrained": True, "linear_probe": True, "freeze": "all-but-last-3"}
    run = write_run(tmp_path / "run", ["a", "b"], **figures)
    assert "Stages" not in Page(run).sections
    (run / "recipe.toml").write_text(RECIPE.override(given).to_toml(), encoding="utf-8")
    (run / "summary.json").write_text(json.dumps(summary_of(["a", "b"], time_seconds=times, **figures)))
    stages = Page(run).sections["Stages"]
    assert "pre-trained | the layers before the head: the published weights of cnn" in stages
    assert "frozen: their output is computed once for each image | 12 s" in stages
    assert "the head is fitted to the features | 1.5 s" in stages
    assert "1,000 of 5,000 parameters, 4 epochs; the others are frozen | 60 s" in stages
    assert "the weights of epoch 3 | 2.0 s" in stages
    (run / "summary.json").unlink()  # as of a killed run
    assert "Stages" not in Page(run).sections
