"""Makes the cells of README's table of figures from the JSON lines of benches."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

Result = dict[str, Any]
Cells = tuple[str, str, str]  # Weft's figures, the peer's figures, their ratio.

NOT_HERE: Cells = ("not on this CPU", "", "")
PEFT = "transformers + peft"

# --- Numbers as a reader wants them ------------------------------------------


def _number(value: float) -> str:
    """Returns the value as text, with one decimal if it is below 10, else with none."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def _times(value: float) -> str:
    return f"{value:.2f}" if value < 2 else _number(value)


def _list(values: list[float], form: Callable[[float], str] = _number) -> str:
    return ", ".join(map(form, values))


def _gib(side: Mapping[str, Any]) -> str:
    return f"{side['extra_rss_bytes'] / 2**30:.1f} GiB"


def _rate(side: Mapping[str, Any]) -> str:
    return _number(side["tokens_per_second"])


def _seconds(value: float) -> str:
    return f"{value:.1f} s"


def _apart(name: str, side: Mapping[str, Any], reference: Mapping[str, Any]) -> str:
    """Returns the relative difference as text, such as 1.8e-4."""
    value = abs(side[name] - reference[name]) / abs(reference[name])
    digits, exponent = f"{value:.1e}".split("e")
    return f"{digits}e{int(exponent)}"


def _speed_and_memory(ours: Mapping[str, Any], peer: Mapping[str, Any]) -> str:
    speed = _times(peer["seconds"] / ours["seconds"])
    return f"{speed}, memory {ours['extra_rss_bytes'] / peer['extra_rss_bytes']:.2f}"


# --- Cells, by row -----------------------------------------------------------


def step(result: Result) -> Cells:
    ours, peer = result["ours"]["weft"], result["peer"]["naive"]
    return (
        f"{_rate(ours)} tok/s, {100 * ours['fraction_of_gemm_rate']:.0f} % of the GEMM"
        f" rate, {_gib(ours)} above the weights",
        f"{PEFT}: {_rate(peer)} tok/s, {_gib(peer)}",
        _speed_and_memory(ours, peer),
    )


def step_bf16(result: Result) -> Cells:
    f32, ours = result["ours"]["weft"], result["ours"]["weft bf16"]
    peer_f32, peer = result["peer"]["naive"], result["peer"]["naive bf16"]
    return (
        f"{_rate(ours)} tok/s, {_times(f32['seconds'] / ours['seconds'])} of f32;"
        f" loss {_apart('loss', ours, f32)} and gradient norm"
        f" {_apart('grad_norm', ours, f32)} from f32",
        f"{PEFT} under bf16 autocast: {_rate(peer)} tok/s;"
        f" {_apart('loss', peer, peer_f32)} and {_apart('grad_norm', peer, peer_f32)}",
        _speed_and_memory(ours, peer),
    )


def recomputed(result: Result) -> Cells:
    ours, peer = result["ours"]["all"], result["peer"]["lean"]
    return (
        f"{_rate(ours)} tok/s, {_gib(ours)}",
        "peft with its own checkpointing and a chunked loss:"
        f" {_rate(peer)} tok/s, {_gib(peer)}",
        _speed_and_memory(ours, peer),
    )


def moe(result: Result) -> Cells:
    ours, peers = result["ours"]["weft"], result["peer"]
    best, other = sorted(peers, key=lambda name: float(peers[name]["seconds"]))
    return (
        f"{_rate(ours)} tok/s, {_gib(ours)} above the weights",
        f"{PEFT}, `{best}`: {_rate(peers[best])} tok/s, {_gib(peers[best])};"
        f" `{other}`: {_rate(peers[other])} tok/s",
        _speed_and_memory(ours, peers[best]),
    )


def group_prompt(result: Result) -> Cells:
    ours, peer = result["ours"], result["peer"]["peer"]["seconds"]
    shared, repeated = ours["shared"]["seconds"], ours["repeated"]["seconds"]
    return (
        _seconds(shared),
        f"{PEFT}: {_seconds(peer)}; here without sharing: {_seconds(repeated)}",
        f"{_times(peer / shared)}; {_times(repeated / shared)}",
    )


def adapters(result: Result) -> Cells:
    config, ours, peer = result["config"], result["ours"], result["peer"]["peer"]
    side = f"{config['adapters']} adapters"
    own = ours[side]
    others = {int(name.split()[0]): _rate(ours[name]) for name in ours if name != side}
    here = [f"{_rate(own)} tok/s; all of one adapter {others.pop(1)}"]
    here += [f"of {count} adapters {rate}" for count, rate in sorted(others.items())]
    padded = ", padded" if config["shortest"] < config["longest"] else ""
    return (
        ", ".join(here),
        f"{PEFT}, adapter by adapter{padded}: {_rate(peer)} tok/s",
        _times(peer["seconds"] / own["seconds"]),
    )


