"""Programs that go on through kills, breaks and crowds."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import tinker
from sdk_parts import GREEDY, TOKENS, datum, logprobs, new_client, prompt
from tinker import types


def dimuon(base: str) -> dict[str, Any]:
    """Trains with Dimuon, goes on from a checkpoint with and without the optimizer's
    state, and mixes optimizers. Asks the test to kill the server after two steps."""
    config = types.DimuonOptimizerConfig()
    service, client = new_client(base, optimizer=config)
    data = [datum(weights=[1.0] * 7)]

    def step(which: Any, params: Any) -> float:
        which.forward_backward(data, "cross_entropy").result()
        return float(which.optim_step(params).result().metrics["grad_norm"])

    def refused(which: Any, params: Any) -> str:
        try:
            which.optim_step(params).result()
        except tinker.RequestFailedError as error:
            return str(error)
        return ""

    params = types.DimuonParams(learning_rate=1e-2, beta1=0.8, grad_clip_norm=1.0)
    norms = [step(client, params), step(client, params)]
    path = client.save_state("two").result().path
    untrained = new_client(base, optimizer=config)[1]
    print("kill", flush=True)
    norms.append(step(client, params))
    again = service.create_training_client_from_state_with_optimizer(path)
    repeated = step(again, params)
    adam = types.AdamParams()
    mixed = [refused(client, adam), refused(again, adam)]
    plain = service.create_training_client_from_state(path)
    step(plain, adam)
    fresh = service.create_training_client_from_state(path, optimizer=config)
    step(fresh, params)
    mixed.append(refused(plain, params))
    rest = service.create_rest_client()
    infos = [client.get_info(), again.get_info(), plain.get_info(), fresh.get_info()]
    infos.append(rest.get_weights_info_by_tinker_path(path).result())
    before = untrained.save_state("zero").result().path
    infos.append(rest.get_weights_info_by_tinker_path(before).result())
    output = client.forward(data, "cross_entropy").result()
    return {
        "norms": norms,
        "repeated": repeated,
        "mixed": mixed,
        "types": [info.optimizer_config.type for info in infos],
        "logprobs": logprobs(output),
    }


def train_and_sample(base: str, kills: tuple[int, ...]) -> dict[str, Any]:
    """Trains six times, and samples. Before it waits for the steps and the sample with
    these numbers, asks the test to kill the server."""

    def may_kill(number: int) -> None:
        if number in kills:
            print("kill", flush=True)

    _, client = new_client(base)
    norms = []
    for number in range(6):
        forward = client.forward_backward([datum(weights=[1.0] * 7)], "cross_entropy")
        step = client.optim_step(types.AdamParams(learning_rate=1e-3))
        may_kill(number)
        forward.result()
        norms.append(step.result().metrics["grad_norm"])
    sampler = client.save_weights_and_get_sampling_client()
    may_kill(6)
    result = sampler.sample(prompt(TOKENS[:4]), 1, GREEDY).result()
    return {"norms": norms, "tokens": [int(t) for t in result.sequences[0].tokens]}


def survive(base: str) -> dict[str, Any]:
    return train_and_sample(base, (2, 4, 6))


def calm(base: str) -> dict[str, Any]:
    return train_and_sample(base, ())


def quiet(base: str) -> dict[str, Any]:
    """Does the same as calm(). Returns also what the SDK logs meanwhile."""
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore
    logging.getLogger().addHandler(handler)
    out = calm(base)
    logging.getLogger().removeHandler(handler)
    return {**out, "warnings": warnings}


def crowd(base: str) -> dict[str, Any]:
    """32 clients train while another client waits for 500 samples."""
    sampler = tinker.ServiceClient().create_sampling_client(base_model=base)
    one = types.SamplingParams(max_tokens=16, temperature=1.0, stop=[])
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
