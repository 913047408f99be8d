"""Tests that the benches still run, and that they compare and count correctly. The
sizes are tiny, so the times mean nothing."""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

# Waiting threads must sleep, because other tests need the core.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import run  # Sets the import path for the modules below.

# isort: split
import daemon
import flops
import group_prompt
import inputs
import int8_error
import logprobs
import memory
import models
import multi_adapter
import processes
import report
import sample
import sample_client
import shapes
import tinker_sdk
import torch_peer

QUICK = ["--threads", "1", "--rounds", "1", "--reps", "1"]
RUN_PROGRAM = processes.run_program


def run_in_this_process(command: Sequence[str | Path], threads: int) -> report.Run:
    """Replaces run_program, so that transformers is imported once for all peers."""
    program, *arguments = [str(part) for part in command]
    if program != sys.executable:
        return RUN_PROGRAM(command, threads)
    output = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(output):
        patch.setattr(sys, "argv", arguments)
        runpy.run_path(arguments[0], run_name="__main__")
    result: report.Run = json.loads(output.getvalue().splitlines()[-1])
    return result


@pytest.fixture(autouse=True)
def one_import(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (processes, logprobs, sample):
        monkeypatch.setattr(module, "run_program", run_in_this_process)


@pytest.fixture(autouse=True)
def brief_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the rates of the machine quick to measure. At the sizes of a bench, each
    peer would take seconds."""
    monkeypatch.setitem(torch_peer.GEMM_SHAPE, "cpu", (64, 48, 32))
    monkeypatch.setitem(torch_peer.READ_BYTES, "cpu", 1 << 16)
    monkeypatch.setattr(sample_client, "PAIRS", 2)


def reported(name: str, capsys: Any, *arguments: str) -> dict[str, Any]:
    """Returns what a bench prints on stdout."""
    assert run.BENCHES[name](list(arguments)) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["bench"] == name
    return result


def quick(name: str, capsys: Any, *arguments: str) -> dict[str, Any]:
    return reported(name, capsys, *QUICK, *arguments)


def compared(name: str, capsys: Any, *arguments: str) -> dict[str, Any]:
    """Returns the report of a bench whose sides have common figures."""
    result = quick(name, capsys, *arguments)
    for side in (result["ours"] | result["peer"]).values():
        assert side["tokens_per_second"] > 0
        assert side["fraction_of_gemm_rate"] > 0
        assert side["peak_rss_bytes"] > side["extra_rss_bytes"]
    return result


@pytest.fixture(scope="module")
def tiny() -> tuple[str, str]:
    return ("--model", str(models.tiny_model("llama-tied")))


# Selects the model `tiny` of shapes.py, which is written on first use, and the CPU.
SHAPE = ("--shape", "tiny", "--device", "cpu")


def test_train_step(capsys: Any) -> None:
    size = ("--batch", "2", "--length", "16", "--rank", "8")
    result = compared("train_step", capsys, *SHAPE, *size)
    assert result["ratio"].keys() == {"speed weft/naive", "model FLOPs/GEMM rate"}
    assert (result["config"]["rank"], result["config"]["device"]) == (8, "cpu")
    beside = compared("train_step", capsys, *SHAPE, *size, "--cpu-bf16")
    assert beside["ours"].keys() == {"weft", "weft bf16"}
    assert beside["peer"].keys() == {"naive", "naive bf16"}


def test_moe(capsys: Any) -> None:
    size = ("--shape", "tiny-moe", "--batch", "2", "--length", "16")
    result = compared("moe", capsys, *size)
    assert result["peer"].keys() == {"eager", "grouped_mm"}


def test_memory(capsys: Any, tiny: tuple[str, str]) -> None:
    size = ("--batch", "4", "--length", "32", "--chunk", "16")
    result = compared("memory", capsys, *tiny, *size)
    assert result["head_bytes_by_rows"].keys() == {"16", "32", "64"}
    assert result["ours"].keys() == {"all", "off"}
    assert result["peer"].keys() == {"naive", "lean"}
    fewer = compared("memory", capsys, *tiny, *size, "--recomputed")
    assert fewer["ours"].keys() == {"all"} and fewer["peer"].keys() == {"lean"}
    assert fewer["ratio"].keys() == {"speed all/lean", "memory all/lean"}


def test_group_prompt(capsys: Any) -> None:
    size = ("--group", "3", "--prompt", "32", "--completion", "8", "--slice", "2")
    ratios = compared("group_prompt", capsys, *SHAPE, *size)["ratio"]
    speed = ratios.pop("speed shared/repeated")["value"]
    # Repeated prompts make 3 * (32 + 8) tokens. A shared prompt makes 32 + 3 * 8.
    over = ratios.pop("speed shared/repeated over that of the tokens")["value"]
    assert over * 3 * 40 / 56 == pytest.approx(speed)
    assert ratios.keys() == {"speed shared/peer"}


@pytest.mark.parametrize(
    ("op", "sizes", "peers"),
    [
        ("attention", "2 40 9 3 16", {"LibTorch"}),
        ("grouped", "90 48 20 7", {"grouped_mm", "loop"}),
    ],
)
def test_op(op: str, sizes: str, peers: set[str], capsys: Any) -> None:
    options = (op, "--sizes", *sizes.split(), "--reps", "1", "--threads", "1")
    result = reported("op", capsys, *options)
    assert result["peer"].keys() == peers
    assert all(ratio["value"] > 0 for ratio in result["ratio"].values())
    for side in (result["ours"] | result["peer"]).values():
        assert ("gflops" in side) == (op == "grouped")


def test_logprobs(capsys: Any) -> None:
    size = ("--rows", "96", "--hidden", "32", "--vocab", "500", "--chunk", "40")
    for sizes in (size, ("--rows", "48", *SHAPE)):
        result = compared("logprobs", capsys, *sizes)
        assert result["ratio"]["forward fused/GEMM rate"]["value"] > 0
        for side in (result["ours"] | result["peer"]).values():
            assert side["logprobs_error"] <= logprobs.TOLERANCE
            assert side["dhidden_error"] <= logprobs.TOLERANCE
    assert (result["config"]["hidden"], result["config"]["vocab"]) == (64, 320)


def test_a_wrong_head_ends_the_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoilt(command: Sequence[str | Path], threads: int) -> report.Run:
        run = run_in_this_process(command, threads)
        if command[0] == logprobs.HEAD_BENCH:
            path = Path(command[1], "dhidden")
            values = np.fromfile(path, np.float32)
            values[7] *= 1.1
            values.tofile(path)
        return run

    monkeypatch.setattr(logprobs, "run_program", spoilt)
    with pytest.raises(SystemExit, match="fused: dhidden off by"):
        run.BENCHES["logprobs"]([*QUICK, "--rows", "16", *SHAPE])


def test_heads_in_bf16_may_round_but_not_weft_s_logprobs() -> None:
    assert logprobs.bound("fused", "logprobs", "bf16") == logprobs.TOLERANCE
    assert logprobs.bound("naive", "logprobs", "bf16") == 8 * 2.0**-7
    assert logprobs.bound("fused", "dhidden", "bf16") == 8 * 2.0**-7


def test_inputs_of_a_gpu_are_bf16_numbers() -> None:
    import torch

    values = np.random.default_rng(1).standard_normal((7, 33), dtype=np.float32)
    wanted = torch.from_numpy(values).to(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(logprobs.bf16(values), wanted)


def test_multi_adapter(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    def running(*arguments: Any) -> Any:
        started.append(arguments[2:])
        return processes.running(*arguments)

    monkeypatch.setattr(multi_adapter, "running", running)
    size = ("--adapters", "3", "--sequences", "2", "--shortest", "4", "--longest", "24")
    result = compared("multi_adapter", capsys, *SHAPE, *size, "--rank", "4")
    # One weftd ran 3 adapters, another ran 1. Each had one slot of rank 4 per adapter.
    assert started == [
        ("--max-rank", "4", "--max-resident-adapters", count) for count in "31"
    ]
    assert result["ratio"].keys() == {
        "speed weft/peer",
        "model FLOPs/GEMM rate",
        "speed 3 adapters/one",
    }
    losses = [s["loss"] for s in (result["ours"] | result["peer"]).values()]
    assert max(losses) == pytest.approx(min(losses), rel=1e-5)


def test_a_bench_that_moves_adapters_fails() -> None:
    name = "weft_adapter_moves_total"
    page = f'# TYPE {name} counter\n{name}{{direction="host_to_device"}} '
    processes.expect_resident(f"{page}0\n")
    with pytest.raises(SystemExit, match="adapters were moved 2 times"):
        processes.expect_resident(f"{page}2\n")


def test_ragged_sequences_are_dealt_out_once(tiny: tuple[str, str]) -> None:
    options = multi_adapter._parse([*tiny, "--adapters", "3", "--sequences", "4"])
    dealt = multi_adapter.ragged(options)
    lengths = [len(row) - 1 for rows in dealt for row in rows]
    assert [len(rows) for rows in dealt] == [4, 4, 4]
    assert (min(lengths), max(lengths), len(set(lengths))) == (32, 512, 12)


def test_sample(capsys: Any, tmp_path: Path) -> None:
    png = tmp_path / "sample.png"
    sizes = ("--batches", "1", "2", "--prompt", "8", "--tokens", "8")
    plot = ("--plot", str(png))
    group = ("--group-prompt", "24", "--group-tokens", "4")
    result = quick("sample", capsys, *SHAPE, *sizes, *group, *plot)
    assert png.read_bytes().startswith(b"\x89PNG")
    assert result["ours"].keys() == {"weft f32", "weft bf16", "weft int8"}
    assert result["peer"].keys() == {"transformers"}
    assert "group" in result["ours"]["weft f32"]["seconds"]
    assert "group" not in result["ours"]["weft bf16"]["seconds"]
    assert all(entry["value"] > 0 for entry in result["ratio"].values())


def test_sampling_on_a_gpu_is_held_against_its_memory(tmp_path: Path) -> None:
    """The times are invented: reading takes 10 ms per iteration, prefill 20 ms."""
    arguments = [*SHAPE, "--batches", "1", "4", "--prompt", "8", "--tokens", "5"]
    options = sample._parse(arguments)
    options.device = "cuda"
    bench = sample.SampleBench(options, tmp_path)
    model = inputs.config(options.model)
    rate = flops.decode_bytes(model, 1, 10, 2, 2) / 0.010
    points = {"1": 0.070, "1 prefill": 0.020, "4": 0.1, "4 prefill": 0.020}
    points |= dict.fromkeys(("one adapter", "mixed adapters", "group", "separate"), 1.0)
    peer = {"seconds": {"1": 0.14, "4": 0.2}, "gemm_flops_per_second": 1e15}
    peer |= {"read_bytes_per_second": rate, "copy_bytes_per_second": rate / 2}
    weft = {"seconds": points, "pairs": []}
    result = bench._make(
        {"weft bf16": [weft], "transformers": [{**peer, "versions": {}}]}
    )
    assert bench._sides().keys() == {"weft bf16", "transformers"}
    ratios = result["ratio"]
    # The four tokens after the first take 50 ms.
    reached = ratios["fraction of the limit, batch 1"]
    assert reached["value"] == pytest.approx(0.8) and reached["met"]
    assert reached["target"] == ">= 0.75"
    assert ratios["speed weft/transformers, batch 4"] == {"value": pytest.approx(2.0)}


def test_an_unlikely_token_ends_the_bench() -> None:
    sample._expect_likely_tokens({"1": 0.01}, 0.02)
    with pytest.raises(SystemExit, match="batch 8 has a token"):
        sample._expect_likely_tokens({"1": 0.01, "8": 0.03}, 0.02)


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


def test_tinker_overhead(capsys: Any, tiny: tuple[str, str]) -> None:
    result = quick("tinker_overhead", capsys, *tiny, "--data", "16", "--length", "8")
    assert result["ratio"]["seconds tinker/grpc"]["value"] > 0


@pytest.mark.skipif(not tinker_sdk.SDK.exists(), reason="no Tinker SDK")
def test_custom_loss(capsys: Any, tiny: tuple[str, str]) -> None:
    result = quick("custom_loss", capsys, *tiny, "--data", "2", "--length", "8")
    assert set(result["ours"]) == {"dpo", "gspo", "entropy_bonus", "kl", "sixteen"}
    assert all(ratio["value"] > 0 for ratio in result["ratio"].values())


def test_mixed_load(capsys: Any, tiny: tuple[str, str], tmp_path: Path) -> None:
    png = tmp_path / "mixed.png"
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
    time = ("--warm-seconds", "0.2", "--share-seconds", "0.5", "--plot", str(png))
    result = quick("mixed_load", capsys, *tiny, *size, *time)
    assert result["ratio"]["failed requests"]["value"] == 0
    assert result["ours"]["points"][0]["train_tokens_per_second"] > 0
    assert result["ours"]["shares"]["few"] > 0
    assert png.read_bytes().startswith(b"\x89PNG")


def test_builds(capsys: Any, tiny: tuple[str, str], tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.symlink_to(daemon.BUILD_DIR)
    both = (str(daemon.BUILD_DIR), str(other), *tiny)
    size = ("--batch", "2", "--length", "16", "--adapters", "2", "--tokens", "4")
    ratios = quick("builds", capsys, *both, *size)["ratio"]
    assert f"speed {other}/{daemon.BUILD_DIR}, train step" in ratios


def test_sample_many(capsys: Any, tiny: tuple[str, str]) -> None:
    size = ("--prompts", "6", "--samples", "2", "--max-tokens", "8", "--pieces", "2")
    result = quick("sample_many", capsys, *tiny, *size)
    assert result["ours"]["at once"]["drawn_tokens"] <= 6 * 2 * 8
    assert all(entry["value"] > 0 for entry in result["ratio"].values())


def test_residency(capsys: Any, tiny: tuple[str, str]) -> None:
    size = ("--adapters", "5", "--slots", "2", "--length", "16", "--clients", "3")
    result = quick("residency", capsys, *tiny, *size)
    assert result["ratio"]["speed paged/resident, 5 adapters"]["value"] > 0


def test_durability(capsys: Any, tiny: tuple[str, str]) -> None:
    result = quick("durability", capsys, *tiny, "--adapters", "3", "--length", "16")
    assert all(entry["value"] > 0 for entry in result["ratio"].values())
    logged = {side for side, of in result["ours"].items() if of["log_bytes_per_step"]}
    assert logged == {"step", "half"}


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


def test_restart(capsys: Any, tiny: tuple[str, str]) -> None:
    size = ("--adapters", "3", "--unsaved", "2")
    result = reported("restart", capsys, *tiny, *size)
    assert result["ratio"]["seconds of a start after a stop"]["met"]
    assert result["ratio"]["seconds of a start after a kill"]["value"] > 0


def test_soak_counts_every_step_once(capsys: Any) -> None:
    size = ("--clients", "6", "--adapters", "18", "--resident", "4", "--seconds", "3")
    result = quick("soak", capsys, *size, "--processes", "1", "--pause", "0.1")
    assert result["ratio"]["wrong counts"]["value"] == 0
    assert result["ratio"]["failed calls"]["value"] == 0
    assert result["ours"]["steps"] > 0 and result["ours"]["adapter_moves"] > 0


def test_int8_error(capsys: Any, tiny: tuple[str, str]) -> None:
    size = ("--sequences", "2", "--length", "24", "--threads", "1")
    ours = reported("int8_error", capsys, *tiny, *size)["ours"]["int8"]
    assert ours["tokens"] == 2 * 23
    assert 0 < ours["mean_difference"] < ours["largest_difference"]
    assert 0 < ours["same_likeliest_token"] <= 1


def test_the_error_of_8_bits_is_that_of_all_tokens() -> None:
    exact = int8_error.Scores(
        np.array([-1.0, -2.0, -3.0, -4.0]), np.array([5, 6, 7, 8])
    )
    other = int8_error.Scores(
        np.array([-1.0, -1.5, -3.0, -5.0]), np.array([5, 9, 7, 9])
    )
    assert int8_error.compare(exact, other) == {
        "tokens": 4,
        "mean_difference": 0.375,
        "largest_difference": 1.0,
        "same_likeliest_token": 0.5,
    }


def test_load_keeps_to_its_memory_and_reads_each_weight_once(capsys: Any) -> None:
    size = ("--layers", "1", "--shard", "200MB")
    result = reported("load", capsys, "--rounds", "1", "--reps", "1", *size)
    assert result["config"]["files"] > 1
    assert result["ratio"]["peak memory/limit"]["met"]
    assert result["ratio"]["bytes read/limit"]["met"]
    weft = result["ours"]["weft"]
    # The kernel's count may exceed the reader's own count, because the kernel also
    # counts the bytes of config.json.
    assert 0 <= weft["rchar_bytes"] - weft["bytes_read"] < 1 << 16


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
    result = RUN_PROGRAM([program, tiny[1], dtype, "3", "4", "6", "1", "cpu"], 1)
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
        RUN_PROGRAM([program, str(tmp_path), "f32", batch, "4", "6", "1", "cpu"], 1)
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
    result = RUN_PROGRAM([program, tmp_path, "f32", "3", "4", "6", "1", "cpu"], 1)
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


def test_a_shared_prompt_is_less_work_for_the_same_tokens(
    tiny: tuple[str, str],
) -> None:
    options = group_prompt._parse([*tiny, "--group", "4", "--prompt", "64"])
    work = group_prompt.work(options)
    assert work["shared"].tokens == work["repeated"].tokens == 4 * (64 + 64)
    assert work["shared"].flops < 0.7 * work["repeated"].flops
    assert work["peer"] == work["repeated"]


def test_a_group_has_one_prompt_and_many_completions(tiny: tuple[str, str]) -> None:
    tokens = inputs.group(Path(tiny[1]), 5, 20, 10)
    assert tokens.shape == (5, 30)
    assert (tokens[:, :20] == tokens[0, :20]).all()
    assert len({row.tobytes() for row in tokens[:, 20:]}) == 5
    with pytest.raises(SystemExit, match="tokens >"):
        inputs.rows(models.demo_model(), 1 << 12, 1 << 12)


def test_text_is_read_with_the_models_tokenizer() -> None:
    tokens = inputs.rows(models.demo_model(), 8, 513)
    assert tokens.shape == (8, 513)
    assert (tokens == inputs.rows(models.demo_model(), 8, 513)).all()


def test_the_last_rows_of_each_sequence_are_scored() -> None:
    data = memory.scored(np.arange(20).reshape(2, 10), 6)
    for datum in data:
        assert datum.weights is not None
        assert datum.weights.tolist() == [0.0] * 6 + [1.0] * 3
