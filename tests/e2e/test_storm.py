"""Three tenants attack weftd in every way of `attacks.py`, while a fourth trains and
samples. Nothing ends the process, and the fourth loses no more than its share. In a
storm of less than five minutes the model has few layers, so that he gets enough done.

    pytest tests/e2e/test_storm.py --seconds 1800 -s

What is checked:

- weftd and the front for OpenAI's API have not restarted, and still serve.
- Memory stays below 3 GiB, and is flat. The attackers slowly fill what they may have:
  adapters, and pages of the key/value cache. Both have limits, and the server says how
  much they take. In a storm of five minutes or more, the peak of all other memory in
  the second half is less than 5 % of the limit above that of the first half. Where the
  test may make a control group (version 2), the kernel enforces the limit. Elsewhere
  weftd reads the limit from a file in a mount namespace of its own, and the test
  watches its resident memory five times a second, so that a shorter peak would be
  missed. Where it may make no namespace either, weftd sizes itself by the machine.
- Dave's throughput is at least 0.8 of his share. He has four loops that train, a
  forward_backward and an optim_step at a time, and eight that sample. How much each
  kind gets done is divided by the processor time that weftd takes meanwhile, because
  the machine may have other work. His share of training is a quarter of what he gets
  done alone, as if each of the three attackers had work all the time, and that of
  sampling a fifth, because samples of the base model have turns of their own. Each
  attacker trains and samples, but sometimes waits for an answer, so he often gets more.
- Nothing of his takes longer than 120 s of weftd's processor time, and no call longer
  than ten minutes, so the engine does not stand still for him. A quarter of the engine
  would give him a round of the demo model in about 15 s; the longest wait that was
  seen is 65 s.
- His losses and norms of gradients are bit for bit those that he gets alone. They can
  be, because each of his sequences fills a micro-batch. The rounding of a smaller one
  depends on the others in its micro-batch (tests/oracle/tolerance.py). In decoding all
  tenants share a batch, so rounding may decide between two tokens. He draws the tokens
  that he draws alone, and where one differs, it is from the same distribution: the
  log-probabilities of the likeliest tokens agree within 2e-4, because each may be 1e-4
  off (LOGPROBS in tests/oracle/tolerance.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import attacks  # noqa: F401  It fills KINDS.
import daemon as daemon_module
import numpy as np
import pytest
from attacker import KINDS, ROOT, VOCAB, Target
from conftest import fixtures
from daemon import processor_seconds
from texts import next_token, random_tokens
from token_file import Tokens

import weft

LIMIT = 3 << 30
ATTACKERS = ("ann", "bert", "cleo")
BATCH_TOKENS = 64
SLOTS = 16
ROUNDS = 4  # Of an adapter's life. Then its worker begins again.
# Samples of the base model have turns of their own, as if they were a tenant.
LEAST = {"train": 0.8 / (len(ATTACKERS) + 1), "sample": 0.8 / (len(ATTACKERS) + 2)}
ALONE_SECONDS = 6.0
LONG_SECONDS = 300.0
FLAGS = (
    *("--model-name", "demo"),
    *("--threads", "1", "--max-context", "512", "--max-rank", "16"),
    *("--max-batch-tokens", str(BATCH_TOKENS)),
    *("--max-decode-sequences", str(SLOTS)),
    *("--kv-cache-bytes", str(256 << 20)),
    *("--memory-budget", str(512 << 20)),
    *("--max-stored-reply-bytes", str(64 << 20)),
    *("--max-import-bytes", str(256 << 20)),
    *("--max-message-bytes", str(16 << 20)),
    *("--max-adapters-per-tenant", "16"),
    *("--max-adapter-bytes-per-tenant", str(192 << 20)),
    *("--disk-reserve-bytes", str(1 << 20)),
)
GROUPS = Path("/sys/fs/cgroup")


def told(limit: int) -> tuple[str, ...]:
    """The command that starts a program which sees the limit of a container, though the
    kernel does not enforce it. Empty if this process may not make a namespace."""
    script = (
        f"mount -t tmpfs none {GROUPS} && echo {limit} > {GROUPS}/memory.max"
        f' && echo 0 > {GROUPS}/memory.current && exec "$@"'
    )
    tell = ("unshare", "-rm", "sh", "-c", script, "sh")
    possible = subprocess.run([*tell, "true"], capture_output=True).returncode == 0
    return tell if possible else ()


def group() -> Path | None:
    """Makes a control group with the limit, if this process may."""
    folder = GROUPS / f"weft-storm-{os.getpid()}"
    try:
        if "memory" not in (GROUPS / "cgroup.subtree_control").read_text().split():
            return None
        folder.mkdir()
        (folder / "memory.max").write_text(str(LIMIT))
    except OSError:
        return None
    return folder


@contextlib.contextmanager
def limited() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yields how the limit is held, and the command that starts a program under it."""
    if folder := group():
        join = f'echo $$ > {folder}/cgroup.procs; exec "$@"'
        try:
            yield "by the kernel", ("sh", "-c", join, "sh")
        finally:
            folder.rmdir()
    elif tell := told(LIMIT):
        yield "by watching; weftd was told the limit", tell
    else:
        yield "by watching; weftd sized itself by the machine", ()


