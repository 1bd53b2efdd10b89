"""Which tables get `fused_triton`: in a plan that exists, or while TorchRec's planner looks for one.

A choice is one kernel for all tables, or globs on table names -> kernel. The kernels are "fused_triton" (an error if a
table cannot have it), "fused" (FBGEMM) and "auto" (Triton, but FBGEMM and one log line for the table where support.py
has a reason or, while planning, where FBGEMM is faster by measured rates). Of several globs that match a table the
first one counts, as of the rules in a configuration file. A table that none matches keeps what it has in a finished
plan, and gets "fused" while planning.

Planning needs neither a GPU nor Triton.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.collective_utils import invoke_on_rank_and_broadcast_result
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.constants import BATCH_SIZE
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError, ShardingOption
from torchrec.distributed.planner.utils import sharder_name
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    ModuleSharder,
    ParameterSharding,
    ShardingPlan,
    ShardingType,
)

from torchrec_triton.config import Config, matches
from torchrec_triton.plan.configured import constraints_of
from torchrec_triton.plan.estimator import KERNELS, PerfEstimator, collection_of
from torchrec_triton.plan.rates import find_rates
from torchrec_triton.plan.reasons import (
    FUSED,
    FUSED_TRITON,
    UnsupportedTableError,
    collection_reasons,
    planned_device_type,
    sharding_reasons,
)
from torchrec_triton.plan.report import TableReport, shortage
from torchrec_triton.plan.storage import StorageEstimator

logger = logging.getLogger("torchrec_triton")

AUTO = "auto"
FASTER = "faster, all tables taken together, by the rates of"
Choice = str | Mapping[str, str]


def with_compute_kernel(
    plan: ShardingPlan,
    choice: Choice,
    *,
    module: nn.Module | None = None,
    sharders: list[ModuleSharder[Any]] | None = None,
) -> ShardingPlan:
    """A copy of `plan` in which the chosen tables have the chosen kernel; shards and ranks stay as they are. The log
    says which tables change.

    module, sharders: what the plan is for. Given, every setting of every table is judged here. Without them only what
    stands in the plan is (sharding type, device, shapes), and the sharder judges the rest when it shards.

    `fused` and `fused_triton` are exchanged, and `dense` (what TorchRec's plan helpers give) on explicit request.
    Tables in other kernels or replicated stay as they are, and asking for `fused_triton` by name is refused for them.

    Raises:
        ValueError: a kernel that is none of the three, a glob that matches no table, or a module without sharders.
        UnsupportedTableError: a table cannot have the `fused_triton` that was asked for by name.
    """
    choice = _validated(choice)
    if (module is None) != (not sharders):
        raise ValueError("module and sharders are for judging every setting: give both, or neither")
    module_plans = {path: p for path, p in plan.plan.items() if isinstance(p, EmbeddingModuleShardingPlan)}
    _refuse_unmatched(choice, [table for params in module_plans.values() for table in params])
    modules = () if module is None else _sharded_modules(module, sharders or [])
    sharded = {path: (child, sharder) for path, child, sharder in modules}
    copies: dict[str, Any] = dict(plan.plan)
    refused: dict[str, list[str]] = {}
    for path, params in module_plans.items():
        device_type = planned_device_type(params) or "cuda"
        if module is not None and path not in sharded:
            types = ", ".join(type(sharder).__name__ for sharder in sharders or [])
            raise ValueError(
                f"module {path!r} of the plan is none of this model that one of these sharders takes: {types}"
            )
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
    for path, params in module_plans.items():
        for table, sharding in params.items():
            if (kernel := copies[path][table].compute_kernel) != sharding.compute_kernel:
                logger.info("table %s: %s -> %s", table, sharding.compute_kernel, kernel)
    return ShardingPlan(copies)


def make_planner(
    choice: Choice | Config,
    topology: Topology,
    *,
    batch_size: int | None = None,
    constraints: dict[str, ParameterConstraints] | None = None,
    rates: str | Path | None = None,
    reproducible: bool = False,
    **planner_keywords: Any,
) -> EmbeddingShardingPlanner:
    """TorchRec's planner, in which every table of a Triton sharder is offered the kernel that was chosen for it.

    choice: one kernel, globs -> kernel, or a configuration, which gives batch size and constraints too, unless they are
        arguments.
    topology: of the machines to train on; its compute_device decides, not the host that plans.
    constraints: TorchRec's; a table whose compute_kernels name one of `fused` and `fused_triton`, or neither
        (`fused_uvm`, `dense`, ...), keeps to it.
    rates: by which `auto` chooses: the name of a GPU in configs/rates/, or a file that `torchrec-triton bench --rates`
        wrote. By default those of this machine's GPU.
    reproducible: one plan in every process also where no table is offered Triton: TorchRec (up to 1.8) lets the order
        of a hash decide between equals.
    planner_keywords: go to EmbeddingShardingPlanner (storage_reservation, proposer, partitioner, stats, ...).

    With `fused` for all tables, and `reproducible` off, the plan is TorchRec's own: nothing is estimated in another
    way.

    Planning raises UnsupportedTableError if a table cannot have the `fused_triton` that was asked for by name, on every
    rank alike; and TorchRec's PlannerError, with what each table needs, if there is no plan.
    """
    if isinstance(choice, Config):
        batch_size, constraints = batch_size or choice.data.batch_size, constraints or constraints_of(choice)
        choice = choice.kernels()
    batch_size, globs = batch_size or BATCH_SIZE, _validated(choice)
    constrained = [kernel for c in (constraints or {}).values() for kernel in c.compute_kernels or ()]
    estimators: list[Any] = []
    note = ""
    if {*globs.values(), *constrained} & {AUTO, FUSED_TRITON}:
        gpu = topology.compute_device == "cuda"
        here = torch.cuda.get_device_name() if gpu and torch.cuda.is_available() else None
        found, rule = find_rates(rates, here) if gpu else (None, "")
        if rule and AUTO in globs.values():
            logger.warning(rule)
        note = rule or (f"rates of {found.gpu}, {found.date}, commit {found.commit}" if found else "")
        estimators.append(PerfEstimator(topology, constraints, found))
        estimators.append(StorageEstimator(topology=topology, constraints=constraints))
    elif rates is not None:
        find_rates(rates, None)  # not needed, but a wrong name is told
    enumerator = _Enumerator(
        topology=topology,
        batch_size=batch_size,
        constraints=constraints,
        estimator=estimators or None,
        choice=globs,
        ordered=reproducible or bool(estimators),
    )
    planner = _Planner(
        topology=topology, batch_size=batch_size, constraints=constraints, enumerator=enumerator, **planner_keywords
    )
    planner.note = note
    return planner


class _Enumerator(EmbeddingEnumerator):
    """Offers each table one of `fused` and `fused_triton` for each sharding type, never both: the search is no larger
    than TorchRec's, and no order decides between equals."""

    def __init__(self, *, choice: Mapping[str, str], ordered: bool, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._choice, self._ordered = choice, ordered
        self.reasons: dict[tuple[str, str], list[str]] = {}  # of a table under a sharding type
        self.perf = next((e for e in self._estimators if isinstance(e, PerfEstimator)), None)  # None: TorchRec's own
        self._choosing = False

    def judge(self, module: nn.Module, sharders: list[ModuleSharder[Any]]) -> None:
        """Find the reasons of every table under every sharding type, and refuse what cannot be met."""
        self.reasons.clear()
        refused = {}
        for _, child, sharder in _sharded_modules(module, sharders):
            tables = list(sharder.shardable_parameters(child))
            for sharding_type in ShardingType:
                params = {table: self._parameter_sharding(table, sharding_type.value) for table in tables}
                found = _reasons(child, sharder, params, self._compute_device)
                for table, reasons in found.items():  # tables of one name in two collections share their reasons
                    self.reasons.setdefault((table, sharding_type.value), []).extend(reasons)
            for table in tables:
                allowed = getattr((self._constraints or {}).get(table), "sharding_types", None)
                why = [self.reasons[table, kind] for kind in allowed or [kind.value for kind in ShardingType]]
                if self.asked(table) == FUSED_TRITON and all(why):
                    # Reasons that no sharding type escapes say most.
                    every = list(dict.fromkeys(reason for w in why for reason in w))
                    refused[table] = [reason for reason in every if all(reason in w for w in why)] or every
        _refuse_unmatched(self._choice, [table for table, _ in self.reasons])
        if refused:
            raise UnsupportedTableError(refused)

    def enumerate(self, module: nn.Module, sharders: list[ModuleSharder[Any]]) -> list[ShardingOption]:
        self.judge(module, sharders)
        self._choosing = self.perf is not None
        try:
            return super().enumerate(module, sharders)
        finally:
            self._choosing = False

    def populate_estimates(self, sharding_options: list[ShardingOption]) -> None:
        """TorchRec calls it with every option and its shards, and proposers with those that they changed."""
        if self._choosing and self.perf:
            self._choosing = False
            self.perf.choose(
                sharding_options, lambda o: o.compute_kernel == FUSED_TRITON and self.asked(o.name) == AUTO
            )
        super().populate_estimates(sharding_options)

    def asked(self, table: str) -> str:
        """The kernel that constraints or the choice ask for."""
        constrained = getattr((self._constraints or {}).get(table), "compute_kernels", None) or []
        named = [kernel for kernel in (FUSED, FUSED_TRITON) if kernel in constrained]
        if constrained and not named:  # another kernel altogether, as TorchRec would take it
            return FUSED
        return named[0] if len(named) == 1 else _chosen(table, self._choice) or FUSED

    def _filter_compute_kernels(self, name: str, allowed_compute_kernels: list[str], sharding_type: str) -> list[str]:
        kernel, reasons = self.asked(name), self.reasons[name, sharding_type]
        if kernel == FUSED_TRITON:
            return [] if reasons else [FUSED_TRITON]
        offered = FUSED if kernel == FUSED or reasons else FUSED_TRITON
        allowed = [offered if k in (FUSED, FUSED_TRITON) else k for k in allowed_compute_kernels]
        allowed = list(dict.fromkeys(allowed))
        found = super()._filter_compute_kernels(name, allowed, sharding_type)
        return sorted(found, key=allowed.index) if self._ordered else found

    def _filter_sharding_types(self, name: str, allowed_sharding_types: list[str], *args: Any) -> list[str]:
        found = super()._filter_sharding_types(name, allowed_sharding_types, *args)
        return sorted(found, key=allowed_sharding_types.index) if self._ordered else found

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
    note = ""  # whose rates count

    def plan(self, module: nn.Module, sharders: list[ModuleSharder[Any]]) -> ShardingPlan:
        self._best_plan: list[ShardingOption] | None = None
        try:
            plan = super().plan(module, sharders)
        except PlannerError as error:
            error.args = (f"{error}\n{self._shortage(module, sharders)}",)
            raise
        for report in self.explain():
            if self._enumerator.asked(report.table) == AUTO and report.compute_kernel == FUSED:
                chosen = report.reasons[0].startswith(FASTER)
                _log_fallback(report.table, report.reasons, logging.INFO if chosen else logging.WARNING)
        return plan

    def collective_plan(self, module: nn.Module, sharders: Any = None, pg: Any = None) -> ShardingPlan:
        """TorchRec plans on rank 0 only, and an error there would leave the others waiting: so every rank judges, and
        each is told if there is no plan."""
        sharders = sharders or get_default_sharders()
        self._enumerator.judge(module, sharders)
        found = invoke_on_rank_and_broadcast_result(pg or dist.group.WORLD, 0, self._plan_or_error, module, sharders)
        if isinstance(found, PlannerError):
            raise found
        return found

    def _plan_or_error(self, module: nn.Module, sharders: list[ModuleSharder[Any]]) -> ShardingPlan | PlannerError:
        try:
            return self.plan(module, sharders)
        except PlannerError as error:
            return error

    def _shortage(self, module: nn.Module, sharders: list[ModuleSharder[Any]]) -> str:
        """Beside TorchRec's error, which must not be lost to another one."""
        try:
            options = self._enumerator.enumerate(module, sharders)  # there already, unless the reservation failed
            left = self._storage_reservation.last_reserved_topology
            # A method of InferenceStorageReservation in TorchRec 1.6.
            return shortage(options, self._topology, left() if callable(left) else left)
        except Exception as error:
            return f"What the tables need is not known: {type(error).__name__}: {error}"

    def explain(self) -> list[TableReport]:
        """Every table of the plan that was made last, in the order of the plan."""
        return [self._report(option) for option in self._best_plan or []]

    def _report(self, option: ShardingOption) -> TableReport:
        perf = self._enumerator.perf
        known = perf and perf.rates and option.compute_kernel in KERNELS and collection_of(option)
        unable = self._enumerator.reasons.get((option.name, option.sharding_type))
        return TableReport(
            path=option.path,
            table=option.name,
            sharding_type=option.sharding_type,
            compute_kernel=option.compute_kernel,
            ranks=tuple(shard.rank for shard in option.shards),
            bytes=max(shard.storage.hbm + shard.storage.ddr for shard in option.shards),
            milliseconds={
                kernel: max(perf.times(option, kernel), key=sum)
                for kernel in (KERNELS if known else ())
                if kernel == FUSED or not unable
            },
            reasons=tuple(self._why_not(option)),
        )

    def _why_not(self, option: ShardingOption) -> list[str]:
        """Why a table has not got `fused_triton`."""
        kernel, rates = option.compute_kernel, self._enumerator.perf and self._enumerator.perf.rates
        if kernel == FUSED_TRITON:
            return []
        if kernel == FUSED and self._enumerator.asked(option.name) == FUSED:
            return [f"{FUSED} was asked for"]
        if found := self._enumerator.reasons.get((option.name, option.sharding_type)):
            return list(dict.fromkeys(found))
        if kernel == FUSED:
            return [f"{FASTER} {rates.gpu}" if rates else "TorchRec proposed it"]
        return [f"{kernel}: not in device memory alone, as {FUSED_TRITON} would be"]


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
    return next((kernel for glob, kernel in choice.items() if matches(table, glob)), None)


def _refuse_unmatched(choice: Mapping[str, str], tables: list[str]) -> None:
    for glob in choice:
        if glob != "*" and not any(matches(table, glob) for table in tables):
            raise ValueError(f"no table matches {glob!r}; tables: {', '.join(sorted(set(tables)))}")


def _log_fallback(table: str, reasons: Iterable[str], level: int = logging.WARNING) -> None:
    logger.log(level, "table %s: %s (FBGEMM), not %s: %s", table, FUSED, FUSED_TRITON, "; ".join(reasons))


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
