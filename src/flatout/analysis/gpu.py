"""`flatout plan --gpu`: speed, memory, largest batch and cost on GPUs that are not there.

A roofline for each operation of a traced step: rates are from data sheets, and the share that kernels reach of them is
fitted to published benchmarks by `benchmarks/gpu_estimates.py`.
"""

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from flatout.config.settings import nearest
from flatout.utils.errors import InputError
from flatout.utils.run_files import JsonObject

if TYPE_CHECKING:
    from flatout.analysis.gpu_trace import Call, Trace
    from flatout.analysis.plan import Work


class Chip(NamedTuple):
    """A GPU, from its data sheet."""

    half: float  # dense 16-bit TFLOP/s of tensor cores with 32-bit sums: float16, and bfloat16 since Ampere
    tf32: float  # the same for TF32; 0 if there is none
    fp32: float  # TFLOP/s outside of tensor cores
    bandwidth: float  # of the memory, in GB/s
    memory: float  # in GiB
    l2: float  # the cache that all multiprocessors share, in MiB
    multiprocessors: int
    clock: float  # in GHz, boosted
    source: str  # where these figures are published

    @property
    def usable_bytes(self) -> float:
        """Memory for tensors alive at once: without CUDA's context, and the gaps between blocks of the allocator."""
        return (self.memory * 2**30 - CONTEXT_BYTES) * USABLE_SHARE


_NVIDIA = "https://www.nvidia.com/"
_PAPERS = "https://images.nvidia.com/aem-dam/"
_HOPPER = "https://resources.nvidia.com/en-us-hopper-architecture/nvidia-h100-tensor-c"
_AMPERE = _NVIDIA + "content/dam/en-zz/Solutions/Data-Center/nvidia-ampere-architecture-whitepaper.pdf"
_GA102 = _NVIDIA + "content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.1.pdf"
_ADA = _PAPERS + "Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf"
_BLACKWELL = _PAPERS + "Solutions/geforce/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf"
_CENTER = _NVIDIA + "en-us/data-center/"
_WORKSTATION = _NVIDIA + "en-us/products/workstations/professional-desktop-gpus/"
_GEFORCE = _NVIDIA + "en-us/geforce/graphics-cards/"

