"""The pictures of a report: predictions, confusion matrix and curves."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flatout.report import pictures
from flatout.tasks import SingleLabel
from flatout.utils import style
from tests.unit.runs import epoch_line


def pixels(path: Path) -> np.ndarray:
    from PIL import Image

    with Image.open(path) as image:
        return np.asarray(image.convert("RGB")).astype(int)


def blue_and_red(image: np.ndarray, *, least: int = 60) -> tuple[int, int]:
    """Return how many pixels are clearly blue and how many clearly red; letters have soft edges."""
    difference = image[..., 2] - image[..., 0]
    return int((difference > least).sum()), int((difference < -least).sum())


@pytest.mark.parametrize(("size", "channels"), [(8, 1), (28, 3), (128, 3)])
def test_prediction_titles_are_blue_where_right_and_red_where_wrong(tmp_path: Path, size: int, channels: int):
    images = np.full((2, size, size, channels), 128, np.uint8)
    for name, predicted in (("right", [0, 1]), ("wrong", [1, -1])):
        pictures.draw_predictions(
            tmp_path / f"{name}.png", images, np.array([0, 1]), np.array(predicted), ["cat", "dog"], SingleLabel()
        )
    right, wrong = pixels(tmp_path / "right.png"), pixels(tmp_path / "wrong.png")
    assert blue_and_red(right)[0] > 50 and blue_and_red(right)[1] == 0
    assert blue_and_red(wrong)[0] == 0 and blue_and_red(wrong)[1] > 50
    assert (right[0, 0] == 255).all()


def test_long_titles_stay_in_their_columns(tmp_path: Path):
    names = ["W" * 60, "狗" * 40]
    images = np.zeros((25, 8, 8, 1), np.uint8)
    pictures.draw_predictions(tmp_path / "p.png", images, np.zeros(25, int), np.ones(25, int), names, SingleLabel())
    image = pixels(tmp_path / "p.png")
    width = image.shape[1]
    for column in range(1, 5):
        gap = image[:, round(width * column / 5) - 1 : round(width * column / 5) + 2]
        assert blue_and_red(gap) == (0, 0)


@pytest.mark.parametrize("count", [2, 101])
def test_confusion_shows_right_in_blue_and_wrong_in_red(tmp_path: Path, count: int):
    classes = [f"a rather long name {i}" for i in range(count)]
    path = tmp_path / "c.png"
    for right, step in ((True, 0), (False, 1)):
        pictures.draw_confusion(path, np.roll(np.eye(count, dtype=int), step, axis=1) * 5, classes, 5 * count)
        blue, red = blue_and_red(pixels(path))
        assert (blue > 500, red > 500) == (right, not right)
        assert min(blue, red) == 0
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
    pictures.draw_curves(tmp_path / "curves.png", metrics, {}, SingleLabel())
    assert pixels(tmp_path / "curves.png").min() < 100


def panel(metrics: list[dict[str, Any]], quantity: str, **summary: Any) -> Any:
    """Return the axes of a panel of curves."""
    axes = style.new_figure(4, 3).add_subplot()
    pictures.draw_panel(axes, metrics, summary, quantity, SingleLabel())
    return axes


def test_axes_do_not_dramatise_noise():
    noise = [epoch_line(e, train_accuracy=0.51, valid_accuracy=0.51 + 0.01 * (e % 2), train_loss=0.690 + 0.001 * e,
                        valid_loss=0.69) for e in range(1, 6)]  # fmt: skip
    low, high = panel(noise, "accuracy").get_ylim()
    assert high - low >= 0.1
    low, high = panel(noise, "loss").get_ylim()
    assert high - low >= 0.17


@pytest.mark.parametrize("lines", [[epoch_line(1)], [epoch_line(1), epoch_line(2, step=15)]])
def test_a_run_of_few_epochs_shows_the_loss_by_steps_which_a_short_last_one_does_not_move(lines: list[dict[str, Any]]):
    loss = panel(lines, "loss", train_loss_by_step=[[5, 2.0], [10, 1.0], [15, 0.5]])
    assert list(loss.lines[0].get_xdata()) == [0.5, 1.0, 1.5]


def test_the_legend_names_the_kept_epoch_and_its_score():
    metrics = [epoch_line(e, valid_accuracy=0.8 + 0.01 * e) for e in (1, 2, 3)]
    labels = [text.get_text() for text in panel(metrics, "accuracy", kept_epoch=2).get_legend().get_texts()]
    assert "kept: epoch 2, valid 0.820" in labels
