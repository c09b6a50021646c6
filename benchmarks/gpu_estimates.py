"""How well `flatout plan --gpu` predicts published speeds: the efficiencies of kernels, and the errors elsewhere.

    python benchmarks/gpu_estimates.py --data FOLDER [--fit] [--traces FILE]

FOLDER has benchmark tables of timm (https://github.com/huggingface/pytorch-image-models, folder `results/`), named
`benchmark-{train,infer}-amp-{nhwc,nchw}-pt*-GPU.csv`. Networks are divided by a hash of their name: the efficiencies in
`flatout.analysis.gpu` come from one half, the errors from the other. `--fit`, which needs scipy, computes the
efficiencies, and also predicts each GPU with those that were fitted without it.

Two things are computed as the tables did, unlike flatout: torch 1.12, of the training table, had no fused attention;
and cuDNN converts images in nchw order for each convolution. The error of training with fused attention is printed too.
"""

import argparse
import csv
import dataclasses
import hashlib
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from flatout.analysis.gpu import CHIPS, FITTED, Efficiencies, call_seconds, columns
from flatout.analysis.gpu_trace import Call, Trace, trace
from flatout.models.build import quiet

NAMES = [field.name for field in dataclasses.fields(Efficiencies)]
# Not fitted, since all GeForce cards are alike in them: `feed` is that of large products of cuBLAS on A100 and H100,
# `issue` that of the rows of `DATA_CENTER`.
FIXED = ("feed", "issue")
# Batches that the training table tried, until one fitted.
TRIED = (512, 384, 256, 192, 128, 96, 64, 48, 32, 24, 16, 12, 8, 6, 4, 3, 2, 1)
# Networks whose numbers of parameters differ by more than this have changed since the table was made.
CHANGED = 0.02
# What a fit starts from.
START = Efficiencies(
    depth=16.0,
    width=12.0,
    weight_gradient=0.6,
    grouped=0.8,
    grouped_gradient=0.05,
    odd=0.5,
    attention=0.6,
    feed=8192.0,
    depthwise=0.1,
    depthwise_gradients=0.03,
    products=0.9,
    stream=0.95,
    reduction=0.8,
    move=0.8,
    issue=42.0,
    cached=0.5,
    gap=6e-6,
)
# The weight of a factor of e in an efficiency, against that of a row's error by a factor of e.
RIDGE = 0.3
# Model, size, batch, GPU, whether it is trained, and images/s in mixed precision with PyTorch of 2020 and 2021,
# decoding included: https://github.com/NVIDIA/DeepLearningExamples, PyTorch/Classification/ConvNets/*/README.md.
DATA_CENTER = (
    ("resnet50", 224, 256, "a100-80", True, 2470),
    ("resnet50", 224, 256, "v100", True, 1200),
    ("resnet50", 224, 256, "v100", False, 3382),
    ("resnet50", 224, 256, "t4", False, 1198),
    ("resnext101_32x4d", 224, 128, "a100-40", True, 908.4),
    ("resnext101_32x4d", 224, 128, "v100", True, 534.91),
    ("resnext101_32x4d", 224, 128, "v100", False, 1079.1),
    ("resnext101_32x4d", 224, 128, "t4", False, 948.27),
    ("efficientnet_b0", 224, 256, "a100-80", True, 2489),
    ("efficientnet_b0", 224, 256, "v100", True, 1301),
    ("efficientnet_b4", 380, 64, "a100-80", True, 331),
    ("efficientnet_b4", 380, 64, "v100", True, 204),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A published measurement with the trace of its step; `seconds` of the step."""

    model: str
    gpu: str
    train: bool
    fused: bool
    channels_last: bool = True
    seconds: float
    trace: Trace

    @property
    def is_for_fit(self) -> bool:
        """Whether the network is in the half that efficiencies come from."""
        return int(hashlib.sha256(self.model.partition(".")[0].encode()).hexdigest(), 16) % 2 == 0


# --- traces -----------------------------------------------------------------------------------------------------------


class Traces:
    """A file of traces, to which new ones are added."""

    def __init__(self, path: Path) -> None:
        self.path, self.known = path, dict[tuple[Any, ...], dict[str, Any]]()
        for line in map(json.loads, path.read_text().splitlines() if path.exists() else ()):
            self.known[tuple(line.pop("key"))] = line

    def row(self, model: str, size: int, batch: int, gpu: str, *, train: bool, speed: float, **form: Any) -> Row | None:
        """Return a measurement of `speed` images/s; None if the network cannot be made or traced."""
        fused = form.get("fused", True)
        key = (model, batch, size, train, fused)
        if key not in self.known:
            self.known[key] = traced(*key)
            with self.path.open("a") as file:
                file.write(json.dumps({"key": key, **self.known[key]}) + "\n")
        if not (found := self.known[key]):
            return None
        calls = {Call(*call): count for *call, count in found["calls"]}
        made = Trace(batch=batch, calls=calls, parameters=found["parameters"], peak_bytes=found["peak"])
        return Row(model=model, gpu=gpu, train=train, seconds=batch / speed, trace=made, **{"fused": True, **form})


def table_rows(folder: Path, traces: Traces) -> Iterator[Row]:
    """Yield the rows of all tables; networks that timm no longer has, or has changed, are left out."""
    for path in sorted(folder.glob("benchmark-*.csv")):
        kind, _, layout, *_, gpu = path.stem.removeprefix("benchmark-").split("-")
        for line in csv.DictReader(path.open()):
            for fused in (False, True) if kind == "train" else (True,):
                row = traces.row(
                    line["model"],
                    int(line[f"{kind}_img_size"]),
                    int(line[f"{kind}_batch_size"]),
                    gpu if gpu.startswith("rtx") else f"rtx{gpu}",
                    train=kind == "train",
                    speed=float(line[f"{kind}_samples_per_sec"]),
                    fused=fused,
                    channels_last=layout == "nhwc",
                )
                if row and abs(row.trace.parameters / 1e6 / float(line["param_count"]) - 1) <= CHANGED:
                    yield row


def traced(model: str, batch: int, size: int, train: bool, fused: bool) -> dict[str, Any]:
    """Return the trace of a network as JSON; empty if it cannot be made or traced."""
    import timm
    from timm.layers.config import set_fused_attn

    set_fused_attn(fused)
    try:
        with quiet(), torch.device("meta"):
            try:
                network = timm.create_model(model, img_size=size)
            except TypeError:
                network = timm.create_model(model)
            config: Any = network.pretrained_cfg
            labels = torch.empty(batch, dtype=torch.long)

            def loss(logits: Any) -> torch.Tensor:
                return functional.cross_entropy(logits[0] if isinstance(logits, tuple) else logits, labels)

            found = trace(network, (batch, config["input_size"][0], size, size), loss, train=train)
    except Exception as error:  # a network may raise anything
        print(f"{model}: {type(error).__name__}: {str(error)[:100]}", file=sys.stderr)
        return {}
    calls = [[*call, count] for call, count in found.calls.items()]
    return {"parameters": found.parameters, "peak": found.peak_bytes, "calls": calls}


# --- errors -----------------------------------------------------------------------------------------------------------


class Predictor:
    """Predicts the logarithms of the seconds of many rows at once, which a fit needs."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.measured = np.log([row.seconds for row in rows])
        self.groups = []
        for gpu, channels_last in sorted({(row.gpu, row.channels_last) for row in rows}):
            chosen = [i for i, row in enumerate(rows) if (row.gpu, row.channels_last) == (gpu, channels_last)]
            calls = columns(call for i in chosen for call in rows[i].trace.calls)
            counts = np.array([count for i in chosen for count in rows[i].trace.calls.values()])
            owners = np.repeat(np.arange(len(chosen)), [len(rows[i].trace.calls) for i in chosen])
            if not channels_last:
                # Arguments and result are each read and written once more.
                calls["bytes"] *= np.where(np.isin(calls["kind"], ("conv", "conv-dgrad", "conv-wgrad")), 3, 1)
            self.groups.append((CHIPS[gpu], chosen, calls, counts, owners))

    def __call__(self, e: Efficiencies) -> np.ndarray:
        predicted = np.empty(len(self.measured))
        for chip, chosen, calls, counts, owners in self.groups:
            seconds = (np.hypot(*call_seconds(chip, calls, e)) + e.gap) * counts
            predicted[chosen] = np.log(np.bincount(owners, seconds))
        return predicted


def fit(rows: Sequence[Row]) -> Efficiencies:
    """Return the efficiencies with the least squares of logarithmic errors, large ones damped."""
    from scipy.optimize import least_squares

    predict, names = Predictor(rows), [name for name in NAMES if name not in FIXED]
    start = np.log([getattr(START, name) for name in names])
    upper = np.array([0.0 if getattr(START, name) <= 1 and name != "gap" else np.inf for name in names])

    def with_values(values: Iterable[float]) -> Efficiencies:
        return dataclasses.replace(START, **dict(zip(names, values, strict=True)))

    def residuals(x: np.ndarray) -> np.ndarray:
        # What the tables say little about stays near its start.
        return np.concatenate([predict(with_values(np.exp(x))) - predict.measured, RIDGE * (x - start)])

    found = least_squares(residuals, start, bounds=(-np.inf, upper), loss="soft_l1", f_scale=0.15)
    return with_values(float(f"{value:.3g}") for value in np.exp(found.x))


def errors(rows: Sequence[Row], e: Efficiencies) -> dict[str, Any]:
    """Return the median and the 90th percentile of |predicted / measured - 1|, and the share within 35 %."""
    predict = Predictor(rows)
    ratio = np.exp(predict(e) - predict.measured)
    off = np.abs(ratio - 1)
    return {
        "rows": len(rows),
        "networks": len({row.model for row in rows}),
        "median_error": round(float(np.median(off)), 3),
        "error_90": round(float(np.quantile(off, 0.9)), 3),
        "within_35_percent": round(float(np.mean(off <= 0.35)), 3),
        "median_ratio": round(float(np.median(ratio)), 3),
    }


def memory(rows: Sequence[Row]) -> dict[str, Any]:
    """Return how often the published batch is estimated to fit, and the next larger one that was tried not to."""
    fits = refused = tried = 0
    for row in rows:
        usable, weights = CHIPS[row.gpu].usable_bytes, 12 * row.trace.parameters
        fits += row.trace.peak_bytes <= usable
        if row.trace.batch in TRIED[1:]:
            larger = TRIED[TRIED.index(row.trace.batch) - 1]
            tried += 1
            refused += weights + (row.trace.peak_bytes - weights) * larger / row.trace.batch > usable
    return {"batches": len(rows), "fit": fits, "next_larger": tried, "next_larger_refused": refused}


def main() -> None:
    """Print errors as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument(
        "--traces", type=Path, default=Path("gpu-traces.jsonl"), help="cache of traces (about 30 minutes)"
    )
    parser.add_argument("--fit", action="store_true")
    args = parser.parse_args()
    traces = Traces(args.traces)
    rows = list(table_rows(args.data, traces))
    published = [row for row in rows if not (row.train and row.fused)]
    half, other = ([row for row in published if row.is_for_fit == wanted] for wanted in (True, False))
    e = fit(half) if args.fit else FITTED
    kinds = sorted({(row.gpu, row.train) for row in rows})
    result: dict[str, Any] = {"efficiencies": dataclasses.asdict(e)}
    for name, part in (("fitted_networks", half), ("other_networks", other)):
        result[name] = {}
        for gpu, train in kinds:
            chosen = [row for row in part if (row.gpu, row.train) == (gpu, train)]
            result[name][f"{gpu} {'training' if train else 'prediction'}"] = errors(chosen, e)
    fused = [row for row in rows if row.train and row.fused and not row.is_for_fit]
    result["other_networks"]["rtx3090 training, with fused attention"] = errors(fused, e)
    ordered = [dataclasses.replace(row, channels_last=True) for row in other if not row.channels_last]
    result["other_networks"]["nchw tables, estimated in channels-last order as flatout computes"] = errors(ordered, e)
    result["other_networks_and_gpu"] = {}
    for gpu in sorted({row.gpu for row in rows}) if args.fit else ():
        without = fit([row for row in half if row.gpu != gpu])
        chosen = [row for row in other if row.gpu == gpu and not row.train]
        result["other_networks_and_gpu"][f"{gpu} prediction"] = errors(chosen, without)
    center = [traces.row(m, s, b, gpu, train=train, speed=speed) for m, s, b, gpu, train, speed in DATA_CENTER]
    result["data_center"] = errors([row for row in center if row], e)
    result["memory"] = memory([row for row in published if row.train])
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
