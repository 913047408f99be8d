"""Several ranks that share one model, against transformers and peft, and against
one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import checkpoints
import daemon as daemon_module
import numpy as np
import pytest
import tolerance
from batching import together
from conftest import SMOLLM2, model_folder
from parallel import SIZES, need_devices
from reference import MIXED
from test_gradients import assert_gradients
from texts import next_token, sequences

KINDS = ("llama-tied", "qwen3", "gemma2", SMOLLM2)


@pytest.fixture(scope="module")
def ranks_for(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[[str, str], daemon_module.Daemon]]:
    """Daemons of a model and a size, one at a time: they share the cores."""
    with ExitStack() as stack:
        last: dict[tuple[str, str], daemon_module.Daemon] = {}

        def get(kind: str, size: str) -> daemon_module.Daemon:
            need_devices(SIZES[size])
            if (kind, size) not in last:
                stack.pop_all().close()
                last.clear()
                last[kind, size] = stack.enter_context(
                    daemon_module.running(
                        model_folder(kind),
                        tmp_path_factory.mktemp("weftd-ranks"),
                        *SIZES[size],
                    )
                )
            return last[kind, size]

        yield get


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_gradients_of_a_mixed_batch(
    kind: str,
    size: str,
    ranks_for: Any,
    reference_for: Any,
    unique: Any,
    tmp_path: Path,
) -> None:
    """Twice: the second batch runs with weights that an optimizer step has made on
    rank 0."""
    reference, daemon = reference_for(kind), ranks_for(kind, size)
    tokens = sequences(kind, model_folder(kind), reference.vocab)
    folders = [
        reference.make_adapter(tmp_path / str(i), shape, seed=50 + i)
        for i, shape in enumerate(MIXED)
    ]
    data = [[next_token(t) for t in tokens[i::2]] for i in range(len(MIXED))]
    with daemon.client() as client:
        adapters = [client.import_adapter(unique("ranks"), f) for f in folders]
        for step in range(2):
            calls = [
                partial(a.forward_backward, d)
                for a, d in zip(adapters, data, strict=True)
            ]
            replies = together(client, calls)
            measured = [checkpoints.gradients(daemon, adapter) for adapter in adapters]
            for index, folder in enumerate(folders):
                with reference.adapter(folder) as adapted:
                    loss = adapted.cross_entropy_backward(data[index])
                    assert_gradients(measured[index], adapted.gradients())
                    for datum, result in zip(
                        data[index], replies[index].results, strict=True
                    ):
                        wanted = adapted.logprobs(datum.tokens, datum.targets)
                        difference = tolerance.max_difference(
                            result.logprobs, wanted.detach().numpy()
                        )
                        assert difference <= tolerance.LOGPROBS
                metrics = replies[index].metrics
                assert metrics["loss:sum"] == pytest.approx(loss, rel=1e-4)
            if step == 0:
                for index, adapter in enumerate(adapters):
                    adapter.optim_step(learning_rate=1e-3)
                    folders[index] = tmp_path / f"trained-{index}"
                    adapter.export(folders[index])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_sampling_is_that_of_one_rank(
    kind: str,
    size: str,
    ranks_for: Any,
    daemon_for: Any,
    reference_for: Any,
    unique: Any,
    tmp_path: Path,
) -> None:
    """Base and adapter, several samples of a prompt, which is in a page's middle:
    pages are copied, and found again the second time."""
    reference = reference_for(kind)
    prompt = sequences(kind, model_folder(kind), reference.vocab)[3]
    folder = reference.make_adapter(tmp_path / "a", MIXED[1], seed=5)
    options = {"max_tokens": 6, "temperature": 0.0, "stop": [], "num_samples": 3}
    drawn = []
    for daemon in (ranks_for(kind, size), daemon_for(kind)):
        with daemon.client() as client:
            adapter = client.import_adapter(unique("ranks"), folder)
            for source in (client, adapter):
                for _ in range(2):
                    drawn.append(source.sample(prompt, prompt_logprobs=True, **options))
    half = len(drawn) // 2
    for own, other in zip(drawn[:half], drawn[half:], strict=True):
        difference = tolerance.max_difference(
            own.prompt_logprobs, other.prompt_logprobs
        )
        assert difference <= tolerance.LOGPROBS
        for sample, wanted in zip(own.samples, other.samples, strict=True):
            np.testing.assert_array_equal(sample.tokens, wanted.tokens)
            difference = tolerance.max_difference(sample.logprobs, wanted.logprobs)
            assert difference <= tolerance.LOGPROBS
