"""forward_backward of Weft and of transformers + peft, in one run.

Each measurement has a fresh process, is warmed up, and has the machine to
itself; Weft and the peer alternate, and the best repetition counts. Weft is
timed at the client, over gRPC. Before any time counts, both must have computed
the same loss and the same gradient norm.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import machine
import models
from daemon import Daemon

HERE = Path(__file__).resolve().parent
RANK, ALPHA = 16, 32.0
LOSS_TOLERANCE = 1e-5  # Relative; both sum some thousand f32 terms.
NORM_TOLERANCE = 1e-4  # Relative; what the oracle tests allow a tensor.


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as scratch:
        work = Path(scratch)
        np.save(work / "tokens.npy", _tokens(options))
        ours: list[dict[str, Any]] = []
        peer: list[dict[str, Any]] = []
        for round_number in range(options.rounds):
            ours.append(_measure_weft(options, work, round_number))
            peer.append(_measure_peer(options, work))
            expect_equal(ours[-1], peer[-1])
            _progress(round_number, ours[-1], peer[-1])
    report = _report(options, ours, peer)
    print(_sentence(report), file=sys.stderr)
    emit(report, options.output)
    return 0


def emit(report: dict[str, Any], output: Path | None) -> None:
    """The JSON line, to stdout and to a file if there is one."""
    line = json.dumps(report)
    if output is not None:
        output.write_text(line + "\n", "utf-8")
    print(line)


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="run.py train_step",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--model", type=Path, help="model folder; SmolLM2 by default")
    parser.add_argument("--batch", type=int, default=8, help="sequences")
    parser.add_argument("--length", type=int, default=512, help="tokens of each")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=2, help="processes of each side")
    parser.add_argument("--reps", type=int, default=2, help="timed steps per process")
    parser.add_argument("--output", type=Path, help="also write the JSON line here")
    options = parser.parse_args(arguments)
    options.model = options.model or models.demo_model()
    options.config = json.loads((options.model / "config.json").read_text("utf-8"))
    return options


def _tokens(options: argparse.Namespace) -> np.ndarray:
    """[batch, length + 1] seeded random ids."""
    shape = (options.batch, options.length + 1)
    return np.random.default_rng(7).integers(0, options.config["vocab_size"], shape)


def _measure_weft(
    options: argparse.Namespace, work: Path, round_number: int
) -> dict[str, Any]:
    import weft

    tokens = np.load(work / "tokens.npy")
    data = [weft.Datum.next_token(row) for row in tokens]
    return time_weft(options, tokens, data, work, f"weftd-{round_number}")


def time_weft(
    options: argparse.Namespace,
    tokens: np.ndarray,
    data: list[Any],
    work: Path,
    name: str,
    *flags: str,
) -> dict[str, Any]:
    """Steps on `data` by a daemon of its own, in `work`/`name`; `tokens` teach
    the adapter."""
    threads = ("--threads", str(options.threads))
    daemon = Daemon(options.model, work / name, *threads, *flags)
    daemon.start()
    try:
        with daemon.client(timeout=3600.0) as client:
            adapter = _adapter(client, work / "adapter", tokens)
            warm = adapter.forward_backward(data)
            # A step of rate 0 tells the norm, clears the gradient, moves nothing.
            norm = adapter.optim_step(learning_rate=0.0).grad_norm
            seconds = []
            for _ in range(options.reps):
                start = time.perf_counter()
                adapter.forward_backward(data)
                seconds.append(time.perf_counter() - start)
        peak = machine.peak_resident_bytes(daemon.pid)
        code = daemon.stop()
    finally:
        daemon.kill()
    if code != 0:
        raise SystemExit(f"weftd ended with {code}\n{daemon.log_tail()}")
    return {
        "seconds": seconds,
        "loss": warm.metrics["loss:sum"],
        "grad_norm": norm,
        "peak_rss_bytes": peak,
    }


def _adapter(client: Any, folder: Path, tokens: np.ndarray) -> Any:
    """The adapter of every round: made once, trained a little so that neither A
    nor B is zero, then exchanged as a PEFT folder."""
    import weft

    if folder.exists():
        return client.import_adapter("bench", folder)
    first = client.create_adapter("first", rank=RANK, alpha=ALPHA, seed=1)
    first.forward_backward([weft.Datum.next_token(tokens[0, :64])])
    first.optim_step(learning_rate=1e-3)
    first.export(folder)
    first.delete()
    return client.import_adapter("bench", folder)


def _measure_peer(options: argparse.Namespace, work: Path) -> dict[str, Any]:
    command = [sys.executable, str(HERE / "train_step_peer.py")]
    command += ["--model", str(options.model), "--work", str(work)]
    command += ["--threads", str(options.threads), "--reps", str(options.reps)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads)}
    allocator = machine.tcmalloc()
    if allocator is not None:
        environment["LD_PRELOAD"] = allocator
    done = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, env=environment, text=True
    )
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def expect_equal(ours: dict[str, Any], peer: dict[str, Any]) -> None:
    for name, bound in (("loss", LOSS_TOLERANCE), ("grad_norm", NORM_TOLERANCE)):
        difference = abs(ours[name] - peer[name]) / abs(peer[name])
        if not difference <= bound:
            raise SystemExit(
                f"{name}: ours {ours[name]!r}, peer {peer[name]!r}: relative "
                f"difference {difference:.1e} > {bound:.0e}; times mean nothing"
            )


def _progress(number: int, ours: dict[str, Any], peer: dict[str, Any]) -> None:
    times = [
        "/".join(f"{second:.2f}" for second in side["seconds"]) for side in (ours, peer)
    ]
    print(f"round {number + 1}: weft {times[0]} s, peer {times[1]} s", file=sys.stderr)


def flops(config: dict[str, Any], batch: int, length: int, rank: int) -> float:
    """Floating-point operations of one forward and backward, base frozen.

    Two passes over every base weight (forward, input gradient), three over every
    LoRA weight, and causal attention: two products forward, five backward, over
    half the square.
    """
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    heads = config["num_attention_heads"]
    head = config.get("head_dim") or hidden // heads
    kv = config.get("num_key_value_heads", heads) * head
    ffn = config["intermediate_size"]
    shapes = [(hidden, heads * head), (hidden, kv), (hidden, kv)]
    shapes += [(heads * head, hidden), (hidden, ffn), (hidden, ffn), (ffn, hidden)]
    base = layers * sum(a * b for a, b in shapes) + hidden * config["vocab_size"]
    lora = layers * rank * sum(a + b for a, b in shapes)
    attention = 7 * layers * batch * length * length * heads * head
    return float(batch * length * (4 * base + 6 * lora) + attention)


def _summary(
    options: argparse.Namespace, runs: list[dict[str, Any]], gemm_rate: float
) -> dict[str, Any]:
    best = min(second for run in runs for second in run["seconds"])
    rate = flops(options.config, options.batch, options.length, RANK) / best
    return {
        "seconds": best,
        "all_seconds": [second for run in runs for second in run["seconds"]],
        "tokens_per_second": options.batch * options.length / best,
        "gflops": rate / 1e9,
        "fraction_of_gemm_rate": rate / gemm_rate,
        "peak_rss_bytes": max(run["peak_rss_bytes"] for run in runs),
        "loss": runs[0]["loss"],
        "grad_norm": runs[0]["grad_norm"],
    }


def _report(
    options: argparse.Namespace,
    ours: list[dict[str, Any]],
    peer: list[dict[str, Any]],
) -> dict[str, Any]:
    gemm_rate = max(run["gemm_flops_per_second"] for run in peer)
    sides = [_summary(options, runs, gemm_rate) for runs in (ours, peer)]
    return {
        "bench": "train_step",
        "ours": sides[0],
        "peer": sides[1],
        "ratio": sides[0]["tokens_per_second"] / sides[1]["tokens_per_second"],
        "config": {
            "model": options.model.name,
            "batch": options.batch,
            "length": options.length,
            "rank": RANK,
            "dtype": "f32",
            "threads": options.threads,
            "rounds": options.rounds,
            "reps": options.reps,
            "peer_allocator": "tcmalloc" if machine.tcmalloc() else "glibc",
            "peer_versions": peer[0]["versions"],
        },
        "gemm_gflops": gemm_rate / 1e9,
        "machine": machine.describe(),
    }


def _sentence(report: dict[str, Any]) -> str:
    parts = []
    for name in ("ours", "peer"):
        side = report[name]
        parts.append(
            f"{name} {side['tokens_per_second']:.0f} tok/s"
            f" ({side['seconds']:.2f} s, {side['fraction_of_gemm_rate']:.0%} of the"
            f" GEMM rate, peak {side['peak_rss_bytes'] / 2**20:.0f} MiB)"
        )
    return f"train_step: {'; '.join(parts)}; ratio {report['ratio']:.2f}"
