"""An ONNX model in 8-bit integers, by onnxruntime's static quantization."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flatout.export.program import quietly


def quantized(model: Any, calibration: Sequence[np.ndarray], is_network: Any) -> Any:
    """Return an ONNX model whose networks compute in 8 bits; resizing and what follows the logits stay as they are.

    Weights have a scale for each channel. The ranges of activations are those of the calibration images.

    Args:
        model: in 32 bits.
        calibration: batches of images.
        is_network: whether a node belongs to a network.
    """
    import onnx
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            self._batches = iter(calibration)

        def get_next(self) -> Any:
            images = next(self._batches, None)
            return None if images is None else {"images": images}

    others = [node.name for node in model.graph.node if not is_network(node)]
    with tempfile.TemporaryDirectory() as folder, quietly():
        whole, prepared, small = (Path(folder) / name for name in ("whole.onnx", "prepared.onnx", "small.onnx"))
        onnx.save(model, whole)
        quant_pre_process(str(whole), str(prepared), skip_symbolic_shape=True)
        quantize_static(str(prepared), str(small), Reader(), QuantFormat.QDQ, per_channel=True, nodes_to_exclude=others)
        return onnx.load(small)
