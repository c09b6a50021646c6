"""How much a model's dropout layers drop."""

from torch import nn

from flatout.errors import InputError

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def set_dropout(model: nn.Module, share: float) -> None:
    """Let every dropout layer drop that share, 0 to 1; -1 leaves each as the model has it.

    Only torch's dropout modules and those derived from them are found. What a model drops in its forward pass by
    `nn.functional.dropout`, and stochastic depth, keep their own shares.

    Raises:
        InputError: there is no such layer, and `share` is greater than 0.
    """
    if share == -1:
        return
    layers = [module for module in model.modules() if isinstance(module, _DROPOUTS)]
    if not layers and share > 0:
        raise InputError(f"dropout = {share:g}: {type(model).__name__} has no dropout layer; leave the key out")
    for layer in layers:
        layer.p = share
