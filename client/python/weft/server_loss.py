"""A custom loss that the server computes, as a graph of tensor operations. Does no
I/O."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weft.errors import InvalidArgument

if TYPE_CHECKING:
    import torch
    import torch.fx

# torch.fx patches its module while it traces, so two threads must not.
_TRACING = threading.Lock()


@dataclass(frozen=True)
class ServerLoss:
    """What `trace_loss` makes of a function. Pass it as `custom_loss` with the loss
    "custom".

    graph: JSON, format 1 of the Tinker SDK. inputs: the number of dimensions of each
    input, in the function's order, "logprobs" first.
    """

    graph: str
    inputs: Mapping[str, int]


def trace_loss(
    fn: Callable[..., tuple[torch.Tensor, Mapping[str, torch.Tensor]]], **ranks: int
) -> ServerLoss:
    """Traces a loss for the server, which then computes it in one forward pass.

    fn: (logprobs, *inputs) -> (loss, metrics), written with torch. It runs once per
    datum, and the losses add up. logprobs has the shape of the datum's targets, and
    the other inputs are its `custom_inputs`. The loss is a scalar tensor, and metrics a
    dict of scalar tensors with names like "custom/kl:mean" or "custom/kl:sum".
    ranks: the number of dimensions of each input after logprobs, which has one; give
    logprobs=2 for soft targets [N, K]. Needs torch. Raises InvalidArgument for what
    torch.fx cannot trace, such as a branch on a tensor's value. Threads: any.
    """
    import torch.fx

    try:
        with _TRACING:
            nodes = list(torch.fx.symbolic_trace(fn).graph.nodes)
        graph = {"format": 1, "nodes": [_node(node) for node in nodes]}
    except Exception as error:  # Runs fn, which may raise anything.
        raise InvalidArgument(f"the loss cannot be traced: {error}") from error
    names = [str(node.target) for node in nodes if node.op == "placeholder"]
    inputs = {"logprobs": 1, **ranks}
    if sorted(names) != sorted(inputs) or names[0] != "logprobs":
        raise InvalidArgument(
            f"the loss takes {', '.join(names)}, must take logprobs first, and the "
            f"inputs whose ranks are given: {', '.join(ranks) or 'none'}"
        )
    return ServerLoss(json.dumps(graph), {name: inputs[name] for name in names})


def _node(node: torch.fx.Node) -> dict[str, Any]:
    from torch.fx.node import _get_qualified_name

    target = str(node.target)
    if node.op == "call_function":
        # Python's operators live in a private module.
        function: Any = node.target
        target = _get_qualified_name(function).replace("_operator.", "operator.")
    return {
        "op": node.op,
        "name": node.name,
        "target": target,
        "args": [_argument(arg) for arg in node.args],
        "kwargs": {key: _argument(arg) for key, arg in node.kwargs.items()},
    }


def _argument(arg: object) -> object:
    import torch

    if isinstance(arg, torch.fx.Node):
        return {"ref": arg.name}
    if isinstance(arg, float) and not math.isfinite(arg):
        return {"float": str(arg)}
    if arg is None or isinstance(arg, (bool, int, float, str)):
        return arg
    if isinstance(arg, list):
        return [_argument(item) for item in arg]
    if isinstance(arg, tuple):
        return {"tuple": [_argument(item) for item in arg]}
    if isinstance(arg, dict):
        return {"dict": {key: _argument(item) for key, item in arg.items()}}
    if isinstance(arg, slice):
        return {"slice": [_argument(x) for x in (arg.start, arg.stop, arg.step)]}
    if arg is Ellipsis:
        return {"ellipsis": True}
    for kind in ("dtype", "device", "layout", "memory_format"):
        if isinstance(arg, getattr(torch, kind)):
            return {kind: str(arg).removeprefix("torch.")}
    raise TypeError(f"an argument is a {type(arg).__name__}")
