"""Runs Tinker programs with the SDK against the server at TINKER_BASE_URL. Runs in
the SDK's own environment, which has no Weft client. Each line of stdin names a
program. Prints its result as the line "result JSON", which the tests check.

Usage: sdk_script.py BASE_MODEL
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import custom_losses
import tinker
from tinker import types
from tinker.lib.api_future_impl import _APIFuture
from tinker.lib.client_connection_pool_type import ClientConnectionPoolType

TOKENS = [3, 17, 5, 42, 8, 30, 11, 2]
GREEDY = types.SamplingParams(max_tokens=6, temperature=0.0, stop=[])


def prompt(tokens: list[int]) -> types.ModelInput:
    return types.ModelInput.from_ints(tokens)


def datum(tokens: list[int] = TOKENS, **inputs: Any) -> types.Datum:
    """Returns a datum whose targets are the next tokens."""
    return types.Datum(
        model_input=prompt(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], **inputs},
    )


def policy_datum() -> types.Datum:
    count = len(TOKENS) - 1
    return datum(
        logprobs=[-4.0 - 0.1 * i for i in range(count)],
        advantages=[(-1.0) ** i * 0.5 for i in range(count)],
    )


def logprobs(output: types.ForwardBackwardOutput) -> list[list[float]]:
    return [list(entry["logprobs"].data) for entry in output.loss_fn_outputs]


def new_client(base: str, **options: Any) -> tuple[Any, Any]:
    service = tinker.ServiceClient()
    client = service.create_lora_training_client(
        base_model=base, rank=8, seed=7, **options
    )
    return service, client.result() if hasattr(client, "result") else client


def train(base: str) -> dict[str, Any]:
    """Runs the losses, accumulation and steps that test_sdk.py repeats over gRPC."""
    service, client = new_client(base)
    out: dict[str, Any] = {"info": client.get_info().model_dump(mode="json")}
    capabilities = service.get_server_capabilities()
    out["models"] = [model.model_name for model in capabilities.supported_models]
    weights = [1.0, 0.5, 0.0, -0.25, 1.0, 2.0, 1.0]
    out["forward"] = logprobs(
        client.forward([datum(weights=weights)], "cross_entropy").result()
    )
    out["losses"] = {}
    for loss, config in (
        ("cross_entropy", None),
        ("importance_sampling", None),
        ("ppo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}),
        ("cispo", None),
        ("dro", {"beta": 0.1}),
    ):
        data = datum(weights=weights) if loss == "cross_entropy" else policy_datum()
        result = client.forward_backward([data, data], loss, config).result()
        out["losses"][loss] = result.metrics["loss:sum"]
    step = client.optim_step(
        types.AdamParams(learning_rate=1e-3, grad_clip_norm=1.0)
    ).result()
    out["grad_norm"] = step.metrics["grad_norm"]
    out["after"] = logprobs(
        client.forward([datum(weights=[1.0] * 7)], "cross_entropy").result()
    )
    out["model_id"] = client.model_id
    return out


def refused(base: str) -> dict[str, Any]:
    """Refusals name a category and leave the client usable."""
    _, client = new_client(base)
    messages = []
    bad = types.Datum(
        model_input=prompt([1, 2]), loss_fn_inputs={"target_tokens": [1, 10**6]}
    )
    asks: list[Callable[[], Any]] = [
        lambda: client.forward_backward([bad], "cross_entropy"),
        lambda: client.forward_backward([policy_datum()], "stable_reinforce"),
        lambda: client.save_weights_external("out", age_encryption_recipients=["age1"]),
    ]
    for ask in asks:
        try:
            ask().result()
        except tinker.RequestFailedError as error:
            messages.append([str(error), str(error.category)])
    # The refused calls leave no gap in the step numbers, so the next calls run.
    result = client.forward_backward([datum(weights=[1.0] * 7)], "cross_entropy")
    step = client.optim_step(types.AdamParams())
    result.result()
    step.result()
    return {"messages": messages}


def reinforce(base: str) -> dict[str, Any]:
    """Rewards answers with small ids for some steps, as rl_loop of the cookbook does:
    with its default loss, and with samples that are one step old."""
    _, client = new_client(base)
    shown, limit, rewards, metrics = TOKENS[:4], 160, [], []
    old = client.save_weights_and_get_sampling_client(record_stability_info=True)
    for step in range(16):
        options = types.SamplingParams(max_tokens=8, temperature=1.0, seed=step)
        drawn = old.sample(prompt(shown), 16, options).result().sequences
        old = client.save_weights_and_get_sampling_client(record_stability_info=True)
        scores = [sum(t < limit for t in s.tokens) / len(s.tokens) for s in drawn]
        rewards.append(sum(scores) / len(scores))
        data = []
        for sequence, score in zip(drawn, scores, strict=True):
            count, before = len(sequence.tokens), len(shown) - 1
            id = sequence.sequence_id
            data.append(
                datum(
                    [*shown, *sequence.tokens],
                    logprobs=[0.0] * before + list(sequence.logprobs),
                    advantages=[0.0] * before + [score - rewards[-1]] * count,
                ).with_provenance(
                    model_input=[
                        types.PromptProvenanceSpan(sequence_id=id, length=len(shown)),
                        types.SampledProvenanceSpan(sequence_id=id, length=count - 1),
                    ],
                    loss_fn_inputs=[
                        types.PromptProvenanceSpan(
                            sequence_id=id, offset=1, length=before
                        ),
                        types.SampledProvenanceSpan(sequence_id=id, length=count),
                    ],
                )
            )
        result = client.forward_backward(data, "stable_reinforce", {"kl_coeff": 0.01})
        client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        metrics.append(result.result().metrics)
    return {"rewards": rewards, "metrics": metrics}


def provenance(base: str) -> dict[str, Any]:
    """Trains on recorded samples of a truncated distribution with placeholders in place
    of their logprobs. Returns the metrics with and without records, and after the test
    has killed the server."""
    _, client = new_client(base)
    options = types.SamplingParams(max_tokens=6, temperature=1.0, top_p=0.7, seed=3)
    shown, metrics, logs = TOKENS[:4], [], []

    def data(sequence: Any) -> types.Datum:
        id, count = sequence.sequence_id, len(sequence.tokens)
        return datum(
            [*shown, *sequence.tokens],
            logprobs=[-3.0] * (len(shown) - 1 + count),
            advantages=[0.0] * (len(shown) - 1) + [1.0] * count,
            weights=[0.0] * (len(shown) - 1) + [1.0] * count,
        ).with_provenance(
            model_input=[
                types.PromptProvenanceSpan(sequence_id=id, length=len(shown)),
                types.SampledProvenanceSpan(sequence_id=id, length=count - 1),
            ],
            loss_fn_inputs=[
                types.PromptProvenanceSpan(
                    sequence_id=id, offset=1, length=len(shown) - 1
                ),
                types.SampledProvenanceSpan(sequence_id=id, length=count),
            ],
        )

    def sequences(record: bool) -> Any:
        sampler = client.save_weights_and_get_sampling_client(
            record_stability_info=record
        )
        return sampler.sample(prompt(shown), 2, options).result().sequences

    def train(drawn: Any) -> None:
        call = client.forward_backward(
            [data(sequence) for sequence in drawn], "importance_sampling"
        )
        client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        result = call.result()
        metrics.append(result.metrics)
        first = result.loss_fn_outputs[0]["logprobs"].data[len(shown) - 1 :]
        logs.append([list(first), list(drawn[0].logprobs)])

    recorded = sequences(True)
    train(recorded)
    train(sequences(False))
    print("kill", flush=True)
    train(recorded)
    return {"metrics": metrics, "logprobs": logs}


def custom(base: str) -> dict[str, Any]:
    """Trains with cross_entropy as a custom loss and as the built-in loss. Returns the
    gradient norms and the losses of both."""
    norms = []
    for own in (True, False):
        _, client = new_client(base)
        data = [datum(weights=[1.0] * 7)]
        if own:

            def loss(_: Any, values: list[Any]) -> tuple[Any, dict[str, float]]:
                total = -sum(value.sum() for value in values)
                return total, {"mine": float(total)}

            first = client.forward_backward_custom(data, loss).result()
        else:
            second = client.forward_backward(data, "cross_entropy").result()
        step = client.optim_step(types.AdamParams()).result()
        norms.append(step.metrics["grad_norm"])
    return {
        "norms": norms,
        "losses": [first.metrics["loss:sum"], second.metrics["loss:sum"]],
    }


def custom_on_server(base: str) -> dict[str, Any]:
    """Trains with five losses that the server computes, and that the SDK computes. A
    sixth loss cannot run, and a seventh step does."""
    out = custom_losses.compared(base, 3, 7, 320, 2)
    service, client = new_client(base)

    def bad(logprobs: Any) -> tuple[Any, dict[str, Any]]:
        return logprobs.cumprod(0).sum(), {}

    def unfit(logprobs: Any, a: Any) -> tuple[Any, dict[str, Any]]:
        return (logprobs * a).sum(), {}

    errors = []
    try:
        service.create_custom_loss(bad, {"logprobs": 1}).result()
    except tinker.RequestFailedError as error:
        errors.append([str(error), str(error.category)])
    handle = service.create_custom_loss(unfit, {"logprobs": 1, "a": 1}).result()
    for values in ([1.0, 2.0], [1.0] * 7):
        a = types.TensorData(data=values, dtype="float32", shape=[len(values)])
        # Data of RL have `logprobs`, which are not those of the step.
        data = [datum(a=a, logprobs=[-4.0] * 7)]
        try:
            client.forward_backward_custom(data, handle).result()
        except tinker.RequestFailedError as error:
            errors.append([str(error), str(error.category)])
    norm = client.optim_step(types.AdamParams()).result().metrics["grad_norm"]
    return {"losses": out, "errors": errors, "norm": norm}


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
        {
            "X-API-Key": os.environ["TINKER_API_KEY"],
            "Content-Type": "application/json",
        },
    )
    with urllib.request.urlopen(request, timeout=10) as reply:
        return json.loads(reply.read())


def sample(base: str) -> dict[str, Any]:
    """Samples from a snapshot before and after ten more steps, and from the base."""
    service, client = new_client(base)
    params = types.AdamParams(learning_rate=1e-2)

    def step() -> None:
        client.forward_backward([datum(weights=[1.0] * 7)], "cross_entropy").result()
        client.optim_step(params).result()

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
    drawn = base_client.sample(
        prompt(TOKENS),
        3,
        types.SamplingParams(max_tokens=5, seed=3, temperature=0.8, stop=[]),
        include_prompt_logprobs=True,
        topk_sample_logprobs=2,
    ).result()
    top = base_client.sample(
        prompt(TOKENS),
        1,
        GREEDY,
        include_prompt_logprobs=True,
        topk_prompt_logprobs=4,
        topk_sample_logprobs=2,
    ).result()
    last = base_client.sample(
        prompt(TOKENS),
        1,
        GREEDY,
        include_prompt_logprobs=True,
        topk_prompt_logprobs=4,
        prompt_logprobs_last_n=2,
    ).result()
    scored = base_client.compute_logprobs(prompt(TOKENS)).result()
    first = greedy(base_client)[0]
    stopped = base_client.sample(
        prompt(TOKENS[:4]),
        1,
        types.SamplingParams(max_tokens=6, temperature=0.0, stop=[first]),
    ).result()
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


def accounts(base: str) -> dict[str, Any]:
    """Asks who the caller is, samples by path, copies, and reads the accounts."""
    service, client = new_client(base)
    client.forward_backward([datum(weights=[1.0] * 7)], "cross_entropy").result()
    path = client.save_weights_for_sampler("kept").result().path
    holder = service.holder

    async def sample_by(**source: str) -> Any:
        with holder.aclient(ClientConnectionPoolType.SAMPLE) as raw:
            return await raw.sampling.asample(
                request=types.SampleRequest(
                    prompt=prompt(TOKENS), sampling_params=GREEDY, **source
                )
            )

    def drawn(**source: str) -> Any:
        future = holder.run_coroutine_threadsafe(sample_by(**source)).result()
        result = _APIFuture(
            types.SampleResponse,
            holder,
            future,
            request_start_time=time.time(),
            request_type="Sample",
        ).result()
        return result.sequences[0].tokens

    api = tinker.RestClient()
    admin = tinker.AdminClient()
    copy = api.copy_weights(path, "any", ttl_seconds=7200).result()
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    session = client.model_id.split(":")[0]
    found = api.search_sessions(types.SessionSearchRequest(session_id=session))
    summary = found.result().sessions[0]
    usage = admin.get_billing_usage(hour, hour + timedelta(hours=2)).result()
    stored = admin.get_current_checkpoint_storage_usage().result().data
    loaded = service.create_sampling_client(model_path=copy)
    return {
        "who": api.whoami().result().model_dump(),
        "base": drawn(base_model=base),
        "by_path": drawn(model_path=path),
        "by_copy": loaded.sample(prompt(TOKENS), 1, GREEDY)
        .result()
        .sequences[0]
        .tokens,
        "events": [
            [entry.event, entry.tinker_path]
            for entry in admin.get_audit_log().result().entries
            if client.model_id in (entry.tinker_path or "") or entry.tinker_path == copy
        ],
        "path": path,
        "copy": copy,
        "used": {
            event.event_info.type: event.event_info.token_count
            for event in usage.data
            if event.session_id == session and event.event_info.type == "training"
        },
        "stored": sum(item.checkpoint_count for item in stored),
        "summary": [summary.checkpoints_count, summary.status.type],
    }


def checkpoints(base: str) -> dict[str, Any]:
    """Saves, loads, lists, deletes and downloads."""
    service, client = new_client(base)
    rest = service.create_rest_client()
    data = [datum(weights=[1.0] * 7)]

    def step(which: Any) -> float:
        which.forward_backward(data, "cross_entropy").result()
        return float(
            which.optim_step(types.AdamParams(learning_rate=1e-3))
            .result()
            .metrics["grad_norm"]
        )

    step(client)
    path = client.save_state("one").result().path
    ahead = [step(client), step(client)]
    again = service.create_training_client_from_state_with_optimizer(path)
    repeated = [step(again), step(again)]
    copy = rest.copy_weights(path, "any").result()
    of_copy = service.create_training_client_from_state_with_optimizer(copy)
    copied = [step(of_copy), step(of_copy)]
    try:
        rest.copy_weights(path + "-not", "any").result()
        missing = ""
    except tinker.NotFoundError as error:
        missing = str(error)
    fresh = service.create_training_client_from_state(path)
    step(fresh)
    run = path.split("/")[2]
    listed = rest.list_checkpoints(run).result().checkpoints
    info = rest.get_weights_info_by_tinker_path(path).result()
    runs = rest.list_training_runs().result()
    found = rest.get_training_run(run).result()
    exported = client.save_weights_external("out").result().path
    urls = rest.get_external_weights_urls(exported).result().urls
    sizes = {}
    for name, url in urls.items():
        with urllib.request.urlopen(url, timeout=10) as reply:
            sizes[name] = len(reply.read())
    rest.delete_checkpoint_from_tinker_path(path).result()
    left = rest.list_checkpoints(run).result().checkpoints
    return {
        "path": path,
        "ahead": ahead,
        "repeated": repeated,
        "copied": copied,
        "missing": missing,
        "listed": [entry.tinker_path for entry in listed],
        "rank": info.lora_rank,
        "runs": [entry.training_run_id for entry in runs.training_runs],
        "run": found.training_run_id,
        "sizes": sizes,
        "left": [entry.tinker_path for entry in left],
    }


def survive(base: str) -> dict[str, Any]:
    """Trains and samples. The test kills and restarts the server after each line "kill"
    that this function prints."""
    _, client = new_client(base)
    norms = []
    for number in range(6):
        forward = client.forward_backward([datum(weights=[1.0] * 7)], "cross_entropy")
        step = client.optim_step(types.AdamParams(learning_rate=1e-3))
        if number in (2, 4):
            print("kill", flush=True)
        forward.result()
        norms.append(step.result().metrics["grad_norm"])
    sampler = client.save_weights_and_get_sampling_client()
    print("kill", flush=True)
    result = sampler.sample(prompt(TOKENS[:4]), 1, GREEDY).result()
    return {"norms": norms, "tokens": [int(t) for t in result.sequences[0].tokens]}


def calm(base: str) -> dict[str, Any]:
    """Does the same as survive(), but without kills."""
    _, client = new_client(base)
    norms = []
    for _ in range(6):
        client.forward_backward([datum(weights=[1.0] * 7)], "cross_entropy").result()
        step = client.optim_step(types.AdamParams(learning_rate=1e-3)).result()
        norms.append(step.metrics["grad_norm"])
    sampler = client.save_weights_and_get_sampling_client()
    result = sampler.sample(prompt(TOKENS[:4]), 1, GREEDY).result()
    return {"norms": norms, "tokens": [int(t) for t in result.sequences[0].tokens]}


def quiet(base: str) -> dict[str, Any]:
    """Does the same as calm(). Returns also what the SDK logs meanwhile."""
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore
    logging.getLogger().addHandler(handler)
    out = calm(base)
    logging.getLogger().removeHandler(handler)
    return {**out, "warnings": warnings}


def back_to_checkpoint(base: str, kill: bool) -> list[float]:
    """Loads an earlier checkpoint, runs three more steps and returns their gradient
    norms. If `kill`, asks the test to kill the server after the first of the three."""
    _, client = new_client(base)

    def step(weight: float) -> float:
        data = [datum(weights=[weight] * 7)]
        client.forward_backward(data, "cross_entropy").result()
        adam = types.AdamParams(learning_rate=1e-2)
        norm: float = client.optim_step(adam).result().metrics["grad_norm"]
        return norm

    step(1)
    path = client.save_state("early").result().path
    for _ in range(5):
        step(2)  # A restarted server must not run these steps again.
    client.load_state_with_optimizer(path).result()
    norms = [step(1)]
    if kill:
        print("kill", flush=True)
    return [*norms, step(1), step(1)]


def back(base: str) -> dict[str, Any]:
    return {"norms": back_to_checkpoint(base, kill=False)}


def back_killed(base: str) -> dict[str, Any]:
    return {"norms": back_to_checkpoint(base, kill=True)}


def chunks(base: str) -> dict[str, Any]:
    """Makes one call that the SDK splits into many requests, which arrive in any order.
    The server tells the SDK to send at most four data in a request."""
    _, client = new_client(base)
    data = [datum(weights=[1.0 / (1 + i)] * 7) for i in range(30)]
    result = client.forward_backward(data, "cross_entropy")
    step = client.optim_step(types.AdamParams())
    metrics = result.result().metrics
    return {
        "loss": metrics["loss:sum"],
        "count": len(result.result().loss_fn_outputs),
        "grad_norm": step.result().metrics["grad_norm"],
    }


def rest(base: str) -> dict[str, Any]:
    """Returns the REST client's results, and the refusals of unsupported calls."""
    service, client = new_client(base)
    client.forward_backward([datum(weights=[1.0] * 7)], "cross_entropy").result()
    path = client.save_state("kept", ttl_seconds=7200).result().path
    api = service.create_rest_client()
    session = client.model_id.split(":")[0]
    sampler = client.save_weights_and_get_sampling_client()
    api.set_checkpoint_ttl_from_tinker_path(path, None).result()
    refusals = []
    asks: list[Callable[[], Any]] = [
        lambda: api.publish_checkpoint_from_tinker_path(path).result(),
        lambda: api.unpublish_checkpoint_from_tinker_path(path).result(),
        lambda: api.assign_session_project(session, "p").result(),
        lambda: api.export_session_trace(session).result(),
        lambda: api.search_sessions(
            types.SessionSearchRequest(project_ids=["p"])
        ).result(),
    ]
    for ask in asks:
        try:
            ask()
        except tinker.BadRequestError as error:
            refusals.append(str(error))
    again = tinker.SamplingClient.from_sampler_handle(sampler.get_sampler_handle())
    return {
        "session": session in api.list_sessions(limit=1000).result().sessions,
        "runs": api.get_session(session).result().training_run_ids,
        "run": api.get_training_run_by_tinker_path(path).result().training_run_id,
        "model_id": client.model_id,
        "mine": path
        in [c.tinker_path for c in api.list_user_checkpoints().result().checkpoints],
        "base": sampler.get_base_model(),
        "again": len(again.sample(prompt([3]), 1, GREEDY).result().sequences),
        "expires": [
            c.expires_at
            for c in api.list_checkpoints(client.model_id).result().checkpoints
        ],
        "refusals": refusals,
    }


