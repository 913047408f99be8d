"""Traces Python functions into the graphs of custom losses, as the Tinker SDK does."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.fx
from torch.fx.node import _get_qualified_name

CONSTANTS = {
    torch.dtype: "dtype",
    torch.device: "device",
    torch.layout: "layout",
    torch.memory_format: "memory_format",
}


def encoded(arg: Any) -> Any:
    """Encodes an argument of a call as in custom_loss_graph, format 1."""
    if isinstance(arg, torch.fx.Node):
        return {"ref": arg.name}
    if isinstance(arg, float) and not math.isfinite(arg):
        return {"float": str(arg)}
    if isinstance(arg, list):
        return [encoded(item) for item in arg]
    if isinstance(arg, tuple):
        return {"tuple": [encoded(item) for item in arg]}
    if isinstance(arg, dict):
        return {"dict": {key: encoded(item) for key, item in arg.items()}}
    if isinstance(arg, slice):
        return {"slice": [encoded(x) for x in (arg.start, arg.stop, arg.step)]}
    if arg is Ellipsis:
        return {"ellipsis": True}
    if type(arg) in CONSTANTS:
        return {CONSTANTS[type(arg)]: str(arg).removeprefix("torch.")}
    assert arg is None or isinstance(arg, (bool, int, float, str)), arg
    return arg


def traced(fn: Callable[..., Any]) -> dict[str, Any]:
    """Returns the graph of a loss (logprobs, *inputs) -> (loss, metrics)."""
    nodes = []
    for node in torch.fx.symbolic_trace(fn).graph.nodes:
        target = str(node.target)
        if node.op == "call_function":
            target = _get_qualified_name(node.target).replace("_operator.", "operator.")
        nodes.append(
            {
                "op": node.op,
                "name": node.name,
                "target": target,
                "args": [encoded(arg) for arg in node.args],
                "kwargs": {key: encoded(arg) for key, arg in node.kwargs.items()},
            }
        )
    return {"format": 1, "nodes": nodes}
