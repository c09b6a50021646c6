"""The pictures, the verdict and the page of a run folder."""

import base64
import gzip
import hashlib
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flatout import style
from flatout.cli import main
from flatout.console import duration
from flatout.errors import InputError
from flatout.report import pictures
from flatout.report.page import TIME_PARTS, draw_all
from flatout.tasks import single_label
from flatout.tasks.single_label import SingleLabel
from tests.unit.runs import RECIPE, epoch_line, summary_of

HOSTILE = [
    "<script>alert(1)</script>",
    "x^2 costs $5 and $6",
    "狗 in Chinese",
    'quote"&amp;',
    "a_very_long_name_that_goes_on_and_on_one",
]


def write_run(
    run: Path,
    classes: list[str],
    *,
    size: int = 28,
    channels: int = 1,
    count: int = 60,
    metrics: list[dict[str, Any]] | None = None,
    **values: Any,
) -> Path:
    """Write a run folder in which every third answer is wrong."""
    rng = np.random.default_rng(0)
    K = len(classes)
    labels = np.arange(count) % K
    answers = np.where(np.arange(count) % 3 == 0, (labels + 1) % K, labels)
    probabilities = np.full((count, K), 0.1 / K, np.float32)
    probabilities[np.arange(count), answers] += 0.9
    sample = np.arange(min(count, 50))
    wrong = np.flatnonzero(answers[sample] != labels[sample])
    run.mkdir()
    (run / "recipe.toml").write_text(RECIPE.to_toml(), encoding="utf-8")
    metrics = metrics if metrics is not None else [epoch_line(e) for e in range(1, 5)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics), encoding="utf-8")
    (run / "summary.json").write_text(json.dumps(summary_of(classes, **values)), encoding="utf-8")
    images = rng.integers(0, 256, (len(sample), size, size, channels), dtype=np.uint8)
    np.savez(
        run / "predictions.npz", split="test", probabilities=probabilities, labels=labels, sample=sample,
        images=images, grid=sample[:25], mistakes=wrong,
    )  # fmt: skip
    return run


def replace_predictions(run: Path, **changes: Any) -> None:
    with np.load(run / "predictions.npz") as arrays:
        content: dict[str, Any] = dict(arrays)
    np.savez(run / "predictions.npz", **(content | changes))


@pytest.fixture
def page_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the PNG files out: they take seconds, and the page has pictures of its own."""
    for module, name in ((pictures, "draw_curves"), (pictures, "draw_predictions"), (single_label, "draw_confusion")):
        monkeypatch.setattr(module, name, lambda path, *args: path.write_bytes(b"\x89PNG\r\n\x1a\n"))


class Page(HTMLParser):
    """The elements of a page, their addresses, and the text under each heading."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.ids: list[str] = []
        self.sections: dict[str, str] = {"": ""}
        self._heading: str | None = None
        self._current = ""
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "srcset", "action"):
                self.addresses.append(value or "")
            if name == "id":
                self.ids.append(value or "")
        if tag == "h2":
            self._heading = ""

    def handle_endtag(self, tag: str) -> None:
        if tag == "h2" and self._heading is not None:
            self._current, self._heading = self._heading, None
            self.sections[self._current] = ""
        if tag in ("td", "th"):
            self.sections[self._current] += " | "

    def handle_data(self, data: str) -> None:
        if self._heading is not None:
            self._heading += data
        elif data.strip():
            self.sections[self._current] += data


def pixels(path: Path) -> np.ndarray:
    from PIL import Image

    with Image.open(path) as image:
        return np.asarray(image.convert("RGB")).astype(int)


def coloured(image: np.ndarray, colour: str) -> int:
    """Return how many pixels are within a small distance of a colour."""
    wanted = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    return int((np.abs(image - wanted).max(axis=-1) < 12).sum())


def blue_and_red(image: np.ndarray) -> tuple[int, int]:
    """Return how many pixels are clearly blue and how many clearly red; letters have soft edges."""
    difference = image[..., 2] - image[..., 0]
    return int((difference > 60).sum()), int((difference < -60).sum())


