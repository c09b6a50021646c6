"""`flatout plan --gpu`: a job's speed, memory, largest batch and cost on GPUs that are not there."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from flatout.analysis.gpu import HOST_BYTES_PER_SECOND, Chip, largest_batch, step_time
from flatout.analysis.roofline import Work
from flatout.config import Recipe
from flatout.models.build import build_model, check_name, create_timm, quiet
from flatout.tasks import task_of
from flatout.utils.errors import InputError, first_line

if TYPE_CHECKING:
    from torch import nn

    from flatout.analysis.gpu_trace import Trace

# The median and the 90th percentile of the errors of networks that the efficiencies were not fitted to: of training on
# an RTX 3090, and of prediction on GPUs that they were not fitted to either. See benchmarks/results/gpu-estimates.json.
EXPECTED_ERRORS = {"training": (0.12, 0.33), "prediction": (0.12, 0.25)}


def estimate_on_gpus(
    work: Work, chips: Mapping[str, Chip], price: float | None, *, inference: bool, allow_code: bool
) -> dict[str, Any]:
    """Return the estimates in plan.json: a row for each GPU.

    Args:
        price: the price of one GPU for an hour.
        inference: predictions instead of training.

    Raises:
        InputError: the model cannot be traced, the batch does not fit, or the job trains nothing.
    """
    if not work.recipe.epochs:
        raise InputError(
            "epochs = 0: the job fits the head to features and trains nothing; --epochs N estimates training, and "
            "--inference --epochs 1 the pass that computes the features"
        )
    traces = _tracer(work, inference=inference, allow_code=allow_code)
    rows, refused = [], []
    for name, chip in chips.items():
        precision = work.recipe.precision
        if precision == "auto":
            precision = _usual_precision(chip, lambda: traces(False, work.batch), inference=inference)
        if precision not in chip.precisions:
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
        rows.append(_row(work, name, chip, trace, precision, price) | {"largest_batch": max(largest, work.batch)})
    if refused:
        raise InputError(f"--batch-size {work.batch}: does not fit on {'; '.join(refused)}")
    median, most = EXPECTED_ERRORS["prediction" if inference else "training"]
    rows = [{**row, "expected_error": median, "expected_error_90": most} for row in rows]
    return {"estimate": True, "inference": inference, "price_per_gpu_hour": price, "gpus": rows}


def _usual_precision(chip: Chip, trace: "Callable[[], Trace]", *, inference: bool) -> str:
    from flatout.engine.torch.accelerator import BF16_OPERATIONS

    if "tf32" not in chip.precisions:
        return chip.precisions[0]
    step = trace()
    # A training step computes three times as much as its forward pass.
    operations = sum(call.flops * times for call, times in step.calls.items()) / (2 if inference else 6) / step.batch
    return "bf16" if operations >= BF16_OPERATIONS else "tf32"


def _row(work: Work, name: str, chip: Chip, trace: "Trace", precision: str, price: float | None) -> dict[str, Any]:
    time = step_time(chip, trace, tf32=precision != "fp32")
    image_bytes = math.prod(work.recipe.stored_sides) * work.recipe.channels * (work.recipe.data.bits or 8) // 8
    # Images that do not fit on the GPU are copied to it during the step before.
    is_copied = trace.peak_bytes + image_bytes * work.images > chip.usable_bytes
    copying = image_bytes * work.batch / HOST_BYTES_PER_SECOND if is_copied else 0.0
    step = max(time.seconds, copying)
    images_per_second = work.batch / step
    job = work.images_trained / images_per_second
    return {
        "gpu": name,
        "images_per_second": images_per_second,
        "step_seconds": step,
        "epoch_seconds": job / work.recipe.epochs,
        "job_seconds": job,
        "cost": None if price is None else price * job / 3600,
        "memory_bytes": trace.peak_bytes,
        "gpu_memory_bytes": int(chip.memory * 2**30),
        "limit": "input" if copying > time.seconds else time.limit,
        "shares": time.shares,
        "precision": precision,
        "source": chip.source,
    }


def _tracer(work: Work, *, inference: bool, allow_code: bool) -> "Callable[[bool, int], Trace]":
    """Return a cached function of half precision and batch that traces a step."""
    import torch

    from flatout.analysis.gpu_trace import trace

    recipe, task = work.recipe, task_of(work.recipe)
    network, states = _network(work, allow_code), _optimizer_states(recipe)

    @functools.cache
    def traced(half: bool, batch: int) -> "Trace":
        labels = task.targets(task.random_labels(np.random.default_rng(0), batch, work.classes))
        targets = torch.from_numpy(labels).to("meta")
        shape = (batch, recipe.channels, *recipe.image_sides)
        try:
            return trace(
                network,
                shape,
                lambda logits: task.per_sample(logits, targets).mean(),
                train=not inference,
                half=half,
                states=states,
            )
        except Exception as error:  # a network may raise anything
            raise InputError(
                f"model = {recipe.model!r}: cannot be traced without data ({type(error).__name__}: "
                f"{first_line(error)}); flatout bench measures it on a machine with the GPU"
            ) from error

    return traced


def _network(work: Work, allow_code: bool) -> "nn.Module":
    import torch

    from flatout.models.layers import freeze, set_dropout

    recipe = work.recipe
    if not recipe.model.startswith("timm:"):
        return build_model(recipe, work.classes, allow_code=allow_code).to("meta")
    check_name(recipe.model)
    try:
        with quiet(), torch.device("meta"):
            network = create_timm(recipe, task_of(recipe).num_outputs(work.classes))
    except Exception as error:  # so may its constructor
        raise InputError(
            f"model = {recipe.model!r}: cannot be built for images of {recipe.image_sides} pixels ({first_line(error)})"
        ) from error
    freeze(network, recipe.freeze)
    set_dropout(network, recipe.dropout)
    return network


def _optimizer_states(recipe: Recipe) -> int:
    """Return how many numbers the optimizer keeps for each parameter, from a step on a small one."""
    import torch

    from flatout.engine.optim import build

    parameter = torch.nn.Parameter(torch.zeros(8, 8))
    parameter.grad = torch.zeros_like(parameter)
    optimizer = build(recipe.optimizer, {"weight": parameter}, capturable=False)
    optimizer.step()
    kept = optimizer.state[parameter].values()
    return sum(isinstance(value, torch.Tensor) and value.shape == parameter.shape for value in kept)
