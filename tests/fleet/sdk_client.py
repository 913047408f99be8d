"""Trains with the Tinker SDK until the file FOLDER/stop exists, or for ROUNDS rounds,
and saves its state at the end. Runs in the SDK's environment.

    sdk_client.py MODEL FOLDER NAME [ROUNDS]

NAME is that of the last state. FOLDER/NAME.rounds has the number of rounds so far.
"""

from __future__ import annotations

import sys
from pathlib import Path

import tinker
from sdk_parts import GREEDY, datum, prompt
from tinker import types

SAMPLE_EVERY = 10  # Rounds.


def main(model: str, folder: Path, name: str, rounds: str = "-1") -> None:
    service = tinker.ServiceClient()
    client = service.create_lora_training_client(base_model=model, rank=4, seed=1)
    done = 0
    while not (folder / "stop").exists() and done != int(rounds):
        tokens = [3 + (done * k) % 90 for k in range(2, 23)]
        forward = client.forward_backward(
            [datum(tokens, weights=[1.0] * (len(tokens) - 1))], "cross_entropy"
        )
        update = client.optim_step(types.AdamParams(learning_rate=1e-3))
        forward.result()
        update.result()
        done += 1
        draft = folder / "draft"
        draft.write_text(str(done))
        draft.replace(folder / f"{name}.rounds")
        if done % SAMPLE_EVERY == 0:
            sampler = client.save_weights_and_get_sampling_client()
            sampler.sample(prompt([3, 4]), 1, GREEDY).result()
    client.save_state(name).result()


main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