@dataclass
class Worker:
    """One of Dave's loops. `lives` has the results of each life of its adapter."""

    name: str
    act: Callable[[Any, int], Any]
    seed: int
    pid: int  # Of weftd.
    lives: list[list[Any]] = field(default_factory=list)
    done: float = 0.0  # With the part in time of what ended too late.
    slowest: float = 0.0  # In seconds of weftd's processor time.

    def run(self, client: weft.Client, seconds: float) -> None:
        self.lives, self.done = [], 0.0
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            adapter = client.create_adapter(self.name, rank=2, seed=self.seed)
            life: list[Any] = []
            self.lives.append(life)
            while len(life) < ROUNDS and time.monotonic() < end:
                start, busy = time.monotonic(), processor_seconds(self.pid)
                life.append(self.act(adapter, 100 * self.seed + len(life)))
                took = time.monotonic() - start
                busy = processor_seconds(self.pid) - busy
                self.slowest = max(self.slowest, busy)
                self.done += min(1.0, (end - start) / took)
            adapter.delete()


def train(adapter: Any, seed: int) -> tuple[float, float]:
    """Returns the loss and the norm of the gradient. The sequence fills a micro-batch,
    because rounding depends on what else is in a micro-batch."""
    data = [next_token(random_tokens(VOCAB, BATCH_TOKENS + 1, seed))]
    loss = adapter.forward_backward(data).metrics["loss:sum"]
    return loss, adapter.optim_step(learning_rate=1e-3).grad_norm


def sample(adapter: Any, seed: int) -> list[Any]:
    drawn = adapter.sample(
        random_tokens(VOCAB, 5, seed),
        num_samples=SLOTS // 4,
        max_tokens=8,
        seed=seed,
        ignore_eos=True,
        top_logprobs=5,
    )
    return list(drawn.samples)


def same(worker: Worker, one: Any, other: Any) -> bool:
    """Returns whether the results of a loop agree, as the head of this file says."""
    if worker.act is train:
        return bool(one == other)
    return all(map(same_sample, one, other))


def same_sample(one: Any, other: Any) -> bool:
    for position, (mine, others) in enumerate(
        zip(one.tokens, other.tokens, strict=True)
    ):
        top = [sorted(p for _, p in s.top_logprobs[position]) for s in (one, other)]
        if not np.allclose(top[0], top[1], rtol=0, atol=2e-4):
            return False
        if mine != others:  # What follows has another context.
            return True
    return True


