"""Features, the input of a network's head: captured by hooks, and computed by OpenVINO on CPUs.

That is 1.2 to 4.8 times as fast as torch's eager mode (`benchmarks/features.py`).
Shape letters: B batch, F features, C channels, H height, W width, K outputs.
"""

import contextlib
import io
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from flatout.models.build import quiet
from flatout.models.layers import head_modules
from flatout.models.weights import digest_of
from flatout.utils.errors import InputError, first_line

Function = Callable[[torch.Tensor], torch.Tensor]

# More features are averaged in groups of neighbours, such as the pixels of a channel.
MAX_FEATURES = 1024
# Preparing OpenVINO takes as long as torch takes for about this many pixels in total.
WORTHWHILE_PIXELS = 5_000_000
# Images that a thread computes at a time: their activations fit the processor's cache.
PART = 8
# Pixels of a batch: with 32 images of 224 pixels, threads wait for each other for a seventh of the time.
BATCH_PIXELS = 6_500_000
# Images whose features are compared with torch's: not two, as in the export, which could make that a constant; and few.
COMPARED = 3
# The largest difference from torch's output, as a share of its largest value.
TOLERANCE = 1e-4
# The latest functions, by key, until they are requested again: a run reuses those of measurements.
_kept: dict[str, Function] = {}
MAX_KEPT = 3


class Features:
    """The input of the head, averaged over several calls of the network."""

    def __init__(self) -> None:
        self._seen: list[torch.Tensor] = []

    def catch(self, module: nn.Module, arguments: tuple[object, ...]) -> None:
        """Forward pre-hook that stores the input of the head."""
        if arguments and isinstance(arguments[0], torch.Tensor) and arguments[0].ndim > 1:
            self._seen.append(compact(arguments[0]))

    def take(self) -> torch.Tensor | None:
        """Return the features float32 [B, F] since the last call; None if the head was not called."""
        seen, self._seen = self._seen, []
        return torch.stack(seen).mean(dim=0) if seen else None


def compact(x: torch.Tensor) -> torch.Tensor:
    """Reduce the input of a head, [B, F], [B, tokens, F] or [B, F, H, W], to float32 [B, F]."""
    x = x.float()
    if x.ndim > 2:
        x = x.mean(dim=1) if x.ndim == 3 else x.flatten(2).mean(dim=2)
    width = int(x.shape[1])  # a constant in a trace, whose division would round differently
    group = -(-width // MAX_FEATURES)
    if group > 1:
        x = functional.pad(x, (0, -width % group)).unflatten(1, (-1, group)).mean(dim=2)
    return x


@contextlib.contextmanager
def caught(model: nn.Module, network: nn.Module) -> Iterator[Features]:
    """Capture the features inside the block, unless the model has several heads, or `network`, a part of it, none."""
    features = Features()
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(AttributeError, InputError, ValueError):
            (name,) = head_modules(model)
            head = network.get_submodule(name)
            # In a head with a norm or hidden layers, the last layer counts.
            layers = [module for module in head.modules() if isinstance(module, nn.Linear | nn.Conv2d)]
            stack.enter_context([head, *layers][-1].register_forward_pre_hook(features.catch))
        yield features


def frozen_network(
    network: nn.Module, example: torch.Tensor, threads: int, report: Callable[[str], None] = lambda sentence: None
) -> Function:
    """Compile a network in evaluation mode, [B, C, H, W] to [B, ...], for the CPU.

    If OpenVINO does not support it, or results for `example`, one or more images, differ from torch's, the reason
    is reported, and the network itself is returned.
    """
    network.eval()
    # One image would be exported as a network for single images.
    example = torch.cat([example[:COMPARED]] * COMPARED)[:COMPARED]
    key = digest_of(network.state_dict(), {"network": repr((type(network), [*example.shape[1:]], threads))})
    try:
        computed = _kept.get(key) or _compiled(_exported(network, example), threads)
        found = computed(example)
    except Exception as error:  # exporter and runtime raise anything on networks that they do not support
        report(f"features are computed by torch: OpenVINO cannot ({type(error).__name__}: {first_line(error)})")
        return network
    with torch.no_grad():
        expected = network(example).float()
    difference = float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-30))
    if not difference <= TOLERANCE:
        report(f"features are computed by torch: those of OpenVINO differ by {difference:.1e} of the largest")
        return network
    if key in _kept:
        _kept.clear()
    elif len(_kept) == MAX_KEPT:
        del _kept[next(iter(_kept))]
    _kept[key] = computed
    return computed


