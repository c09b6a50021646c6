"""The classifiers: our own nets, timm's, the user's; their weights; which of their layers train."""
