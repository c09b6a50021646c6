"""The comparison that `flatout scale` makes of its runs: speed-up, efficiency, and what the sentences say of them."""

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from flatout.errors import InputError
from flatout.scale.chart import draw_scaling
from flatout.scale.findings import explained_by_rounding, findings
from flatout.scale.scale import compare, folder_name, lines_of, split_specs


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
    result |= {**compare(runs), **head}
    return result | {"findings": findings(result)}


def said(*runs: dict[str, Any], **head: Any) -> str:
    return "\n".join(result_of(*runs, **head)["findings"])


@pytest.mark.parametrize(
    ("text", "specs"),
    [
        ("cpu", ["cpu"]),
        ("cpu,2xcpu", ["cpu", "2xcpu"]),
        ("cuda:0,2", ["cuda:0,2"]),
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


def test_run_folders_of_different_specs_differ() -> None:
    specs = ["cuda", "cuda:1", "cuda:1,2", "2xcuda"]
    names = [folder_name(spec, repeat) for spec in specs for repeat in range(1, 4)]
    assert len(set(names)) == len(names)
    assert not [name for name in names if set(name) & set(":,/")]


def test_a_figure_is_the_median_of_its_repeats_with_the_least_and_the_most() -> None:
    rates = (100.0, 500.0, 120.0)
    row = result_of(*(run("cpu", 1, rate, repeat=k) for k, rate in enumerate(rates)))["specs"][0]
    assert row["images_per_second"] == {"median": 120.0, "min": 100.0, "max": 500.0}
    assert row["communication_fraction"] is None


def test_efficiency_is_against_the_fewest_devices_of_the_same_kind() -> None:
    runs = run("4xcpu", 4, 3000), run("cpu", 1, 1000), run("2xcuda", 2, 50_000), run("8xcuda", 8, 100_000)
    rows = {row["devices"]: row for row in result_of(*runs)["specs"]}
    assert {name: row["base"] for name, row in rows.items()} == {
        "4xcpu": "cpu", "cpu": "cpu", "2xcuda": "2xcuda", "8xcuda": "2xcuda",
    }  # fmt: skip
    assert (rows["4xcpu"]["speed_up"], rows["4xcpu"]["efficiency"]) == (3.0, 0.75)
    assert (rows["8xcuda"]["speed_up"], rows["8xcuda"]["efficiency"]) == (2.0, 0.5)
    assert rows["cpu"]["efficiency"] == 1.0


def test_good_scaling_is_said_without_excuses() -> None:
    text = said(run("cpu", 1, 1000), run("2xcpu", 2, 1900))
    assert "2xcpu (2 x 1 thread) trains 1.90 times as fast as cpu (1 x 1 thread), an efficiency of 95%." in text
    assert "Causes" not in text


@pytest.mark.parametrize(
    ("values", "cores", "reason"),
    [
        ({"communication_fraction": 0.2}, 8, "20% of the time is communication"),
        ({"input_wait_fraction": 0.3}, 8, "30% is waiting for images"),
        ({"batch_size": 10}, 8, "a batch of 10 does not divide by 4"),
        ({"batch_size": 32}, 8, "8 images per device and step are too few"),
        ({}, 2, "4 threads share 2 cores"),
        ({}, 8, "were not measured"),
        ({"communication_fraction": 0.01}, 8, "explain little"),
    ],
)
def test_where_the_rest_went(values: dict[str, Any], cores: int, reason: str) -> None:
    assert reason in said(run("cpu", 1, 1000), run("4xcpu", 4, 2000, **values), cores=cores)


def test_processes_with_fewer_threads_are_also_counted_by_threads() -> None:
    text = said(run("cpu", 1, 1000, threads=2), run("2xcpu", 2, 1020, threads=1))
    assert "an efficiency of 51% counted by processes, and of 102% counted by threads." in text
    assert "Causes" not in text


@pytest.mark.parametrize(("rate", "is_flagged"), [(2760, True), (2080, False)])
def test_an_efficiency_beyond_the_hardware_is_flagged_as_unreliable(rate: float, is_flagged: bool) -> None:
    result = result_of(run("cpu", 1, 1000), run("2xcpu", 2, rate))
    assert ("not plausible: the runs were too short or disturbed" in "\n".join(result["findings"])) == is_flagged
    assert ("(unreliable)" in "\n".join(lines_of(result))) == is_flagged


def test_threads_of_an_accelerators_process_are_not_counted() -> None:
    rows = result_of(run("cpu", 1, 1000, threads=8), run("cuda", 1, 50_000, threads=8))["specs"]
    assert [row["threads_per_rank"] for row in rows] == [8, None]


def test_repeats_that_overlap_are_noise() -> None:
    first = [run("cpu", 1, rate) for rate in (1000, 1400)]
    assert "noise" in said(*first, *(run("2xcpu", 2, rate) for rate in (1300, 1600)))
    assert "noise" not in said(*first, *(run("2xcpu", 2, rate) for rate in (1900, 2000)))


def test_repeats_far_apart_show_a_busy_machine() -> None:
    assert "a factor of up to 1.4" in said(*(run("cpu", 1, rate) for rate in (1000, 1400)))
    assert "factor" not in said(*(run("cpu", 1, rate) for rate in (1000, 1050)))


def test_one_repeat_is_said_to_show_no_noise() -> None:
    assert "--repeats 3" in said(run("cpu", 1, 1000), run("2xcpu", 2, 1900))


def test_other_kinds_are_compared_with_the_slowest_and_warmup_is_told_apart() -> None:
    text = said(run("cpu", 1, 1000, threads=2), run("cuda", 1, 50_000, threads=None, warmup_seconds=1.0))
    assert "cuda trains 50 times as fast as cpu (1 x 2 threads)." in text
    assert "Warm-up is 50% of the training time on cuda; without it: 100,000 images per second." in text


def test_a_run_too_short_for_its_start_is_named() -> None:
    runs = run("cpu", 1, 50_000), run("2xcpu", 2, 90_000, wall_seconds=15.0)
    assert "Everything included, 2xcpu takes 15.0 s and cpu 7.0 s" in said(*runs)


@pytest.mark.parametrize(
    ("correct", "head", "sentence"),
    [
        (900, {}, "Every run gives the same answer: 900 of 1,000 test images right."),
        (903, {}, "the order of summation explains that"),
        (700, {}, "more than the order of summation explains"),
        (700, {"scaling": "weak"}, "with --weak the batch grows"),
        (700, {"norm": "per-device"}, 'norm = "per-device"'),
    ],
)
def test_whether_the_answer_is_the_same(correct: int, head: dict[str, Any], sentence: str) -> None:
    text = said(run("cpu", 1, 1000), run("2xcpu", 2, 1900, correct=correct), **head)
    assert sentence in text
    assert ("The runs differ" in text) == (correct != 900)


def test_rounding_explains_a_borderline_image_and_no_more_than_chance() -> None:
    assert explained_by_rounding(100, 100, 100) == 1.0
    assert explained_by_rounding(5000, 5000, 10_000) == 50.0


def test_without_a_test_or_validation_split_nothing_is_said_of_answers() -> None:
    result = result_of(*(run(spec, n, 1000.0 * n, correct=None, count=None) for spec, n in (("cpu", 1), ("2xcpu", 2))))
    assert not [sentence for sentence in result["findings"] if "answer" in sentence]
    assert "-" in next(line for line in lines_of(result) if "images right" in line)


@pytest.mark.parametrize(
    "runs",
    [
        [run("cpu", 1, 1000), run("2xcpu", 2, 1900), run("4xcpu", 4, 2500)],
        [run("cpu", 1, 1000), run("cuda", 1, 50_000, warmup_seconds=1.0)],
        [run("cpu", 1, 1000)],
        [run("cpu", 1, 1000, images_per_second=None, train_seconds=0.0, warmup_seconds=None), run("2xcpu", 2, 1900)],
    ],
    ids=["lines", "bars", "one", "no-rate"],
)
def test_the_chart_is_drawn_and_not_empty(runs: list[dict[str, Any]], tmp_path: Path) -> None:
    draw_scaling(tmp_path / "chart.png", result_of(*runs))
    with Image.open(tmp_path / "chart.png") as image:
        assert image.width > image.height > 400
        colours = image.convert("RGB").getcolors(1 << 24) or []
    assert len(colours) > 50
