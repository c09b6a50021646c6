"""The engine's steps with a CUDA runtime that stands in for a GPU: what is recorded, and what that costs."""

from typing import Any

import pytest

from tests.cuda_mock import device
from tests.engine.recorded import CASES

RECORDED = "the whole step runs as one CUDA graph"
EAGER = "the step runs without a CUDA graph: "
# Nodes of the graph of a step; an operation more in each step shows here.
NODES = {
    "fashion-mnist": 96,
    "fashion-mnist-keras": 98,
    "mnist-parallel": 83,
    "digits": 101,
    "cats-dogs": 139,
    "caltech101": 100,
    "oct-vgg16": 84,
    "fast-cnn-64": 196,
    "resnet50": 943,
}
NODES_OF_RANKS = {"global": 124, "per-device": 100}
# Beside a replay, a step sets the learning rate, and two numbers for dropout. The inputs of the three steps are copied
# together, three or four tables.
KERNELS_PER_STEP, COPIES_PER_STEP, BYTES_PER_STEP = 3.5, 1.5, 400
PINNED_BYTES = 2048


pytestmark = pytest.mark.usefixtures("mock")


def run(name: str, *args: Any, **options: Any) -> Any:
    return device.run("tests.cuda_mock.scenarios", name, *args, **options)


@pytest.fixture(scope="module")
def quick() -> dict[str, Any]:
    """What the quick scenarios of one GPU return, which share a process."""
    # What counts imports and pinned memory comes first.
    first, others = ["command", "streamed"], ["planted_numbers", "recorded_evaluations", "failed_capture", "planted"]
    return run("several", [*first, *others, "numbers"])


@pytest.fixture(scope="module")
def slow() -> dict[str, Any]:
    """Likewise the slow ones."""
    return run("several", ["jobs", "large", "cases", "timm_models", "recorded_numbers"])


def check_recorded(found: dict[str, Any], *, groups: int = 1) -> None:
    """Check that a step is one replay within its budgets: without waiting, illegal calls or growing memory.

    Each of the groups of parameters has a learning rate of its own.
    """
    start, step = found["start"], found["step"]
    assert found["notes"][-1] == RECORDED
    assert {"illegal call", "recorded copy H2D pageable", "unsupported"}.isdisjoint(start)
    assert step["graph launch"] == 1
    assert step["kernel"] <= KERNELS_PER_STEP + groups - 1
    assert step["copy H2D pinned"] <= COPIES_PER_STEP
    assert step["copy H2D pinned bytes"] <= BYTES_PER_STEP
    assert found["held"]["pinned bytes"] <= PINNED_BYTES
    assert {"synchronise", "cudaMalloc", "copy H2D pageable", "copy D2D"}.isdisjoint(step)
    assert found["held"]["device bytes"] == start["device bytes"]


@pytest.mark.slow
def test_budgets_of_jobs_and_networks(slow: dict[str, Any]) -> None:
    for name, found in (slow["jobs"] | slow["large"]).items():
        check_recorded(found)
        assert found["start"]["graph nodes"] <= NODES[name], name


@pytest.mark.slow
def test_budgets_of_all_cases(slow: dict[str, Any]) -> None:
    assert slow["cases"].keys() == CASES.keys()
    for name, one in slow["cases"].items():
        if "streamed" in name:
            # Its images are copied in each step, on a stream of their own, and then to where the graph reads them.
            assert one["notes"][-1] == RECORDED
            assert one["step"]["graph launch"] == 1
            assert one["start"].get("illegal call", 0) == 0
        else:
            check_recorded(one, groups=5 if name == "layer decay" else 1)


@pytest.mark.slow
def test_networks_of_timm(slow: dict[str, Any]) -> None:
    for one in slow["timm_models"].values():
        check_recorded(one)


def test_recorded_steps_compute_what_a_plain_loop_does(quick: dict[str, Any]) -> None:
    for name, found in quick["numbers"].items():
        assert (found["notes"], found["different"]) == ([RECORDED], []), name


@pytest.mark.slow
def test_recorded_steps_compute_what_eager_ones_do(slow: dict[str, Any]) -> None:
    for name, found in slow["recorded_numbers"].items():
        assert (found["notes"][-1], found["different"]) == (RECORDED, []), name
    # Of each split, and again after a state was loaded.
    assert slow["recorded_numbers"]["recorded anew"]["notes"] == 4 * [RECORDED]


