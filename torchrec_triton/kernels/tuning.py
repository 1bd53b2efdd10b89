"""Tile sizes. They change speed, not what is computed, though they may change the order of a sum and so its last bit.

Values were found on one H200 (torch 2.11, triton 3.6); docs/notes/kernel-log.md says by which runs.
"""
from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tiles:
    """Elements of a kernel's tile, rows times padded dim; a warp takes WARP_TILE of them.

    forward: rows in flight of the pooled lookup, fp16 and bf16; fp32 rows get half.
    single, short: runs side by side, a run a row.
    long: lookups of a long run side by side; partial: the same for a whole block.
    """

    forward: int = 512
    single: int = 512
    short: int = 512
    long: int = 4096
    partial: int = 4096


TILES = Tiles()