class Dave:
    """The fourth tenant: four loops that train, and eight that sample."""

    def __init__(self, server: daemon_module.Daemon, token: str) -> None:
        self._pid = server.pid
        self._client = weft.Client(
            server.address, timeout=600.0, security=weft.Security(token=token)
        )
        self.workers = [Worker(f"poet-{i}", train, i, server.pid) for i in range(4)]
        self.workers += [Worker(f"reader-{i}", sample, i, server.pid) for i in range(8)]

    def run(self, seconds: float) -> dict[str, float]:
        """Returns for each kind of work how often it got done in a second of weftd's
        processor time."""
        before = processor_seconds(self._pid)
        with ThreadPoolExecutor(len(self.workers)) as pool:
            runs = [pool.submit(w.run, self._client, seconds) for w in self.workers]
            for run in runs:
                run.result()
        taken = processor_seconds(self._pid) - before
        return {
            act.__name__: sum(w.done for w in self.workers if w.act is act) / taken
            for act in (train, sample)
        }


@dataclass(frozen=True)
class Memory:
    """The resident memory of weftd during a storm, in MiB."""

    peak: int
    # The peaks, in both halves, of what is neither adapters nor pages.
    early_rest: int
    late_rest: int

    def check(self, seconds: float) -> None:
        assert self.peak < LIMIT >> 20
        if seconds >= LONG_SECONDS:
            assert self.late_rest - self.early_rest < 0.05 * (LIMIT >> 20)


class Watch:
    """Reads the resident memory of weftd while it is entered."""

    def __init__(self, server: Any) -> None:
        self._server = server
        self._stop = threading.Event()
        self._rows: list[tuple[float, int, int]] = []
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        told, held, most_pages = 0.0, 0, 0
        while not self._stop.wait(0.2):
            with contextlib.suppress(OSError, IndexError):
                if time.monotonic() > told + 5:
                    told = time.monotonic()
                    adapters, *pages = self._held()
                    # Pages that were used once stay in memory.
                    most_pages = max(most_pages, *pages)
                    held = adapters + most_pages
                resident = Path(f"/proc/{self._server.pid}/statm").read_text().split()
                size = int(resident[1]) * 4096
                self._rows.append((time.monotonic(), size, size - held))

    def _held(self) -> list[int]:
        """Bytes of adapters, of pages that sequences use, and of cached pages."""
        names = ("adapter", "kv_cache_used", "prefix_cache")
        page = self._server.scrape()
        series = (rf"^weft_{name}_bytes(?:{{.*}})? (\S+)$" for name in names)
        return [
            int(sum(map(float, re.findall(one, page, re.MULTILINE)))) for one in series
        ]

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def memory(self) -> Memory:
        times, sizes, rest = np.array(self._rows, dtype=float).T
        early = times <= (times[0] + times[-1]) / 2
        peaks = (sizes, rest[early], rest[~early])
        return Memory(*(int(peak.max()) >> 20 for peak in peaks))


@contextlib.contextmanager
def front(server: str, model: Path, folder: Path) -> Iterator[tuple[str, Any]]:
    """The front for OpenAI's API, as address and process."""
    address = f"127.0.0.1:{daemon_module.free_port()}"
    command = [sys.executable, "-m", "weft", "openai", "--server", server]
    command += ["--model-dir", str(model), "--listen", address]
    path = {"PYTHONPATH": str(ROOT / "client" / "python")}
    with (folder / "front.log").open("wb") as log:
        process = subprocess.Popen(
            command, env={**os.environ, **path}, stdout=log, stderr=log
        )
    try:
        limit = time.monotonic() + 60
        while not serves(f"http://{address}/health"):
            assert process.poll() is None and time.monotonic() < limit
            time.sleep(0.05)
        yield address, process
    finally:
        process.kill()
        process.wait()


def serves(url: str, **headers: str) -> bool:
    request = urllib.request.Request(url, headers=headers)
    with (
        contextlib.suppress(OSError),
        urllib.request.urlopen(request, timeout=5) as got,
    ):
        return bool(got.status == 200)
    return False


@contextlib.contextmanager
def attackers(targets: list[Target]) -> Iterator[list[dict[str, Any]]]:
    """Attacks inside. Afterwards the list has each attacker's report."""
    program = [sys.executable, str(Path(__file__).with_name("attacks.py"))]
    pipe = subprocess.PIPE
    processes = [
        subprocess.Popen(program, stdin=pipe, stdout=pipe, text=True) for _ in targets
    ]
    reports: list[dict[str, Any]] = []
    try:
        for process, target in zip(processes, targets, strict=True):
            print(json.dumps(asdict(target)), file=process.stdin, flush=True)
        yield reports
        for process in processes:
            process.terminate()
        reports += [
            json.loads(process.communicate(timeout=300)[0]) for process in processes
        ]
    finally:
        for process in processes:
            process.kill()


