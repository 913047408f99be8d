"""Training requests that carry many bytes for each of their tokens."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterable
from typing import Any


def _node(op: str, name: str, target: str, *args: Any) -> dict[str, Any]:
    return {"op": op, "name": name, "target": target, "args": args, "kwargs": {}}


def custom_loss(
    *nodes: dict[str, Any], big: dict[str, Any] | None = None
) -> dict[str, Any]:
    """A loss that computes `nodes` besides the sum of the log-probabilities. Its input
    `big`, if there is one, costs no token."""
    names = ["logprobs"] if big is None else ["logprobs", "big"]
    every = [
        *(_node("placeholder", name, name) for name in names),
        *nodes,
        _node("call_method", "total", "sum", {"ref": "logprobs"}),
        _node(
            "output", "output", "output", {"tuple": [{"ref": "total"}, {"dict": {}}]}
        ),
    ]
    graph = json.dumps({"format": 1, "nodes": every})
    inputs = [{"name": name, "rank": 1} for name in names]
    datum = {"tokens": [3], "targets": [4]}
    return {
        "loss": {
            "function": "LOSS_FUNCTION_CUSTOM",
            "custom_loss": {"graph": graph, "inputs": inputs},
        },
        "data": [datum if big is None else {**datum, "custom_inputs": {"big": big}}],
    }


# Operations that make much of little.
OF_MUCH: list[list[dict[str, Any]]] = [
    [
        _node("call_function", "empty", "torch.zeros", [1 << 28, 0]),
        _node("call_function", "full", "torch.sum", {"ref": "empty"}, 1),
    ],
    [
        _node("call_function", "none", "torch.zeros", [0]),
        _node("call_method", "empty", "reshape", {"ref": "none"}, 1 << 28, 0),
        _node("call_function", "full", "torch.logsumexp", {"ref": "empty"}, 1),
    ],
    [
        _node(
            "call_function",
            "many",
            "operator.getitem",
            {"ref": "logprobs"},
            {"tuple": [None] * 20_000},
        )
    ],
]


def custom_inputs(mib: int) -> dict[str, Any]:
    value = {"shape": [mib << 18], "floats_le": bytes(mib << 20)}
    return custom_loss(big=value)


def _words(values: Iterable[int]) -> bytes:
    return array("I", values).tobytes()


_ONE = {"tokens_le": _words([3] * 128), "targets_le": _words([4] * 128)}


def _training(data: list[dict[str, Any]], **loss: Any) -> dict[str, Any]:
    return {"loss": {"function": "LOSS_FUNCTION_CROSS_ENTROPY", **loss}, "data": data}


def tokens(mib: int) -> dict[str, Any]:
    return _training([_ONE] * min(mib << 10, 4096))


def soft_targets(mib: int) -> dict[str, Any]:
    """64 targets for each token."""
    one = {
        **_ONE,
        "targets_le": _words(range(3, 67)) * 128,
        "weights_le": array("f", [1 / 64]).tobytes() * (64 * 128),
        "targets_per_token": 64,
    }
    return _training([one] * (16 * mib))


def supports(mib: int) -> dict[str, Any]:
    """The target of each token is one of 256."""
    one = {
        **_ONE,
        "support_offsets_le": _words(range(0, 129 << 8, 1 << 8)),
        "support_tokens_le": _words(range(3, 3 + (1 << 8))) * 128,
    }
    return _training([one] * (8 * mib))


def spans(mib: int) -> dict[str, Any]:
    """Targets that records have drawn which do not exist."""
    drawn = [
        {"sequence_id": f"{i}:" + "x" * 60, "start": i, "length": 1} for i in range(128)
    ]
    one = {**_ONE, "sampled_spans": drawn}
    return _training([one] * min(64 * mib, 4096), replay_support=True)


def teachers_tokens(mib: int) -> dict[str, Any]:
    """A teacher that reads much more than the adapter that learns."""
    one = {**_ONE, "teacher_tokens_le": _words([3] * 400)}
    loss = {"function": "LOSS_FUNCTION_FORWARD_KL", "teacher": {"base_model": True}}
    return {"loss": loss, "data": [one] * min(512 * mib, 4096)}


def routing(mib: int) -> dict[str, Any]:
    """The experts of tiny_model("qwen3-moe"). Other models refuse the step, which keeps
    its number."""
    layers, of_token = 3, [0, 1]
    one = {**_ONE, "routing_le": array("H", of_token * layers).tobytes() * 128}
    return _training([one] * min(512 * mib, 4096))


PAYLOADS: tuple[Callable[[int], dict[str, Any]], ...] = (
    custom_inputs,
    tokens,
    soft_targets,
    supports,
    spans,
    teachers_tokens,
    routing,
)
