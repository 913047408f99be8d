"""The rules for nvcc's output. Each has a regular expression for kernels' names, and

- the threads of a block, and the bytes of its dynamic shared memory;
- the warps that an SM of compute capability 9.0 must hold at a time: at least 32 if a
  thread has one or two loads of 16 bytes in flight; fewer if it has several, or if
  whole stages are being copied to shared memory;
- the instructions that must occur: 128-bit loads and stores if rows are moved; HMMA
  fed by LDSM and LDGSTS if tiles are multiplied;
- the bits of its narrowest store to global memory, if nvcc must not split the stores.

Kernels that read one element at a time (a width of 1, for rows that do not begin at
multiples of 16 bytes) need no wide instructions."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Rule:
    threads: int
    warps: int
    instructions: tuple[str, ...] = ()
    dynamic_shared_bytes: int = 0
    store_bits: int = 0  # 0: stores may have any width.


WIDE = ("LDG.128", "STG.128")
TILES = ("HMMA", "LDSM", "LDGSTS.128")

# The dtype of rows, or of the weights that are read with them.
_T = "(float|__nv_bfloat16)"
_N = "[48]"  # Number of elements in 16 bytes.

_ROWS = {
    rf"GatedProduct(Backward)?Kernel<{_T}, 1, \d>": Rule(256, 48),
    rf"GatedProduct(Backward)?Kernel<{_T}, {_N}, \d>": Rule(
        256, 48, WIDE, store_bits=128
    ),
    rf"HeadGradientKernel<{_T}, 1>": Rule(256, 48),
    rf"HeadGradientKernel<{_T}, {_N}>": Rule(256, 40, WIDE, store_bits=128),
    rf"LseMergeKernel<{_T}, 1>": Rule(256, 48),
    rf"LseMergeKernel<{_T}, {_N}>": Rule(256, 48, WIDE),
    rf"RmsNormKernel<{_T}, {_T}, 1, \w+>": Rule(512, 48),
    rf"RmsNormKernel<{_T}, {_T}, {_N}, \w+>": Rule(512, 48, WIDE, store_bits=128),
    rf"RmsNormBackwardKernel<{_T}, {_T}, 1>": Rule(512, 32),
    rf"RmsNormBackwardKernel<{_T}, {_T}, {_N}>": Rule(512, 16, WIDE, store_bits=128),
    rf"Rotary(Backward)?Kernel<{_T}, {_T}, 1, \w+>": Rule(384, 24),
    rf"Rotary(Backward)?Kernel<{_T}, {_T}, {_N}, \w+>": Rule(
        384, 24, WIDE, store_bits=128
    ),
    r"VocabRowsKernel<1, \d>": Rule(512, 48),
    # A kernel without the softmax (0) writes no whole rows, so it has no wide stores.
    rf"VocabRowsKernel<{_N}, 0>": Rule(512, 48, ("LDG.128",)),
    rf"VocabRowsKernel<{_N}, [12]>": Rule(512, 48, WIDE),
}

_SAMPLER = {
    "ChunkMaxKernel": Rule(256, 48, ("LDG.128",)),
    "CountKernel": Rule(512, 32, ("LDG.128",)),
    "DrawKernel": Rule(256, 40, ("LDG.128",)),
    "EditLogitsKernel": Rule(1024, 32, ("LDG.128",)),
    "ListTokensKernel": Rule(1024, 32),
}

# The sort and the search read a few numbers for each row.
_EXPERTS = {
    rf"SumExpertRowsKernel<{_T}, 1>": Rule(256, 48),
    rf"SumExpertRowsKernel<{_T}, {_N}>": Rule(256, 32, WIDE, store_bits=128),
    "KeepExpertsKernel": Rule(256, 48),
    "SortByExpertKernel": Rule(256, 48),
    "FindLoraExpertRowsKernel": Rule(512, 32),
}

# A warp loads keys and values directly into the registers that it multiplies.
_ATTENTION = {
    rf"PagedAttentionKernel<{_T}, [1-4], true>": Rule(128, 8, ("LDG.128", "HMMA")),
    rf"PagedAttentionKernel<{_T}, [1-4], false>": Rule(128, 8, ("HMMA",)),
}


def _stages(rank: int, stages: int) -> int:
    """Returns the bytes of `stages` stages. Each holds 64 bf16 numbers for each of 128
    rows (or features) and for each rank."""
    return stages * (128 + rank) * 64 * 2


def _expand_bytes(rank: int) -> int:
    """Returns the bytes of 128 rows and 64 features with `rank` bf16 numbers each, and
    of y's tile."""
    return (128 + 64) * rank * 2 + 128 * 64 * 2


