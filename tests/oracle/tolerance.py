"""The bounds of the numeric comparisons, and the measures to which they apply.

No bound was chosen to make a test pass. The promised bounds come from the product,
whose users may rely on them; the derived bounds follow from machine epsilon.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

# The promised bounds for f32. All but the last compare with transformers + peft.
LOGITS = 1e-3  # Largest absolute difference.
LOGPROBS = 1e-4  # Largest absolute difference.
GRADIENTS = 1e-4  # Relative Frobenius norm, for every tensor.
TRAINED_WEIGHTS = 1e-3  # Relative Frobenius norm, after ten steps.
SAMPLER_VERSUS_TRAINER = 1e-4  # Largest absolute difference of a logprob.

EPSILON = {"f32": 2.0**-23, "bf16": 2.0**-7}


def logprobs(dtype: str, expected: Any) -> float:
    """Returns the largest permitted difference from the `expected` log-probabilities of
    a sequence: the promise for f32, otherwise the rounding error of the largest one."""
    if dtype == "f32":
        return LOGPROBS
    return summed(dtype, 1) * float(np.max(np.abs(np.asarray(expected))))


def sampler_versus_trainer(dtype: str, expected: Any) -> float:
    """Returns the largest permitted difference between the log-probabilities of
    sampling and the `expected` ones of training."""
    return SAMPLER_VERSUS_TRAINER if dtype == "f32" else logprobs(dtype, expected)


def gradients(dtype: str) -> float:
    """Returns the largest permitted relative difference of a gradient: GRADIENTS for
    f32, otherwise the rounding error of its terms."""
    return GRADIENTS if dtype == "f32" else summed(dtype, 1)


def max_difference(actual: Any, expected: Any) -> float:
    """Returns the largest absolute difference; infinite if shapes differ or there
    is a NaN."""
    left = np.asarray(actual, dtype=np.float64)
    right = np.asarray(expected, dtype=np.float64)
    if left.shape != right.shape:
        return math.inf
    if left.size == 0:
        return 0.0
    difference = float(np.max(np.abs(left - right)))
    return math.inf if math.isnan(difference) else difference


def relative_difference(actual: Any, expected: Any) -> float:
    """Returns |actual - expected| / |expected| in the Frobenius norm; 0 / 0 is 0."""
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


def assert_near(
    actual: Any, expected: Any, bound: float = LOGPROBS, what: object = ""
) -> None:
    """Expects that the largest absolute difference is within the bound."""
    difference = max_difference(actual, expected)
    assert difference <= bound, f"{what}: {difference:.2e} > {bound:.2e}"


def assert_tensors(
    actual: Mapping[str, Any], expected: Mapping[str, Any], bound: float
) -> None:
    """Expects the same names, and relative differences within the bound."""
    assert set(actual) == set(expected)
    for name, tensor in expected.items():
        difference = relative_difference(actual[name], tensor)
        assert difference <= bound, f"{name}: {difference:.2e} > {bound:.2e}"


def summed(dtype: str, terms: int) -> float:
    """Returns the relative error of a sum of `terms` rounded numbers: a random walk
    of roundings, with a factor 8 for the several sums of a layer."""
    return 8.0 * EPSILON[dtype] * math.sqrt(terms)


def trained_in_company(dtype: str) -> float:
    """Returns the relative difference of weights trained in batches with other
    sequences.

    Rounding depends on the shape of a batch, so a gradient element g carries noise
    of about d = 8 eps times the gradient's root mean square. AdamW divides by |g|.
    So elements with |g| below that noise, a fraction d of all, may move the other
    way by the whole learning rate. The relative difference of what was learnt is
    then about sqrt(2 d). A factor 2 accounts for momentum.
    """
    return 2.0 * math.sqrt(2.0 * 8.0 * EPSILON[dtype])
