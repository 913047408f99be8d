"""Times weftd on a published shape with seeded weights, from an unpacked bundle:

    python3 tests/device/trace/trace_weft.py SHAPE BATCH LENGTH RANK [weftd flags]

One adapter trains, then eight train together. Then ten adapters take turns in nine
slots, so that each step moves one adapter to the host and another adapter back.
Finally the base model and an adapter are sampled with 1, 8 and 64 sequences. The
printed times are wall time at the client. weftd runs with this process's environment,
so CUDA_INJECTION64_PATH and CUDA_TRACE_FILE make it record its kernels too. Repetitions
are 0.3 s apart, so cuda_trace.py --gap 100 finds them as bursts.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(_ROOT / folder) for folder in ("tests/bench", "tests/oracle")]
sys.path.append(str(_ROOT / "client" / "python"))

import daemon as daemon_module  # noqa: E402
import numpy as np  # noqa: E402
import shapes  # noqa: E402

import weft  # noqa: E402

METRICS = (
    "weft_device_memory",
    "weft_adapter_moves_total",
    "weft_adapter_swap_in_seconds_sum",
    "weft_adapter_swap_in_seconds_count",
)
ADAPTERS = 8
SLOTS = ADAPTERS + 1
BATCHES = (1, 8, 64)
PROMPT, NEW_TOKENS = 32, 33
IDLE_SECONDS = 0.3


class Tokens:
    """Draws random token ids of a vocabulary, with a fixed seed."""

    def __init__(self, vocab: int):
        self._vocab = vocab
        self._rng = np.random.default_rng(0)

    def draw(self, count: int) -> Any:
        return self._rng.integers(3, self._vocab, count)

    def datum(self, count: int) -> weft.Datum:
        ids = self.draw(count + 1)
        return weft.Datum(ids[:-1], ids[1:])


def timed(label: str, call: Callable[[], object], reps: int) -> None:
    for rep in range(reps):
        time.sleep(IDLE_SECONDS)
        start = time.monotonic()
        call()
        took = (time.monotonic() - start) * 1e3
        print(f"{label} rep {rep}: {took:.1f} ms", flush=True)


def train(client: Any, tokens: Tokens, batch: int, length: int, rank: int) -> Any:
    """Times the training of one adapter and of several. Returns a trained adapter."""
    one = client.create_adapter("one", rank=rank)
    data = [tokens.datum(length) for _ in range(batch)]
    timed(
        f"forward_backward {batch}x{length} r{rank}",
        lambda: one.forward_backward(data),
        4,
    )
    timed("forward", lambda: one.forward(data), 2)
    timed("optim_step", lambda: one.optim_step(learning_rate=1e-5), 3)
    many = [client.create_adapter(f"m{i}", rank=rank) for i in range(ADAPTERS)]
    share = max(1, batch // ADAPTERS)
    parts = [[tokens.datum(length) for _ in range(share)] for _ in many]
    with ThreadPoolExecutor(ADAPTERS) as pool:
        timed(
            f"{ADAPTERS} adapters",
            lambda: list(
                pool.map(
                    lambda p: p[0].forward_backward(p[1]), zip(many, parts, strict=True)
                )
            ),
            3,
        )
    take_turns([one, *many, client.create_adapter("last", rank=rank)], parts[0])
    return many[0]


def take_turns(adapters: Sequence[Any], data: Sequence[weft.Datum]) -> None:
    """Times steps of an adapter that is on the device, and steps that first move one
    adapter out and another one in."""
    # There is one slot less than adapters. After this round, the next adapter is always
    # the least recently used one, so it is not on the device.
    for adapter in adapters:
        adapter.forward_backward(data)
    timed("step, no move", lambda: adapters[-1].forward_backward(data), 3)
    turns = iter(adapters)
    timed("step, 1 out, 1 in", lambda: next(turns).forward_backward(data), 4)


def _all(
    pool: Executor, one: Callable[[Any], object], prompts: Sequence[Any]
) -> list[object]:
    return list(pool.map(one, prompts))


def sample(client: Any, adapter: Any, tokens: Tokens) -> None:
    for count in BATCHES:
        prompts = [tokens.draw(PROMPT) for _ in range(count)]
        for who, source in (("base", client), ("adapter", adapter)):
            one = partial(
                source.sample, max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True
            )
            with ThreadPoolExecutor(count) as pool:
                timed(
                    f"sample {who} n={count} {PROMPT}+{NEW_TOKENS}",
                    partial(_all, pool, one, prompts),
                    2,
                )


def main() -> int:
    name, batch, length, rank = sys.argv[1], *map(int, sys.argv[2:5])
    folder = shapes.folder(name, daemon_module.DEVICE)
    tokens = Tokens(shapes.SHAPES[name]["vocab_size"])
    flags = ("--max-resident-adapters", str(SLOTS), *sys.argv[5:])
    server = daemon_module.Daemon(folder, Path("trace_weft"), *flags)
    server.start()
    with server.client() as client:
        adapter = train(client, tokens, batch, length, rank)
        sample(client, adapter, tokens)
        for line in server.scrape().splitlines():
            if line.startswith(METRICS):
                print(line, flush=True)
    return server.stop()


if __name__ == "__main__":
    raise SystemExit(main())
