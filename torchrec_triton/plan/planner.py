"""Which tables get `fused_triton`: in a plan that exists, or while TorchRec's planner looks for one.

A choice is one kernel for all tables, or globs on table names -> kernel. The kernels are "fused_triton" (an error if a
table cannot have it), "fused" (FBGEMM) and "auto" (Triton where support.py says yes, else FBGEMM and one log line for
the table). Of several globs that match a table the first one counts, as of the rules in a configuration file. A table
that none matches keeps what it has in a finished plan, and gets "fused" while planning.

Planning needs neither a GPU nor Triton.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.constants import BATCH_SIZE
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.estimator.config import EmbeddingPerfEstimatorConfig
from torchrec.distributed.planner.estimator.estimator import EmbeddingPerfEstimatorFactory
from torchrec.distributed.planner.types import ParameterConstraints, ShardingOption
from torchrec.distributed.planner.utils import sharder_name
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    ModuleSharder,
    ParameterSharding,
    ShardingPlan,
    ShardingType,
)

from torchrec_triton.plan.reasons import (
    FUSED,
    FUSED_TRITON,
    UnsupportedTableError,
    collection_reasons,
    planned_device_type,
    sharding_reasons,
)
from torchrec_triton.plan.storage import StorageEstimator

logger = logging.getLogger("torchrec_triton")

AUTO = "auto"
Choice = str | Mapping[str, str]


def with_compute_kernel(
    plan: ShardingPlan,
    choice: Choice,
    *,
    module: nn.Module | None = None,
    sharders: list[ModuleSharder[Any]] | None = None,
) -> ShardingPlan:
    """A copy of `plan` in which the chosen tables have the chosen kernel; shards and ranks stay as they are.

    module, sharders: what the plan is for. Given, every setting of every table is judged here. Without them only what
    stands in the plan is (sharding type, device, shapes), and the sharder judges the rest when it shards.

    `fused` and `fused_triton` are exchanged, and `dense` (what TorchRec's plan helpers give) on explicit request.
    Tables in other kernels or replicated stay as they are, and asking for `fused_triton` by name is refused for them.

    Raises:
        ValueError: a kernel that is none of the three, or a glob that matches no table.
        UnsupportedTableError: a table cannot have the `fused_triton` that was asked for by name.
    """
    choice = _validated(choice)
    module_plans = {path: p for path, p in plan.plan.items() if isinstance(p, EmbeddingModuleShardingPlan)}
    _refuse_unmatched(choice, [table for params in module_plans.values() for table in params])
    modules = () if module is None else _sharded_modules(module, sharders or [])
    sharded = {path: (child, sharder) for path, child, sharder in modules}
    copies: dict[str, Any] = dict(plan.plan)
    refused: dict[str, list[str]] = {}
    for path, params in module_plans.items():
        device_type = planned_device_type(params) or "cuda"
        if path in sharded:
            child, sharder = sharded[path]
            reasons = _reasons(child, sharder, params, device_type)
        else:
            reasons = {table: sharding_reasons(sharding, device_type) for table, sharding in params.items()}
        kernels = {table: sharding.compute_kernel for table, sharding in params.items()}
        for table, planned in kernels.items():
            kernel, why = _chosen(table, choice), reasons[table]
            if not _exchangeable(params[table], kernel):
                if kernel == FUSED_TRITON:
                    refused[table] = [*why, f"compute_kernel={planned} in the plan is not exchanged for {FUSED_TRITON}"]
            elif kernel == FUSED_TRITON and why:
                refused[table] = why
            elif kernel == AUTO and why:
                _log_fallback(table, why)
                kernels[table] = FUSED
            elif kernel is not None:
                kernels[table] = FUSED if kernel == FUSED else FUSED_TRITON
        copies[path] = EmbeddingModuleShardingPlan(
            {t: dataclasses.replace(sharding, compute_kernel=kernels[t]) for t, sharding in params.items()}
        )
    if refused:
        raise UnsupportedTableError(refused)
    return ShardingPlan(copies)


def make_planner(
    topology: Topology,
    choice: Choice = AUTO,
    *,
    batch_size: int = BATCH_SIZE,
    constraints: dict[str, ParameterConstraints] | None = None,
    **planner_keywords: Any,
) -> EmbeddingShardingPlanner:
    """TorchRec's planner, in which every table of a Triton sharder is offered the kernel that was chosen for it.

    topology: of the machines to train on; its compute_device decides, not the host that plans.
    constraints: TorchRec's; a table whose compute_kernels name one of `fused` and `fused_triton`, or neither
        (`fused_uvm`, `dense`, ...), keeps to it.
    planner_keywords: go to EmbeddingShardingPlanner (storage_reservation, proposer, partitioner, stats, ...).

    Planning raises UnsupportedTableError if a table cannot have the `fused_triton` that was asked for by name, on every
    rank alike.
    """
    perf_estimator = EmbeddingPerfEstimatorFactory.create_with_config(
        _PerfConfig(), topology=topology, constraints=constraints
    )
    enumerator = _Enumerator(
        topology=topology,
        batch_size=batch_size,
        constraints=constraints,
        estimator=[perf_estimator, StorageEstimator(topology=topology, constraints=constraints)],
        choice=_validated(choice),
    )
    return _Planner(
        topology=topology, batch_size=batch_size, constraints=constraints, enumerator=enumerator, **planner_keywords
    )


class _PerfConfig(EmbeddingPerfEstimatorConfig):
    """Rates `fused_triton` like `fused` on every device; stock TorchRec has no rate for it on the CPU."""

    def get_device_bw(self, compute_device: str, compute_kernel: str, *args: Any, **kwargs: Any) -> float | None:
        return super().get_device_bw(
            compute_device, FUSED if compute_kernel == FUSED_TRITON else compute_kernel, *args, **kwargs
        )


class _Enumerator(EmbeddingEnumerator):
    """Offers each table one of `fused` and `fused_triton`, never both: they cost the same in TorchRec's eyes, so every
    plan would be found twice, and the order of a hash would choose."""

    def __init__(self, *, choice: Mapping[str, str], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._choice = choice
        self._reasons: dict[tuple[str, str], list[str]] = {}  # of a table under a sharding type

    def judge(self, module: nn.Module, sharders: list[ModuleSharder[Any]]) -> None:
        """Find the reasons of every table under every sharding type, and refuse what cannot be met."""
        self._reasons.clear()
        refused = {}
        for _, child, sharder in _sharded_modules(module, sharders):
            tables = list(sharder.shardable_parameters(child))
            for sharding_type in ShardingType:
                params = {table: self._parameter_sharding(table, sharding_type.value) for table in tables}
                found = _reasons(child, sharder, params, self._compute_device)
                for table, reasons in found.items():  # tables of one name in two collections share their reasons
                    self._reasons.setdefault((table, sharding_type.value), []).extend(reasons)
            for table in tables:
                allowed = getattr((self._constraints or {}).get(table), "sharding_types", None)
                why = [self._reasons[table, kind] for kind in allowed or [kind.value for kind in ShardingType]]
                if self._kernel(table) == FUSED_TRITON and all(why):
                    # Reasons that no sharding type escapes say most.
                    every = list(dict.fromkeys(reason for w in why for reason in w))
                    refused[table] = [reason for reason in every if all(reason in w for w in why)] or every
        _refuse_unmatched(self._choice, [table for table, _ in self._reasons])
        if refused:
            raise UnsupportedTableError(refused)

    def enumerate(self, module: nn.Module, sharders: list[ModuleSharder[Any]]) -> list[ShardingOption]:
        self.judge(module, sharders)
        return super().enumerate(module, sharders)

    def log_fallbacks(self, plan: ShardingPlan) -> None:
        """One line for each table that could have had Triton by choice and has FBGEMM's kernel in the plan."""
        for params in plan.plan.values():
            for table, sharding in params.items() if isinstance(params, EmbeddingModuleShardingPlan) else ():
                if self._kernel(table) == AUTO and sharding.compute_kernel == FUSED:
                    _log_fallback(table, list(dict.fromkeys(self._reasons[table, sharding.sharding_type])))

    def _filter_compute_kernels(self, name: str, allowed_compute_kernels: list[str], sharding_type: str) -> list[str]:
        kernel, reasons = self._kernel(name), self._reasons[name, sharding_type]
        if kernel == FUSED_TRITON:
            return [] if reasons else [FUSED_TRITON]
        offered = FUSED if kernel == FUSED or reasons else FUSED_TRITON
        allowed = [offered if k in (FUSED, FUSED_TRITON) else k for k in allowed_compute_kernels]
        return super()._filter_compute_kernels(name, list(dict.fromkeys(allowed)), sharding_type)

    def _kernel(self, table: str) -> str:
        constrained = getattr((self._constraints or {}).get(table), "compute_kernels", None) or []
        named = [kernel for kernel in (FUSED, FUSED_TRITON) if kernel in constrained]
        if constrained and not named:  # another kernel altogether, as TorchRec would take it
            return FUSED
        return named[0] if len(named) == 1 else _chosen(table, self._choice) or FUSED

    def _parameter_sharding(self, table: str, sharding_type: str) -> ParameterSharding:
        constraint = (self._constraints or {}).get(table, ParameterConstraints())
        return ParameterSharding(
            sharding_type,
            FUSED_TRITON,
            cache_params=constraint.cache_params,
            enforce_hbm=constraint.enforce_hbm,
            stochastic_rounding=constraint.stochastic_rounding,
            bounds_check_mode=constraint.bounds_check_mode,
            output_dtype=constraint.output_dtype,
        )


class _Planner(EmbeddingShardingPlanner):
    def plan(self, module: nn.Module, sharders: list[ModuleSharder[Any]]) -> ShardingPlan:
        plan = super().plan(module, sharders)
        self._enumerator.log_fallbacks(plan)
        return plan

    def collective_plan(self, module: nn.Module, sharders: Any = None, pg: Any = None) -> ShardingPlan:
        """Judge on every rank first: TorchRec plans on rank 0 only, and an error there leaves the others waiting."""
        sharders = sharders or get_default_sharders()
        self._enumerator.judge(module, sharders)
        return super().collective_plan(module, sharders, pg)


def _exchangeable(sharding: ParameterSharding, kernel: str | None) -> bool:
    if sharding.compute_kernel == EmbeddingComputeKernel.DENSE.value:
        return kernel != AUTO and sharding.sharding_type != ShardingType.DATA_PARALLEL.value
    return sharding.compute_kernel in (FUSED, FUSED_TRITON)


def _validated(choice: Choice) -> dict[str, str]:
    globs = {"*": choice} if isinstance(choice, str) else dict(choice)
    for glob, kernel in globs.items():
        if kernel not in (FUSED_TRITON, FUSED, AUTO):
            raise ValueError(f"compute kernel {kernel!r} for tables {glob!r}; allowed: {FUSED_TRITON}, {FUSED}, {AUTO}")
    return globs


def _chosen(table: str, choice: Mapping[str, str]) -> str | None:
    return next((kernel for glob, kernel in choice.items() if fnmatchcase(table, glob)), None)


def _refuse_unmatched(choice: Mapping[str, str], tables: list[str]) -> None:
    for glob in choice:
        if glob != "*" and not any(fnmatchcase(table, glob) for table in tables):
            raise ValueError(f"no table matches {glob!r}; tables: {', '.join(sorted(set(tables)))}")


def _log_fallback(table: str, reasons: list[str]) -> None:
    logger.warning("table %s: %s (FBGEMM), not %s: %s", table, FUSED, FUSED_TRITON, "; ".join(reasons))


def _sharded_modules(
    module: nn.Module, sharders: list[ModuleSharder[Any]]
) -> Iterator[tuple[str, nn.Module, ModuleSharder[Any]]]:
    """(path, child, sharder) of every child that a planner would shard, outermost first and not what lies within."""
    by_type = {sharder_name(sharder.module_type): sharder for sharder in sharders}
    done: set[nn.Module] = set()
    for path, child in module.named_modules():
        sharder = by_type.get(sharder_name(type(child)))
        if sharder is not None and child not in done:
            done.update(child.modules())
            yield path, child, sharder


def _reasons(
    child: nn.Module, sharder: ModuleSharder[Any], params: Mapping[str, ParameterSharding], device_type: str
) -> dict[str, list[str]]:
    """Why each table of a sharded module cannot run on Triton."""
    if FUSED_TRITON not in sharder.compute_kernels(ShardingType.TABLE_WISE.value, "cuda"):
        why = f"{type(sharder).__name__} cannot build it; use TritonEmbeddingBagCollectionSharder"
        return {table: [why] for table in params}
    collection = getattr(child, "_embedding_bag_collection", child)  # that of a feature-processed collection
    return collection_reasons(collection, params, sharder.fused_params, device_type)
