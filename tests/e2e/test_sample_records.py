"""Tests training on recorded samples: it is the training with the values that the
samples had, also after a restart, and for the same tenant only."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import daemon as daemon_module
import numpy as np
import pytest
import raw
import tolerance
from durable import Durable
from models import tiny_model
from token_file import Tokens

import weft
from weft import methods
from weft._proto import sampling_pb2, training_pb2

PROMPT = [3, 4, 5, 6]
DRAWS: dict[str, Any] = {
    "num_samples": 3,
    "max_tokens": 7,
    "seed": 5,
    "top_p": 0.8,
    "ignore_eos": True,
}
LOSS = "importance_sampling"
TAKES: dict[str, Any] = {"replay_logprobs": True, "replay_support": True}


def shifted(adapter: weft.Adapter) -> weft.Adapter:
    """Trains the adapter, which otherwise would equal the base model."""
    adapter.forward_backward([weft.Datum.next_token([7, 8, 9, 10])])
    adapter.optim_step(learning_rate=1e-2)
    return adapter


def spans_alone(sample: weft.Sample) -> weft.Datum:
    """Returns the sample's datum without logprobs, which its record has."""
    full = weft.Datum.from_sample(sample, advantage=1.0)
    return weft.Datum(
        full.tokens,
        full.targets,
        full.weights,
        advantages=full.advantages,
        sampled=full.sampled,
    )


@pytest.mark.parametrize("kind", ["llama-tied", "qwen3-moe"])
def test_records_replay_what_the_client_could_have_sent(
    daemon_for: Any, unique: Any, kind: str
) -> None:
    experts = kind == "qwen3-moe"
    with daemon_for(kind).client() as client:
        sent, named = (
            shifted(client.create_adapter(unique("records"), rank=4, seed=1))
            for _ in range(2)
        )
        explicit = sent.sample(
            PROMPT,
            **DRAWS,
            return_support=True,
            truncated_logprobs=True,
            return_routing=experts,
        ).samples
        recorded = named.sample(PROMPT, **DRAWS, record=True).samples
        assert [s.tokens for s in recorded] == [s.tokens for s in explicit]
        assert all(s.routing is None and s.support is None for s in recorded)
        replay: dict[str, Any] = {
            "replay_logprobs": True,
            "replay_support": True,
            "replay_routing": experts,
        }
        # After an update, the router and the distribution are other ones.
        for adapter in (sent, named):
            adapter.forward_backward([weft.Datum.next_token([9, 8, 7, 6, 5])])
            adapter.optim_step(learning_rate=3e-2)
        expected = sent.forward_backward(
            [weft.Datum.from_sample(s, advantage=1.0) for s in explicit], LOSS
        )
        result = named.forward_backward(
            [spans_alone(s) for s in recorded], LOSS, **replay
        )
        for ours, theirs in zip(result.results, expected.results, strict=True):
            np.testing.assert_array_equal(ours.logprobs, theirs.logprobs)
            np.testing.assert_array_equal(ours.losses, theirs.losses)
        own = {"replayed_tokens:sum": 21, "records_missing:sum": 0, "staleness:mean": 1}
        assert result.metrics == {**expected.metrics, **own}
        # Without the records' values the same data give something else.
        plain = sent.forward(
            [weft.Datum(d.tokens, d.targets) for d in map(spans_alone, recorded)]
        )
        assert not np.array_equal(
            plain.results[0].logprobs[3:], result.results[0].logprobs[3:]
        )
        assert named.optim_step().grad_norm == sent.optim_step().grad_norm


