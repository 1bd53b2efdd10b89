"""Tile sizes. They change speed, not what is computed, though they may change the order of a sum and so its last bit.

Values were found on one H200 (torch 2.11, triton 3.6); docs/notes/kernel-log.md says by which runs.
"""
from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tiles:
    """Elements of a kernel's tile, rows times padded dim; a warp takes WARP_TILE of them.

    forward: rows in flight of the pooled lookup, fp16 and bf16; fp32 rows get half.
    single, short, middle: runs side by side, a run a row.
    medium: one run, its lookups side by side; long: the same for the ends of long runs; partial: for whole blocks.
    waves: programs of the update kernels, a multiprocessor, at most.
    """

    forward: int = 512
    single: int = 512
    short: int = 512
    middle: int = 512
    medium: int = 1024
    long: int = 4096
    partial: int = 1024
    waves: int = 64


TILES = Tiles()
