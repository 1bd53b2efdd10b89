"""Tile sizes. They change speed, not what is computed, though they may change the order of a sum and so its last bit.

Values were found on one H200 (torch 2.11, triton 3.6); docs/notes/kernel-log.md says by which runs.
"""
from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tiles:
    """Elements of kernels' tiles, rows times padded dim; a warp takes WARP_TILE of them unless said otherwise. And the
    sizes of a batch whose time is that of launches and chains of loads.

    forward: rows in flight of the pooled lookup, fp16 and bf16; fp32 rows get half.
    forward_padded: the same for rows narrower than the tile.
    short: single, short and middle runs side by side, a run a row; short_warp of them a warp.
    long: lookups of a long run, or of a whole block, side by side; long_wide: the same for rows of 256 and more.
    few: lookups up to which all classes of runs share a launch, with the warps of long runs, and short_warp elements
        of the others for each; blocks are small, and a tile of their lookups has four times `long`.
    few_elements: lookups times the widest padded dim, up to which tables of all widths share launches.
    """

    forward: int = 512
    forward_padded: int = 256
    short: int = 1024
    short_warp: int = 512
    long: int = 2048
    long_wide: int = 4096
    few: int = 2**18
    few_elements: int = 2**22


TILES = Tiles()
