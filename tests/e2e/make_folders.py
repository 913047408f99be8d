"""Makes the folders of a release for test_earlier_folders.py. Run it when a release is
tagged, with that release's weftd:

    python tests/e2e/make_folders.py NAME WEFTD

It writes the folder earlier/NAME beside this file: model/config.json, state,
checkpoints, and expected.json with what the release computed from them.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

EARLIER = Path(__file__).resolve().parent / "earlier"
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
}
TOKENS = [5, 9, 2, 33, 7, 7, 21, 14]
FLAGS = ("--load-format=dummy", "--device=cpu", "--dtype=f32")


def flags(folder: Path, ports: Path) -> list[str]:
    """Returns weftd's flags for the folders in `folder`."""
    return [
        f"--model={folder / 'model'}",
        f"--state-dir={folder / 'state'}",
        f"--checkpoint-dir={folder / 'checkpoints'}",
        "--listen=127.0.0.1:0",
        "--metrics-listen=",
        f"--port-file={ports}",
        *FLAGS,
    ]


def logprobs(adapter: Any) -> list[float]:
    import weft

    result = adapter.forward([weft.Datum.next_token(TOKENS)])
    return [float(p) for p in result.results[0].logprobs]


def main(name: str, weftd: str) -> None:
    import weft

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text(json.dumps(CONFIG, indent=2))
        ports = folder / "ports"
        process = subprocess.Popen([weftd, *flags(folder, ports)])
        while not ports.exists():
            time.sleep(0.05)
        with weft.Client(ports.read_text().splitlines()[0]) as client:
            adapter = client.create_adapter("poet", rank=2, seed=1)
            for step in range(3):
                adapter.forward_backward([weft.Datum.next_token(TOKENS)])
                adapter.optim_step(learning_rate=1e-2)
                if step == 1:
                    adapter.save("second")
                    saved = logprobs(adapter)
            adapter.snapshot("fixed")
            now = logprobs(adapter)
            info = adapter.info()
            expected = {
                "next_step": info.next_step,
                "optim_steps": info.optim_steps,
                "snapshots": list(info.snapshots),
                "logprobs": now,
                "saved_logprobs": saved,
            }
        process.kill()  # The log stays, to be run again.
        process.wait()
        (folder / "expected.json").write_text(json.dumps(expected, indent=2) + "\n")
        ports.unlink()
        shutil.rmtree(folder / "checkpoints" / ".spill", ignore_errors=True)
        shutil.copytree(folder, EARLIER / name)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
