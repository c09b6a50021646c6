"""Features of frozen networks on CPUs: flatout, ONNX Runtime called directly and torch's eager mode; prints JSON.

    python benchmarks/features.py [--only resnet18 ...] [--batches 16,32] [--threads 2] [--repeats 5] [--out FILE]
    python benchmarks/features.py --decode DATA [--images 400]

The networks are timm's, with random weights, which take the same time, at 224 pixels. The three ways alternate; rates
are medians over the repeats, in images per second, and ratios are medians of the ratios within a repeat. `--decode`
adds reading and decoding: `flatout pack` in a fresh process and flatout's features, against Pillow and torchvision with
either of the others, image after image as in a script. DATA has class folders of JPEG files. It needs onnxruntime and
torchvision.
"""

import argparse
import functools
import io
import json
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import timm
import torch
from PIL import Image
from torch import nn
from torchvision import transforms

from common import RESULTS, about, image_files, in_turn, make_parser, median_ratio, write
from flatout.models.features import frozen_network

MODELS = ("tf_efficientnet_lite0", "resnet18", "mobilenetv4_conv_small", "hgnetv2_b2", "convnext_nano")
SIZE, DECODED_BATCH = 224, 32
Compute = Callable[[torch.Tensor], torch.Tensor]


class Features(nn.Module):
    """A network of timm without its last layer: images [B, 3, H, W] to features [B, F]."""

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.network: Any = timm.create_model(name).eval()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.network.forward_head(self.network.forward_features(images), pre_logits=True)


def flatout_features(name: str, threads: int) -> Compute:
    return frozen_network(Features(name), torch.rand(4, 3, SIZE, SIZE), threads)


def onnxruntime_features(name: str, threads: int) -> Compute:
    """Return features by ONNX Runtime, as its documentation shows: one call for each batch."""
    file, options = io.BytesIO(), onnxruntime.SessionOptions()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            Features(name),
            (torch.rand(2, 3, SIZE, SIZE),),
            file,  # pyright: ignore[reportArgumentType]
            dynamo=False,
            input_names=["images"],
            output_names=["features"],
            dynamic_axes={"images": {0: "batch"}, "features": {0: "batch"}},
        )
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(file.getvalue(), options, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(np.asarray(session.run(None, {"images": images.numpy()})[0]))


def eager_features(name: str, threads: int) -> Compute:
    """Return features by torch in channels_last, on the threads of the process."""
    assert torch.get_num_threads() == threads
    network = Features(name).to(memory_format=torch.channels_last)

    @torch.inference_mode()
    def compute(images: torch.Tensor) -> torch.Tensor:
        return network(images.contiguous(memory_format=torch.channels_last))

    return compute


WAYS = {"flatout": flatout_features, "onnxruntime": onnxruntime_features, "torch": eager_features}


def rate(compute: Compute, images: torch.Tensor, seconds: float) -> float:
    """Return images per second over at least so many seconds, after one batch that is not counted."""
    compute(images)
    count, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        compute(images)
        count += len(images)
    return count / (time.perf_counter() - began)


def medians(rates: dict[str, list[float]]) -> dict[str, Any]:
    """Return median rates, and flatout's over each of the others."""

    def ratio(other: str) -> float:
        return round(median_ratio(rates["flatout"], rates[other]), 3)

    return {
        "images_per_second": {way: round(statistics.median(values), 1) for way, values in rates.items()},
        **{f"flatout_over_{other}": ratio(other) for other in rates if other != "flatout"},
    }


def measure(name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the figures of a network, for each batch."""
    computes = {way: create(name, args.threads) for way, create in WAYS.items()}
    found = []
    for batch in args.batches:
        images = torch.rand(batch, 3, SIZE, SIZE)
        timed = {way: functools.partial(rate, compute, images, args.seconds) for way, compute in computes.items()}
        rates = in_turn(timed, args.repeats)
        expected = computes["torch"](images)
        differences = {
            way: float((computes[way](images) - expected).abs().max() / expected.abs().max())
            for way in ("flatout", "onnxruntime")
        }
        found.append({"model": name, "batch": batch, **medians(rates), "largest_difference": differences})
    return found


def normalise(images: torch.Tensor) -> torch.Tensor:
    return (images.float() - 127) / 128


def decoded_by_pillow(files: list[Path], compute: Compute) -> float:
    """Return images per second of reading, decoding and features, batch after batch."""
    transform = transforms.Compose([transforms.Resize((SIZE, SIZE)), transforms.PILToTensor()])
    began = time.perf_counter()
    for start in range(0, len(files), DECODED_BATCH):
        images = []
        for file in files[start : start + DECODED_BATCH]:
            with Image.open(file) as image:
                images.append(transform(image.convert("RGB")))
        compute(normalise(torch.stack(images)))
    return len(files) / (time.perf_counter() - began)


def decoded_by_flatout(folder: Path, compute: Compute) -> float:
    """Return images per second of `flatout pack`, its start included, and features of the pack's images."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "pack"
        began = time.perf_counter()
        command = [sys.executable, "-m", "flatout", "pack", str(folder), "--size", str(SIZE), "--channels", "3"]
        subprocess.run([*command, "--out", str(out)], check=True, stdout=subprocess.DEVNULL)
        images = np.load(out / "images.npy", mmap_mode="r")
        for start in range(0, len(images), DECODED_BATCH):
            batch = torch.from_numpy(images[start : start + DECODED_BATCH].copy())
            compute(normalise(batch.permute(0, 3, 1, 2).contiguous()))
        return len(images) / (time.perf_counter() - began)


def measure_decoding(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of a network with decoding, on the same files for all ways."""
    found = image_files(args.decode)
    files = found[:: max(1, len(found) // args.images)]
    computes = {way: create(name, args.threads) for way, create in WAYS.items()}
    with tempfile.TemporaryDirectory() as scratch:
        for number, file in enumerate(files):
            target = Path(scratch) / file.parent.name / f"{number}{file.suffix}"
            target.parent.mkdir(exist_ok=True)
            target.write_bytes(file.read_bytes())
        copies = sorted(Path(scratch).glob("*/*"))
        timed = {way: functools.partial(decoded_by_pillow, copies, compute) for way, compute in computes.items()}
        timed["flatout"] = functools.partial(decoded_by_flatout, Path(scratch), computes["flatout"])
        rates = in_turn(timed, args.repeats)
    return {"model": name, "decoded": args.decode.name, "images": len(files), **medians(rates)}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--only", nargs="*", default=[], help=f"networks of timm; default: {' '.join(MODELS)}")
    parser.add_argument("--batches", default="16,32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    parser.add_argument("--decode", type=Path, metavar="DATA", help="with decoding the JPEG files of DATA")
    parser.add_argument("--images", type=int, default=400, help="about how many files --decode reads")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    args.out = args.out or RESULTS / f"features{'-decoded' if args.decode else ''}.json"
    args.batches = [int(text) for text in args.batches.split(",")]
    torch.set_num_threads(args.threads)
    rows = []
    for name in args.only or MODELS:
        rows += [measure_decoding(name, args)] if args.decode else measure(name, args)
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    versions = about("flatout", "torch", "timm", "openvino", "onnxruntime", "torchvision", "pillow")
    result = {**versions, "threads": args.threads, "image_size": SIZE, "rows": rows}
    write(result, args.out)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
