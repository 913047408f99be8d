"""The adapter that a run trains: made, found, taken up again, saved."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from weft.adapter import Adapter
from weft.client import Client
from weft.datum import Datum
from weft.errors import FailedPrecondition, NotFound
from weft.recipes.batches import requests
from weft.recipes.schedule import SCHEDULES
from weft.recipes.watch import FORMATS
from weft.types import LossOptions, OptimOptions, ServerInfo


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that every recipe has."""
    add = parser.add_argument
    server = os.environ.get("WEFT_SERVER", "127.0.0.1:50051")
    add("--server", default=server, help="HOST:PORT; or WEFT_SERVER")
    add("--model-dir", required=True, help="folder with tokenizer.json")
    add("--adapter", required=True, help="its name on the server")
    add("--tenant", help="of a new adapter; one of its own")
    add("--rank", type=int, default=16, help="of a new adapter")
    add("--alpha", type=float, default=32.0, help="of a new adapter")
    add("--resume", action="store_true", help="go on where the adapter is")
    add("--lr", type=float, default=2e-4, help="learning rate at its highest")
    add("--schedule", choices=SCHEDULES, default="cosine")
    add("--warmup", type=int, default=0, help="steps until the rate is full")
    add("--weight-decay", type=float, default=0.0)
    add("--max-grad-norm", type=float, default=1.0, help="clips; 0: no clipping")
    add("--seed", type=int, default=0, help="order of the data, draws, new weights")
    add("--eval-every", type=int, default=0, help="steps; 0: at start and end only")
    add("--save-every", type=int, default=0, help="steps; 0: at the end only")
    add("--output", type=Path, default=Path("run"), help="folder of log and plot")
    add("--log-format", choices=FORMATS, default="jsonl")
    add("--export", type=Path, help="folder for the adapter in PEFT's form")


def server_info(client: Client) -> ServerInfo:
    """What the server runs, once it has loaded it; until then this waits, for as
    long as the server can be reached. Raises Unavailable where it cannot."""
    info = client.info()
    if not client.healthy():
        print("waiting for the server to be ready", flush=True)
    while not client.healthy():
        time.sleep(0.5)
        info = client.info()
    return info if info.model.context_length else client.info()


def open_adapter(client: Client, options: argparse.Namespace) -> tuple[Adapter, int]:
    """The adapter, and how many optimizer steps it has had.

    With --resume an adapter that the server has lost comes back from its last
    checkpoint. Without, FailedPrecondition for one that was trained before.
    """
    try:
        adapter = client.adapter(options.adapter)
    except NotFound:
        adapter = _make(client, options)
    done = adapter.info().optim_steps
    if done and not options.resume:
        raise FailedPrecondition(
            f"adapter {options.adapter!r} has had {done} steps: give --resume to go "
            "on, or another name"
        )
    return adapter, done


def _make(client: Client, options: argparse.Namespace) -> Adapter:
    saved = client.checkpoints(options.adapter) if options.resume else []
    if not saved:
        return client.create_adapter(
            options.adapter,
            rank=options.rank,
            alpha=options.alpha,
            seed=options.seed,
            tenant=options.tenant,
        )
    last = max(saved, key=lambda checkpoint: checkpoint.optim_steps)
    adapter = client.create_adapter(
        options.adapter,
        rank=last.config.rank,
        alpha=last.config.alpha,
        target_modules=last.config.target_modules,
        tenant=options.tenant,
    )
    adapter.load(last.name)
    return adapter


@dataclass(frozen=True)
class Update:
    """What one optimizer step did."""

    loss: float  # Sum of the data's weighted losses.
    grad_norm: float  # Before clipping.
    metrics: list[dict[str, float]]  # One for each request.


def update(
    adapter: Adapter,
    batches: Sequence[Sequence[Datum]],
    info: ServerInfo,
    loss: str,
    loss_options: LossOptions,
    optim_options: OptimOptions,
) -> Update:
    """Adds up the gradients of all batches, then steps. All is under way before the
    first answer: numbered steps keep their order."""
    gradients = [
        adapter.submit.forward_backward(request, loss, **loss_options)
        for batch in batches
        for request in requests(batch, info)
    ]
    step = adapter.submit.optim_step(**optim_options)
    metrics = [gradient.result().metrics for gradient in gradients]
    return Update(
        sum(values["loss:sum"] for values in metrics), step.result().grad_norm, metrics
    )


def optim_options(options: argparse.Namespace, rate: float) -> OptimOptions:
    """The command line's AdamW values at this learning rate."""
    return {
        "learning_rate": rate,
        "weight_decay": options.weight_decay,
        "max_grad_norm": options.max_grad_norm,
    }


def is_due(step: int, every: int, total: int) -> bool:
    """Whether what happens every so many steps, and at the end, happens now."""
    return step == total or (every > 0 and step % every == 0)


def save(adapter: Adapter, step: int) -> None:
    """Writes checkpoint step-N; one of a run before this one is replaced."""
    name = f"step-{step}"
    adapter.save(name, overwrite=True)
    print(f"saved {adapter.id}/{name}", flush=True)