def test_forward_gives_the_recorded_logprobs(daemon_for: Any, unique: Any) -> None:
    with daemon_for("qwen3-moe").client() as client:
        adapter = shifted(client.create_adapter(unique("scores"), rank=4, seed=1))
        samples = adapter.sample(PROMPT, **DRAWS, record=True).samples
        scored = adapter.forward(
            [spans_alone(s) for s in samples],
            LOSS,
            replay_logprobs=True,
            replay_support=True,
            replay_routing=True,
        )
        assert scored.metrics["staleness:mean"] == 0
        for sample, result in zip(samples, scored.results, strict=True):
            tolerance.assert_near(
                result.logprobs[3:], sample.logprobs, tolerance.SAMPLER_VERSUS_TRAINER
            )
        # A part of a sample, in a datum with another beginning.
        tokens = [11, *samples[0].tokens[2:]]
        part = weft.Datum(
            tokens[:-1],
            tokens[1:],
            advantages=np.ones(5),
            sampled=[weft.SampledSpan(samples[0].sequence_id, 0, 5, offset=2)],
        )
        parted = adapter.forward([part], LOSS, **TAKES)
        assert parted.metrics["replayed_tokens:sum"] == 5


def test_a_stream_names_the_same_sequences(daemon_for: Any, unique: Any) -> None:
    with daemon_for("llama-tied").client() as client:
        adapter = shifted(client.create_adapter(unique("stream"), rank=4, seed=1))
        deltas = list(adapter.sample_stream(PROMPT, **DRAWS, record=True))
        names = {d.sample_index: d.sequence_id for d in deltas if d.finish_reason}
        assert len(set(names.values())) == 3
        assert all(d.support is None for d in deltas)
        assert not any(d.sequence_id for d in deltas if not d.finish_reason)
        tokens = [t for d in deltas if d.sample_index == 1 for t in d.tokens]
        datum = weft.Datum(
            [PROMPT[-1], *tokens[:-1]],
            tokens,
            advantages=np.ones(len(tokens)),
            sampled=[weft.SampledSpan(names[1], 0, len(tokens))],
        )
        result = adapter.forward([datum], LOSS, **TAKES)
        assert result.metrics["replayed_tokens:sum"] == 7


def test_wrong_and_missing_spans_are_refused(daemon_for: Any, unique: Any) -> None:
    with daemon_for("llama-tied").client() as client:
        adapter = client.create_adapter(unique("wrong"), rank=4, seed=1)
        sample = adapter.sample(PROMPT, **DRAWS, record=True).samples[0]
        good = spans_alone(sample)

        def refused(code: type[Exception], match: str, **change: Any) -> None:
            span = weft.SampledSpan(
                **{
                    "sequence_id": sample.sequence_id,
                    "start": 3,
                    "length": 7,
                    "offset": 0,
                    **change,
                }
            )
            datum = weft.Datum(
                good.tokens,
                good.targets,
                good.weights,
                advantages=good.advantages,
                sampled=[span],
            )
            with pytest.raises(code, match=match):
                adapter.forward_backward([datum], LOSS, **TAKES)

        refused(
            weft.InvalidArgument,
            "is '.*:9', but the record has 3",
            sequence_id=sample.sequence_id[:-1] + "9",
        )
        refused(weft.InvalidArgument, "has 7 drawn tokens", offset=1)
        refused(weft.InvalidArgument, "name only what was drawn", start=2)
        refused(
            weft.FailedPrecondition, "there is no record of 'x:0'", sequence_id="x:0"
        )
        with pytest.raises(weft.InvalidArgument, match="no switch of loss uses it"):
            adapter.forward_backward([good], LOSS)
        # The refused calls leave no gap in the step numbers.
        assert adapter.forward_backward([good], LOSS, **TAKES).step == 6


def metric(page: str, name: str) -> float:
    found = re.search(rf"^{name} (\S+)$", page, re.MULTILINE)
    assert found is not None
    return float(found[1])


def test_records_stay_within_their_bytes(tmp_path: Path) -> None:
    flags = ("--sample-record-bytes", "2000")
    with daemon_module.running(tiny_model("llama-tied"), tmp_path, *flags) as daemon:
        with daemon.client() as client:
            adapter = client.create_adapter("a", rank=4, seed=1)
            draws = {"max_tokens": 30, "ignore_eos": True, "record": True}
            samples = [
                adapter.sample(PROMPT, seed=seed, **draws).samples[0]
                for seed in range(5)
            ]
            with pytest.raises(weft.FailedPrecondition, match="no record"):
                adapter.forward([spans_alone(samples[0])], LOSS, **TAKES)
            adapter.forward([spans_alone(samples[4])], LOSS, **TAKES)
        page = daemon.scrape()
    assert 0 < metric(page, "weft_sample_record_bytes") <= 2000
    assert metric(page, "weft_sample_records") < 5
    assert metric(page, "weft_sample_records_dropped_total") > 0


