"""Tests that every kernel of preset cuda keeps its values in registers, lets an SM
hold enough warps, and moves and multiplies with the intended instructions."""

from __future__ import annotations

import os
import re
from pathlib import Path

import device_code
import pytest
from device_code import Kernel
from device_rules import EARLY, RULES, Rule

ROOT = Path(__file__).resolve().parents[3]
BUILD = Path(os.environ.get("WEFT_CUDA_BUILD_DIR", ROOT / "build" / "cuda"))
LIBRARY = BUILD / "kernels" / "cuda" / "libweft_kernels_cuda.a"


@pytest.fixture(scope="module")
def kernels() -> list[Kernel]:
    if not LIBRARY.exists():
        pytest.skip("preset cuda was not built")
    if device_code.tool() is None:
        pytest.skip("no cuobjdump")
    # The rules apply only to sm_90, the one architecture that was measured.
    found = [k for k in device_code.read(LIBRARY) if k.arch.startswith("sm_90")]
    if not found:
        pytest.skip("preset cuda was not built for sm_90")
    return found


def _rule(kernel: Kernel) -> Rule:
    found = [rule for name, rule in RULES.items() if re.fullmatch(name, kernel.name)]
    assert len(found) == 1, f"{kernel.name} has {len(found)} rules in device_rules.py"
    return found[0]


def _label(kernel: Kernel) -> str:
    return f"{kernel.arch} {kernel.name}"


def test_each_kernel_has_a_rule_and_each_rule_a_kernel(kernels: list[Kernel]) -> None:
    for kernel in kernels:
        _rule(kernel)
    names = {kernel.name for kernel in kernels}
    unused = [n for n in RULES if not any(re.fullmatch(n, name) for name in names)]
    assert not unused


def test_nothing_is_kept_in_local_memory(kernels: list[Kernel]) -> None:
    spilled = [
        f"{_label(kernel)}: {kernel.stack_bytes + kernel.local_bytes} bytes"
        for kernel in kernels
        if kernel.local_bytes or kernel.has("LDL") or kernel.has("STL")
    ]
    assert not spilled, "\n" + "\n".join(spilled)


def test_an_sm_holds_as_many_warps_as_the_rule_says(kernels: list[Kernel]) -> None:
    crowded = []
    for kernel in kernels:
        rule = _rule(kernel)
        warps = kernel.resident_warps(rule.threads, rule.dynamic_shared_bytes)
        if warps < rule.warps:
            crowded.append(
                f"{_label(kernel)}: {warps} warps < {rule.warps}: {kernel.registers} "
                f"registers, {kernel.shared_bytes} + {rule.dynamic_shared_bytes} bytes"
            )
    assert not crowded, "\n" + "\n".join(crowded)


def test_kernels_use_the_instructions_they_are_built_on(kernels: list[Kernel]) -> None:
    missing = [
        f"{_label(kernel)}: no {mnemonic}"
        for kernel in kernels
        for mnemonic in _rule(kernel).instructions
        if not kernel.has(mnemonic)
    ]
    assert not missing, "\n" + "\n".join(missing)


def test_stores_are_as_wide_as_the_rule_says(kernels: list[Kernel]) -> None:
    split = [
        f"{_label(kernel)}: a store of {bits} bits < {least}"
        for kernel in kernels
        if (bits := kernel.narrowest_store()) < (least := _rule(kernel).store_bits)
    ]
    assert not split, "\n" + "\n".join(split)


def test_kernels_that_start_early_wait_and_no_others(kernels: list[Kernel]) -> None:
    wrong = [
        _label(kernel)
        for kernel in kernels
        if kernel.has("ACQBULK") != bool(EARLY.fullmatch(kernel.name))
    ]
    assert not wrong, "\n" + "\n".join(wrong)


USAGE = """
arch = sm_90a
 Function _ZN1a6KernelIfLi64EEEvl:
  REG:70 STACK:0 SHARED:2048 LOCAL:16 CONSTANT[0]:544
"""
CODE = """
arch = sm_90a
\t\tFunction : _ZN1a6KernelIfLi64EEEvl
        /*0010*/                   LDG.E.128.CONSTANT R4, desc[UR4][R2.64] ;
                                                                    /* 0x00000 */
        /*0020*/              @!P0 STL [R1], R4 ;
        /*0030*/                   STG.E.128 desc[UR4][R2.64], R4 ;
        /*0040*/              @!P0 STG.E desc[UR4][R2.64+0x10], R4 ;
"""


def test_reads_resources_and_instructions() -> None:
    (kernel,) = device_code.kernels_of(USAGE, CODE)
    assert (kernel.arch, kernel.registers, kernel.local_bytes) == ("sm_90a", 70, 16)
    assert kernel.name == "a::Kernel<float, 64>"
    assert kernel.has("LDG.128") and kernel.has("STL") and not kernel.has("LDG.64")
    assert kernel.narrowest_store() == 32
    kernel.instructions.add("STG.E.U16")
    assert kernel.narrowest_store() == 16
    kernel.instructions = {"STG.E.EF.64", "STS.U16"}
    assert kernel.narrowest_store() == 64
    # With 70 registers per thread, a warp takes 9 x 256 = 2304 registers.
    # 65536 / 2304 = 28 warps, or 7 blocks of 4 warps.
    assert kernel.resident_warps(128) == 28
    # 233,472 bytes / (2,048 + 97,280 + 1,024) = 2 blocks.
    assert kernel.resident_warps(128, 97280) == 8