def crowd(base: str) -> dict[str, Any]:
    """32 clients train while another client waits for 500 samples."""
    sampler = tinker.ServiceClient().create_sampling_client(base_model=base)
    one = types.SamplingParams(max_tokens=8, temperature=1.0, stop=[])
    drawn = [sampler.sample(prompt([3 + i % 200, 5]), 1, one) for i in range(500)]

    def one_client(_: int) -> float:
        _, client = new_client(base)
        forward = client.forward_backward([datum(weights=[1.0] * 7)], "cross_entropy")
        step = client.optim_step(types.AdamParams(learning_rate=1e-3))
        forward.result()
        return float(step.result().metrics["grad_norm"])

    with ThreadPoolExecutor(32) as pool:
        norms = list(pool.map(one_client, range(32)))
    lengths = {len(future.result().sequences[0].tokens) for future in drawn}
    return {"norms": norms, "lengths": sorted(lengths)}


PROGRAMS: dict[str, Callable[[str], dict[str, Any]]] = {
    program.__name__: program
    for program in (
        train,
        refused,
        reinforce,
        provenance,
        custom,
        custom_on_server,
        sample,
        in_flight,
        prompt_scores,
        accounts,
        checkpoints,
        survive,
        calm,
        quiet,
        back,
        back_killed,
        chunks,
        rest,
        crowd,
    )
}


def main() -> None:
    base = sys.argv[1]
    for line in sys.stdin:
        result = PROGRAMS[line.strip()](base)
        print("result " + json.dumps(result, default=str), flush=True)


if __name__ == "__main__":
    main()
