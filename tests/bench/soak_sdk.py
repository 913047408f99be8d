"""Trains and samples with the Tinker SDK for some time, and prints what it counted.
soak.py runs it in the SDK's environment: soak_sdk.py BASE_MODEL SECONDS."""

from __future__ import annotations

import json
import sys
import time

import tinker
from tinker import types

TOKENS = [3, 17, 5, 42, 8, 30, 11, 2]


def datum() -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints(TOKENS[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData(
                data=TOKENS[1:], dtype="int64", shape=[len(TOKENS) - 1]
            ),
            "weights": types.TensorData(
                data=[1.0] * (len(TOKENS) - 1), dtype="float32", shape=[len(TOKENS) - 1]
            ),
        },
    )


def main() -> None:
    base, end = sys.argv[1], time.monotonic() + float(sys.argv[2])
    service = tinker.ServiceClient()
    client = service.create_lora_training_client(base_model=base, rank=4).result()
    options = types.SamplingParams(max_tokens=3, temperature=1.0)
    prompt = types.ModelInput.from_ints(TOKENS[:3])
    counts = {"steps": 0, "samples": 0, "checkpoints": 0}
    while time.monotonic() < end:
        forward = client.forward_backward([datum()], "cross_entropy")
        step = client.optim_step(types.AdamParams(learning_rate=1e-4))
        forward.result()
        step.result()
        counts["steps"] += 2
        if counts["steps"] % 20 == 0:
            sampler = client.save_weights_and_get_sampling_client().result()
            drawn = [sampler.sample(prompt, 1, options) for _ in range(16)]
            counts["samples"] += sum(len(f.result().sequences) for f in drawn)
        if counts["steps"] % 100 == 0:
            client.save_state("soak", overwrite=True).result()
            counts["checkpoints"] += 1
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
