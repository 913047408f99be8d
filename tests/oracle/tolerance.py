"""Bounds of the numeric comparisons, and the measures they apply to.

Nothing here was tuned until a test passed: the promises come from the product
(they are what users may rely on), the derived bounds from machine epsilon.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

# Promised for f32 against transformers + peft.
LOGITS = 1e-3  # Largest absolute difference.
LOGPROBS = 1e-4  # Largest absolute difference.
GRADIENTS = 1e-4  # Relative, Frobenius, of every tensor.
TRAINED_WEIGHTS = 1e-3  # Relative, Frobenius, after ten AdamW steps.
SAMPLER_VERSUS_TRAINER = 1e-4  # Largest absolute difference of a logprob.

EPSILON = {"f32": 2.0**-23, "bf16": 2.0**-7}


def logprobs(dtype: str, expected: Any) -> float:
    """Largest absolute difference of log-probabilities from the `expected` ones of a
    sequence: promised for f32, the roundings of the largest one else."""
    if dtype == "f32":
        return LOGPROBS
    return summed(dtype, 1) * float(np.max(np.abs(np.asarray(expected))))


def gradients(dtype: str) -> float:
    """GRADIENTS for f32; otherwise the roundings of the terms that add up to them."""
    return GRADIENTS if dtype == "f32" else summed(dtype, 1)


def max_difference(actual: Any, expected: Any) -> float:
    """Largest absolute difference; infinite when shapes differ or a NaN is in it."""
    left = np.asarray(actual, dtype=np.float64)
    right = np.asarray(expected, dtype=np.float64)
    if left.shape != right.shape:
        return math.inf
    if left.size == 0:
        return 0.0
    difference = float(np.max(np.abs(left - right)))
    return math.inf if math.isnan(difference) else difference


def relative_difference(actual: Any, expected: Any) -> float:
    """|actual - expected| / |expected| in the Frobenius norm; 0 / 0 is 0."""
    left = np.asarray(actual, dtype=np.float64)
    right = np.asarray(expected, dtype=np.float64)
    if left.shape != right.shape:
        return math.inf
    difference = float(np.linalg.norm(left - right))
    if math.isnan(difference):
        return math.inf
    if difference == 0.0:
        return 0.0
    norm = float(np.linalg.norm(right))
    return difference / norm if norm > 0.0 else math.inf


def summed(dtype: str, terms: int) -> float:
    """Relative error of a sum of `terms` rounded numbers: a random walk of
    roundings, with a factor 8 for the several sums of a layer."""
    return 8.0 * EPSILON[dtype] * math.sqrt(terms)


def trained_in_company(dtype: str) -> float:
    """Relative difference of weights trained in batches of another composition.

    Rounding depends on the shape of a batch, so a gradient element g carries
    noise of about d = 8 eps times the gradient's root mean square. AdamW divides
    by |g|: elements with |g| below that noise, a fraction d of all, may move the
    other way by the whole learning rate. The relative difference of what was
    learnt is then about sqrt(2 d); one factor 2 for momentum.
    """
    return 2.0 * math.sqrt(2.0 * 8.0 * EPSILON[dtype])
