"""Losses per sample, and predictions from logits. Shape letters: V views, B batch, K outputs."""

import math

import torch
from torch.nn import functional


def per_sample(logits_BK: torch.Tensor, labels_B: torch.Tensor, loss: str, label_smoothing: float) -> torch.Tensor:
    """Return the loss of each sample, float32 [B].

    Cross-entropy is log-softmax followed by the negative log-likelihood; binary cross-entropy takes one logit, that of
    class 1. Label smoothing moves that share of the target evenly over all classes (Szegedy et al., arXiv 1512.00567).
    """
    logits = logits_BK.float()
    if loss == "binary-cross-entropy":
        target = labels_B.to(logits.dtype) * (1 - label_smoothing) + label_smoothing / 2
        return functional.binary_cross_entropy_with_logits(logits[:, 0], target, reduction="none")
    return functional.cross_entropy(logits, labels_B, reduction="none", label_smoothing=label_smoothing)


def probabilities(logits_BK: torch.Tensor) -> torch.Tensor:
    """Return class probabilities, float32 [B, classes]; a single logit becomes two classes."""
    logits = logits_BK.float()
    if logits.shape[1] == 1:
        positive = logits.sigmoid()
        return torch.cat([1 - positive, positive], dim=1)
    return logits.softmax(dim=1)


def predicted(logits_BK: torch.Tensor) -> torch.Tensor:
    """Return the most probable class of each sample, int64 [B]; -1 where the logits are not finite."""
    best_B = (logits_BK[:, 0] > 0).long() if logits_BK.shape[1] == 1 else logits_BK.argmax(dim=1)
    return torch.where(logits_BK.isfinite().all(dim=1), best_B, -1)


def averaged(logits_VBK: torch.Tensor) -> torch.Tensor:
    """Return logits [B, K] whose probabilities are the mean of those of several views of the same images."""
    logits = logits_VBK.float()
    if logits.shape[2] == 1:
        return functional.logsigmoid(logits).logsumexp(0) - functional.logsigmoid(-logits).logsumexp(0)
    return logits.log_softmax(2).logsumexp(0) - math.log(len(logits))