def test_page_holds_every_section_in_order_and_is_self_contained(tmp_path: Path):
    extras = {"skipped_images": {"a/b.jpg": "truncated"}, "verdict": ["Too low."]}
    run = write_run(tmp_path / "run", ["cat", "dog", "owl"], size=128, channels=3, **extras)
    draw_all(run)
    page = Page(run / "report.html")
    assert list(page.sections)[1:] == [
        "Verdict", "Curves", "25 predictions", "Most confident mistakes", "Confusion matrix", "Results of each class",
        "Where the time went", "Recipe", "Environment", "Skipped images",
    ]  # fmt: skip
    assert "80 of 100 right" in page.sections[""]
    assert "Too low." in page.sections["Verdict"]
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
    draw_all(run)
    page = Page(run / "report.html")
    assert "script" not in page.tags
    assert "b" not in page.tags
    assert "<b>bad</b>" in page.sections["Skipped images"]
    for name in HOSTILE:
        assert name in page.sections["Results of each class"]


@pytest.mark.usefixtures("page_alone")
def test_class_table_is_worst_first_and_short(tmp_path: Path):
    classes = [f"class {i:02}" for i in range(30)]
    draw_all(write_run(tmp_path / "run", classes, count=90))
    table = Page(tmp_path / "run" / "report.html").sections["Results of each class"]
    shown = re.findall(r"class \d\d(?= \| 3 \|)", table)
    # A third is always taken for the next class, whose precision is 1/2.
    assert shown == [*classes[::3], *classes[1::3], *classes]
    assert "the worst 20 of 30 classes" in table
    assert "All 30 classes" in table
    assert re.search(r"class 00 \| 3 \|\s+0\.000 \|\s+0\.000 \|\s+0\.000 \|\s+class 01 \(3\s×\)", table)
    assert re.search(r"class 01 \| 3 \|\s+0\.500 \|\s+1\.000 \|\s+0\.667 \|\s+—", table)


@pytest.mark.parametrize(("size", "channels"), [(8, 1), (28, 3), (128, 3)])
def test_prediction_titles_are_blue_where_right_and_red_where_wrong(tmp_path: Path, size: int, channels: int):
    images = np.full((2, size, size, channels), 128, np.uint8)
    for name, predicted in (("right", [0, 1]), ("wrong", [1, -1])):
        pictures.draw_predictions(
            tmp_path / f"{name}.png", images, np.array([0, 1]), np.array(predicted), ["cat", "dog"], SingleLabel()
        )
    right, wrong = pixels(tmp_path / "right.png"), pixels(tmp_path / "wrong.png")
    assert blue_and_red(right)[0] > 50
    assert blue_and_red(right)[1] == 0
    assert blue_and_red(wrong)[0] == 0
    assert blue_and_red(wrong)[1] > 50
    assert (right[0, 0] == 255).all()


