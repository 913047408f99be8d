"""The experts that a transformers model chooses, or is given."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def _routers(model: Any) -> list[Any]:
    """Returns the routers of all layers with experts, in order."""
    return [
        module
        for name, module in model.named_modules()
        if name.endswith((".mlp.gate", ".mlp.router")) and hasattr(module, "top_k")
    ]


def takes_sigmoids(config: Any) -> bool:
    """Returns whether routers take sigmoids. transformers does not sort the experts of
    such a router."""
    return config.model_type in ("glm4_moe", "minimax_m2")


def chosen(reference: Any, tokens: list[int]) -> np.ndarray:
    """Returns the experts of every token, [N, L, K], as the model chooses them."""
    seen: list[np.ndarray] = []

    def keep(_router: Any, _inputs: Any, output: Any) -> None:
        seen.append(output[2].numpy())

    hooks = [r.register_forward_hook(keep) for r in _routers(reference.model)]
    try:
        reference.logits(tokens)
    finally:
        for hook in hooks:
            hook.remove()
    return np.stack(seen, axis=1)


@contextmanager
def given(model: Any, routing: np.ndarray) -> Iterator[None]:
    """Sends the tokens of one sequence to the experts in `routing` [N, L, K]."""

    def use(layer: int) -> Any:
        index = torch.tensor(routing[:, layer].astype(np.int64))

        def replace(router: Any, _inputs: Any, output: Any) -> Any:
            scores = (
                output[0].sigmoid()
                if takes_sigmoids(model.config)
                else torch.softmax(output[0], dim=-1)
            )
            weights = scores.gather(1, index)
            if getattr(router, "norm_topk_prob", True):
                weights = weights / weights.sum(dim=-1, keepdim=True)
            weights = weights * getattr(router, "routed_scaling_factor", 1.0)
            return output[0], weights, index

        return replace

    hooks = [
        router.register_forward_hook(use(layer))
        for layer, router in enumerate(_routers(model))
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