def recorded_step(server: Durable, step: int) -> training_pb2.ForwardBackwardRequest:
    """Samples, and returns a step that trains on the sample."""
    request = sampling_pb2.SampleRequest(
        adapter_id="a",
        prompt=PROMPT,
        config={"max_tokens": 5, "top_p": 0.8, "stop": {"ignore_eos": True}},
        record=True,
    )
    sample = server.call(methods.SAMPLE, request).reply.samples[0]
    tokens = [*PROMPT, *sample.tokens]
    return training_pb2.ForwardBackwardRequest(
        adapter_id="a",
        step=step,
        data=[
            training_pb2.Datum(
                tokens=tokens[:-1],
                targets=tokens[1:],
                weights=[0, 0, 0, *[1] * 5],
                advantages=[0, 0, 0, *[1] * 5],
                sampled_spans=[
                    {"sequence_id": sample.sequence_id, "start": 3, "length": 5}
                ],
            )
        ],
        loss={"function": 2, "replay_logprobs": True, "replay_support": True},
    )


def test_records_and_replayed_steps_outlive_the_server(durable: Durable) -> None:
    daemon = durable.start()
    with daemon.client() as client:
        shifted(client.create_adapter("a", rank=4, seed=1))
    done, fresh = (recorded_step(durable, step) for step in (3, 4))
    expected = durable.call(methods.FORWARD_BACKWARD, done)
    assert expected.code == "OK", expected
    durable.restart()
    # The log has the values themselves, so the replay gives the same gradient.
    again = durable.call(methods.FORWARD_BACKWARD, done)
    assert again.replayed and again.reply == expected.reply
    repeated = training_pb2.ForwardBackwardRequest()
    repeated.CopyFrom(done)
    repeated.step = 4
    second = durable.call(methods.FORWARD_BACKWARD, repeated)
    assert second.reply.results == expected.reply.results
    # A stored reply needs no record, and a new step fails in its turn.
    durable.restart("--sample-record-bytes", "0")
    again = durable.call(methods.FORWARD_BACKWARD, done)
    assert again.replayed and again.reply == expected.reply
    fresh.step = 5
    refused = durable.call(methods.FORWARD_BACKWARD, fresh)
    assert (refused.code, refused.trailers["weft-step-done"]) == (
        "FAILED_PRECONDITION",
        "1",
    )
    optim = training_pb2.OptimStepRequest(adapter_id="a", step=6)
    step = durable.call(methods.OPTIM_STEP, optim)
    assert step.code == "OK", step
    assert step.reply.grad_norm > 0


def test_no_tenant_trains_on_the_records_of_another(tmp_path: Path) -> None:
    tokens = Tokens(tmp_path / "tokens")
    alice, bob = (
        tokens.add(name, name, "train", "sample") for name in ("alice", "bob")
    )
    flags = ("--auth-tokens-file", str(tokens.path))
    with daemon_module.running(tiny_model("llama-tied"), tmp_path, *flags) as daemon:
        one, other = (
            daemon.client(security=weft.Security(token=token)) for token in (alice, bob)
        )
        with one, other:
            mine, theirs = (
                client.create_adapter("a", rank=4, seed=1) for client in (one, other)
            )
            sample = mine.sample(PROMPT, **DRAWS, record=True).samples[0]
            with pytest.raises(weft.FailedPrecondition, match="no record"):
                theirs.forward([spans_alone(sample)], LOSS, **TAKES)
            mine.forward([spans_alone(sample)], LOSS, **TAKES)
        with raw.Raw(daemon.address, alice) as channel:
            sample = channel.sample(
                PROMPT, adapter_id="", config={"max_tokens": 2}, record=True
            )
            assert sample.reply.samples[0].sequence_id