def test_tiny_images_are_enlarged_by_whole_pixels(tmp_path: Path):
    board = (np.indices((8, 8)).sum(0) % 2 * 255).astype(np.uint8)[None, :, :, None]
    pictures.draw_predictions(tmp_path / "p.png", board, np.array([0]), np.array([0]), ["a", "b"], SingleLabel())
    row = pixels(tmp_path / "p.png")
    picture = row[row.shape[0] // 2 :, : row.shape[1] // 5].mean(axis=-1)
    assert np.isin(picture, (0, 255)).mean() > 0.97  # no grey between the fields


def test_long_titles_stay_in_their_columns(tmp_path: Path):
    names = ["W" * 60, "狗" * 40]
    images = np.zeros((25, 8, 8, 1), np.uint8)
    pictures.draw_predictions(tmp_path / "p.png", images, np.zeros(25, int), np.ones(25, int), names, SingleLabel())
    image = pixels(tmp_path / "p.png")
    width = image.shape[1]
    for column in range(1, 5):
        gap = image[:, round(width * column / 5) - 1 : round(width * column / 5) + 2]
        assert blue_and_red(gap) == (0, 0)


def test_shorten_keeps_both_ends():
    assert style.shorten("crocodile_head", 40) == "crocodile_head"
    short = style.shorten("crocodile_head", 9)
    assert len(short) == 9
    assert (short[0], short[-1]) == ("c", "d")
    assert style.shorten("two\nlines", 40) == "two lines"


@pytest.mark.parametrize("count", [2, 10, 101, pytest.param(300, marks=pytest.mark.slow)])
def test_confusion_shows_right_in_blue_and_wrong_in_red(tmp_path: Path, count: int):
    classes = [f"a rather long name {i}" for i in range(count)]
    path = tmp_path / "c.png"
    single_label.draw_confusion(path, np.eye(count, dtype=int) * 5, classes)
    assert coloured(pixels(path), style.RIGHT) > 500
    assert coloured(pixels(path), style.WRONG) == 0
    single_label.draw_confusion(path, np.roll(np.eye(count, dtype=int), 1, axis=1) * 5, classes)
    assert coloured(pixels(path), style.WRONG) > 500
    assert coloured(pixels(path), style.RIGHT) == 0
    assert path.stat().st_size < 400_000


@pytest.mark.parametrize(
    "metrics",
    [
        pytest.param([], id="none"),
        pytest.param([epoch_line(1)], id="one epoch"),
        pytest.param([epoch_line(1, train_loss=math.nan, train_accuracy=None, valid_loss=math.inf)], id="all broken"),
        pytest.param([epoch_line(1), epoch_line(2, train_loss=math.nan), {"epoch": 3}], id="broken later"),
        pytest.param([epoch_line(e, train_loss=10.0 ** (9 * e), learning_rate=0.1 / e) for e in (1, 2)], id="huge"),
        pytest.param([epoch_line(e, train_loss=0.0, test_accuracy=0.5) for e in range(1, 400)], id="many"),
    ],
)
def test_curves_draw_whatever_happened(tmp_path: Path, metrics: list[dict[str, Any]]):
    pictures.draw_curves(tmp_path / "curves.png", metrics, {})
    assert pixels(tmp_path / "curves.png").min() < 100


def test_learning_rate_panel_only_where_it_changes(tmp_path: Path):
    pictures.draw_curves(tmp_path / "constant.png", [epoch_line(e) for e in (1, 2)], {})
    pictures.draw_curves(tmp_path / "moving.png", [epoch_line(e, learning_rate=0.1 / e) for e in (1, 2)], {})
    assert pixels(tmp_path / "moving.png").shape[0] > pixels(tmp_path / "constant.png").shape[0]


def test_a_chart_is_the_same_text_each_time():
    metrics = [epoch_line(e) for e in range(1, 5)]
    one, other = (pictures.curve_svg(metrics, summary_of(["a", "b"]), "loss") for _ in range(2))
    assert one == other


def test_drawing_leaves_pyplot_and_settings_alone(tmp_path: Path):
    import sys

    import matplotlib

    before = dict(matplotlib.rcParams)
    had_pyplot = "matplotlib.pyplot" in sys.modules
    draw_all(write_run(tmp_path / "run", ["a", "b"]))
    assert dict(matplotlib.rcParams) == before
    assert ("matplotlib.pyplot" in sys.modules) == had_pyplot


@pytest.mark.usefixtures("page_alone")
def test_a_failed_run_still_has_a_page(tmp_path: Path):
    metrics = [epoch_line(1), epoch_line(2, train_loss=math.nan, valid_accuracy=None)]
    run = write_run(
        tmp_path / "run", ["a", "b"], metrics=metrics, test_accuracy=None, test_correct=None, valid_accuracy=math.nan,
        stopped="the loss was not a number in epoch 2", images_per_second=math.nan, time_seconds=None,
        epochs_trained=2,
    )  # fmt: skip
    replace_predictions(run, probabilities=np.full((60, 2), np.nan, np.float32))
    draw_all(run)
    page = Page(run / "report.html")
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
        ("metrics.jsonl", None, "Curves", "There is no metrics.jsonl"),
        ("metrics.jsonl", None, "Verdict", "Without a finished epoch the run cannot be judged"),
        ("metrics.jsonl", b'{"epoch": 1, "train_loss": 0.5}\n{"epo', "Curves", "Line 2 of metrics.jsonl is damaged"),
        ("summary.json", None, "", "the run did not finish"),
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
    draw_all(run)
    assert sentence in Page(run / "report.html").sections[section]


def test_no_run_folder_is_refused(tmp_path: Path):
    with pytest.raises(InputError, match="no such run folder"):
        draw_all(tmp_path / "nothing")
    with pytest.raises(InputError, match=r"recipe\.toml"):
        draw_all(tmp_path)
    (tmp_path / "recipe.toml").write_text(RECIPE.to_toml())
    with pytest.raises(InputError, match=r"summary\.json nor metrics\.jsonl"):
        draw_all(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.toml"]


def test_a_page_that_cannot_be_written_is_named_and_leaves_nothing(tmp_path: Path):
    run = write_run(tmp_path / "run", ["a", "b"])
    (run / "report.html").mkdir()
    with pytest.raises(InputError, match=r"report\.html: cannot be written"):
        draw_all(run)
    assert not list(run.glob(".*"))


@pytest.mark.usefixtures("page_alone")
def test_page_of_real_images(tmp_path: Path, shared_data: Path):
    run = write_run(tmp_path / "run", [f"class {i}" for i in range(10)])
    with gzip.open(shared_data / "fashion-mnist" / "t10k-images-idx3-ubyte.gz") as file:
        images = np.frombuffer(file.read(16 + 50 * 784), np.uint8, offset=16).reshape(50, 28, 28, 1)
    replace_predictions(run, images=images)
    draw_all(run)
    assert (run / "predictions.png").stat().st_size < 300_000
    assert (run / "report.html").stat().st_size < 1_000_000


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (3.14, "3.1 s"), (9.97, "10 s"), (99.4, "99 s"), (269, "4 min 29 s"), (3720, "1 h 02 min")],
)
def test_duration(seconds: float, text: str):
    assert duration(seconds) == text


