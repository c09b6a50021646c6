"""The classifiers: our own nets, timm's, the user's; their weights; the layers that train."""
