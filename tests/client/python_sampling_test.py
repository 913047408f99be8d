"""Tests what a sample is asked, and sampling for training: many prompts at once,
futures, and data from samples."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from conftest import FAST, Sent
from fake_weftd import FakeWeftd

import weft
from weft._proto import sampling_pb2
from weft.convert import datum_message, sample_request, to_sample_result
from weft.sampling import FIRST_LIMIT, InFlight

FULL = grpc.StatusCode.RESOURCE_EXHAUSTED


def test_the_bound_doubles_until_a_refusal_then_creeps() -> None:
    bound = InFlight(first=4)
    for _ in range(4):
        bound.answered()
    assert bound.limit == 8
    refused, other = bound.watch(), bound.watch()
    refused()
    other()  # Both calls were in flight, so they halve the bound only once.
    assert bound.limit == 4
    for _ in range(3):
        bound.answered()
    assert bound.limit == 4
    for _ in range(2):
        bound.answered()
    assert bound.limit == 5
    for _ in range(9):
        refused()
    assert bound.limit == 1
    bound.answered()
    assert bound.limit == 2


def test_a_prompt_has_scores_and_draws(client: weft.Client) -> None:
    options: weft.SampleOptions = {
        "max_tokens": 1,
        "prompt_targets": [[7], np.array([8, 9]).tolist()],
        "prompt_alternatives": 2,
        "prompt_logprobs": True,
        "prompt_logprobs_last_n": 1,
    }
    result = client.sample([4, 5, 6], **options)
    first = next(iter(client.sample_stream([4, 5, 6], **options)))
    for reply in (result, first):
        assert reply.prompt_target_logprobs is not None
        assert reply.prompt_target_logprobs.tolist() == [-0.5] * 3
        assert reply.prompt_alternatives == [[], [(5, -0.75)] * 2, [(6, -0.75)] * 2]
        assert reply.prompt_cached_tokens == 1
    plain = client.sample([4, 5, 6], max_tokens=1)
    assert plain.prompt_target_logprobs is None and plain.prompt_alternatives == []


def test_many_prompts_come_back_in_order(
    client: weft.Client, sent: Sent, server: FakeWeftd
) -> None:
    with weft.Client(server.target, retry=FAST) as spied:
        adapter = spied.create_adapter("a")
        prompts = [[n, n + 1] for n in range(3 * FIRST_LIMIT)]
        results = adapter.sample_many(prompts, num_samples=2, max_tokens=3, seed=7)
    assert [list(r.samples[1].prompt) for r in results] == prompts
    assert all(len(r.samples) == 2 for r in results)
    requests = [m for m in sent if type(m).__name__ == "SampleRequest"]
    # One seed for all prompts would draw the same random numbers for each.
    assert [m.config.seed for m in requests] == [7 + n for n in range(len(prompts))]
    alone = client.adapter("a").sample([5, 6], num_samples=2, max_tokens=3, seed=12)
    assert [s.tokens for s in alone.samples] == [s.tokens for s in results[5].samples]
    assert client.sample_many([]) == []


def test_samples_in_flight_have_a_version_for_each_token(client: weft.Client) -> None:
    adapter = client.create_adapter("moving")
    moving: dict[str, Any] = {"max_tokens": 3, "in_flight": True}
    sample = adapter.sample([1, 2], **moving, recompute_cache=True).samples[0]
    assert sample.versions == [1, 2, 2]
    assert len(sample.tokens) == 3
    streamed = [
        version
        for delta in adapter.sample_stream([1, 2], **moving)
        for version in delta.versions
    ]
    assert streamed == [1, 2, 2]
    assert adapter.sample([1, 2], max_tokens=3).samples[0].versions == []


def test_no_more_is_in_flight_than_the_bound(
    server: FakeWeftd, client: weft.Client
) -> None:
    server.hold()
    from threading import Thread

    results: list[Any] = []
    thread = Thread(target=lambda: results.extend(client.sample_many([[1]] * 99)))
    thread.start()

    def arrived() -> int:
        return sum(rpc == "Sample" for rpc, _ in server.arrived())

    while arrived() < FIRST_LIMIT:
        pass
    assert arrived() == FIRST_LIMIT
    server.release()
    thread.join(20)
    assert len(results) == 99


def test_refusals_with_a_hint_are_waited_out(
    server: FakeWeftd, client: weft.Client
) -> None:
    server.retry_hint(1)
    for _ in range(12):
        server.refuse("Sample", FULL, "the queue is full")
    assert len(client.sample_many([[1], [2], [3]], max_tokens=2)) == 3


def test_a_batch_may_take_longer_than_the_timeout_while_answers_come(
    server: FakeWeftd,
) -> None:
    server.retry_hint(400)

    def each(client: weft.Client) -> Iterator[Any]:
        """Yields calls, each of which is refused once and then waits."""
        prompts = [[1], [2], [3]]
        for draw in client._sampler.sample_each(prompts, {}, None, InFlight()):
            server.refuse("Sample", FULL, "the queue is full")
            yield draw

    with weft.Client(server.target, retry=FAST, timeout=1.0) as client:
        started = time.monotonic()
        results = client._driver.run_many(each(client), lambda: 1, 1.0)
        assert time.monotonic() - started > 1.0 and len(results) == 3


def test_a_batch_without_an_answer_ends_at_the_timeout(server: FakeWeftd) -> None:
    message = "no answer to any of 3 calls in flight within 0.3 s"
    prompts = [[1], [2], [3]]
    server.hold()
    with (
        weft.Client(server.target, retry=FAST, timeout=0.3) as client,
        pytest.raises(weft.DeadlineExceeded, match=message),
    ):
        client.sample_many(prompts)

    async def run() -> None:
        async with weft.AsyncClient(server.target, timeout=0.3) as client:
            with pytest.raises(weft.DeadlineExceeded, match=message):
                await client.sample_many(prompts)

    asyncio.run(run())
    server.release()


def test_an_error_ends_the_rest(client: weft.Client, server: FakeWeftd) -> None:
    server.refuse("Sample", grpc.StatusCode.INTERNAL, "broken")
    with pytest.raises(weft.Internal, match="broken"):
        client.sample_many([[1]] * 40)
    assert len(client.sample_many([[1]] * 3)) == 3
    with pytest.raises(weft.InvalidArgument, match="prompt"):
        client.sample_many([[1], [], [2]])


def test_asyncio_samples_many(server: FakeWeftd) -> None:
    async def run() -> None:
        async with weft.AsyncClient(server.target, retry=FAST) as client:
            adapter = await client.get_or_create("a")
            prompts = [[n + 1] for n in range(40)]
            server.retry_hint(1)
            server.refuse("Sample", FULL, "the queue is full")
            results = await adapter.sample_many(prompts, max_tokens=2)
            assert [list(r.samples[0].prompt) for r in results] == prompts
            with pytest.raises(weft.InvalidArgument):
                await client.sample_many([[1], []])
            saved = adapter.submit.save("first")
            version = adapter.submit.snapshot("best")
            drawn = adapter.submit.sample([1], max_tokens=2)
            assert (await saved).last_step == 1 and await version >= 1
            assert (await drawn).samples[0].tokens

    asyncio.run(run())


def test_the_base_model_has_futures_too(server: FakeWeftd, client: weft.Client) -> None:
    data = [weft.Datum.next_token([1, 2, 3])]
    server.hold()
    drawn = [client.submit.sample([n], max_tokens=2) for n in (1, 2)]
    scored = client.submit.forward(iter(data))
    assert not scored.done() and not any(future.done() for future in drawn)
    server.release()
    assert [f.result(5).samples[0].prompt for f in drawn] == [[1], [2]]
    assert scored.result(5).step == 0 and len(scored.result().results) == 1

    async def run() -> None:
        async with weft.AsyncClient(server.target, retry=FAST) as aio:
            one, two = aio.submit.sample([1], max_tokens=2), aio.submit.forward(data)
            assert (await one).samples[0].tokens and (await two).step == 0

    asyncio.run(run())


def test_saves_snapshots_and_samples_have_futures(client: weft.Client) -> None:
    adapter = client.create_adapter("a")
    data = [weft.Datum.next_token([1, 2, 3])]
    gradient = adapter.submit.forward_backward(data)
    update = adapter.submit.optim_step()
    saved = adapter.submit.save("first")
    version = adapter.submit.snapshot("best")
    drawn = adapter.submit.sample([1], max_tokens=2)
    assert gradient.result(20).step == 1 and update.result(20).step == 2
    # Steps run in the order of the calls, so the checkpoint contains both
    # steps.
    assert saved.result(20).last_step == 3 and saved.result().optim_steps == 1
    assert version.result(20) == update.result().version
    assert len(drawn.result(20).samples[0].tokens) == 2
    assert adapter.next_step == 5
    assert adapter.submit.sample([1], snapshot="best").result(20).samples


def test_an_adapter_is_made_once(client: weft.Client) -> None:
    first = client.get_or_create("a", rank=4, target_modules=["q_proj", "v_proj"])
    first.optim_step()
    again = client.get_or_create("a", rank=4)
    assert again.next_step == 2
    assert client.get_or_create("a", rank=4, target_modules=["v_proj", "q_proj"])
    for options in ({"rank": 8}, {"alpha": 1.0}, {"target_modules": ["q_proj"]}):
        with pytest.raises(weft.FailedPrecondition, match="exists with"):
            client.get_or_create("a", **{"rank": 4, **options})  # type: ignore[arg-type]


def test_another_client_may_make_it_first(
    client: weft.Client, server: FakeWeftd
) -> None:
    client.create_adapter("a")
    server.refuse("GetAdapter", grpc.StatusCode.NOT_FOUND, "not yet")
    assert client.get_or_create("a").next_step == 1


def drawn(**values: Any) -> weft.Sample:
    fields: dict[str, Any] = {
        "tokens": [7, 8],
        "logprobs": np.array([-0.5, -0.25], "<f4"),
        "finish_reason": "stop",
        "top_logprobs": [],
        "prompt": [4, 5, 6],
    }
    return weft.Sample(**{**fields, **values})


def test_a_sample_is_made_by_position() -> None:
    scores, routing = np.zeros(2, "<f4"), np.zeros([4, 2], "<u2")
    support = [np.array([7], "<u4")] * 2
    places: list[Any] = [scores, "stop", [], [4], routing, support, "id", "w", [1, 1]]
    sample = weft.Sample([7, 8], *places)
    assert sample.routing is routing and sample.support is support
    assert (sample.sequence_id, sample.text, sample.versions) == ("id", "w", [1, 1])


def test_a_sample_becomes_a_datum() -> None:
    datum = weft.Datum.from_sample(drawn(), advantage=2.0, weight=0.5)
    assert datum.tokens.tolist() == [4, 5, 6, 7]
    assert datum.targets.tolist() == [5, 6, 7, 8]
    assert datum.weights is not None and datum.weights.tolist() == [0, 0, 0.5, 0.5]
    assert datum.logprobs is not None
    assert datum.logprobs.tolist() == [0, 0, -0.5, -0.25]
    assert datum.advantages is not None and datum.advantages.tolist() == [0, 0, 2, 2]
    each = weft.Datum.from_sample(drawn(), advantage=[1.0, 3.0])
    assert each.advantages is not None and each.advantages.tolist() == [0, 0, 1, 3]
    assert weft.Datum.from_sample(drawn()).advantages is None


def test_a_sample_s_supports_become_the_datum_s() -> None:
    support = [np.array([3, 7], "<u4"), np.array([], "<u4")]
    datum = weft.Datum.from_sample(drawn(support=support))
    assert datum.support is not None
    assert [list(ids) for ids in datum.support] == [[], [], [3, 7], []]
    message = datum_message(datum)
    assert message.support_offsets_le == np.array([0, 0, 0, 2, 2], "<u4").tobytes()
    assert message.support_tokens_le == np.array([3, 7], "<u4").tobytes()
    assert not datum_message(weft.Datum.from_sample(drawn())).support_offsets_le


def test_supports_travel() -> None:
    request = sample_request([1], {"truncated_logprobs": True, "return_support": True})
    assert request.truncated_logprobs and request.return_support
    sample = sampling_pb2.Sample(
        tokens=[7, 8],
        logprobs=[-1, 0],
        support_offsets_le=np.array([0, 2, 2], "<u4").tobytes(),
        support_tokens_le=np.array([3, 7], "<u4").tobytes(),
    )
    reply = sampling_pb2.SampleResponse(samples=[sample, sampling_pb2.Sample()])
    got, other = to_sample_result(reply, [1], lambda _: None).samples
    assert got.support is not None and other.support is None
    assert [list(ids) for ids in got.support] == [[3, 7], []]


def test_a_sequence_is_scored(client: weft.Client) -> None:
    scores = client.compute_logprobs([1, 2, 3])
    assert scores.shape == (3,) and scores[0] == 0
    adapter = client.create_adapter("a")
    np.testing.assert_array_equal(adapter.compute_logprobs([1, 2, 3]), scores)
    assert adapter.next_step == 1


def test_samples_with_every_kind_of_stop(sent: Sent, client: weft.Client) -> None:
    result = client.sample(
        [1, 2],
        num_samples=2,
        max_tokens=3,
        temperature=0.0,
        seed=7,
        stop=[5, [6, 7], "\n", b"\xff"],
        prompt_logprobs=True,
    )
    assert [sample.tokens for sample in result.samples] == [[3, 4, 5], [4, 5, 6]]
    assert result.samples[0].finish_reason == "length"
    assert result.prompt_logprobs is not None
    config = sent[-1].config
    assert config.temperature == 0.0 and config.HasField("temperature")
    assert list(config.stop.token_ids) == [5]
    assert list(config.stop.token_sequences[0].tokens) == [6, 7]
    assert list(config.stop.byte_strings) == [b"\n", b"\xff"]


def test_changes_of_logits_are_sent(sent: Sent, client: weft.Client) -> None:
    client.sample(
        [1],
        min_p=0.5,
        repetition_penalty=1.5,
        presence_penalty=-1,
        frequency_penalty=2.0,
        logit_bias={7: 1, 8: -100.0},
        allowed_token_ids=[7, 8],
        min_tokens=4,
    )
    config = sent[-1].config
    assert (config.min_p, config.repetition_penalty) == (0.5, 1.5)
    assert (config.presence_penalty, config.frequency_penalty) == (-1, 2)
    assert [(b.token, b.bias) for b in config.logit_bias] == [(7, 1), (8, -100)]
    assert list(config.allowed_token_ids) == [7, 8] and config.min_tokens == 4
    client.sample([1])
    config = sent[-1].config
    assert not config.HasField("repetition_penalty") and not config.logit_bias


def test_an_empty_stop_list_leaves_the_end_of_sequence(
    sent: Sent, client: weft.Client
) -> None:
    given: list[weft.types.SampleOptions]
    given = [{}, {"stop": None}, {"stop": []}, {"ignore_eos": False}]
    for options in given:
        client.sample([1], **options)
        assert sent[-1].config.stop == sampling_pb2.StopRule()
    client.sample([1], stop=[5], ignore_eos=True)
    assert sent[-1].config.stop.ignore_eos


def test_streams_samples(client: weft.Client) -> None:
    adapter = client.create_adapter("a")
    deltas = list(adapter.sample_stream([1], max_tokens=3, num_samples=2))
    tokens: dict[int, list[int]] = {0: [], 1: []}
    for delta in deltas:
        tokens[delta.sample_index] += delta.tokens
    assert tokens == {0: [2, 3, 4], 1: [3, 4, 5]}
    assert deltas[-1].finish_reason == "length"
    assert deltas[0].finish_reason is None


def test_stream_errors_are_typed(server: FakeWeftd, client: weft.Client) -> None:
    server.refuse("SampleStream", grpc.StatusCode.UNIMPLEMENTED, "no")
    with pytest.raises(weft.Unimplemented):
        list(client.sample_stream([1]))