# Rates that a sheet gives with sparsity alone are halved. GeForce cards compute at half rate with 32-bit sums. A clock
# that a sheet lacks is that of the peak: operations per second / (multiprocessors x operations per clock). Caches and
# multiprocessors of data center cards are in the white papers of their architectures.
CHIPS = {
    "h100": Chip(989.4, 494.7, 66.9, 3352, 80, 50, 132, 1.83, _HOPPER),
    "h100-pcie": Chip(756, 378, 51.2, 2039, 80, 50, 114, 1.62, _HOPPER),
    "h200": Chip(989.4, 494.7, 66.9, 4800, 141, 50, 132, 1.83, _CENTER + "h200/"),
    "a100-40": Chip(312, 156, 19.5, 1555, 40, 40, 108, 1.41, _AMPERE),
    "a100-80": Chip(312, 156, 19.5, 2039, 80, 40, 108, 1.41, _CENTER + "a100/"),
    "a100-80-pcie": Chip(312, 156, 19.5, 1935, 80, 40, 108, 1.41, _CENTER + "a100/"),
    "a30": Chip(165, 82, 10.3, 933, 24, 24, 56, 1.44, _CENTER + "products/a30-gpu/"),
    "a10": Chip(125, 62.5, 31.2, 600, 24, 6, 72, 1.695, _CENTER + "products/a10-gpu/"),
    "a40": Chip(149.7, 74.8, 37.4, 696, 48, 6, 84, 1.74, _CENTER + "a40/"),
    "l4": Chip(121, 60, 30.3, 300, 24, 48, 58, 2.04, _CENTER + "l4/"),
    "l40": Chip(181, 90.5, 90.5, 864, 48, 96, 142, 2.49, _CENTER + "l40/"),
    "l40s": Chip(362, 183, 91.6, 864, 48, 96, 142, 2.52, _CENTER + "l40s/"),
    "t4": Chip(65, 0, 8.1, 320, 16, 4, 40, 1.59, _CENTER + "tesla-t4/"),
    "v100": Chip(125, 0, 15.7, 900, 32, 6, 80, 1.53, _CENTER + "v100/"),
    "v100-16": Chip(125, 0, 15.7, 900, 16, 6, 80, 1.53, _CENTER + "v100/"),
    "rtx-a6000": Chip(154.8, 77.4, 38.7, 768, 48, 6, 84, 1.8, _GA102),
    "rtx-6000-ada": Chip(364.2, 182.1, 91.1, 960, 48, 96, 142, 2.505, _ADA),
    "rtx-pro-6000": Chip(503.8, 251.9, 125, 1792, 96, 128, 188, 2.617, _WORKSTATION + "rtx-pro-6000/"),
    "rtx3060": Chip(25.5, 12.7, 12.7, 360, 12, 3, 28, 1.777, _GEFORCE + "30-series/rtx-3060-3060ti/"),
    "rtx3060ti": Chip(32.4, 16.2, 16.2, 448, 8, 4, 38, 1.665, _GEFORCE + "30-series/rtx-3060-3060ti/"),
    "rtx3070": Chip(40.6, 20.3, 20.3, 448, 8, 4, 46, 1.725, _GA102),
    "rtx3080": Chip(59.5, 29.8, 29.8, 760, 10, 5, 68, 1.71, _GA102),
    "rtx3080ti": Chip(68.2, 34.1, 34.1, 912, 12, 6, 80, 1.665, _GEFORCE + "30-series/rtx-3080-3080ti/"),
    "rtx3090": Chip(71.0, 35.6, 35.6, 936, 24, 6, 82, 1.695, _GA102),
    "rtx3090ti": Chip(80.0, 40.0, 40.0, 1008, 24, 6, 84, 1.86, _ADA),
    "rtx4060": Chip(30.2, 15.1, 15.1, 272, 8, 24, 24, 2.46, _GEFORCE + "40-series/rtx-4060-4060ti/"),
    "rtx4060ti": Chip(44.1, 22.1, 22.1, 288, 8, 32, 34, 2.535, _GEFORCE + "40-series/rtx-4060-4060ti/"),
    "rtx4070": Chip(58.3, 29.1, 29.1, 504, 12, 36, 46, 2.475, _GEFORCE + "40-series/rtx-4070-family/"),
    "rtx4070ti": Chip(80.2, 40.1, 40.1, 504, 12, 48, 60, 2.61, _ADA),
    "rtx4080": Chip(97.5, 48.7, 48.7, 717, 16, 64, 76, 2.505, _ADA),
    "rtx4090": Chip(165.2, 82.6, 82.6, 1008, 24, 72, 128, 2.52, _ADA),
    "rtx5070": Chip(61.7, 30.9, 30.9, 672, 12, 48, 48, 2.512, _BLACKWELL),
    "rtx5070ti": Chip(87.9, 43.9, 43.9, 896, 16, 48, 70, 2.452, _BLACKWELL),
    "rtx5080": Chip(112.6, 56.3, 56.3, 960, 16, 64, 84, 2.617, _BLACKWELL),
    "rtx5090": Chip(209.5, 104.8, 104.8, 1792, 32, 96, 170, 2.407, _BLACKWELL),
}
# Other names, and the form that a name means if there are several.
ALIASES = {"a100": "a100-80", "v100-32": "v100", "h100-sxm": "h100", "a6000": "rtx-a6000"}

# The rest of the memory is CUDA's context, and gaps between the blocks of the allocator. Of 518 networks trained on an
# RTX 3090 with the largest batch that fitted, 511 fit by these numbers, and 347 of 392 do not with the next larger one.
CONTEXT_BYTES, USABLE_SHARE = 0.7 * 2**30, 0.945
# The median and the 90th percentile of the errors of networks that the efficiencies were not fitted to: of training on
# an RTX 3090, and of prediction on GPUs that they were not fitted to either. See benchmarks/results/gpu-estimates.json.
EXPECTED_ERRORS = {"training": (0.12, 0.32), "prediction": (0.12, 0.25)}
# Copies from pinned memory over PCIe 3.0 x16, in bytes per second: the least of these cards' hosts.
HOST_BYTES_PER_SECOND = 12e9


@dataclass(frozen=True, kw_only=True)
class Efficiencies:
    """What kernels reach of a chip's rates; fitted by `benchmarks/gpu_estimates.py`."""

    # A product of [m, k] and [k, n] reaches k / (k + depth) n / (n + width) m / (m + width) of the tensor cores' peak.
    depth: float = 7.42
    width: float = 10.2
    # Further factors of convolutions: gradients of weights; groups; gradients in groups that cuDNN has no fast kernels
    # for; channels that are not a multiple of 8.
    weight_gradient: float = 0.627
    grouped: float = 0.769
    grouped_gradient: float = 0.0568
    odd: float = 0.523
    attention: float = 0.778  # of the tensor cores' peak
    # Operations per multiprocessor and clock at which tensor cores reach half of their peak, waiting for operands.
    feed: float = 8192.0
    # Of the CUDA cores' peak, for the forward pass and each gradient.
    depthwise: float = 0.117
    depthwise_gradients: float = 0.025
    # Of the memory's bandwidth: convolutions and products; elementwise operations and norms; sums, softmax and pooling;
    # copies in another order.
    products: float = 0.975
    stream: float = 1.0
    reduction: float = 0.976
    move: float = 0.891
    issue: float = 42.0  # bytes per multiprocessor and clock at which half of the bandwidth is reached
    cached: float = 0.345  # with a largest tensor of at most this share of L2, half of the bytes move through memory
    gap: float = 1.05e-05  # seconds between two kernels


