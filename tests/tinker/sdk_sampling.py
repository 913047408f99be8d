"""Programs that sample."""

from __future__ import annotations

import json
import os
import urllib.request
from functools import partial
from typing import Any

import tinker
from sdk_parts import GREEDY, TOKENS, datum, new_client, prompt
from tinker import types


def as_json(result: types.SampleResponse) -> dict[str, Any]:
    """Returns the values of a response, which the SDK has read from protobuf."""
    return {
        "sequences": [
            {
                "stop_reason": sequence.stop_reason,
                "tokens": sequence.tokens,
                "logprobs": sequence.logprobs,
                "topk_logprobs": sequence.topk_logprobs,
            }
            for sequence in result.sequences
        ],
        "prompt_logprobs": result.prompt_logprobs,
        "topk_prompt_logprobs": result.topk_prompt_logprobs,
        "prompt_cache_hit_tokens": result.prompt_cache_hit_tokens,
        "type": "sample",
    }


def retrieve_json(result: types.SampleResponse) -> Any:
    """Asks for the JSON form of `result`."""
    future = result.sequences[0].sequence_id.rsplit(":", 1)[0]
    request = urllib.request.Request(
        os.environ["TINKER_BASE_URL"] + "/api/v1/retrieve_future",
        json.dumps({"request_id": future}).encode(),
        {"X-API-Key": os.environ["TINKER_API_KEY"], "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=10) as reply:
        return json.loads(reply.read())


def sample(base: str) -> dict[str, Any]:
    """Samples from a snapshot before and after ten more steps, and from the base."""
    service, client = new_client(base)

    def step() -> None:
        client.forward_backward([datum(weights=[1.0] * 7)], "cross_entropy").result()
        client.optim_step(types.AdamParams(learning_rate=1e-2)).result()

    step()
    sampler = client.save_weights_and_get_sampling_client()

    def greedy(source: Any) -> list[int]:
        result = source.sample(prompt(TOKENS[:4]), 1, GREEDY).result()
        return [int(token) for token in result.sequences[0].tokens]

    before = greedy(sampler)
    path = client.save_weights_for_sampler("kept").result().path
    for _ in range(10):
        step()
    after = greedy(sampler)
    loaded = greedy(service.create_sampling_client(model_path=path))
    base_client = service.create_sampling_client(base_model=base)
    whole = partial(base_client.sample, prompt(TOKENS), include_prompt_logprobs=True)
    params = types.SamplingParams(max_tokens=5, seed=3, temperature=0.8, stop=[])
    drawn = whole(3, params, topk_sample_logprobs=2).result()
    four = partial(whole, 1, GREEDY, topk_prompt_logprobs=4)
    top = four(topk_sample_logprobs=2).result()
    last = four(prompt_logprobs_last_n=2).result()
    scored = base_client.compute_logprobs(prompt(TOKENS)).result()
    first = greedy(base_client)[0]
    params = types.SamplingParams(max_tokens=6, temperature=0.0, stop=[first])
    stopped = base_client.sample(prompt(TOKENS[:4]), 1, params).result()
    return {
        "before": before,
        "after": after,
        "loaded": loaded,
        "drawn": [list(map(int, s.tokens)) for s in drawn.sequences],
        "drawn_logprobs": [list(map(float, s.logprobs)) for s in drawn.sequences],
        "prompt_logprobs": scored,
        "top": top.topk_prompt_logprobs,
        "top_forms": [as_json(top), retrieve_json(top)],
        "last_top": last.topk_prompt_logprobs,
        "last_logprobs": last.prompt_logprobs,
        "both": list(drawn.prompt_logprobs or []) == list(scored),
        "stopped": [list(map(int, stopped.sequences[0].tokens)), first],
        "stop_reason": stopped.sequences[0].stop_reason,
    }


def in_flight(base: str) -> dict[str, Any]:
    """Steps while a sampling client of kind inflight samples. Asks the test to kill the
    server after the last step."""
    _, client = new_client(base)

    def step() -> None:
        client.forward_backward([datum(weights=[1.0] * 7)], "cross_entropy").result()
        client.optim_step(types.AdamParams(learning_rate=1e-2)).result()

    def scores(source: Any) -> list[float]:
        return list(source.compute_logprobs(prompt(TOKENS)).result()[1:])

    def save(kind: Any) -> Any:
        return client.save_weights_and_get_sampling_client(kind=kind).result()

    first, start = save("inflight"), save("snapshot")
    out: dict[str, Any] = {"before": scores(first)}
    many = types.SamplingParams(max_tokens=400, temperature=1.0, seed=3, stop=[])
    drawn = first.sample(prompt(TOKENS), 2, many)
    for _ in range(5):
        step()
    out["drawn"] = [len(s.tokens) for s in drawn.result().sequences]
    second, end = save("inflight"), save("snapshot")
    print("kill", flush=True)
    sources = {"start": start, "first": first, "second": second, "end": end}
    return {**out, **{name: scores(source) for name, source in sources.items()}}


def from_checkpoints(base: str) -> dict[str, Any]:
    """Samples with 40 clients from two checkpoints, and one that is overwritten."""
    service, client = new_client(base)

    def step() -> None:
        client.forward_backward([datum(weights=[1.0] * 7)], "cross_entropy").result()
        client.optim_step(types.AdamParams(learning_rate=1e-2)).result()

    def begin(source: Any) -> Any:
        return source.sample(prompt(TOKENS[:4]), 1, GREEDY)

    def bits(future: Any) -> list[Any]:
        sequence = future.result().sequences[0]
        return [list(map(int, sequence.tokens)), list(map(float, sequence.logprobs))]

    def of_model() -> list[Any]:
        return bits(begin(client.save_weights_and_get_sampling_client()))

    def of_path(path: str) -> Any:
        return service.create_sampling_client(model_path=path)

    models, paths = [], []
    for name in ("first", "second"):
        step()
        models.append(of_model())
        paths.append(client.save_weights_for_sampler(name).result().path)
    samplers = [[of_path(path) for path in paths] for _ in range(20)]
    drawn = [[begin(sampler) for sampler in pair] for pair in samplers]
    kept = client.save_state("kept").result().path
    old = of_path(kept)
    before = bits(begin(old))
    step()
    client.save_state("kept", overwrite=True).result()
    try:
        failure = str(bits(begin(old)))
    except tinker.RequestFailedError as error:
        failure = f"{error.category}: {error}"
    return {
        "models": models,
        "paths": [[bits(future) for future in pair] for pair in drawn],
        "before": before,
        "failure": failure,
        "latest": of_model(),
        "after": bits(begin(of_path(kept))),
    }


def tensor(data: types.TensorData) -> Any:
    return data.to_numpy().tolist()


def prompt_scores(base: str) -> dict[str, Any]:
    """Asks for scores and draws at the positions of a prompt of several pages."""
    sampler = tinker.ServiceClient().create_sampling_client(base_model=base)
    tokens = [(3 + 7 * i) % 200 for i in range(40)]
    count = len(tokens) - 1
    one = types.SamplingParams(max_tokens=1, temperature=0.5, seed=4)

    def ask(**options: Any) -> types.SampleResponse:
        return sampler.sample(prompt(tokens), 1, one, **options).result()

    rows = [[tokens[i + 1], i, -1] for i in range(count)]
    dense = types.TensorData(
        data=[token for row in rows for token in row], dtype="int64", shape=[count, 3]
    )
    columns = [0, 1] * count
    sparse = types.TensorData(
        data=[token for row in rows for token in row[:2]],
        dtype="int64",
        shape=[count, 3],
        sparse_crow_indices=[2 * i for i in range(count + 1)],
        sparse_col_indices=columns,
    )
    first = ask(
        include_prompt_logprobs=True,
        target_prompt_logprobs=dense,
        prompt_alt_tokens_k=3,
        topk_prompt_logprobs=100,
    )
    second = ask(target_prompt_logprobs=sparse)
    last = ask(include_prompt_logprobs=True, prompt_logprobs_last_n=4)
    scored = second.target_prompt_logprobs
    return {
        "tokens": tokens,
        "logprobs": first.prompt_logprobs,
        "top": first.topk_prompt_logprobs,
        "dense": tensor(first.target_prompt_logprobs),
        "sparse": [list(scored.data), scored.sparse_col_indices == columns],
        "alternatives": [
            tensor(first.prompt_alt_tokens.tokens),
            tensor(first.prompt_alt_tokens.logprobs),
        ],
        "hits": [first.prompt_cache_hit_tokens, last.prompt_cache_hit_tokens],
        "last": last.prompt_logprobs,
    }
