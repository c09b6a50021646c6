"""The comparison that `flatout scale` makes of its runs: speed-up, efficiency, and the findings."""

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from flatout.analysis.scale import (
    compare_specs,
    draw_scaling,
    explained_by_rounding,
    findings,
    format_scale,
    split_specs,
)
from flatout.utils.errors import InputError


def run(devices: str, world_size: int, rate: float, *, threads: int | None = 1, **values: Any) -> dict[str, Any]:
    """Return the figures of a run over 100,000 images that starts in 4 s."""
    train = 100_000 / rate
    figures = {
        "devices": devices, "kind": "cuda" if "cuda" in devices else "cpu", "repeat": 1, "batch_size": 64,
        "world_size": world_size, "threads_per_rank": threads,
        "images_per_second": rate, "epoch_seconds": train / 5, "train_seconds": train, "warmup_seconds": 0.0,
        "setup_seconds": 4.0, "wall_seconds": train + 5, "communication_fraction": None, "input_wait_fraction": 0.0,
        "split": "test", "accuracy": 0.9, "correct": 900, "count": 1000,
    }  # fmt: skip
    return figures | values


def result_of(*runs: dict[str, Any], cores: int = 8, **head: Any) -> dict[str, Any]:
    result: dict[str, Any] = {
        "job": "sample", "scaling": "strong", "batch_size": 64, "epochs": 5, "norm": "global",
        "repeats": len(runs) // len({r["devices"] for r in runs}), "machine": {"cores": cores}, "out": "there",
    }  # fmt: skip
    result |= {**compare_specs(runs), **head}
    return result | {"findings": findings(result)}


@pytest.mark.parametrize(
    ("text", "specs"),
    [
        ("cpu,2xcpu", ["cpu", "2xcpu"]),
        ("cuda:0,cuda:0,2,3 , 4xcuda", ["cuda:0", "cuda:0,2,3", "4xcuda"]),
        ("cpu,2", ["cpu,2"]),  # refused as a SPEC
    ],
)
def test_specs_are_split_at_the_commas_between_them(text: str, specs: list[str]) -> None:
    assert split_specs(text) == specs


@pytest.mark.parametrize(("text", "named"), [("cpu,,2xcpu", "empty"), ("", "empty"), ("cpu,2xcpu,cpu", "twice")])
def test_empty_and_repeated_specs_are_refused(text: str, named: str) -> None:
    with pytest.raises(InputError, match=named):
        split_specs(text)


def test_figures_of_rows() -> None:
    """Medians over the repeats; efficiency against the fewest devices of the same kind."""
    row = result_of(*(run("cpu", 1, rate, repeat=k) for k, rate in enumerate((100.0, 500.0, 120.0))))["specs"][0]
    assert row["images_per_second"] == {"median": 120.0, "min": 100.0, "max": 500.0}
    assert row["communication_fraction"] is None
    runs = run("4xcpu", 4, 3000), run("cpu", 1, 1000), run("2xcuda", 2, 50_000), run("8xcuda", 8, 100_000)
    rows = {row["devices"]: row for row in result_of(*runs)["specs"]}
    assert [(name, row["base"], row["speed_up"], row["efficiency"]) for name, row in rows.items()] == [
        ("4xcpu", "cpu", 3.0, 0.75),
        ("cpu", "cpu", 1.0, 1.0),
        ("2xcuda", "2xcuda", 1.0, 1.0),
        ("8xcuda", "2xcuda", 2.0, 0.5),
    ]
    assert [row["threads_per_rank"] for row in rows.values()] == [1, 1, None, None]


BASE, TWO = run("cpu", 1, 1000), run("2xcpu", 2, 1900)
MISSING = {"correct": None, "count": None}


@pytest.mark.parametrize(
    ("runs", "head", "sentence"),
    [
        (
            [BASE, TWO],
            {},
            "2xcpu (2 x 1 thread) trains 1.90 times as fast as cpu (1 x 1 thread), an efficiency of 95%.",
        ),
        ([BASE, run("4xcpu", 4, 2000, communication_fraction=0.2)], {}, "Causes: 20% of the time is communication"),
        ([BASE, run("4xcpu", 4, 2000, input_wait_fraction=0.3)], {}, "30% is waiting for images"),
        ([BASE, run("4xcpu", 4, 2000, batch_size=10)], {}, "a batch of 10 does not divide by 4"),
        ([BASE, run("4xcpu", 4, 2000, batch_size=32)], {}, "8 images per device and step are too few"),
        ([BASE, run("4xcpu", 4, 2000)], {"cores": 2}, "4 threads share 2 cores"),
        (
            [run("cpu", 1, 1000, threads=2), run("2xcpu", 2, 1020)],
            {},
            "an efficiency of 51% counted by processes, and of 102% counted by threads.",
        ),
        ([BASE, run("2xcpu", 2, 2760)], {}, "not plausible: the runs were too short or disturbed"),
        ([run("cpu", 1, 1000, threads=2), run("cuda", 1, 50_000)], {}, "cuda trains 50 times as fast as cpu (1 x 2 th"),
        ([run("cpu", 1, 1000), run("cpu", 1, 1400)], {}, "a factor of up to 1.4"),
        ([BASE, TWO], {}, "--repeats 3"),
        ([BASE, TWO], {}, "Every run gives the same answer: 900 of 1,000 test images right."),
        ([BASE, TWO | {"correct": 903}], {}, "the order of summation explains that"),
        ([BASE, TWO | {"correct": 700}], {}, "more than the order of summation explains"),
        ([BASE, TWO | {"correct": 700}], {"scaling": "weak"}, "with --weak the batch grows"),
        ([BASE, TWO | {"correct": 700}], {"norm": "per-device"}, 'norm = "per-device"'),
    ],
)
def test_findings(runs: list[dict[str, Any]], head: dict[str, Any], sentence: str) -> None:
    result = result_of(*runs, **head)
    assert sentence in "\n".join(result["findings"])


def test_nothing_is_found_where_there_is_nothing() -> None:
    noise = [run("cpu", 1, rate) for rate in (1000, 1400)]
    assert "noise" in result_of(*noise, *(run("2xcpu", 2, rate) for rate in (1300, 1600)))["findings"][0]
    assert "noise" not in result_of(*noise, *(run("2xcpu", 2, rate) for rate in (1900, 2000)))["findings"][0]
    assert "Causes" not in result_of(BASE, TWO)["findings"][0]
    assert not [finding for finding in result_of(BASE | MISSING, TWO | MISSING)["findings"] if "answer" in finding]
    assert "-" in next(line for line in format_scale(result_of(BASE | MISSING)) if "images right" in line)
    assert explained_by_rounding(100, 100, 100) == 1.0
    assert explained_by_rounding(5000, 5000, 10_000) == 50.0


@pytest.mark.parametrize(
    "runs",
    [[BASE, TWO, run("cuda", 1, 50_000)], [BASE | {"images_per_second": None, "warmup_seconds": None}, TWO]],
    ids=["rates", "no-rate"],
)
def test_the_chart_is_drawn_and_not_empty(runs: list[dict[str, Any]], tmp_path: Path) -> None:
    draw_scaling(tmp_path / "chart.png", result_of(*runs))
    with Image.open(tmp_path / "chart.png") as image:
        assert image.width > image.height > 400
        colours = image.convert("RGB").getcolors(1 << 24) or []
    assert len(colours) > 50
