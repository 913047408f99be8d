"""Starts the measured programs: weftd, and programs that print one JSON line."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import daemon
import machine
import numpy as np
import timing
from peer_options import DTYPES
from report import RANK as RANK  # The LoRA rank in all benches.
from report import Run

import weft

HERE = Path(__file__).resolve().parent
ALPHA = 32.0


@contextmanager
def scratch(parent: Path | None = None) -> Iterator[Path]:
    """Creates a folder and removes it afterwards."""
    with tempfile.TemporaryDirectory(prefix="weft-bench-", dir=parent) as folder:
        yield Path(folder)


def run_program(command: Sequence[str | Path], threads: int) -> Run:
    """Runs a program with weftd's allocator and returns the last line of its
    stdout."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    allocator = machine.tcmalloc()
    if allocator is not None:
        environment["LD_PRELOAD"] = allocator
    done = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, env=environment, text=True
    )
    result: Run = json.loads(done.stdout.splitlines()[-1])
    return result


def run_peer(
    options: argparse.Namespace,
    work: Path,
    program: str,
    *flags: str,
    python: str = sys.executable,
) -> Run:
    """Runs one process of a peer's program, with the options of peer_options.py and
    `flags`."""
    command = [python, HERE / program, "--model", options.model, "--work", work]
    command += ["--threads", str(options.threads), "--reps", str(options.reps)]
    command += ["--device", options.device]
    return run_program([*command, *flags], options.threads)


@contextmanager
def running(
    options: argparse.Namespace, work: Path, *flags: str, model: Path | None = None
) -> Iterator[tuple[daemon.Daemon, Any]]:
    """Starts a fresh weftd of `model`, by default `options.model`, and a client of
    it. weftd's files are in a new folder below `work`."""
    folder = Path(tempfile.mkdtemp(prefix="weftd-", dir=work))
    own = ["--threads", str(options.threads), "--device", options.device]
    own += ["--dtype", DTYPES[options.device]]
    with (
        daemon.running(model or options.model, folder, *own, *flags) as process,
        process.client(timeout=3600.0) as client,
    ):
        yield process, client


def metric(page: str, name: str) -> float:
    """Returns the sum of a metric's series on a metrics page; 0 if there is none."""
    return sum(
        float(line.split()[-1])
        for line in page.splitlines()
        if line.startswith((f"{name} ", f"{name}{{"))
    )


def adapter_moves(page: str) -> int:
    """Reads from a metrics page how often adapters were moved, in any direction."""
    return int(metric(page, "weft_adapter_moves_total"))


def resident(options: argparse.Namespace, adapters: int) -> tuple[str, ...]:
    """Returns flags of a weftd whose device holds this many adapters of
    `options.rank`. By default a slot on CUDA has the size of the largest rank, so
    fewer adapters may fit."""
    slots = ("--max-resident-adapters", str(adapters))
    return ("--max-rank", str(options.rank), *slots)


def expect_resident(page: str) -> None:
    """Ends the bench if an adapter was moved, because the times would include the
    moves."""
    moves = adapter_moves(page)
    if moves > 0:
        raise SystemExit(f"adapters were moved {moves} times; times mean nothing")


class StepBench:
    """Runs forward_backward of the same tokens and adapter on either side.

    Each call has a fresh process. The process loads model and adapter and reads two
    tokens, so that mapped weights and code are in memory too. Then it starts to
    watch its memory, takes one step to warm up, and `options.reps` steps that are
    timed.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        tokens: np.ndarray,
        work: Path,
        prompt: int = 0,
    ):
        """`tokens` are [sequences, length + 1]. Each token predicts the next one. The
        first `prompt` tokens of a sequence are not trained."""
        self._options, self._work, self._prompt = options, work, prompt
        self._tokens = tokens
        self._data = [
            weft.Datum.next_token(row, prompt_length=prompt) for row in tokens
        ]
        np.save(work / "tokens.npy", tokens)
        self._make_adapter()

    def weft(
        self,
        *flags: str,
        data: Sequence[weft.Datum] | None = None,
        reps: int | None = None,
    ) -> Run:
        """Runs steps of weftd with `flags`. The client times them, over gRPC."""
        data = self._data if data is None else data
        reps = self._options.reps if reps is None else reps
        with running(self._options, self._work, *flags) as (process, client):
            adapter = client.import_adapter("bench", self._work / "adapter")
            adapter.forward([weft.Datum.next_token(self._tokens[0, :3])])
            memory = machine.PeakMemory(process.pid, self._options.device)
            warm = adapter.forward_backward(data)
            # A step with learning rate 0 returns the norm, clears the gradient
            # and changes no weights.
            norm = adapter.optim_step(learning_rate=0.0).grad_norm
            seconds = timing.each(lambda: adapter.forward_backward(data), reps)
            peak = memory.read()
        return {
            "seconds": seconds,
            "loss": warm.metrics["loss:sum"],
            "grad_norm": norm,
            **peak,
        }

    def peer(self, *flags: str) -> Run:
        """Runs steps of transformers + peft. `flags` are those of model_peer.py."""
        prompt = ("--prompt", str(self._prompt))
        return run_peer(self._options, self._work, "model_peer.py", *prompt, *flags)

    def _make_adapter(self) -> None:
        """Makes a PEFT folder for all processes. A separate daemon trains the adapter a
        little, so that both A and B are nonzero. The daemon is not reused, because
        training leaves memory behind."""
        with running(self._options, self._work) as (_, client):
            adapter = client.create_adapter(
                "bench", rank=self._options.rank, alpha=ALPHA, seed=1
            )
            adapter.forward_backward([weft.Datum.next_token(self._tokens[0, :64])])
            adapter.optim_step(learning_rate=1e-3)
            adapter.export(self._work / "adapter")
