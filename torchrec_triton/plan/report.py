"""What a plan holds, table by table, and why there is none: for people to read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torchrec.distributed.planner.types import ShardingOption, Storage, Topology

MIB = 2**20


@dataclass(frozen=True)
class TableReport:
    """One table of a plan.

    path: of its collection; ranks: of its shards; milliseconds: kernel that it can have -> predicted (forward,
    backward) of its slowest shard, empty where there are no rates; bytes: of its largest shard, with optimizer state,
    input, output and workspace; reasons: why it has not got `fused_triton`.
    """

    path: str
    table: str
    sharding_type: str
    compute_kernel: str
    ranks: tuple[int, ...]
    bytes: int
    milliseconds: dict[str, tuple[float, float]] = field(default_factory=dict)
    reasons: tuple[str, ...] = ()


def as_text(reports: Iterable[TableReport], heading: Iterable[str] = ()) -> str:
    """A line a table, below it every reason why it has not got `fused_triton`."""
    reports = list(reports)
    widest = max([23, *(len(report.table) for report in reports)])
    row = f"{{:<{widest}}} {{:<19}}{{:<8}}{{:<17}}{{:>10}}{{:>13}}{{:>10}}"
    lines = [line for line in heading if line]
    lines += ["predicted ms are forward + backward of the slowest shard; MiB of the largest", ""]
    lines += [row.format("table", "sharding", "ranks", "kernel", "fused", "fused_triton", "MiB")]
    for report in reports:
        times = [
            f"{sum(report.milliseconds[kernel]):.3f}" if kernel in report.milliseconds else "-"
            for kernel in ("fused", "fused_triton")
        ]
        ranks = ranges(report.ranks)
        size = f"{report.bytes / MIB:,.1f}"
        lines.append(row.format(report.table, report.sharding_type, ranks, report.compute_kernel, *times, size))
        lines += [f"    {reason}" for reason in report.reasons]
    return "\n".join(lines)


def shortage(options: Sequence[ShardingOption], topology: Topology, reserved: Topology | None) -> str:
    """What tables need, the most demanding first, beside what a rank has for them.

    A table's need is that of its most frugal option, by the share of a rank's memory (of the GPU's or the host's,
    whichever is larger) that its largest shard takes. reserved: what the storage reservation left; None if it left
    nothing.
    """
    have = [max(sizes) for sizes in zip(*(_bytes(device.storage) for device in (reserved or topology).devices))]
    least: dict[str, tuple[float, list[int], ShardingOption]] = {}
    for option in options:
        need = [max(sizes) for sizes in zip(*(_bytes(shard.storage) for shard in option.shards))]
        share = max(size / max(1, most) for size, most in zip(need, have))
        if option.fqn not in least or share < least[option.fqn][0]:
            least[option.fqn] = share, need, option
    ordered = sorted(least.values(), key=lambda item: -item[0])
    rest = (
        "left for tables by the storage reservation" if reserved else "in all, and the storage reservation wants more"
    )
    lines = [f"A rank has {_amounts(have)} memory {rest}. On one rank is needed at least:"]
    for _, need, option in ordered[:10]:
        lines += [f"  table {option.name}: {_amounts(need)}, {option.compute_kernel}, {option.sharding_type}"]
    lines += [f"  {len(ordered) - 10} more tables: less"] * (len(ordered) > 10)
    return "\n".join(lines)


def _bytes(storage: Storage | None) -> tuple[int, int]:
    assert storage is not None  # estimated by now
    return storage.hbm, storage.ddr


def _amounts(sizes: Sequence[int]) -> str:
    """Bytes of the GPU's and the host's memory, as far as there are any."""
    named = [f"{size / MIB:,.0f} MiB {where}" for size, where in zip(sizes, ("GPU", "host")) if size]
    return " and ".join(named) or "0 MiB"


def ranges(ranks: Sequence[int]) -> str:
    """(0, 1, 2, 5) -> "0-2,5"."""
    groups: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if groups and rank == groups[-1][-1] + 1:
            groups[-1].append(rank)
        else:
            groups.append([rank])
    return ",".join(str(group[0]) if len(group) == 1 else f"{group[0]}-{group[-1]}" for group in groups)
