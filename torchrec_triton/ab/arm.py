"""One model in training: through TorchRec's planner, sharder, DistributedModelParallel and train pipeline."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from itertools import count, islice, pairwise
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel, TrainPipelineSparseDist
from torchrec.distributed.planner import Topology
from torchrec.distributed.train_pipeline import TrainPipelineBase
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from torchrec_triton.ab.model import Recommender, fill
from torchrec_triton.config import Config, ConfigError, ShardingTypeName
from torchrec_triton.module.sharding import TritonEmbeddingBagCollectionSharder
from torchrec_triton.module.warm_up import warm_up
from torchrec_triton.plan.configured import constraints_of
from torchrec_triton.plan.estimator import KERNELS
from torchrec_triton.plan.planner import make_planner, with_compute_kernel
from torchrec_triton.plan.reasons import FUSED_TRITON

PIPELINES = {"sparse_dist": TrainPipelineSparseDist, "base": TrainPipelineBase}
_CPU_OPTIMIZERS = ("EXACT_ROWWISE_ADAGRAD", "EXACT_SGD", "EXACT_ADAGRAD", "EMAINPLACE_ROWWISE_ADAGRAD")  # FBGEMM's
PHASES = ("input", "forward", "backward", "optimizer")
_LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


class LaunchError(RuntimeError):
    """The processes were not started as they should be; the message says what to do."""


@dataclass(frozen=True)
class Place:
    """This process: its device and its rank among the processes that train together. local_world_size: ranks of a host,
    as TorchRec counts them; ranks_a_gpu: that share each GPU."""

    device: torch.device
    rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    ranks_a_gpu: int = 1

    def finish(self) -> None:
        """Wait until all queued work of this rank is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def settle(self) -> None:
        """Wait until all queued work of this rank, and of the others, is done."""
        self.finish()
        if self.world_size > 1:
            dist.barrier()

    def now(self) -> Any:
        """On a GPU an event in the current stream, else the clock."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0


@contextlib.contextmanager
def place(expected: int = 0, share_gpus: bool = False) -> Iterator[Place]:
    """Join the process group that a launcher described in the environment; one process without a launcher is its own.

    expected: the world size that was asked for, 0 if none was. share_gpus: a host may have several ranks on each of its
    GPUs. NCCL takes one, so they talk over gloo, through the host's memory. TorchRec places shards by the rank within a
    host: every set of ranks with a GPU each is a host to it.
    """
    given = next((name for name in _LAUNCHED[:3] if name in os.environ), None)
    needed = (*_LAUNCHED, "LOCAL_WORLD_SIZE") if share_gpus else _LAUNCHED
    missing = [name for name in needed if name not in os.environ]
    if given and missing and not dist.is_initialized():
        raise LaunchError(f"{given} is set, {', '.join(missing)} not: start with torchrun or TorchX, or unset all")
    world_size, local = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("LOCAL_RANK", 0))
    if expected not in (0, world_size):
        raise LaunchError(f"{expected} processes were asked for, the launcher started {world_size}")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    on_host = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    ranks_a_gpu = 1
    if share_gpus and on_host > gpus > 0:
        if on_host % gpus:
            raise LaunchError(
                f"--share-gpus: {on_host} processes on {gpus} GPUs; start as many on each, a multiple of {gpus}"
            )
        ranks_a_gpu = on_host // gpus
    elif gpus and local >= gpus:
        raise LaunchError(
            f"LOCAL_RANK {local} has no GPU of its own: this host has {gpus}; start fewer processes, or let them share "
            "with --share-gpus to see whether a sharded run works (its times say nothing)"
        )
    device = torch.device("cuda", local % gpus) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
        _multiply_once(device)
    owned = not dist.is_initialized()
    if owned:
        # Long enough for a rank that compiles its kernels first. Alone: no port, so that two runs can't clash.
        alone = {} if given else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        backend = "nccl" if gpus and ranks_a_gpu == 1 else "gloo"
        dist.init_process_group(backend, timeout=timedelta(minutes=30), **alone)
    failed = True
    try:
        if ranks_a_gpu > 1:
            os.environ["LOCAL_WORLD_SIZE"] = str(gpus)  # where TorchRec looks
        yield Place(device, dist.get_rank(), dist.get_world_size(), on_host // ranks_a_gpu, ranks_a_gpu)
        failed = False
    finally:
        if ranks_a_gpu > 1:
            os.environ["LOCAL_WORLD_SIZE"] = str(on_host)
        if owned and not (failed and world_size > 1):  # a rank that failed must not wait for the others here
            dist.destroy_process_group()


def _multiply_once(device: torch.device) -> None:
    """Make what PyTorch keeps for matrix products from the first one to the end of the process, so that the arm which
    trains first isn't charged with it: on Hopper 32 MiB of cuBLAS for the thread of forwards, as much for that of
    backwards, and 1 MiB of cuBLASLt, all of the current stream, in which the pipelines run the model."""
    hidden = torch.nn.Linear(8, 8, device=device)(torch.zeros(8, 8, device=device))  # with a bias: cuBLASLt's
    (hidden @ hidden).sum().backward()


class Feed:
    """The first `count` batches of an iterator for several readers; each is made once, ahead of the step that needs it,
    and dropped when every reader has had it."""

    def __init__(self, batches: Iterator[Batch], count: int, pin: bool) -> None:
        self._batches, self._count, self._pin, self._made = islice(batches, count), count, pin, 0
        self._held: dict[int, Batch] = {}
        self._at: list[int] = []

    def prepare(self, until: int) -> None:
        for number in [number for number in self._held if number < min(self._at, default=0)]:
            del self._held[number]
        for batch in islice(self._batches, max(0, until - self._made)):
            self._held[self._made] = batch.pin_memory() if self._pin else batch
            self._made += 1
        if self._made < min(until, self._count):
            raise ConfigError(f"data.source: ended after {self._made} batches, {self._count} are needed")

    def reader(self) -> Iterator[Batch]:
        self._at.append(0)
        return self._read(len(self._at) - 1)

    def _read(self, reader: int) -> Iterator[Batch]:
        while True:
            self.prepare(self._at[reader] + 1)
            if self._at[reader] not in self._held:
                return
            yield self._held[self._at[reader]]
            self._at[reader] += 1


def in_step(batches: Iterator[Batch]) -> Iterator[Batch]:
    """Batches as long as every rank has one, of one size: a rank alone in a model's collectives would wait for ever."""
    sizes: list[Any] = [0] * dist.get_world_size()
    for number in count():
        batch = next(batches, None)
        dist.all_gather_object(sizes, 0 if batch is None else len(batch.labels))
        if len(set(sizes)) > 1 or not number + sizes[0]:
            raise ConfigError(
                f"data.source: evaluation batch {number} has {sizes} samples on ranks 0 and up: give each "
                "rank as many batches, of one size, and at least one"
            )
        if batch is None:
            return
        yield batch


