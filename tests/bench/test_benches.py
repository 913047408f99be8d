"""Tests that the benches still run, and that they compare and count correctly. The
sizes are tiny, so the times mean nothing. test_peers.py has the benches with peers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from quick import quick, reported

# isort: split
import daemon
import flops
import inputs
import processes
import shapes

needs_a_store = pytest.mark.skipif(
    not (daemon.REPOSITORY / "build" / "store-venv" / "bin" / "weed").exists(),
    reason="no build/store-venv: object stores were NOT timed",
)


def test_rpc_overhead(capsys: Any, tiny: tuple[str, str]) -> None:
    size = ("--calls", "3", "--tokens", "8192", "--sequences", "2", "--length", "16")
    result = quick("rpc_overhead", capsys, *tiny, *size)
    assert all(entry["value"] > 0 for entry in result["ratio"].values())
    assert result["ours"]["calls"].keys() == {
        "forward_backward 1 x 16",
        "optim_step",
        "sample 1 x 1",
    }


def test_busy(capsys: Any, tiny: tuple[str, str]) -> None:
    size = ("--tokens", "4", "--neighbours", "1", "--quotas")
    result = quick("busy", capsys, *tiny, *size)
    assert set(result["ours"]) == {"idle", "1 busy"}
    assert all(rate > 0 for side in result["peer"].values() for rate in side.values())


def test_edge(capsys: Any) -> None:
    size = ("--calls", "3", "--large-calls", "1", "--megabytes", "1")
    result = quick("edge", capsys, *size)
    assert all(entry["value"] is not None for entry in result["ratio"].values())
    assert result["ours"].keys() == result["peer"]["direct"].keys()


def test_mixed_load(capsys: Any, tiny: tuple[str, str]) -> None:
    size = (
        "--samples",
        "2",
        "--length",
        "32",
        "--batch-tokens",
        "64",
        "--trainers",
        "1",
    )
    time = ("--warm-seconds", "0.2", "--share-seconds", "0.5")
    result = quick("mixed_load", capsys, *tiny, *size, *time)
    assert result["ratio"]["failed requests"]["value"] == 0
    assert result["ours"]["points"][0]["train_tokens_per_second"] > 0
    assert result["ours"]["shares"]["few"] > 0


def test_builds(capsys: Any, tiny: tuple[str, str], tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.symlink_to(daemon.BUILD_DIR)
    both = (str(daemon.BUILD_DIR), str(other), *tiny)
    size = ("--batch", "2", "--length", "16", "--adapters", "2", "--tokens", "4")
    ratios = quick("builds", capsys, *both, *size)["ratio"]
    assert f"speed {other}/{daemon.BUILD_DIR}, train step" in ratios


@pytest.mark.parametrize("shape", [(), ("--shape", "tiny")])
def test_log_cost(shape: tuple[str, ...], capsys: Any, tiny: tuple[str, str]) -> None:
    result = quick("log_cost", capsys, *tiny, *shape, "--length", "16", "--reps", "3")
    ours = result["ours"]
    for kind in ("forward_backward", "optim_step"):
        assert all(figure > 0 for figure in ours[kind].values()), ours
    # The image has the weights and both moments of an adapter of rank 16. It leaves out
    # the gradient, which is zero.
    assert ours["snapshot"]["image_bytes"] > 3 * 4 * 16 * 1000
    assert ours["snapshot"]["seconds"] > 0
    assert all(entry["value"] > 0 for entry in result["ratio"].values())


def test_soak_counts_every_step_once(capsys: Any) -> None:
    size = ("--clients", "6", "--adapters", "18", "--resident", "4", "--seconds", "1")
    result = quick("soak", capsys, *size, "--processes", "1", "--pause", "0.1")
    assert result["ratio"]["wrong counts"]["value"] == 0
    assert result["ratio"]["failed calls"]["value"] == 0
    assert result["ours"]["steps"] > 0 and result["ours"]["adapter_moves"] > 0


@needs_a_store
def test_store_cost(capsys: Any, tiny: tuple[str, str]) -> None:
    size = ("--adapters", "8", "--length", "16", "--steps", "1")
    result = quick("store_cost", capsys, *tiny, *size, "--reps", "2", "--alone", "3")
    assert result["ours"]["put_seconds"] > 0
    assert result["ratio"]["throughput store/disk"]["value"] > 0


@needs_a_store
def test_takeover(capsys: Any) -> None:
    size = ("--adapters", "4", "--training", "2", "--stops", "1", "--seconds", "0.5")
    ours = quick("takeover", capsys, *size)["ours"]
    (kill,) = ours["kills"]
    # An owner counts as dead after five seconds without a beat.
    assert kill["unchanged"] > 3 and kill["last_trained"] > 3
    assert kill["replay"] > 0 and len(ours["stops"]) == 1 and ours["steps"] > 0


@needs_a_store
def test_move_pause(capsys: Any, tiny: tuple[str, str]) -> None:
    size = ("--length", "16", "--reps", "3")
    ours = quick("move_pause", capsys, *tiny, *size)["ours"]
    assert len(ours["pauses"]) == len(ours["moves"]) == 3
    assert ours["equal_losses"] == ours["rounds"] >= 12


@needs_a_store
def test_rollouts(capsys: Any) -> None:
    size = ("--calls", "8", "--clients", "8", "--samples", "2", "--tokens", "16")
    result = quick("rollouts", capsys, *size)
    assert all(entry["value"] > 0 for entry in result["ratio"].values())
    # So few calls may go to one of them.
    assert 0 <= result["ours"]["drawn by the second of both"] <= 1


def test_int8_error(capsys: Any, tiny: tuple[str, str]) -> None:
    size = ("--sequences", "2", "--length", "24", "--threads", "1")
    ours = reported("int8_error", capsys, *tiny, *size)["ours"]["int8"]
    assert ours["tokens"] == 2 * 23
    assert 0 < ours["mean_difference"] < ours["largest_difference"]
    assert 0 < ours["same_likeliest_token"] <= 1


def test_a_program_that_is_not_built_is_named_first(tmp_path: Path) -> None:
    script = str(processes.HERE / "run.py")
    done = subprocess.run(
        [sys.executable, script, "sample"],
        env={**os.environ, "WEFT_BUILD_DIR": str(tmp_path)},
        text=True,
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "_bench is not built: cmake --build --preset cpu --target" in done.stderr


@pytest.mark.parametrize("name", ["peer_options", "timing"])
def test_a_peer_without_torch_can_use(name: str) -> None:
    # With -S, Python does not see its installed packages.
    program = processes.HERE / f"{name}.py"
    subprocess.run([sys.executable, "-S", program], check=True)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_decode_counts_the_bytes_of_an_iteration(
    dtype: str, tiny: tuple[str, str]
) -> None:
    program = daemon.BUILD_DIR / "tests" / "bench" / "decode_bench"
    result = processes.run_program(
        [program, tiny[1], dtype, "3", "4", "6", "1", "cpu"], 1
    )
    assert 0 < result["seconds"] <= result["middle_seconds"]
    rate = result["bytes_per_iteration"] / result["middle_seconds"]
    assert result["fraction_of_read_rate"] == pytest.approx(
        rate / result["read_bytes_per_second"]
    )
    assert result["tokens_per_second"] == pytest.approx(3 / result["seconds"])
    width = 2 if dtype == "bf16" else 4
    # The cache has three sequences of 4 + 6 / 2 tokens. It is f32 for both dtypes.
    wanted = flops.decode_bytes(inputs.config(Path(tiny[1])), 3, 7, width, 4)
    assert result["bytes_per_iteration"] == wanted


def test_decode_counts_the_experts_that_tokens_chose(tmp_path: Path) -> None:
    program = daemon.BUILD_DIR / "tests" / "bench" / "decode_bench"
    config = shapes.SHAPES["tiny-moe"]
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    chosen = config["num_hidden_layers"] * config["num_experts_per_tok"]
    one, three = (
        processes.run_program(
            [program, str(tmp_path), "f32", batch, "4", "6", "1", "cpu"], 1
        )
        for batch in "13"
    )
    assert one["experts_per_iteration"] == chosen
    assert chosen < three["experts_per_iteration"] <= 3 * chosen
    routers = 4 * config["num_hidden_layers"] * config["hidden_size"]
    routers *= config["num_experts"]
    wanted = flops.decode_bytes(config, 1, 7, 4, 4) + routers
    assert one["bytes_per_iteration"] == wanted


def test_decode_counts_the_states_of_sequences(tmp_path: Path) -> None:
    program = daemon.BUILD_DIR / "tests" / "bench" / "decode_bench"
    config = shapes.SHAPES["tiny-hybrid"]
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    result = processes.run_program(
        [program, tmp_path, "f32", "3", "4", "6", "1", "cpu"], 1
    )
    assert result["bytes_per_iteration"] == flops.decode_bytes(config, 3, 7, 4, 4)


def test_flops_of_a_gated_delta_rule_counted_by_hand() -> None:
    config = {
        "hidden_size": 4,
        "num_hidden_layers": 2,
        "full_attention_interval": 2,
        "attn_output_gate": True,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 3,
        "linear_value_head_dim": 5,
        "linear_conv_kernel_dim": 4,
        "intermediate_size": 8,
        "vocab_size": 10,
    }
    # q and its gates 4x8, k and v 4x2, o 4x4. The rule has qkv 4x16, z 4x10, b and a
    # 4x2, out 10x4. Both have gate, up and down 4x8.
    attention, rule, mlp = 32 + 8 + 8 + 16, 64 + 40 + 8 + 8 + 40, 3 * 32
    lora = (12 + 6 + 6 + 8) + (20 + 14 + 6 + 6 + 14) + 2 * 36
    base = attention + rule + 2 * mlp
    state = 2 * 3 * 5
    expected = 6 * (4 * base + 6 * lora + 18 * state) + 14 * 18 * 4 + 4 * 5 * 4 * 10
    assert flops.step(config, 1, [flops.Run(6)], 5) == expected
    assert flops.model_flops(config, 6) == 4 * 6 * (base + 4 * 10)
    # Two sequences of three tokens: keys and values of one layer, and the state and
    # three rows of 16 features of the other one.
    kept = 4 * (3 * 4 + 3 * 16) + 4 * state
    assert flops.decode_bytes(config, 2, 3, 2, 4) == 2 * (base + 40) + 2 * kept


def test_flops_of_one_layer_counted_by_hand() -> None:
    config = {
        "hidden_size": 4,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 8,
        "vocab_size": 10,
    }
    # The sizes are q 4x4, k and v 4x2, o 4x4, gate, up and down 4x8.
    base, lora = 16 + 8 + 8 + 16 + 3 * 32, 8 + 6 + 6 + 8 + 3 * 12
    expected = 6 * (4 * base + 6 * lora) + 14 * 18 * 4 + 4 * 5 * 4 * 10
    assert flops.step(config, 1, [flops.Run(6)], 5) == expected
    # The second half of a row of six attends to itself and to the first half.
    halves = [flops.Run(3), flops.Run(3, before=3)]
    assert flops.step(config, 1, halves, 5) == expected
    assert flops.model_flops(config, 6) == 4 * 6 * (base + 4 * 10)
    # A weight has 2 bytes, and a number in the cache has 4. The cache has 2 x 3 tokens,
    # each with 2 numbers in its key and 2 in its value.
    assert flops.decode_bytes(config, 2, 3, 2, 4) == 2 * (base + 40) + 4 * 6 * 2 * 2
