"""Runs as files for other programs: ONNX, torch.export and Keras; `Run.export` writes them."""
