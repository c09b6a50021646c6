"""What a plan shows: an estimate is called an upper bound, and values do not hide the curve."""

from typing import Any

from flatout import style
from flatout.plan import chart
from flatout.plan.text import lines_of


def estimate() -> dict[str, Any]:
    row: dict[str, Any] = {
        "topology": "v5e:2x4", "chips": 8, "devices": 8, "fits": True, "needed_bytes": 2**30, "memory_bytes": 2**34,
        "seconds": {"compute": 1e-6, "memory": 5e-5, "interconnect": 8e-5, "step": 8e-5}, "limit": "interconnect",
        "images_per_second": 12_667_282.0, "job_seconds": 3.0, "padding_fraction": 0.0,
    }  # fmt: skip
    curve = [{"chips": 2**n, "images_per_second": 1e6 * 2**n, "efficiency": 1.0} for n in range(5)]
    return {
        "job": "sample", "model": "cnn", "batch_size": 1024, "epochs": 1, "images": 60_000, "classes": 10, "out": "x",
        "data": "as given", "estimate": True, "price_per_chip_hour": None, "topologies": [row], "scaling": curve,
        "scaling_of": "v5e:2x4",
    }  # fmt: skip


def test_the_text_calls_an_estimate_an_upper_bound() -> None:
    text = "\n".join(lines_of(estimate()))
    assert "≤ 12,667,282" in text
    assert "upper bounds" in text


def test_the_chart_has_its_values_in_the_legend_as_upper_bounds() -> None:
    axes = style.new_figure(4, 3).add_subplot()
    chart._draw_throughput(axes, estimate())
    assert axes.get_title(loc="left") == "Images per second, upper bound"
    _, labels = axes.get_legend_handles_labels()
    assert "v5e:2x4  ≤ 12,667,282" in labels
    assert not axes.texts, "a label at a point would hide the curve"
