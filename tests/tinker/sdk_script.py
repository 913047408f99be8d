"""Runs Tinker programs with the SDK. Runs in the SDK's own environment, which has no
Weft client. Each line of stdin names a program, and may name the server's URL, which
is else TINKER_BASE_URL. Prints its result as the line "result JSON", which the tests
check.

Usage: sdk_script.py BASE_MODEL
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import custom_losses
import tinker
from sdk_checkpoints import accounts, checkpoints, rest
from sdk_parts import (
    TOKENS,
    datum,
    logprobs,
    new_client,
    policy_datum,
    prompt,
    sampled_datum,
)
from sdk_restarts import calm, crowd, dimuon, quiet, survive
from sdk_sampling import from_checkpoints, in_flight, prompt_scores, sample
from tinker import types


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
        data = [
            sampled_datum(shown, one, list(one.logprobs), score - rewards[-1])
            for one, score in zip(drawn, scores, strict=True)
        ]
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
        count = len(sequence.tokens)
        weights = [0.0] * (len(shown) - 1) + [1.0] * count
        return sampled_datum(shown, sequence, [-3.0] * count, 1.0, weights=weights)

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


PROGRAMS: dict[str, Callable[[str], dict[str, Any]]] = {
    program.__name__: program
    for program in (
        train,
        refused,
        reinforce,
        provenance,
        custom_on_server,
        sample,
        in_flight,
        from_checkpoints,
        prompt_scores,
        accounts,
        checkpoints,
        dimuon,
        survive,
        calm,
        quiet,
        chunks,
        rest,
        crowd,
    )
}


def main() -> None:
    base = sys.argv[1]
    for line in sys.stdin:
        name, *url = line.split()
        if url:
            os.environ["TINKER_BASE_URL"] = url[0]
        result = PROGRAMS[name](base)
        print("result " + json.dumps(result, default=str), flush=True)


if __name__ == "__main__":
    main()
