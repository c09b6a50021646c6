"""Trained runs as files for other programs: ONNX, torch.export, plain PyTorch and Keras."""

from typing import TYPE_CHECKING, Any

from flatout.settings import in_python

if TYPE_CHECKING:
    from flatout.export.write import Exported

__all__ = ["export"]


@in_python
def export(*arguments: Any, **named: Any) -> "Exported":
    """Write a run in another format; see `flatout.export.write.export` for the arguments."""
    from flatout.export.write import export

    return export(*arguments, **named)