FITTED = Efficiencies()

# The fields of `Call`, in their order.
_FIELDS = ("bytes", "largest", "flops", "batch", "m", "n", "k", "half")
_CONVOLUTIONS = ("conv", "conv-dgrad", "conv-wgrad")
# cuDNN's fast kernels for gradients of grouped convolutions take these channels per group, and channels in all.
_GROUP_WIDTHS, _GROUPED_CHANNELS = (4, 8, 16, 32), 128
# Multiply-adds per multiprocessor and clock of the CUDA cores.
LANES = 128
# Sides of the tiles of a product that a multiprocessor computes, and the depth from which several share a tile.
_TILE, _SPLIT = 128, 2048


def chips_named(text: str) -> dict[str, Chip]:
    """Return the chips of a list such as `h100,rtx4090`."""
    found, plain = {}, {known.replace("-", ""): known for known in (*CHIPS, *ALIASES)}
    for word in text.split(","):
        name = word.strip().lower()
        name = plain.get(name.replace("-", "").replace(" ", "").replace("_", ""), name)
        name = ALIASES.get(name, name)
        if name not in CHIPS:
            raise InputError(f"--gpu {word.strip()}: not in the table of GPUs; {nearest(name, CHIPS)}")
        found[name] = CHIPS[name]
    return found


def columns(calls: "Iterable[Call]") -> np.ndarray:
    """Return calls as a structured array, a row for each."""
    return np.array(list(calls), dtype=[("kind", "U16"), *((field, float) for field in _FIELDS)])