def test_planted_numbers_differ(quick: dict[str, Any]) -> None:
    """The padded batch replays the record of a full one; or the learning rate stays what it was."""
    found = quick["planted_numbers"]
    assert "model.3.running_var" in found["constants"]
    assert "model.0.weight" in found["rate"]


@pytest.mark.slow
def test_ranks() -> None:
    for found in run("ranks", ranks=2):
        assert all(one == {"notes": [RECORDED], "different": []} for one in found["numbers"].values()), found
        for norm, nodes in NODES_OF_RANKS.items():
            assert found[norm]["notes"][-1] == RECORDED
            assert found[norm]["start"]["graph nodes"] <= nodes
        # Two layers normalise over both ranks: each gathers statistics, and adds up two sums of gradients.
        layers = 2
        recorded = found["global"]["start"]
        assert (recorded["recorded all-gather"], recorded["recorded all-reduce"]) == (layers, layers + 1)
        assert found["per-device"]["start"]["recorded all-reduce"] == 1
        # A planted defect: one all-reduce too few.
        assert found["all-reduce left out"]["start"]["recorded all-reduce"] == layers
        # A ResNet sums each layer once in each direction.
        check_recorded(found["resnet"])
        recorded, layers, buckets = found["resnet"]["start"], 20, 4
        assert recorded["recorded all-gather"] == layers
        assert recorded["recorded all-reduce"] <= layers + buckets
        assert found["sharded"]["notes"] == [f"{EAGER}a sharded model cannot be captured"]
        assert found["sharded"]["start"].get("illegal call", 0) == 0


def test_a_run_does_not_import_the_compiler(quick: dict[str, Any]) -> None:
    assert "precision = tf32" in quick["command"]["printed"]
    assert not quick["command"]["compiler"]


def test_a_slow_gpu_holds_back_the_host(quick: dict[str, Any]) -> None:
    """Pinned memory stays that of a few batches, however far the host could run ahead."""
    found = quick["streamed"]
    assert found["different"] == []
    assert max(found["pinned bytes"][8:]) <= 8 * found["batch bytes"]


def test_an_evaluation_after_every_epoch_is_replayed(quick: dict[str, Any]) -> None:
    for name, found in quick["recorded_evaluations"].items():
        # Full batches and a padded one; then the results are read once.
        assert found["counters"]["graph launch"] == found["batches"]
        assert found["counters"]["kernel"] <= 12 or name != "plain"
        assert found["counters"].get("illegal call", 0) == 0
        assert found["gpu"] == pytest.approx(found["cpu"], rel=1e-5)


def test_a_failed_capture_is_survived(quick: dict[str, Any]) -> None:
    found = quick["failed_capture"]
    assert all(one["different"] == [] for one in found.values())
    assert {name: one["notes"] for name, one in found.items()} == {
        "item": [f"{EAGER}called a synchronizing CUDA operation"],
        "collective": [f"{EAGER}operation not permitted when stream is capturing"],
        "memory": [f"{EAGER}too little memory for a graph beside eager steps"],
        "later": [RECORDED],
    }


def test_planted_defects_are_caught(quick: dict[str, Any]) -> None:
    found = quick["planted"]
    check_recorded(found["none"])
    for defect, reason in {
        "item": "called a synchronizing CUDA operation",
        "pageable copy": "Cannot copy between CPU and CUDA tensors during CUDA graph capture",
        "allocation": "",  # which call notices it depends on torch
        "event": "dependency created on uncaptured work in another stream",
        "fork": "capturing stream has unjoined work",
    }.items():
        (note,) = found[defect]["notes"]
        assert note.startswith(EAGER) and reason in note, defect
    assert found["allocation"]["start"]["illegal call"] > 0
    # These are recorded, and what they do is counted.
    for defect, counted in {
        "copy per step": "copy H2D pageable",
        "pageable copy of a library": "recorded copy H2D pageable",
        "unknown function": "unsupported",
    }.items():
        one = found[defect]
        assert one["notes"] == [RECORDED]
        assert one["start"][counted] > found["none"]["start"].get(counted, 0)
        with pytest.raises(AssertionError):
            check_recorded(one)
