"""What tables cost in TorchRec's planner, and which kernel each gets: by measured times where there are some.

TorchRec's estimators stay as they are for every other compute kernel and for everything but the time that a kernel
takes: communication, storage, prefetching.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
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


@dataclasses.dataclass
class _Group:
    """Tables that one operator would hold. lookups: on an average rank; launch: (kernel, phase) -> ms."""

    lookups: float = 0.0
    launch: dict[tuple[str, int], float] = dataclasses.field(default_factory=lambda: defaultdict(float))


class PerfEstimator(EmbeddingPerfEstimator):
    """TorchRec's, with measured times of `fused` and `fused_triton` in place of its formula.

    rates: by which kernels are chosen; None: `fused_triton` wherever it can run.
    measured: the rates are those of the topology's GPU, so they are its times too; else TorchRec's formula is kept.
    """

    def __init__(self, topology: Topology, constraints: Constraints, rates: Rates | None, measured: bool) -> None:
        super().__init__(topology=topology, constraints=constraints, config=_PerfConfig())
        self.rates, self.measured = rates, measured
        self._groups: dict[Hashable, _Group] = defaultdict(_Group)

    def estimate(self, sharding_options: list[ShardingOption], *args: Any, **kwargs: Any) -> None:
        super().estimate(sharding_options, *args, **kwargs)
        for option in sharding_options if self.measured else ():
            if option.compute_kernel in KERNELS and collection_of(option):
                for shard, (forward, backward) in zip(option.shards, self.times(option, option.compute_kernel)):
                    shard.perf.fwd_compute, shard.perf.bwd_compute = forward, backward

    def choose(self, options: Sequence[ShardingOption], free: Callable[[ShardingOption], bool]) -> None:
        """Set the kernel of each option that is free to have either; the others have theirs.

        Tables of one sharding type, data type and pooling share an operator, if they have one kernel. So it is Triton
        for all, FBGEMM for all, or for each table what is faster: whatever costs an average rank least. Of equal costs
        the first named counts.
        """
        self._groups.clear()
        groups: dict[Hashable, list[ShardingOption]] = defaultdict(list)
        for option in options:
            if option.compute_kernel in KERNELS and collection_of(option):
                groups[self._key(option)].append(option)
        for key, members in groups.items() if self.rates else ():
            group = self._groups[key]
            group.lookups = sum(self._share(option) for option in members)
            for kernel in KERNELS:
                for phase in (0, 1):
                    group.launch[kernel, phase] = max(self._lines(o, kernel)[phase].launch for o in members)
            given = [option.compute_kernel for option in members]
            faster = [min(KERNELS, key=lambda kernel: self.milliseconds(option, kernel)) for option in members]
            plans = [[kernel if free(o) else g for o, g in zip(members, given)] for kernel in KERNELS]
            mixed = [kernel if free(o) else g for o, g, kernel in zip(members, given, faster)]
            best = min(plans, key=lambda kernels: self._cost(members, kernels))
            if self._cost(members, mixed) < MIXED_GAIN * self._cost(members, best):
                best = mixed
            for option, kernel in zip(members, best):
                option.compute_kernel = kernel

    def times(self, option: ShardingOption, kernel: str) -> list[tuple[float, float]]:
        """(forward, backward) of each shard in ms, with its part in the launch of all that share the operator."""
        group = self._groups.get(self._key(option))
        part = min(self._work(option, 1) / group.lookups, 1.0) if group and group.lookups else 1.0
        result = []
        for shard in option.shards:
            forward, backward = (
                part * (group.launch[kernel, phase] if group else line.launch) + line.lookup * self._work(option, phase)
                for phase, line in enumerate(self._lines(option, kernel, shard.size))
            )
            result.append((forward, backward) if 0 not in shard.size else (0.0, 0.0))
        return result

    def milliseconds(self, option: ShardingOption, kernel: str) -> float:
        """Forward and backward of the slowest shard."""
        return max(sum(phases) for phases in self.times(option, kernel))

    def _cost(self, members: list[ShardingOption], kernels: list[str]) -> float:
        """Time (ms) of all of a group's operators on an average rank."""
        total = 0.0
        for kernel in KERNELS:
            chosen = [option for option, k in zip(members, kernels) if k == kernel]
            for phase in (0, 1) if chosen else ():
                lines = [self._lines(option, kernel)[phase] for option in chosen]
                total += max(line.launch for line in lines)
                total += sum(line.lookup * self._share(option, phase) for line, option in zip(lines, chosen))
        return total

    def _share(self, option: ShardingOption, phase: int = 1) -> float:
        """Of the table's work, in lookups, on an average rank."""
        return self._work(option, phase) * len(option.shards) / self._topology.world_size

    def _work(self, option: ShardingOption, phase: int) -> float:
        """Of a shard, in lookups. A forward with more bags than lookups has its work in writing them."""
        lookups, bags = lookups_and_bags(option, self._constraints, self._topology)
        return lookups if phase else max(lookups, bags)

    def _lines(self, option: ShardingOption, kernel: str, size: Sequence[int] | None = None) -> list[Line]:
        """Of forward and backward; size: (rows, dim) of the shard, the first one's unless given."""
        assert self.rates
        rows, dim = size or option.shards[0].size
        lookups, bags = lookups_and_bags(option, self._constraints, self._topology)
        shape = Shape(
            "FP32" if option.tensor.dtype == torch.float32 else "FP16",
            collection_of(option).is_weighted(),
            dim,
            max(lookups, 1e-9) / max(bags, 1e-9),
            max(lookups, 1e-9) / max(rows, 1),
        )
        return [self.rates.line(kernel, phase, shape) for phase in (0, 1)]

    @staticmethod
    def _key(option: ShardingOption) -> Hashable:
        mode = collection_of(option).embedding_bags[option.name].mode
        return option.path, option.sharding_type, option.tensor.dtype, mode


class _PerfConfig(EmbeddingPerfEstimatorConfig):
    """Rates `fused_triton` like `fused` on every device; stock TorchRec has no rate for it on the CPU."""

    def get_device_bw(self, compute_device: str, compute_kernel: str, *args: Any, **kwargs: Any) -> float | None:
        kernel = FUSED if compute_kernel == FUSED_TRITON else compute_kernel
        return super().get_device_bw(compute_device, kernel, *args, **kwargs)
