"""What a plan holds, table by table, and why there is none: for people to read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torchrec.distributed.planner.types import ShardingOption, Storage, Topology

MIB = 2**20


@dataclass(frozen=True)
class TableReport:
    """One table of a plan.

    path: of its collection; ranks: of its shards; milliseconds: kernel -> predicted (forward, backward) of its slowest
    shard, empty where there are no rates; bytes: of its largest shard, with optimizer state, input, output and
    workspace; reasons: why it has not got `fused_triton`.
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
    row = "{:<24}{:<19}{:<8}{:<17}{:>10}{:>13}{:>10}"
    lines = [line for line in heading if line]
    lines += ["predicted ms are forward + backward of the slowest shard; MiB of the largest", ""]
    lines += [row.format("table", "sharding", "ranks", "kernel", "fused", "fused_triton", "MiB")]
    for report in reports:
        times = [
            f"{sum(report.milliseconds[kernel]):.3f}" if kernel in report.milliseconds else "-"
            for kernel in ("fused", "fused_triton")
        ]
        ranks = _ranges(report.ranks)
        size = f"{report.bytes / MIB:,.1f}"
        lines.append(row.format(report.table, report.sharding_type, ranks, report.compute_kernel, *times, size))
        lines += [f"    {reason}" for reason in report.reasons]
    return "\n".join(lines)


def shortage(options: Sequence[ShardingOption], topology: Topology, reserved: Topology | None) -> str:
    """What tables need, the most demanding first, beside what a rank has for them.

    A table's need is that of its most frugal option, on the rank that holds the largest of its shards. reserved: what
    the storage reservation left; None if it left nothing.
    """
    gpu = topology.compute_device == "cuda"
    least: dict[str, tuple[int, ShardingOption]] = {}
    for option in options:
        need = max(_bytes(shard.storage, gpu) for shard in option.shards)
        if option.fqn not in least or need < least[option.fqn][0]:
            least[option.fqn] = need, option
    ordered = sorted(least.values(), key=lambda item: -item[0])
    have = max(_bytes(device.storage, gpu) for device in (reserved or topology).devices)
    rest = (
        "left for tables by the storage reservation" if reserved else "in all, and the storage reservation wants more"
    )
    lines = [
        f"A rank has {have / MIB:,.0f} MiB {'GPU' if gpu else 'host'} memory {rest}. On one rank is needed at least:"
    ]
    lines += [
        f"  table {o.name}: {need / MIB:,.0f} MiB, {o.compute_kernel}, {o.sharding_type}" for need, o in ordered[:10]
    ]
    lines += [f"  {len(ordered) - 10} more tables: less"] * (len(ordered) > 10)
    return "\n".join(lines)


def _bytes(storage: Storage | None, gpu: bool) -> int:
    assert storage is not None  # estimated by now
    return storage.hbm if gpu else storage.ddr


def _ranges(ranks: Sequence[int]) -> str:
    """(0, 1, 2, 5) -> "0-2,5"."""
    groups: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if groups and rank == groups[-1][-1] + 1:
            groups[-1].append(rank)
        else:
            groups.append([rank])
    return ",".join(str(group[0]) if len(group) == 1 else f"{group[0]}-{group[-1]}" for group in groups)