def _drawn(result: Result, side: Mapping[str, Any], batch: int) -> float:
    """Returns tokens per second of `batch` sequences, prompts included."""
    tokens = float(result["config"]["tokens"])
    return batch * tokens / float(side["seconds"][str(batch)])


def sample(result: Result) -> Cells:
    ours, peer = result["ours"]["weft f32"], result["peer"]["transformers"]
    batches = (1, 8, 32)
    here = [_drawn(result, ours, batch) for batch in batches]
    there = [_drawn(result, peer, batch) for batch in batches]
    ratios = [own / other for own, other in zip(here, there, strict=True)]
    return (
        f"{_list(here)} tok/s",
        f"transformers generate: {_list(there)} tok/s",
        _list(ratios, _times),
    )


def _reading(side: Mapping[str, Any]) -> str:
    """Returns the fraction of a token's time that reading the weights takes. This is
    the median over the pairs."""
    parts = [pair["reading"] / pair["token"] for pair in side["pairs"]]
    return f"{statistics.median(parts):.2f}"


def one_sequence(result: Result) -> Cells:
    ours = [result["ours"][f"weft {dtype}"] for dtype in ("f32", "bf16")]
    here = [_drawn(result, side, 1) for side in ours]
    reading = ", ".join(map(_reading, ours))
    cell = f"{_list(here)} tok/s; {reading} of the weights' reading speed"
    peers = [result["peer"].get(f"llama.cpp {dtype}") for dtype in ("f32", "bf16")]
    there = [_drawn(result, side, 1) for side in peers if side is not None]
    if len(there) < len(here):
        return cell, "llama.cpp: not measured", ""
    ratios = [own / other for own, other in zip(here, there, strict=True)]
    return cell, f"llama.cpp: {_list(there)} tok/s", _list(ratios, _times)


def int8(result: Result) -> Cells:
    ours = result["ours"]["weft int8"]
    here = _drawn(result, ours, 1)
    bf16 = _drawn(result, result["ours"]["weft bf16"], 1)
    peer, ratio = f"here in bf16: {_number(bf16)} tok/s", _times(here / bf16)
    llama = result["peer"].get("llama.cpp int8")
    if llama is not None:
        there = _drawn(result, llama, 1)
        peer += f"; llama.cpp with Q8_0: {_number(there)} tok/s"
        ratio += f"; {_times(here / there)}"
    reading = f"{_reading(ours)} of the weights' reading speed"
    return f"{_number(here)} tok/s; {reading}", peer, ratio


def one_prompt(result: Result) -> Cells:
    seconds = result["ours"]["weft f32"]["seconds"]
    return (
        _seconds(seconds["group"]),
        f"as 16 prompts: {_seconds(seconds['separate'])}",
        _times(seconds["separate"] / seconds["group"]),
    )


def mixed_load(result: Result) -> Cells:
    flooded = result["ours"]["points"][-1]
    first, batch = flooded["first_token"]["p95"], flooded["batch_seconds"]
    clients = f"{flooded['trainers']} clients"
    here = f"{_seconds(first)} beside {clients}, a micro-batch is {_seconds(batch)}"
    return here, "", ""


def load(result: Result) -> Cells:
    ours, peer = result["ours"]["weft"], result["peer"]["cat"]
    size = result["config"]["bytes"] / 1e9
    return (
        f"{size:.1f} GB at {ours['bytes_per_second'] / 1e9:.1f} GB/s",
        f"`cat` to /dev/null: {peer['bytes_per_second'] / 1e9:.1f} GB/s",
        _times(peer["seconds"] / ours["seconds"]),
    )


def logprobs(result: Result) -> Cells:
    def cell(side: Mapping[str, Any]) -> str:
        return f"{_seconds(side['seconds'])}, {side['extra_rss_bytes'] / 2**20:.0f} MiB"

    ours, peer = result["ours"]["fused"], result["peer"]["naive"]
    there = f"torch log_softmax: {cell(peer)}"
    return cell(ours), there, _speed_and_memory(ours, peer)


def large_request(result: Result) -> Cells:
    seconds = result["ours"]["large request"]["cpu_seconds_outside_engine"]
    return f"{_number(seconds * 1e3)} ms", "", ""


def calls(result: Result) -> Cells:
    calls = result["ours"]["calls"]
    names = ("forward_backward 1 x 16", "optim_step", "sample 1 x 1")
    return f"{_list([calls[name] * 1e3 for name in names])} ms", "", ""
