"""Checks and repairs offsets in place, as FBGEMM's WARNING and IGNORE modes do. Ids are checked by the lookup.

Offsets that are negative or pass the number of ids are clamped, one below an earlier one is raised to it, and the last
is set to the number of ids. Each repair is counted.
"""
from __future__ import annotations

import triton
import triton.language as tl

from torchrec_triton.kernels.common import begin_kernel


@triton.jit(do_not_specialize=["num_bags", "num_ids"], do_not_specialize_on_alignment=["offsets"])
def check_offsets_kernel(offsets, repairs, num_bags, num_ids, TILE: tl.constexpr, EARLY: tl.constexpr):
    """Repairs the offsets of TILE bags a program and adds the number of bags that needed it to `repairs`."""
    begin_kernel(EARLY)
    bag = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    live = bag < num_bags
    begin = tl.load(offsets + bag, mask=live, other=0).to(tl.int64)
    end = tl.load(offsets + bag + 1, mask=live, other=0).to(tl.int64)
    wrong = live & ((begin < 0) | (begin > end) | (end > num_ids))
    short = live & (bag == num_bags - 1) & (end != num_ids)
    count = tl.sum((wrong | short).to(tl.int64), axis=0)
    if count > 0:
        # A running maximum, which features rely on to be in order. Maxima commute, so neighbouring programs may mix.
        most = (tl.zeros([TILE], tl.int64) + num_ids).to(offsets.dtype.element_ty)
        floor = tl.minimum(tl.maximum(begin, 0), num_ids).to(offsets.dtype.element_ty)
        tl.atomic_max(offsets + bag, floor, mask=wrong)
        tl.atomic_min(offsets + bag, most, mask=wrong)
        tl.store(offsets + bag + 1, most, mask=short)
        at = bag + 1
        behind = wrong
        while tl.max(behind.to(tl.int32), axis=0) > 0:
            behind = behind & (at <= num_bags)
            behind = behind & (tl.load(offsets + at, mask=behind, other=0) < floor)
            tl.atomic_max(offsets + at, floor, mask=behind)
            at += 1
        tl.atomic_add(repairs, count)