class FrozenClassifier(Features):
    """A frozen classifier, or `network`, its last part, in OpenVINO, which is prepared on the first call."""

    def __init__(self, model: nn.Module, network: nn.Module, threads: int) -> None:
        super().__init__()
        self._both, self._threads = _LogitsAndFeatures(model, network), threads
        self._compute: Function | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits [B, K] of images, or of the input of `network`."""
        if self._compute is None:
            self._compute = frozen_network(self._both, x, self._threads)
        found, outputs = self._compute(x), self._both.outputs
        if found.shape[1] > outputs:
            self._seen.append(found[:, outputs:])
        return found[:, :outputs]


class _LogitsAndFeatures(nn.Module):
    """Logits and features side by side, [B, K + F]; `outputs` is K, known after the first call."""

    def __init__(self, model: nn.Module, network: nn.Module) -> None:
        super().__init__()
        self._model, self._network, self.outputs = [model], network, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with caught(self._model[0], self._network) as features:
            logits = self._network(x)
            self.outputs = int(logits.shape[1])
            found = features.take()
        return logits if found is None else torch.cat([logits, found.to(logits.dtype)], dim=1)


def _exported(network: nn.Module, example: torch.Tensor) -> bytes:
    """Export a network as an ONNX model for any number of images."""
    file = io.BytesIO()
    # Two images, since tracing makes the number 1 a constant; torch warns of Python numbers in a trace.
    with torch.no_grad(), quiet(), _no_output():
        torch.onnx.export(
            network,
            (example[:2].contiguous(),),
            file,  # pyright: ignore[reportArgumentType]
            dynamo=False,  # the other exporter takes ten times as long
            input_names=["images"],
            output_names=["features"],
            dynamic_axes={"images": {0: "batch"}, "features": {0: "batch"}},
        )
    return file.getvalue()


@contextlib.contextmanager
def _no_output() -> Iterator[None]:
    """Drop what this process prints: the exporter prints the graph of a network that it cannot export, past Python."""
    sys.stdout.flush()
    shown, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        os.dup2(shown, 1)
        os.close(shown)
        os.close(nowhere)


def _compiled(model: bytes, threads: int) -> Function:
    """Compile an ONNX model by OpenVINO; each thread computes images of its own.

    Threads that share a batch synchronise after each operation, which is slow if another process uses a core. Results
    are bitwise independent of the number of threads and of the other images, too.
    """
    # Importing OpenVINO sends its use to Google Analytics, unless this module is missing.
    sys.modules.setdefault("openvino_telemetry", None)  # pyright: ignore[reportArgumentType]
    import openvino

    core = openvino.Core()
    # Its default is the fastest number format of the processor. Pinned threads would wait for those of other processes.
    settings = {"INFERENCE_PRECISION_HINT": "f32", "NUM_STREAMS": threads, "INFERENCE_NUM_THREADS": threads}
    network = core.compile_model(core.read_model(model), "CPU", settings | {"ENABLE_CPU_PINNING": False})
    own, pool = threading.local(), ThreadPoolExecutor(threads, thread_name_prefix="flatout-features")

    def compute_part(part: np.ndarray) -> np.ndarray:
        if not hasattr(own, "request"):
            own.request = network.create_infer_request()
        return own.request.infer([part], share_inputs=True)[0]

    def compute(images: torch.Tensor) -> torch.Tensor:
        values = images.detach().float().contiguous().numpy()
        parts = [values[i : i + PART] for i in range(0, len(values), PART)]
        return torch.from_numpy(np.concatenate([*pool.map(compute_part, parts)]))

    return compute