class Arm:
    """A model, its optimizers and its pipeline. kernels: table -> the compute kernel asked for; frozen: a plan of where
    the tables lie, so that the planner only chooses between `fused` and `fused_triton` for the tables of `auto`; what
    lies in another kernel there keeps it. arms: how many models share the device's memory.

    plan: TorchRec's; tables: what each table asked for, got, and why. losses: one a step, of this rank. trained: steps,
    with those before the checkpoint that was loaded. phases: a step's four times in ms (see PHASES). peak: bytes of GPU
    memory that this arm alone would need, beside what the process keeps for matrix products.
    """

    def __init__(
        self,
        config: Config,
        here: Place,
        dense: int,
        kernels: dict[str, str],
        frozen: ShardingPlan | None = None,
        arms: int = 1,
    ) -> None:
        torch.manual_seed(config.seed)
        self.config, self.here, self._live, self.peak, self.trained = config, here, 0, 0, 0
        begin = here.allocated()
        if here.device.type == "cpu" and config.optimizer.name not in _CPU_OPTIMIZERS:
            raise ConfigError(
                f"optimizer.name: FBGEMM's CPU kernels have no {config.optimizer.name}; on a machine without a GPU "
                f"take one of {', '.join(_CPU_OPTIMIZERS)}"
            )
        self.net = Recommender(config, dense, here.device)
        sharder = TritonEmbeddingBagCollectionSharder(fused_params=config.torchrec_fused_params())
        got, reasons = kernels, dict[str, list[str]]()
        if frozen is None or "auto" in kernels.values():
            planner = _planner(config, here, kernels, sharder, arms, frozen)
            self.plan = planner.collective_plan(self.net, [sharder], dist.GroupMember.WORLD)
            got = kernels_in(self.plan)
            said = [{table.table: list(table.reasons) for table in planner.explain()}]  # rank 0 has planned
            dist.broadcast_object_list(said)
            reasons = said[0]
        if frozen is not None:
            held = kernels_in(frozen)
            kept = {t: k for t, k in held.items() if k not in KERNELS and kernels[t] != FUSED_TRITON}
            swapped = {t: k if k in KERNELS else kernels[t] for t, k in got.items() if t not in kept}
            self.plan = with_compute_kernel(frozen, swapped, module=self.net, sharders=[sharder])
            reasons |= {table: [f"the plan has {kernel}"] for table, kernel in kept.items()}
        self.tables = {
            table: {
                "asked": kernels[table],
                "kernel": sharding.compute_kernel,
                "sharding": sharding.sharding_type,
                "ranks": list(sharding.ranks or []),
                "reasons": reasons.get(table, []),
            }
            for table, sharding in self.plan.plan["embeddings"].items()
        }
        self.model = DistributedModelParallel(
            self.net, ShardingEnv.from_process_group(dist.GroupMember.WORLD), here.device, self.plan, sharders=[sharder]
        )
        if here.device.type == "cuda":
            warm_up(self.model)  # here, where no other rank waits in a collective, and no step is timed
        weights = self.weights()
        for table in config.model.tables:
            limit = config.model.initial_range or table.rows**-0.5
            for weight, (row, column) in weights[f"embeddings.embedding_bags.{table.name}.weight"]:
                fill(weight, table.name, config.seed, limit, row, column, table.dim)
        dense_parameters = dict(in_backward_optimizer_filter(self.model.named_parameters()))
        self.dense_optimizer = KeyedOptimizerWrapper(
            dense_parameters, lambda parameters: torch.optim.Adam(parameters, lr=config.model.dense_learning_rate)
        )
        optimizer = CombinedOptimizer([self.model.fused_optimizer, self.dense_optimizer])
        self.pipeline = PIPELINES[config.pipeline](self.model, optimizer, here.device)
        self._marks: list[Any] = []
        self._steps: list[list[Any]] = []
        self._losses: list[Tensor] = []
        self.net.register_forward_pre_hook(lambda *_: self._mark())
        self.net.register_forward_hook(lambda *_: self._mark())
        optimizer.register_step_pre_hook(lambda *_: self._mark())
        self._grew(begin)

    def advance(self, batches: Iterator[Batch], steps: int) -> None:
        """Train some steps; call `Place.settle` before it."""
        begin = self.here.allocated()
        if self.here.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.here.device)
        for _ in range(steps):
            self._marks = [self.here.now()]
            loss, _, _ = self.pipeline.progress(batches)
            self._mark()
            self._steps.append(self._marks)
            self._losses.append(loss)
            self.trained += 1
        self._marks = []
        if self.here.device.type == "cuda":
            self.peak = max(self.peak, self._live + torch.cuda.max_memory_allocated(self.here.device) - begin)
        self._grew(begin)

    @torch.no_grad()
    def predict(self, batches: Iterator[Batch]) -> tuple[Tensor, Tensor]:
        """(logits, labels) of held-out batches of this rank, on its device.

        Raises:
            ConfigError: there are none, or other ranks have more or others in size; on every rank.
        """
        if isinstance(self.pipeline, TrainPipelineSparseDist):
            self.pipeline.detach()
        self.model.eval()
        logits, labels = [], []
        for batch in in_step(batches):
            batch = batch.to(self.here.device)
            logits.append(self.model(batch)[1][1].float())
            labels.append(batch.labels)
        self.model.train()
        return torch.cat(logits), torch.cat(labels)

    @property
    def losses(self) -> Tensor:
        return torch.stack(self._losses).float().cpu()

    @property
    def phases(self) -> Tensor:
        """[steps, 4]; a step's time is their sum."""
        self.here.settle()
        if self.here.device.type != "cuda":
            return torch.tensor(self._steps, dtype=torch.float64).diff(dim=1) * 1e3
        return torch.tensor([[a.elapsed_time(b) for a, b in pairwise(step)] for step in self._steps]).double()

    def weights(self) -> dict[str, list[tuple[Tensor, tuple[int, int]]]]:
        """Every weight by name: this rank's shards and where they begin; the model's own tensors."""
        return {name: shards_of(value) for name, value in self.model.state_dict().items()}

    def row_state(self) -> dict[str, list[tuple[Tensor, tuple[int, int]]]]:
        """The optimizer state of each table by name, likewise."""
        return {name: shards_of(value) for name, value in self.table_state().items()}

    def table_state(self) -> dict[str, Any]:
        """The optimizer state of each table by name, as TorchRec holds it."""
        state = self.model.fused_optimizer.state_dict()["state"]
        return {name: value for of_table in state.values() for name, value in of_table.items()}

    def save(self, folder: Path) -> None:
        """All weights, the state of all optimizers and the number of steps, by torch.distributed.checkpoint."""
        dcp.save(self._checkpoint(), checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        """What `save` wrote, whatever kernels, plan and number of ranks it was written with.

        Raises:
            ConfigError: it is of other tables or layers.
        """
        self.dense_optimizer.init_state()  # so that there is something to read it into; all gradients are zero
        state = self._checkpoint()
        saved = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        sizes = _sizes(state)
        for name, size in sizes.items():
            if name not in saved:
                raise ConfigError(f"{folder}: this checkpoint has no {name}, and the configuration has")
            if size and list(getattr(saved[name], "size", size)) != size:
                raise ConfigError(f"{folder}: {name} is {list(saved[name].size)} in it, and {size} here")
        everywhere: list[Any] = [None] * self.here.world_size
        dist.all_gather_object(everywhere, set(sizes))  # a rank has no state of tables that it has no shard of
        known = set().union(*everywhere)
        if left := [name for name in saved if getattr(saved[name], "size", ()) and name not in known]:
            raise ConfigError(
                f"{folder}: this checkpoint has {left[0]}, and the configuration has not; do tables or optimizer.name "
                "differ?"
            )
        dcp.load(state, checkpoint_id=folder)
        self.model.load_state_dict(state["model"])
        self.model.fused_optimizer.load_state_dict(state["optimizer"])
        self.dense_optimizer.load_state_dict(state["dense_optimizer"])
        self.trained = state["steps"]

    def _checkpoint(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.model.fused_optimizer.state_dict(),
            "dense_optimizer": self.dense_optimizer.state_dict(),
            "steps": self.trained,
        }

    def _mark(self) -> None:
        self._marks.append(self.here.now())

    def _grew(self, begin: int) -> None:
        self._live += self.here.allocated() - begin
        self.peak = max(self.peak, self._live)


def _sizes(state: Any, name: str = "") -> dict[str, list[int]]:
    """Of all tensors of nested mappings, by the names that torch.distributed.checkpoint gives them."""
    if isinstance(state, dict):
        return {n: size for key, value in state.items() for n, size in _sizes(value, f"{name}.{key}").items()}
    return {name[1:]: list(state.size())} if isinstance(state, (Tensor, ShardedTensor)) else {}


def shards_of(value: Tensor | ShardedTensor) -> list[tuple[Tensor, tuple[int, int]]]:
    if not isinstance(value, ShardedTensor):
        return [(value, (0, 0))]
    return [(s.tensor, (*s.metadata.shard_offsets, 0)[:2]) for s in value.local_shards()]  # type: ignore[misc]


def kernels_in(plan: ShardingPlan) -> dict[str, str]:
    """Table -> its compute kernel."""
    return {table: sharding.compute_kernel for table, sharding in plan.plan["embeddings"].items()}


def _planner(
    config: Config, here: Place, kernels: dict[str, str], sharder: Any, arms: int, frozen: ShardingPlan | None = None
) -> Any:
    """frozen: a plan whose sharding types the tables keep, so that `auto` chooses kernels for them as they lie."""
    offered = sharder.sharding_types(here.device.type)
    for table in config.model.tables:
        if table.sharding and not set(table.sharding) & set(offered):
            allowed = ", ".join(kind for kind in get_args(ShardingTypeName) if kind in offered)
            asked = ", ".join(table.sharding)
            raise ConfigError(
                f"model.tables: {table.name}: sharding {asked}: on {here.device.type} TorchRec plans {allowed}"
            )
    cuda = here.device.type == "cuda"
    share = arms * here.ranks_a_gpu
    memory = {"hbm_cap": torch.cuda.get_device_properties(here.device).total_memory // share} if cuda else {}
    topology = Topology(
        world_size=here.world_size,
        compute_device=here.device.type,
        local_world_size=min(here.local_world_size, here.world_size),
        **memory,
    )
    constraints = constraints_of(config)
    for table, sharding in frozen.plan["embeddings"].items() if frozen else ():
        constraints[table].sharding_types = [sharding.sharding_type]
    batch_size = config.data.batch_size
    return make_planner(kernels, topology, batch_size=batch_size, constraints=constraints, reproducible=True)