def call_seconds(
    chip: Chip, calls: np.ndarray, e: Efficiencies = FITTED, *, tf32: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """Return the seconds that arithmetic and memory traffic of each call would take alone."""
    kind, batch, m, n, k = (calls[field] for field in ("kind", "batch", "m", "n", "k"))
    is_conv = np.isin(kind, _CONVOLUTIONS)
    is_product = is_conv | (kind == "matmul")
    is_depthwise = np.char.startswith(kind, "depthwise")
    is_arithmetic = is_product | is_depthwise | (kind == "attention")

    # The share of the peak: sizes, then waves of tiles over the multiprocessors, of which the last is not full.
    share = np.ones(len(calls))
    sizes = k / (k + e.depth) * n / (n + e.width) * m / (m + e.width)
    tiles = batch * np.ceil(m / _TILE) * np.ceil(n / _TILE) * np.ceil(k / _SPLIT)
    waves = tiles / np.maximum(1, np.ceil(tiles / chip.multiprocessors) * chip.multiprocessors)
    share[is_product] = (sizes * np.where(kind == "conv-wgrad", e.weight_gradient, waves))[is_product]
    filters, channels = np.where(kind == "conv-wgrad", m, n), np.where(kind == "conv-wgrad", n, k)
    has_kernel = np.isin(filters, _GROUP_WIDTHS) & (filters * batch % _GROUPED_CHANNELS == 0)
    is_grouped = is_conv & (batch > 1)
    share[is_grouped] *= np.where((kind == "conv") | has_kernel, e.grouped, e.grouped_gradient)[is_grouped]
    share[is_conv & (batch == 1) & ((filters % 8 != 0) | (channels % 8 != 0))] *= e.odd
    share[kind == "attention"] = e.attention
    share[is_depthwise] = np.where(kind == "depthwise", e.depthwise, e.depthwise_gradients)[is_depthwise]

    clocks = chip.multiprocessors * chip.clock * 1e9
    full = _fed(chip.tf32 * 1e12, clocks, e.feed) if tf32 and chip.tf32 else chip.fp32 * 1e12
    half = _fed(chip.half * 1e12, clocks, e.feed)
    peak = np.where(is_depthwise, clocks * 2 * LANES, np.where(calls["half"] > 0, half, full))
    arithmetic = np.where(is_arithmetic, calls["flops"], 0) / (peak * share)

    bandwidth = np.full(len(calls), e.stream)
    bandwidth[is_arithmetic] = e.products
    bandwidth[np.isin(kind, ("reduction", "pool"))] = e.reduction
    bandwidth[kind == "move"] = e.move
    in_cache = np.minimum(1, e.cached * chip.l2 * 2**20 / np.maximum(1, calls["largest"]))
    return arithmetic, calls["bytes"] * (1 - in_cache / 2) / (_fed(chip.bandwidth * 1e9, clocks, e.issue) * bandwidth)


def _fed(peak: float, clocks: float, half_at: float) -> float:
    """Return a rate lowered by waiting: to half of its peak if that is `half_at` per multiprocessor and clock."""
    return peak / (1 + peak / clocks / half_at)


def step_time(chip: Chip, trace: "Trace", *, tf32: bool = True) -> tuple[float, dict[str, float]]:
    """Estimate the seconds of a traced step; and shares: `tensor cores`, `CUDA cores`, `memory` and `launches`."""
    calls, counts = columns(trace.calls), np.array(list(trace.calls.values()))
    arithmetic, memory = call_seconds(chip, calls, tf32=tf32)
    busy = np.hypot(arithmetic, memory) * counts
    uses_tensor_cores = (calls["half"] > 0) | (tf32 and chip.tf32 > 0)
    cores = np.char.startswith(calls["kind"], "depthwise") | ~uses_tensor_cores
    is_limited = arithmetic > memory
    seconds = {
        "tensor cores": busy[is_limited & ~cores].sum(),
        "CUDA cores": busy[is_limited & cores].sum(),
        "memory": busy[~is_limited].sum(),
        "launches": FITTED.gap * counts.sum(),
    }
    total = sum(seconds.values())
    return float(total), {name: float(value / total) for name, value in seconds.items()}


def largest_batch(chip: Chip, small: "Trace", large: "Trace") -> int:
    """Return the largest batch that fits, from the memory of two; 0 if none does."""
    per_image = (large.peak_bytes - small.peak_bytes) / (large.batch - small.batch)
    fixed = small.peak_bytes - per_image * small.batch
    return max(0, math.floor((chip.usable_bytes - fixed) / per_image))


def estimate_on_gpus(
    work: "Work", chips: Mapping[str, Chip], price: float | None, *, inference: bool, allow_code: bool
) -> JsonObject:
    """Return the estimates in plan.json: a row for each GPU; `price` is that of one for an hour."""
    from flatout.analysis.gpu_trace import tracer_of, usual_precision

    traces = tracer_of(work, inference=inference, allow_code=allow_code)
    rows, refused = [], []
    median, most = EXPECTED_ERRORS["prediction" if inference else "training"]
    errors = {"expected_error": median, "expected_error_90": most}
    for name, chip in chips.items():
        precision = work.recipe.precision
        if precision == "auto":
            precision = usual_precision(traces, work.batch, inference=inference) if chip.tf32 else "fp32"
        if precision != "fp32" and not chip.tf32:  # the other formats came with Ampere, as TF32 did
            raise InputError(f"--gpu {name}: does not compute in {precision}; use --set precision=fp32")
        trace_of = functools.partial(traces, precision == "bf16")
        trace = trace_of(work.batch)
        guess = largest_batch(chip, trace, trace_of(work.batch + max(work.batch, 256)))
        # Memory is not quite a straight line, so the line is drawn again through what was found.
        largest = largest_batch(chip, trace, trace_of(guess)) if guess not in (0, work.batch) else guess
        if trace.peak_bytes > chip.usable_bytes:
            fit = f"the largest that fits is about {largest:,}" if largest else "not even one image fits"
            refused.append(f"{name}: {trace.peak_bytes / 2**30:.1f} of {chip.memory:g} GiB, {fit}")
            continue
        row = _row(work, name, chip, trace, precision, price)
        rows.append(row | {"largest_batch": max(largest, work.batch)} | errors)
    if refused:
        raise InputError(f"--batch-size {work.batch}: does not fit on {'; '.join(refused)}")
    return {"estimate": True, "inference": inference, "price_per_gpu_hour": price, "gpus": rows}


def _row(work: "Work", name: str, chip: Chip, trace: "Trace", precision: str, price: float | None) -> JsonObject:
    computing, shares = step_time(chip, trace, tf32=precision != "fp32")
    image_bytes = math.prod(work.recipe.stored_sides) * work.recipe.channels * (work.recipe.data.bits or 8) // 8
    # Images that do not fit on the GPU are copied to it during the step before.
    is_copied = trace.peak_bytes + image_bytes * work.images > chip.usable_bytes
    copying = image_bytes * work.batch / HOST_BYTES_PER_SECOND if is_copied else 0.0
    step = max(computing, copying)
    images_per_second = work.batch / step
    epoch = work.images_per_epoch / images_per_second
    job = epoch * work.steps / work.steps_per_epoch
    return {
        "gpu": name,
        "images_per_second": images_per_second,
        "step_seconds": step,
        "epoch_seconds": epoch,
        "job_seconds": job,
        "cost": None if price is None else price * job / 3600,
        "memory_bytes": trace.peak_bytes,
        "gpu_memory_bytes": int(chip.memory * 2**30),
        "limit": "input" if copying > computing else max(shares, key=lambda name: shares[name]),
        "shares": shares,
        "precision": precision,
        "source": chip.source,
    }
