"""8-bit ONNX files: what stays in 32 bits, so that networks with whitened inputs keep their answers."""

from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx", reason="needs ONNX: pip install 'flatout[onnx]'")
onnxruntime = pytest.importorskip("onnxruntime", reason="needs ONNX: pip install 'flatout[onnx]'")


def whitened_net() -> Any:
    """Return a network that divides the outputs of its first layer by their very different deviations, as a model."""
    rng, helper = np.random.default_rng(0), onnx.helper
    deviations = np.geomspace(300, 1, 8).astype(np.float32)
    weights = {
        "basis": rng.normal(size=(8, 3, 2, 2)) * deviations[:, None, None, None] / 1000,
        "scales": np.tile(1000 / 74 / np.sqrt(12) / deviations, 2)[:, None, None],
        "kernels": rng.normal(size=(8, 16, 3, 3)) / 12,
        "head": rng.normal(size=(8, 4)),
    }
    nodes = [
        helper.make_node("Cast", ["images"], ["pixels"], "cast", to=onnx.TensorProto.FLOAT),
        helper.make_node("Conv", ["pixels", "basis"], ["patches"], "network/patches"),
        helper.make_node("Neg", ["patches"], ["negatives"], "network/neg"),
        helper.make_node("Concat", ["patches", "negatives"], ["both"], "network/both", axis=1),
        helper.make_node("Mul", ["both", "scales"], ["white"], "network/scale"),
        helper.make_node("Conv", ["white", "kernels"], ["maps"], "network/conv"),
        helper.make_node("GlobalMaxPool", ["maps"], ["pooled"], "network/pool"),
        helper.make_node("Flatten", ["pooled"], ["features"], "network/flatten"),
        helper.make_node("MatMul", ["features", "head"], ["logits"], "network/head"),
    ]
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("images", onnx.TensorProto.UINT8, ["N", 3, 12, 12])],
        [helper.make_tensor_value_info("logits", onnx.TensorProto.FLOAT, ["N", 4])],
        [onnx.numpy_helper.from_array(array.astype(np.float32), name) for name, array in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def test_a_network_that_whitens_its_inputs_keeps_its_answers() -> None:
    from flatout.inference.export.formats import quantized

    model = whitened_net()
    images = np.random.default_rng(1).integers(0, 256, (500, 3, 4, 4), np.uint8).repeat(3, axis=2).repeat(3, axis=3)
    small = quantized(model, [images[i : i + 16] for i in range(0, 64, 16)], lambda node: node.name.partition("/")[1])
    sessions = [onnxruntime.InferenceSession(one.SerializeToString()) for one in (model, small)]
    expected, found = (session.run(None, {"images": images})[0] for session in sessions)
    assert 0 < np.abs(expected - found).mean() < 0.2 * expected.std(axis=0).mean()
    kinds = {one.name: one.data_type for one in small.graph.initializer}
    assert kinds["basis"] == onnx.TensorProto.FLOAT
    assert {kinds["kernels_quantized"], kinds["head_quantized"]} == {onnx.TensorProto.INT8}
