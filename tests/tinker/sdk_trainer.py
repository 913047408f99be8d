"""Trains with the Tinker SDK as scripts of the cookbook do: it saves its state every
few steps, and goes on from the last one if it was ended. Runs in the SDK's environment.

    sdk_trainer.py MODEL FOLDER STEPS

FOLDER/progress.json has the steps that are done, and the path of the state behind them.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import tinker
from sdk_parts import datum
from tinker import types

EVERY = 10


def main(model: str, folder: Path, steps: int) -> None:
    file = folder / "progress.json"
    service = tinker.ServiceClient()
    done = 0
    if file.exists():
        saved = json.loads(file.read_text())
        done = saved["step"]
        client = service.create_training_client_from_state_with_optimizer(saved["path"])
    else:
        client = service.create_lora_training_client(base_model=model, rank=4, seed=1)
    for step in range(done, steps):
        tokens = [3 + (step * k) % 90 for k in range(2, 12)]
        forward = client.forward_backward(
            [datum(tokens, weights=[1.0] * 9)], "cross_entropy"
        )
        update = client.optim_step(types.AdamParams(learning_rate=1e-3))
        forward.result()
        update.result()
        (folder / "step").write_text(str(step + 1))
        if (step + 1) % EVERY == 0 or step + 1 == steps:
            path = client.save_state(f"step-{step + 1}").result().path
            draft = file.with_suffix(".draft")
            draft.write_text(json.dumps({"step": step + 1, "path": path}))
            os.replace(draft, file)


main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
