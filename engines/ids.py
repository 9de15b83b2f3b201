"""The one flat space of engine ids.

Backend engines keep the numbers that cuDNN gives them, [0, 10_000). [10_000, 20_000) is reserved. Python engines start
at 20_000 in blocks of 100 for each family; a block is fixed once it shipped, so that an id in an autotune record means
the same engine in every release.
"""

from __future__ import annotations

BACKEND_IDS = range(0, 10_000)
RESERVED_IDS = range(10_000, 20_000)
PYTHON_BASE = 20_000
FAMILY_BLOCK_WIDTH = 100
REFERENCE_SLOT = 99

FAMILY_BLOCKS: dict[str, int] = {
    "gdn": 20_100,
    "kda": 20_200,
    "gdn2": 20_300,
    "gemm": 20_400,
    "sdpa_fwd": 20_500,
    "sdpa_bwd": 20_600,
    "conv": 20_800,
    "norm_fwd": 21_000,
    "norm_bwd": 21_100,
    "pointwise": 21_200,
    "generic": 21_900,
}


def engine_id(family: str, slot: int) -> int:
    """The id of `slot` (0 to 99) in `family`'s block."""
    if not 0 <= slot < FAMILY_BLOCK_WIDTH:
        raise ValueError(f"slot {slot} is outside a family's block of {FAMILY_BLOCK_WIDTH}")
    return FAMILY_BLOCKS[family] + slot


def decode(number: int) -> tuple[str, int]:
    """(family, slot) of an engine id; backend ids decode to ("backend", number)."""
    if number in BACKEND_IDS:
        return "backend", number
    block = number - number % FAMILY_BLOCK_WIDTH
    for family, base in FAMILY_BLOCKS.items():
        if base == block:
            return family, number - base
    raise ValueError(f"engine id {number} belongs to no family")