def test_attackers_end_nothing_and_take_no_more_than_their_share(
    tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    seconds = float(pytestconfig.getoption("--seconds"))
    long = seconds >= LONG_SECONDS
    model = fixtures.model_folder(fixtures.SMOLLM2 if long else fixtures.SHORT_SMOLLM2)
    tokens = Tokens(tmp_path / "tokens")
    keys = [tokens.add(name, name, "train", "sample") for name in ATTACKERS]
    own = tokens.add("dave", "dave", "train", "sample")
    tinker = f"127.0.0.1:{daemon_module.free_port()}"
    server = daemon_module.Daemon(
        model,
        tmp_path / "weftd",
        *("--auth-tokens-file", str(tokens.path), "--tinker-listen", tinker),
        *("--state-dir", str(tmp_path / "state")),
        *FLAGS,
    )
    with limited() as (how, launcher), contextlib.ExitStack() as stack:
        server.start_with(*launcher)
        stack.callback(server.kill)
        openai, process = stack.enter_context(front(server.address, model, tmp_path))
        ports = (server.address, tinker, openai, server.metrics_address, "demo")
        dave = Dave(server, own)
        alone = dave.run(max(ALONE_SECONDS, seconds / 20))
        expected = [max(worker.lives, key=len) for worker in dave.workers]
        targets = [Target(*ports, key, seed) for seed, key in enumerate(keys)]
        with Watch(server) as watch, attackers(targets) as reports:
            beside = dave.run(seconds)
        memory = watch.memory()
        last = max(dave.workers, key=lambda worker: worker.slowest)
        print(f"\nlimit held {how}; {memory}; {last.name} waited {last.slowest:.1f} s")
        print(f"dave {beside}, alone {alone}")
        assert not server.ends_within(0), server.log_tail()
        assert process.poll() is None
        assert serves(f"http://{server.metrics_address}/metrics")
        assert serves(f"http://{tinker}/api/v1/healthz", **{"X-API-Key": "tml-" + own})
        assert serves(f"http://{openai}/health")
    check_reports(reports)
    memory.check(seconds)
    assert last.slowest < 120, last.name
    for what, rate in beside.items():
        assert rate >= LEAST[what] * alone[what], what
    for whole, worker in zip(expected, dave.workers, strict=True):
        for life in worker.lives:
            for one, other in zip(life, whole, strict=False):
                assert same(worker, one, other), (worker.name, one, other)


def check_reports(reports: list[dict[str, Any]]) -> None:
    """Each kind of attack must have run, and none have shown a defect."""
    counts = sum((Counter(report["counts"]) for report in reports), Counter())
    print(f"attacks: {dict(counts)}")
    assert [text for report in reports for text in report["defects"]] == []
    assert set(counts) == {attack.__name__ for attack in KINDS}


def test_large_adapters_wait_on_disk(tmp_path: Path) -> None:
    """Ten adapters of 100 MB, in a process that may use 1 GiB and so hold a quarter of
    it and one adapter."""
    if not (tell := told(1 << 30)):
        pytest.skip("this process may make no mount namespace")
    model = fixtures.model_folder(fixtures.SHORT_SMOLLM2)
    server = daemon_module.Daemon(model, tmp_path, "--threads", "1")
    server.start_with(*tell)
    with server:
        before = server.peak_resident_bytes()
        with server.client() as client:
            names = [f"large-{number}" for number in range(10)]
            adapters = [client.create_adapter(name, rank=128) for name in names]
            assert adapters[-1].info().resident_bytes > 80 << 20
            for adapter in adapters:
                assert adapter.optim_step(learning_rate=1e-3).version == 2
        assert server.peak_resident_bytes() - before < 500 << 20
