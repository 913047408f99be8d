"""Kills any rank (kill -9), whatever the group is doing. The group ends and comes
back, and everything that was acknowledged is there and was done once."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import daemon as daemon_module
import models
import pytest
from daemon import STOP_SECONDS, wait_until
from groups import TENSOR_2, TENSOR_2_DATA_2, data, kill_rank, make, ranks_of
from parallel import num_ranks
from raw import Raw

LEARNING_RATE = 1e-2
pytestmark = pytest.mark.filterwarnings(
    "error::pytest.PytestUnhandledThreadExceptionWarning"
)


def one_step(adapter: Any, number: int) -> float:
    """Trains one step. Returns the norm of the gradient."""
    adapter.forward_backward(data(number))
    norm: float = adapter.optim_step(learning_rate=LEARNING_RATE).grad_norm
    return norm


class Work(threading.Thread):
    """Makes calls of one adapter until the server is gone. `norms` and `saved` hold
    what the server acknowledged."""

    def __init__(self, process: daemon_module.Daemon, phase: str):
        super().__init__()
        self.norms: list[float] = []
        self.saved: list[str] = []
        self.rounds = 0
        self._failure: Exception | None = None
        self._process = process
        self._call: Callable[[Any], object] = {
            "train": self._train,
            "save": self.save,
            "sample": self._sample,
        }[phase]

    def run(self) -> None:
        try:
            self._work()
        except Exception as error:
            self._failure = error

    def finish(self) -> None:
        """Waits until the server is gone. Raises the error if a call failed for another
        reason."""
        self.join()
        if self._failure is not None:
            raise self._failure

    def _work(self) -> None:
        import weft

        with self._process.client(timeout=STOP_SECONDS, retry=weft.NO_RETRY) as client:
            adapter = client.create_adapter("a", rank=4, seed=1)
            self.save(adapter)
            # The loop ends when the server is lost.
            with contextlib.suppress(weft.Unavailable):
                while True:
                    self._call(adapter)
                    self.rounds += 1

    def wait_for_rounds(self, count: int) -> None:
        wait_until(lambda: self.rounds >= count, "no progress")

    def _train(self, adapter: Any) -> None:
        self.norms.append(one_step(adapter, len(self.norms)))

    def save(self, adapter: Any) -> None:
        self._train(adapter)
        name = f"after-{len(self.norms)}"
        adapter.save(name)
        self.saved.append(name)

    def _sample(self, adapter: Any) -> None:
        drawn = adapter.sample([5, 6, 7], max_tokens=48, num_samples=3, ignore_eos=True)
        assert [len(sample.tokens) for sample in drawn.samples] == [48] * 3


def expect_what_was_acknowledged(process: daemon_module.Daemon, work: Work) -> None:
    """Starts the group again. Repeats all work on a new adapter. Loads the last
    checkpoint into another adapter, and repeats the work after the checkpoint there.
    The gradients must have the norms that were acknowledged."""
    process.start()
    try:
        _repeat(process, work)
    finally:
        process.stop()


def _repeat(process: daemon_module.Daemon, work: Work) -> None:
    kept = int(work.saved[-1].split("-")[1])
    with Raw(process.address) as raw:
        assert raw.load("kept", work.saved[-1], source="a").code == "OK"
    with process.client() as client:
        again = client.create_adapter("b", rank=4, seed=1)
        kept_on = client.adapter("kept")
        assert kept_on.info().optim_steps == kept
        for number, norm in enumerate(work.norms):
            assert one_step(again, number) == pytest.approx(norm, rel=1e-4)
            if number >= kept:
                assert one_step(kept_on, number) == pytest.approx(norm, rel=1e-4)
        following = len(work.norms)
        if following == kept:
            expected = one_step(again, following)
            assert one_step(kept_on, following) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("flags", "phase", "victim", "delay"),
    [
        (TENSOR_2, "train", 0, 0.0),
        (TENSOR_2, "train", 1, 0.01),
        *((TENSOR_2, "save", victim, 0.005) for victim in (0, 1)),
        *((TENSOR_2, "sample", victim, 0.05) for victim in (0, 1)),
        *((TENSOR_2_DATA_2, "train", victim, 0.005) for victim in (1, 2)),
    ],
)
def test_at_work(
    flags: tuple[str, ...], phase: str, victim: int, delay: float, tmp_path: Path
) -> None:
    process = make(tmp_path, *flags)
    process.start()
    assert len(ranks_of(process)) == num_ranks(flags)
    work = Work(process, phase)
    work.start()
    work.wait_for_rounds(2)
    time.sleep(delay)
    kill_rank(process, victim)
    work.finish()
    expect_what_was_acknowledged(process, work)


@pytest.mark.parametrize("victim", range(2))
def test_idle(victim: int, tmp_path: Path) -> None:
    process = make(tmp_path, *TENSOR_2)
    process.start()
    kill_rank(process, victim)
    process.start()
    assert process.stop() == 0


@pytest.mark.parametrize(("victim", "delay"), [(0, 0.0), (1, 0.0), (1, 0.3), (0, 0.8)])
def test_while_loading(victim: int, delay: float, tmp_path: Path) -> None:
    """Kills a rank after the start, before the ranks have their weights."""
    process = make(tmp_path, *TENSOR_2, model=models.DEMO_MODEL)
    process.launch()
    with process:
        wait_until(lambda: len(ranks_of(process)) == 2, "no second rank")
        time.sleep(delay)
        kill_rank(process, victim)
        process.start()
        assert process.stop() == 0


@pytest.mark.parametrize("victim", range(2))
def test_while_draining(victim: int, tmp_path: Path) -> None:
    """Waiting steps get an error, and none of them is half done."""
    import weft

    process = make(tmp_path, *TENSOR_2)
    process.start()
    work = Work(process, "train")
    with process.client(timeout=STOP_SECONDS, retry=weft.NO_RETRY) as client:
        adapter = client.create_adapter("a", rank=4, seed=1)
        work.save(adapter)
        long = data(99, count=100, length=200)
        waiting = [adapter.submit.forward_backward(long) for _ in range(12)]
        waiting[0].result(STOP_SECONDS)
        process.terminate()
        process.wait_for_drain()
        kill_rank(process, victim)
        with pytest.raises(weft.Unavailable):
            waiting[-1].result(STOP_SECONDS)
    expect_what_was_acknowledged(process, work)
