"""Networks that no longer change, computed on CPUs by ONNX Runtime: two to nine times as fast as torch's eager mode.

ONNX Runtime folds batch norms into convolutions, joins them with activations, and keeps the channels in the blocks that
the processor's vectors hold. `benchmarks/features.py` measures it.
"""

import hashlib
import io
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import nn

from flatout.errors import first_line
from flatout.models.features import caught
from flatout.models.load import quiet

Function = Callable[[torch.Tensor], torch.Tensor]

# Preparing ONNX Runtime takes as long as torch does for images of about so many pixels together.
WORTHWHILE_PIXELS = 5_000_000
# Images at once: their activations stay in the processor's cache. Twice as many are a fifth slower.
BATCH = 8
# Images whose features are compared with torch's: not two, as in the export, which could take that for a constant; and
# few, since torch's first batch of 32 takes seconds.
COMPARED = 3
# The largest difference from torch's output, as a share of its largest value.
TOLERANCE = 1e-4
# Functions by their keys. Measurements prepare the run: the last ones are kept until one of them is asked for again.
_kept: dict[str, Function] = {}
KEPT = 3


def frozen_network(
    network: nn.Module, example: torch.Tensor, threads: int, report: Callable[[str], None] = lambda sentence: None
) -> Function:
    """Return a function that computes what a network in evaluation mode does, [B, C, H, W] to [B, ...], on the CPU.

    Where ONNX Runtime cannot compute the network, or computes something else, that is the network itself.

    Args:
        example: images, [B, C, H, W] with B at least 2. What ONNX Runtime makes of the first is compared with torch.
        report: called with a sentence if ONNX Runtime is not used.
    """
    network.eval()
    key = _key(network, example, threads)
    try:
        computed = _kept.get(key) or _session(_exported(network, example), threads)
        found = computed(example[:COMPARED])
    except Exception as error:  # an exporter and a runtime raise anything on the networks that they do not know
        report(f"features are computed by torch: ONNX Runtime cannot ({type(error).__name__}: {first_line(error)})")
        return network
    with torch.no_grad():
        expected = network(example[:COMPARED]).float()
    difference = float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-30))
    if not difference <= TOLERANCE:
        report(f"features are computed by torch: those of ONNX Runtime differ by {difference:.1e} of the largest")
        return network
    if key in _kept:
        _kept.clear()
    elif len(_kept) == KEPT:
        del _kept[next(iter(_kept))]
    _kept[key] = computed
    return computed


class FrozenClassifier:
    """A classifier, or its last part, that no longer changes: through ONNX Runtime, prepared when it is first called.

    Args:
        model: the classifier.
        network: the part of it that is called.
        threads, report: as for `frozen_network`.
    """

    def __init__(
        self, model: nn.Module, network: nn.Module, threads: int, report: Callable[[str], None] = lambda sentence: None
    ) -> None:
        self._both, self._threads, self._report = _LogitsAndFeatures(model, network), threads, report
        self._compute: Function | None = None
        self._seen: list[torch.Tensor] = []

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits [B, K] of images, or of what the network reads."""
        if self._compute is None:
            self._compute = frozen_network(self._both, x, self._threads, self._report)
        found = self._compute(x)
        outputs = self._both.outputs or found.shape[1]
        if found.shape[1] > outputs:
            self._seen.append(found[:, outputs:])
        return found[:, :outputs]

    def take(self) -> torch.Tensor | None:
        """Return the features since the last call: see `models.features.Features`."""
        seen, self._seen = self._seen, []
        return torch.stack(seen).mean(dim=0) if seen else None


class _LogitsAndFeatures(nn.Module):
    """Logits and features of images side by side, [B, K + F], as one output of an ONNX model.

    Attributes:
        outputs: K, known after the first call.
    """

    def __init__(self, model: nn.Module, network: nn.Module) -> None:
        super().__init__()
        self._model, self._network, self.outputs = [model], network, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with caught(self._model[0], self._network) as features:
            logits = self._network(x)
            self.outputs = int(logits.shape[1])
            found = features.take()
        return logits if found is None else torch.cat([logits, found.to(logits.dtype)], dim=1)


def _key(network: nn.Module, example: torch.Tensor, threads: int) -> str:
    """Return a digest of all that the function of a network depends on."""
    digest = hashlib.sha256(repr((type(network), [*example.shape[1:]], threads)).encode())
    for name, tensor in network.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _exported(network: nn.Module, example: torch.Tensor) -> bytes:
    """Return a network as an ONNX model of any number of images."""
    file = io.BytesIO()
    # Two images, since tracing takes the number 1 for a constant; torch warns of Python's numbers in a trace.
    with torch.no_grad(), quiet("torch.onnx"):
        torch.onnx.export(
            network,
            (example[:2].contiguous(),),
            file,  # pyright: ignore[reportArgumentType]
            dynamo=False,  # the other exporter takes ten times as long
            # ONNX Runtime refuses the operators that the exporter does not know; the exporter would print the graph.
            operator_export_type=torch.onnx.OperatorExportTypes.ONNX_FALLTHROUGH,
            input_names=["images"],
            output_names=["features"],
            dynamic_axes={"images": {0: "batch"}, "features": {0: "batch"}},
        )
    return file.getvalue()


def _session(model: bytes, threads: int) -> Function:
    """Return a function that runs an ONNX model; each thread computes images of its own.

    Threads that share the operations of one batch would wait for each other after each of them, which costs most of the
    speed where another process uses one of the cores. The bits do not depend on the number of threads either.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    pool = ThreadPoolExecutor(threads, thread_name_prefix="flatout-onnx")

    def compute(images: torch.Tensor) -> torch.Tensor:
        values = images.detach().float().contiguous().numpy()
        parts = [values[i : i + BATCH] for i in range(0, len(values), BATCH)]
        found = pool.map(lambda part: session.run(None, {"images": part})[0], parts)
        return torch.from_numpy(np.concatenate([np.asarray(one) for one in found]))

    return compute
