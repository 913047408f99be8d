"""Random custom losses whose operations fit their arguments.

Each operation is tried on PyTorch's meta device, which knows shapes and dtypes and
computes nothing. Sizes are drawn up to far above what a server may compute, and often
are 0 or 1, so that what a loss takes cannot be told from what it gets.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

Values = list[Any]  # Tensors, or what stands for them while a loss is traced.
Step = Callable[[Values], Any]

EACH = "abs exp log1p neg relu sigmoid sqrt square tanh sign floor isnan clone erf"
TWO = "add sub mul div maximum minimum pow remainder eq lt logaddexp xlogy"
OVER = "sum mean prod amax amin logsumexp all any var std count_nonzero"
ALONG = "cumsum logcumsumexp softmax log_softmax argsort argmax"
TYPES = "float double long int bool"


class Pick:
    """Draws the numbers of values."""

    def __init__(self, rng: random.Random, values: Values) -> None:
        self.values, self._rng = values, rng

    def __call__(self, *, of_reals: bool = False) -> int:
        numbers = range(len(self.values))
        reals = [k for k in numbers if self.values[k].is_floating_point()]
        return self._rng.choice(reals if of_reals else numbers)


def _size(rng: random.Random) -> int:
    return rng.choice((0, 1, 2, 3, 6, int(2 ** rng.uniform(0, 34))))


def _shape(rng: random.Random) -> list[int]:
    return [_size(rng) for _ in range(rng.randrange(1, 4))]


def _each(rng: random.Random, pick: Pick) -> Step:
    name, k = rng.choice(EACH.split()), pick(of_reals=True)
    return lambda v: getattr(torch, name)(v[k])


def _two(rng: random.Random, pick: Pick) -> Step:
    name, outer = rng.choice(TWO.split()), rng.random() < 0.3
    k, j = pick(of_reals=True), pick(of_reals=True)
    return lambda v: getattr(torch, name)(v[k].unsqueeze(-1) if outer else v[k], v[j])


def _over(rng: random.Random, pick: Pick) -> Step:
    name, k, keep = rng.choice(OVER.split()), pick(of_reals=True), rng.random() < 0.5
    dim = rng.randrange(max(1, pick.values[k].dim()))
    if name == "count_nonzero":
        return lambda v: torch.count_nonzero(v[k], dim)
    return lambda v: getattr(torch, name)(v[k], dim, keepdim=keep)


def _along(rng: random.Random, pick: Pick) -> Step:
    name, k = rng.choice(ALONG.split()), pick(of_reals=True)
    dim = rng.randrange(max(1, pick.values[k].dim()))
    return lambda v: getattr(torch, name)(v[k], dim)


def _sorted(rng: random.Random, pick: Pick) -> Step:
    name, half = rng.choice(("sort", "median", "max")), rng.randrange(2)
    k = pick(of_reals=True)
    return lambda v: getattr(torch, name)(v[k], -1)[half]


def _form(rng: random.Random, pick: Pick) -> Step:
    shape, k = [*_shape(rng), -1], pick()
    size = _size(rng)
    return rng.choice(
        (
            lambda v: v[k].reshape(shape),
            lambda v: v[k].reshape(-1),
            lambda v: v[k].unsqueeze(0).expand(size, -1),
            lambda v: v[k].unsqueeze(-1).expand(-1, size),
            lambda v: v[k].broadcast_to(size, 6),
            lambda v: v[k].transpose(0, -1),
            lambda v: v[k][::2],
            lambda v: v[k].flip([0]),
            lambda v: v[k].roll(1),
        )
    )


def _new(rng: random.Random, pick: Pick) -> Step:
    shape, size, k = _shape(rng), _size(rng), pick()
    extreme = 10.0 ** rng.choice((-310, -30, 30, 300))
    return rng.choice(
        (
            lambda v: torch.zeros(shape, device=v[0].device),
            lambda v: torch.ones(shape, device=v[0].device),
            lambda v: torch.full(shape, 0.5, device=v[0].device),
            lambda v: torch.arange(size, device=v[0].device),
            lambda v: torch.full(shape, extreme, device=v[0].device).double(),
            lambda v: torch.zeros_like(v[k]),
        )
    )


def _parts(rng: random.Random, pick: Pick) -> Step:
    count, k, j = rng.choice((1, 2, 5, 40)), pick(), pick()
    return rng.choice(
        (
            lambda v: v[k][v[2]],
            lambda v: v[k][(None,) * count],
            lambda v: v[k][..., None],
            lambda v: v[k][1:],
            lambda v: v[k][[0] * count],
            lambda v: torch.gather(v[k], 0, v[2]),
            lambda v: torch.zeros_like(v[k]).scatter_add(0, v[2], v[k]),
            lambda v: torch.where(v[2] > 2, v[k], v[j]),
            lambda v: torch.cat([v[k]] * count),
            lambda v: torch.stack([v[k]] * count),
        )
    )


def _type(rng: random.Random, pick: Pick) -> Step:
    name, k = rng.choice(TYPES.split()), pick()
    return lambda v: getattr(v[k], name)()


KINDS = (
    _type,
    _each,
    _two,
    _two,
    _over,
    _over,
    _along,
    _sorted,
    _form,
    _form,
    _new,
    _parts,
)


def random_loss(seed: int, targets: int) -> Callable[..., Any]:
    """Returns a loss of log-probabilities, reals y and integers i below 6, for so many
    targets. It has up to 24 operations."""
    rng = random.Random(seed)
    values: Values = [torch.empty(targets, device="meta") for _ in range(2)]
    values.append(torch.empty(targets, device="meta", dtype=torch.long))
    steps: list[Step] = []
    for _ in range(rng.randrange(20, 200)):
        step = rng.choice(KINDS)(rng, Pick(rng, values))
        try:
            made = step(values)
        except (RuntimeError, IndexError, TypeError, AssertionError):
            continue
        if isinstance(made, torch.Tensor) and made.dim() <= 4:
            values.append(made)
            steps.append(step)
        if len(steps) == 24:
            break

    def loss(logprobs: Any, y: Any, i: Any) -> tuple[Any, dict[str, Any]]:
        made: Values = [logprobs, y, i]
        for step in steps:
            made.append(step(made))
        total = logprobs.sum()
        for value in made[-4:]:
            total = total + 1e-3 * value.sum()
        return total, {}

    return loss
