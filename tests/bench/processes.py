"""Starts what is measured: weftd, and programs that print one JSON line."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import daemon
import machine
import numpy as np
import weft
from report import Run

HERE = Path(__file__).resolve().parent
RANK, ALPHA = 16, 32.0


def run_program(command: Sequence[str | Path], threads: int) -> Run:
    """The last line of a program's stdout. It has the allocator of weftd."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    allocator = machine.tcmalloc()
    if allocator is not None:
        environment["LD_PRELOAD"] = allocator
    done = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, env=environment, text=True
    )
    result: Run = json.loads(done.stdout.splitlines()[-1])
    return result


class StepBench:
    """forward_backward of the same tokens and adapter, by either side.

    Each call has a fresh process that loads model and adapter, reads two tokens,
    so that mapped weights and code are there too, starts to watch its memory,
    takes one step to warm up, and then `options.reps` that are timed.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        tokens: np.ndarray,
        work: Path,
        prompt: int = 0,
    ):
        """`tokens` are [sequences, length + 1]; each predicts the next one, but
        the first `prompt` of a sequence are not learnt."""
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
        """Steps of weftd with `flags`, timed at the client, over gRPC."""
        data = self._data if data is None else data
        seconds = []
        with self._daemon(*flags) as (process, client):
            adapter = client.import_adapter("bench", self._work / "adapter")
            adapter.forward([weft.Datum.next_token(self._tokens[0, :3])])
            memory = machine.PeakMemory(process.pid)
            warm = adapter.forward_backward(data)
            # A step of rate 0 tells the norm, clears the gradient, moves nothing.
            norm = adapter.optim_step(learning_rate=0.0).grad_norm
            for _ in range(self._options.reps if reps is None else reps):
                start = time.perf_counter()
                adapter.forward_backward(data)
                seconds.append(time.perf_counter() - start)
            peak = memory.read()
        return {
            "seconds": seconds,
            "loss": warm.metrics["loss:sum"],
            "grad_norm": norm,
            **peak,
        }

    def peer(self, *flags: str) -> Run:
        """Steps of transformers + peft; flags are those of model_peer.py."""
        options = self._options
        command = [sys.executable, HERE / "model_peer.py", "--model", options.model]
        command += ["--work", self._work, "--prompt", str(self._prompt)]
        command += ["--threads", str(options.threads), "--reps", str(options.reps)]
        return run_program([*command, *flags], options.threads)

    def _make_adapter(self) -> None:
        """A PEFT folder for all processes, trained a little so that neither A nor
        B is zero; by a daemon of its own, for training leaves memory behind."""
        with self._daemon() as (_, client):
            adapter = client.create_adapter("bench", rank=RANK, alpha=ALPHA, seed=1)
            adapter.forward_backward([weft.Datum.next_token(self._tokens[0, :64])])
            adapter.optim_step(learning_rate=1e-3)
            adapter.export(self._work / "adapter")

    @contextmanager
    def _daemon(self, *flags: str) -> Iterator[tuple[daemon.Daemon, Any]]:
        options = self._options
        folder = Path(tempfile.mkdtemp(prefix="weftd-", dir=self._work))
        threads = ("--threads", str(options.threads))
        with daemon.running(options.model, folder, *threads, *flags) as process:
            with process.client(timeout=3600.0) as client:
                yield process, client
