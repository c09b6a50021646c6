"""`linear_probe = true`: fit the head to the features of a pre-trained model before the first step.

Fine-tuning from a fitted head distorts the features less than from a random one (Kumar et al., arXiv 2202.10054).

Shape letters: N samples, F features.
"""

import warnings
from collections.abc import Mapping

import numpy as np
import torch
from torch import nn

from flatout.models.layers import head_modules
from flatout.recipe import Recipe

# The inverse strengths of regularisation to choose from by validation, and the one without validation data.
STRENGTHS, STRENGTH = (0.001, 0.01, 0.1, 1.0), 0.1
# L-BFGS needs no more images than this for a linear layer.
MOST_IMAGES, MOST_ITERATIONS = 20_000, 200
# Of the gradient, where L-BFGS ends. scikit-learn's 1e-4 takes three times as long and answers no better.
TOLERANCE = 1e-3


def linear_head(model: nn.Module) -> nn.Linear | None:
    """Return the head of a model if it is one linear layer; None otherwise."""
    heads = list(head_modules(model).values())
    return heads[0] if len(heads) == 1 and isinstance(heads[0], nn.Linear) else None


def fit_head(
    head: nn.Linear, features: Mapping[str, np.ndarray], labels: Mapping[str, np.ndarray], recipe: Recipe
) -> str:
    """Set a linear layer by logistic regression with L-BFGS, and return a sentence about the result.

    Args:
        head: with one output for each class; or a single one, for binary cross-entropy.
        features: float32 [N, F] for `train`, and for `valid` if there is such a split.
        labels: int64 [N] for the same splits.
        recipe: of the run, for its seed and class weights.
    """
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    mean, std = features["train"].mean(axis=0), features["train"].std(axis=0) + 1e-6
    scaled = {name: (values - mean) / std for name, values in features.items()}
    chosen = np.random.default_rng(recipe.seed).permutation(len(labels["train"]))[:MOST_IMAGES]
    weights = "balanced" if recipe.class_weights == "balanced" else None
    best, accuracy = None, -1.0
    for strength in STRENGTHS if "valid" in features else (STRENGTH,):
        fitted = LogisticRegression(C=strength, max_iter=MOST_ITERATIONS, tol=TOLERANCE, class_weight=weights)
        with warnings.catch_warnings():
            # The last iterations change little.
            warnings.simplefilter("ignore", ConvergenceWarning)
            fitted.fit(scaled["train"][chosen], labels["train"][chosen])
        found = fitted.score(scaled["valid"], labels["valid"]) if "valid" in features else 0.0
        if found > accuracy:
            best, accuracy = fitted, found
    assert best is not None
    coefficients = best.coef_ / std
    biases = best.intercept_ - coefficients @ mean
    # A class without training images keeps its fresh weights.
    rows = best.classes_ if head.out_features > 1 else [0]
    if len(coefficients) < len(rows):
        # One row separates two classes; a softmax needs half of it for each.
        coefficients, biases = np.concatenate([-coefficients, coefficients]) / 2, np.append(-biases, biases) / 2
    with torch.no_grad():
        head.weight[rows] = torch.from_numpy(coefficients).float()
        if head.bias is not None:
            head.bias[rows] = torch.from_numpy(biases).float()
    result = f"; validation accuracy {accuracy:.3f}" if "valid" in features else ""
    return f"linear probe: the head was fitted to the features of {len(chosen):,} images by logistic regression{result}"