@pytest.mark.usefixtures("page_alone")
def test_the_only_script_filters_the_classes_and_is_allowed_by_its_hash(tmp_path: Path):
    draw_all(write_run(tmp_path / "run", [f"</script>{i}" for i in range(30)]))
    html = (tmp_path / "run" / "report.html").read_text()
    (script,) = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    allowed = re.findall(r"script-src 'sha256-([^']*)'", html)
    assert allowed == [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()]


@pytest.mark.usefixtures("page_alone")
def test_stored_predictions_decide_ties(tmp_path: Path):
    run = write_run(tmp_path / "run", ["cat", "dog"], count=40, test_correct=40, test_count=40, test_accuracy=1.0)
    tied, labels = np.full((40, 2), 0.5, np.float32), np.arange(40) % 2
    replace_predictions(run, probabilities=tied, predicted=labels, mistakes=labels[:0])
    draw_all(run)
    page = Page(run / "report.html")
    assert "40 of 40 right" in page.sections[""]
    assert "every answer is right" in page.sections["Most confident mistakes"]
    assert re.search(r"dog \| 20 \|\s+1\.000 \|\s+1\.000 ", page.sections["Results of each class"])


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("test_accuracy", "high", "test_accuracy is text, not a number"),
        ("test_count", 10.5, "test_count is a number, not a whole number"),
        ("classes", "cat", "classes is text, not a list"),
        ("classes", 2, "classes is a whole number, not a list"),
        ("classes", ["cat", 7], r"classes\[1\] is a whole number, not text"),
        ("verdict", {"a": "b"}, "verdict is an object, not a list"),
        ("time_seconds", [1, 2], "time_seconds is a list, not an object"),
        ("time_seconds", {"train": "long"}, r"time_seconds\.train is text, not a number"),
        ("skipped_images", {"a.jpg": None, "b.jpg": 3}, r"skipped_images\.b\.jpg is a whole number, not text"),
        ("train_loss_by_step", [[1, "x"]], r"train_loss_by_step\[0\]\[1\] is text, not a number"),
    ],
)
def test_a_value_of_another_type_is_named(tmp_path: Path, capsys: Any, key: str, value: Any, message: str):
    run = write_run(tmp_path / "run", ["cat", "dog"])
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps(summary | {key: value}))
    assert main(["report", str(run)]) == 2
    assert re.fullmatch(rf"flatout: .*summary\.json: {message}: .*\n", capsys.readouterr().err)


