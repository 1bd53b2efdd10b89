"""Which kernel each table gets, and what that makes of its cost in TorchRec's planner: by measured times.

TorchRec's estimate of `fused` stays as it is, since it is what all other compute kernels and data parallelism are
compared with; the time of `fused_triton` is that times the measured ratio of the two.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import torch
from torchrec.distributed.planner.estimator.config import EmbeddingPerfEstimatorConfig
from torchrec.distributed.planner.estimator.estimator import EmbeddingPerfEstimator
from torchrec.distributed.planner.shard_estimators import get_num_poolings
from torchrec.distributed.planner.types import ParameterConstraints, ShardingOption, Topology
from torchrec.distributed.types import ShardingType

from torchrec_triton.plan.rates import Line, Rates, Shape
from torchrec_triton.plan.reasons import FUSED, FUSED_TRITON

Constraints = dict[str, ParameterConstraints] | None
KERNELS = (FUSED_TRITON, FUSED)
# Two operators where one would do must take this much less by the rates: interpolation is not exact.
MIXED_GAIN = 0.95


def collection_of(option: ShardingOption) -> Any:
    """The EmbeddingBagCollection that a table is of; None for a table of another kind of module."""
    module = option.module[1]
    module = getattr(module, "_embedding_bag_collection", module)  # of a feature-processed collection
    return module if hasattr(module, "embedding_bags") and hasattr(module, "is_weighted") else None


def lookups_and_bags(option: ShardingOption, constraints: Constraints, topology: Topology) -> tuple[float, float]:
    """Of each shard of the table, in the batch of all ranks. Lookups are shared out as in TorchRec's input sizes."""
    constraint = (constraints or {}).get(option.name, ParameterConstraints())
    batch_sizes = constraint.batch_sizes or [option.batch_size] * option.num_inputs
    features = list(zip(option.input_lengths, get_num_poolings(constraints, option), batch_sizes))
    sharing_ranks = {
        ShardingType.ROW_WISE.value: topology.world_size,
        ShardingType.TABLE_ROW_WISE.value: topology.intra_group_size,
        ShardingType.GRID_SHARD.value: topology.intra_group_size,
    }.get(option.sharding_type, 1)
    lookups = sum(length * poolings * batch for length, poolings, batch in features)
    bags = sum(poolings * batch for _, poolings, batch in features)
    return lookups * topology.world_size / sharing_ranks, bags * topology.world_size