_TILES: dict[str, Rule] = {}
for _rank, _blocks in ((16, 3), (32, 2), (64, 2), (128, 1)):
    _kind = rf"<TileKind<[01], {_rank}> >"
    _warps = 8 * _blocks
    _bytes = _stages(_rank, 4 if _rank <= 64 else 3)
    _TILES |= {
        f"ShrinkKernel{_kind}": Rule(256, _warps, TILES, _bytes),
        f"ExpandKernel{_kind}": Rule(
            256, 24, (*TILES, "STG.128"), _expand_bytes(_rank)
        ),
        f"LoraGradientKernel{_kind}": Rule(256, _warps, TILES, _bytes),
    }

# With few rows, a warp loads a matrix directly into the registers that it multiplies.
_FEW_ROWS = {
    "few_rows::ShrinkKernel": Rule(256, 24, ("LDG.128", "HMMA")),
    r"few_rows::ExpandKernel<[12]>": Rule(128, 16, ("LDG.128", "HMMA")),
    "few_rows::SumKernel": Rule(128, 32, ("LDG.128",)),
}


def _ring(outputs: int) -> int:
    """Returns the bytes of four stages for each of a block's eight warps. A stage holds
    64 inputs of each output."""
    return 8 * 4 * outputs * 64


# 8-bit weights go through shared memory to the registers that a warp multiplies.
_COPIED = ("LDG.128", "LDGSTS.128", "HMMA")
_INT8 = {
    rf"WidenInt8Kernel<{_T}>": Rule(256, 48, WIDE, store_bits=128),
    "few_int8::Int8FewRowsKernel<few_int8::Shape<[12]> >": Rule(
        256, 24, _COPIED, _ring(16)
    ),
    "few_int8::Int8FewRowsKernel<few_int8::Shape<[48]> >": Rule(
        256, 8, _COPIED, _ring(32)
    ),
}

# The memory of the kernels of chunks is that of delta::ScoresMemory, ForwardMemory,
# StatesMemory and RowsMemory. Two blocks fit on an SM, or three of the first.
_CHUNKS = ("HMMA", "LDSM", "LDGSTS.128", "STG.64")
_DELTA = {
    rf"DeltaMixKernel<{_T}, {_T}, 1, 8>": Rule(256, 24),
    rf"DeltaMixKernel<{_T}, {_T}, {_N}, 4>": Rule(256, 32, WIDE),
    rf"DeltaMixBackwardKernel<{_T}, {_T}, 1, 8>": Rule(256, 24),
    rf"DeltaMixBackwardKernel<{_T}, {_T}, {_N}, 4>": Rule(256, 24, WIDE),
    rf"DeltaConvBackwardKernel<{_T}, {_T}, 1>": Rule(256, 48),
    rf"DeltaConvBackwardKernel<{_T}, {_T}, {_N}>": Rule(256, 40, WIDE),
    rf"DeltaStepKernel<{_T}>": Rule(256, 16),  # 16 loads in flight.
    rf"GatedNorm(Backward)?Kernel<{_T}, {_T}>": Rule(256, 32),
    "delta::DeltaScoresKernel": Rule(
        256, 24, ("HMMA", "LDSM", "LDGSTS.128", "STG.128"), 67328
    ),
    "delta::DeltaChunkKernel": Rule(256, 16, (*_CHUNKS, "STG.128"), 91392),
    "delta::DeltaStatesBackwardKernel": Rule(256, 16, (*_CHUNKS, "STG.128"), 91392),
    "delta::DeltaRowsBackwardKernel": Rule(256, 16, (*_CHUNKS, "LDG.128"), 96768),
}

# The kernels that LaunchEarly starts. They wait for earlier launches themselves.
EARLY = re.compile(
    r"(GatedProduct|PagedAttention|RmsNorm|Rotary|RotaryBackward)Kernel<.*>"
    r"|few_rows::(Expand|Shrink)Kernel.*"
    r"|WidenInt8Kernel<.*>|few_int8::Int8FewRowsKernel<.*>"
)

RULES: dict[str, Rule] = {
    "AdamWKernel": Rule(256, 48),
    "SumOfSquaresKernel": Rule(256, 48),
    "SumPartialsKernel": Rule(256, 48),
    **_ROWS,
    **_SAMPLER,
    **_EXPERTS,
    **_ATTENTION,
    **_TILES,
    **_FEW_ROWS,
    **_INT8,
    **_DELTA,
}