@pytest.mark.usefixtures("page_alone")
def test_a_run_of_an_older_version_has_a_page(tmp_path: Path):
    run = write_run(tmp_path / "run", ["cat", "dog"])
    new = ("train_loss_by_step", "kept_epoch", "notes", "verdict", "time_seconds", "date", "machine", "versions")
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps({k: v for k, v in summary.items() if k not in new}))
    draw_all(run)
    assert "80 of 100 right" in Page(run / "report.html").sections[""]


@pytest.mark.parametrize("file", ["run/class_names.csv", "data/LOC_synset_mapping.txt"])
@pytest.mark.usefixtures("page_alone")
def test_readable_names_of_classes(tmp_path: Path, file: str):
    (tmp_path / "data").mkdir()
    run = write_run(tmp_path / "run", ["n01440764", "n02102040"])
    (run / "recipe.toml").write_text(RECIPE.override({"data.path": str(tmp_path / "data")}).to_toml())
    separator = "," if file.endswith(".csv") else " "
    (tmp_path / file).write_text(f"n01440764{separator}tench, Tinca tinca\nn02102040{separator}springer\nn9 cat\n")
    draw_all(run)
    table = Page(run / "report.html").sections["Results of each class"]
    assert "tench, Tinca tinca" in table
    assert "n01440764" not in table


def test_every_part_of_the_time_has_a_colour_of_its_own():
    # What session.py and finish.py measure.
    parts = {"start", "pack", "launch", "read", "model", "place", "compile", "train", "evaluate", "pictures", "other"}
    assert parts <= TIME_PARTS.keys()
    assert len({colour for _, colour in TIME_PARTS.values()}) == len(TIME_PARTS)


def panel(metrics: list[dict[str, Any]], quantity: str, **summary: Any) -> Any:
    """Return the axes of a panel of curves."""
    axes = style.new_figure(4, 3).add_subplot()
    pictures.draw_panel(axes, metrics, summary, quantity)
    return axes


def test_axes_do_not_dramatise_noise():
    noise = [epoch_line(e, train_accuracy=0.51, valid_accuracy=0.51 + 0.01 * (e % 2), train_loss=0.690 + 0.001 * e,
                        valid_loss=0.69) for e in range(1, 6)]  # fmt: skip
    low, high = panel(noise, "accuracy").get_ylim()
    assert high - low >= 0.1
    low, high = panel(noise, "loss").get_ylim()
    assert high - low >= 0.17


def test_a_run_of_one_epoch_shows_the_loss_by_steps_and_accuracies_as_bars():
    losses = [[step, 2.0 / step] for step in range(1, 11)]
    loss = panel([epoch_line(1)], "loss", train_loss_by_step=losses)
    assert len(loss.lines[0].get_xdata()) == 10
    assert len(panel([epoch_line(1)], "accuracy").patches) == 2


def test_the_legend_names_the_kept_epoch_and_its_score():
    metrics = [epoch_line(e, valid_accuracy=0.8 + 0.01 * e) for e in (1, 2, 3)]
    labels = [text.get_text() for text in panel(metrics, "accuracy", kept_epoch=2).get_legend().get_texts()]
    assert "kept: epoch 2, valid 0.820" in labels


@pytest.mark.usefixtures("page_alone")
def test_many_classes_have_a_list_of_the_most_confused(tmp_path: Path):
    draw_all(write_run(tmp_path / "run", [f"class {i:02}" for i in range(20)], count=240))
    assert re.search(
        r"class \d\d \| class \d\d \| 4 \| 12 \|",
        Page(tmp_path / "run" / "report.html").sections["Most confused classes"],
    )


@pytest.mark.usefixtures("page_alone")
def test_notes_about_devices_are_not_part_of_the_verdict(tmp_path: Path):
    draw_all(write_run(tmp_path / "run", ["a", "b"], notes=["using 2 processes"], runs_on=["cpu: 2 threads"]))
    sections = Page(tmp_path / "run" / "report.html").sections
    assert "No problems found" in sections["Verdict"]
    assert "processes" not in sections["Verdict"]
    assert "using 2 processes" in sections["Environment"]
    assert "cpu: 2 threads" in sections["Environment"]
