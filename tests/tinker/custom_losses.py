"""Five custom losses, each computed by the server and by the SDK on the same data.
Runs in the SDK's own environment."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import tinker
import torch
import torch.nn.functional as F
from tinker import types

T = Any  # A tensor, or what torch.fx has in its place.


def dpo(
    logprobs: T, reference: T, weights: T, sign: T, other: T
) -> tuple[T, dict[str, T]]:
    """One side of a pair; `other` is the log ratio of the other side."""
    margin = ((logprobs - reference) * weights).sum() - other
    loss = -F.logsigmoid(0.1 * sign * margin)
    return loss, {"custom/margin:mean": margin, "custom/right:sum": (margin > 0)}


def gspo(logprobs: T, old: T, mask: T, advantage: T) -> tuple[T, dict[str, T]]:
    """A ratio of the whole sequence, whose gradient goes through the mean."""
    count = mask.sum()
    ratio = torch.exp(((logprobs - old) * mask).sum() / count)
    clipped = torch.clamp(ratio, 0.8, 1.2)
    gain = torch.minimum(ratio * advantage, clipped * advantage)
    return -gain * count, {"custom/clipped:mean": (ratio != clipped).float()}


def entropy_bonus(logprobs: T, advantages: T) -> tuple[T, dict[str, T]]:
    """REINFORCE, and the entropy of the drawn tokens as far as they show it."""
    entropy = -(torch.exp(logprobs) * logprobs).sum()
    loss = -(advantages * logprobs).sum() - 0.01 * entropy
    return loss, {"custom/entropy:mean": entropy / logprobs.shape[0]}


def kl(logprobs: T, reference: T, advantages: T) -> tuple[T, dict[str, T]]:
    """A pull towards a reference, by the estimator r - 1 - log r."""
    log_ratio = reference - logprobs
    penalty = torch.exp(log_ratio) - 1 - log_ratio
    loss = (0.1 * penalty - advantages * logprobs).sum()
    return loss, {"custom/kl:sum": penalty.sum().detach()}


# fmt: off
def sixteen(
    logprobs: T, a: T, b: T, c: T, d: T, e: T, f: T, g: T, h: T, i: T, j: T, k: T,
    l: T, m: T, n: T, o: T,  # noqa: E741
) -> tuple[T, dict[str, T]]:
    """As many inputs as a loss may have."""
    rows = torch.stack([a, b, c, d, e, f, g, h, i, j, k, l, m, n, o])
    mix = torch.softmax(rows, dim=0) * torch.arange(15, device=a.device)[:, None]
    smooth = (logprobs[1:] - logprobs[:-1]).square().sum()
    loss = smooth - (mix.sum(0) * logprobs).mean()
    return loss, {"custom/most:mean": mix.amax()}
# fmt: on


LOSSES: dict[Callable[..., Any], dict[str, Any]] = {
    dpo: {"reference": 1, "weights": 1, "sign": 0, "other": 0},
    gspo: {"old": 1, "mask": 1, "advantage": 0},
    entropy_bonus: {"advantages": 1},
    kl: {"reference": 1, "advantages": 1},
    sixteen: dict.fromkeys("abcdefghijklmno", 1),
}
NEGATIVE = ("reference", "old")


def data_for(ranks: dict[str, int], count: int, length: int, vocabulary: int) -> Any:
    """Returns random data with the inputs that a loss reads."""
    source = random.Random(5)

    def value(name: str, rank: int) -> types.TensorData:
        shape = [length] if rank else []
        values = [source.uniform(0.1, 1.0) for _ in range(length if rank else 1)]
        values = [-4 * x if name in NEGATIVE else x for x in values]
        return types.TensorData(data=values, dtype="float32", shape=shape)

    data = []
    for _ in range(count):
        tokens = [source.randrange(vocabulary) for _ in range(length + 1)]
        inputs: dict[str, Any] = {"target_tokens": tokens[1:]}
        inputs |= {name: value(name, rank) for name, rank in ranks.items()}
        data.append(
            types.Datum(
                model_input=types.ModelInput.from_ints(tokens[:-1]),
                loss_fn_inputs=inputs,
            )
        )
    return data


def compared(
    base: str, count: int, length: int, vocabulary: int, repetitions: int
) -> dict[str, Any]:
    """Runs each loss in both ways, in turns. Returns metrics and gradient norm by loss
    and way."""
    service = tinker.ServiceClient()
    clients = {
        way: service.create_lora_training_client(
            base_model=base, rank=8, seed=7
        ).result()
        for way in ("server", "client")
    }
    out: dict[str, Any] = {}
    for loss, ranks in LOSSES.items():
        handle = service.create_custom_loss(loss, {"logprobs": 1, **ranks}).result()
        assert handle.loss_id is not None
        handles = {"server": handle, "client": replace(handle, loss_id=None)}
        data = data_for(ranks, count, length, vocabulary)
        own: dict[str, Any] = {way: {} for way in clients}
        for _ in range(repetitions):
            for way, client in clients.items():
                result = client.forward_backward_custom(data, handles[way]).result()
                step = client.optim_step(types.AdamParams(learning_rate=1e-3)).result()
                metrics = dict(result.metrics)
                metrics.pop("surrogate_loss:sum", None)
                own[way]["norm"] = step.metrics["grad_norm"]
                own[way]["metrics"] = {
                    name: value
                    for name, value in metrics.items()
                    if name.startswith("custom/") or name == "loss:sum"
                }
        out[loss.__name__] = own
    return out