class PerfEstimator(EmbeddingPerfEstimator):
    """TorchRec's, in which `fused_triton` is faster or slower than `fused` as was measured.

    rates: None: `fused_triton` is chosen wherever it can run, and costs as much as `fused`.
    """

    def __init__(self, topology: Topology, constraints: Constraints, rates: Rates | None) -> None:
        super().__init__(topology=topology, constraints=constraints, config=_PerfConfig())
        self.rates = rates
        self._groups: dict[Hashable, _Group] = {}

    def estimate(self, sharding_options: list[ShardingOption], *args: Any, **kwargs: Any) -> None:
        super().estimate(sharding_options, *args, **kwargs)
        for option in sharding_options if self.rates else ():
            if option.compute_kernel == FUSED_TRITON:
                ours, theirs = (self.times(option, kernel) for kernel in KERNELS)
                for shard, mine, other in zip(option.shards, ours, theirs):
                    shard.perf.fwd_compute *= mine[0] / max(other[0], 1e-9)
                    shard.perf.bwd_compute *= mine[1] / max(other[1], 1e-9)

    def choose(self, options: Sequence[ShardingOption], free: Callable[[ShardingOption], bool]) -> None:
        """Set the kernel of each option that is free to have either; the others have theirs.

        Tables of one sharding type, data type and pooling share an operator, if they have one kernel. So it is Triton
        for all, FBGEMM for all, or for each table what is faster, at the price of two operators: whatever costs an
        average rank least. Of equal costs the first named counts.
        """
        self._groups.clear()
        members: dict[Hashable, list[_Member]] = defaultdict(list)
        for option in options if self.rates else ():
            if option.compute_kernel in KERNELS and collection_of(option):
                lines = {kernel: self._lines(option, kernel, option.shards[0].size) for kernel in KERNELS}
                share = len(option.shards) / self._topology.world_size
                members[_key(option)].append(_Member(option, lines, [work * share for work in self._work(option)]))
        for key, group in members.items():
            total = max(sum(member.work[1] for member in group), 1e-9)
            self._groups[key] = _Group(total, {kernel: self._launches(group, kernel) for kernel in KERNELS})
            kept = [None if free(member.option) else member.option.compute_kernel for member in group]
            faster = [min(KERNELS, key=partial(member.cost, part=member.work[1] / total)) for member in group]
            cost = partial(self._cost, group)
            best = min(([own or kernel for own in kept] for kernel in KERNELS), key=cost)
            mixed = [own or kernel for own, kernel in zip(kept, faster)]
            for member, kernel in zip(group, mixed if cost(mixed) < MIXED_GAIN * cost(best) else best):
                member.option.compute_kernel = kernel

    def times(self, option: ShardingOption, kernel: str) -> list[tuple[float, float]]:
        """(forward, backward) of each shard in ms, with its part in the launch of all that share the operator."""
        work, group, result = self._work(option), self._groups.get(_key(option)), []
        part = min(work[1] / group.lookups, 1.0) if group else 1.0
        for shard in option.shards:
            lines = self._lines(option, kernel, shard.size)
            launches = group.launches[kernel] if group else [line.launch for line in lines]
            forward, backward = (part * launches[i] + lines[i].lookup * work[i] for i in (0, 1))
            result.append((forward, backward))
        return result

    def _launches(self, members: list[_Member], kernel: str) -> list[float]:
        """ms of both phases of an operator with these tables: as long as that of the slowest of them, and what further
        widths of rows add."""
        assert self.rates
        further = len({_width(member.option.shards[0].size[1]) for member in members}) - 1
        return [
            max(member.lines[kernel][phase].launch for member in members) + further * self.rates.width[kernel][phase]
            for phase in (0, 1)
        ]

    def _cost(self, members: list[_Member], kernels: list[str]) -> float:
        """ms of all operators of a group on an average rank."""
        total = 0.0
        for kernel in KERNELS:
            if chosen := [member for member, k in zip(members, kernels) if k == kernel]:
                total += sum(self._launches(chosen, kernel)) + sum(member.cost(kernel) for member in chosen)
        return total

    def _work(self, option: ShardingOption) -> tuple[float, float]:
        """Of forward and backward of a shard, in lookups; a forward of more bags than lookups is busy writing bags."""
        lookups, bags = lookups_and_bags(option, self._constraints, self._topology)
        return max(lookups, bags), lookups

    def _lines(self, option: ShardingOption, kernel: str, size: Sequence[int]) -> list[Line]:
        """Of forward and backward; size: (rows, dim) of the shard."""
        assert self.rates
        lookups, bags = lookups_and_bags(option, self._constraints, self._topology)
        shape = Shape(
            "FP32" if option.tensor.dtype == torch.float32 else "FP16",
            collection_of(option).is_weighted(),
            size[1],
            lookups / bags,
            lookups / max(size[0], 1),
        )
        return [self.rates.line(kernel, phase, shape) for phase in (0, 1)]


@dataclasses.dataclass
class _Member:
    """A table of a group. lines: kernel -> of forward and backward; work: of both, in lookups on an average rank."""

    option: ShardingOption
    lines: dict[str, list[Line]]
    work: list[float]

    def cost(self, kernel: str, part: float = 0.0) -> float:
        """ms on an average rank, with a part of a launch."""
        return sum(line.launch * part + line.lookup * work for line, work in zip(self.lines[kernel], self.work))


@dataclasses.dataclass
class _Group:
    """Tables that one operator would hold. lookups: on an average rank; launches: kernel -> ms of both phases."""

    lookups: float
    launches: dict[str, list[float]]


def _width(dim: int) -> int:
    """Rows of what dims the Triton kernels take together: up to the next power of two, and all up to 16."""
    return max(16, 1 << (dim - 1).bit_length())


def _key(option: ShardingOption) -> Hashable:
    mode = collection_of(option).embedding_bags[option.name].mode
    return option.path, option.sharding_type, option.tensor.dtype, mode


class _PerfConfig(EmbeddingPerfEstimatorConfig):
    """Rates `fused_triton` like `fused` on every device; stock TorchRec has no rate for it on the CPU."""

    def get_device_bw(self, compute_device: str, compute_kernel: str, *args: Any, **kwargs: Any) -> float | None:
        kernel = FUSED if compute_kernel == FUSED_TRITON else compute_kernel
        return super().get_device_bw(compute_device, kernel, *args, **kwargs)
