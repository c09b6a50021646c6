"""An ONNX model in 8-bit integers, by onnxruntime's static quantization."""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flatout.export.program import quietly

# What takes the time and has the weights. Norms, activations and attention's softmax lose more than they gain.
_OPERATIONS = ("Conv", "Gemm", "MatMul")


def quantized(model: Any, calibration: Sequence[np.ndarray], network_of: Callable[[Any], str]) -> Any:
    """Return an ONNX model whose networks multiply in 8 bits; the rest stays in 32 bits, resizing for one.

    Weights have a scale for each channel. The range of an activation is the mean of its ranges in the batches of
    calibration images, so that no single image decides it. The first layer of each network stays in 32 bits: it is
    small, and its inputs and outputs differ most in size between channels.

    Args:
        model: in 32 bits.
        calibration: batches of images.
        network_of: the name of the network that a node belongs to, empty for none.
    """
    import onnx
    from onnxruntime.quantization import CalibrationDataReader, quantize_static

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            self._batches = iter(calibration)

        def get_next(self) -> Any:
            images = next(self._batches, None)
            return None if images is None else {"images": images}

    layers = [node for node in model.graph.node if network_of(node) and node.op_type in _OPERATIONS]
    first = {network_of(node): node.name for node in reversed(layers)}.values()
    left_out = [node.name for node in model.graph.node if not network_of(node) or node.name in first]
    with tempfile.TemporaryDirectory() as folder, quietly():
        whole, small = (Path(folder) / name for name in ("whole.onnx", "small.onnx"))
        onnx.save(model, whole)
        quantize_static(
            whole,
            small,
            Reader(),
            op_types_to_quantize=list(_OPERATIONS),
            nodes_to_exclude=left_out,
            per_channel=True,
            extra_options={"CalibMovingAverage": True},
        )
        return onnx.load(small)
