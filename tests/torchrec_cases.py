"""Sharded training in small: tables, batches, a sharded model on a rank, and what it has to give.

`train` runs on a rank (see distributed_harness.py) and returns outputs, weights and state; `expected` computes the same
from kernels/reference.py on the unsharded tables, in fp64.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from distributed_harness import local_size, rank_device, use_local_size
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_row_wise,
    table_wise,
)
from torchrec.distributed.types import ParameterSharding, ShardingEnv, ShardingPlan
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_triton.kernels.reference import lookup_reference, update_reference
from torchrec_triton.module.sharding import (
    TritonEmbeddingBagCollectionSharder,
    TritonFeatureProcessedEmbeddingBagCollectionSharder,
)
from torchrec_triton.plan.planner import with_compute_kernel

PATH = "ebc"  # of the collection in Model


def grid(hosts: Sequence[int]) -> Any:
    """Two column shards on the given hosts, each over the rows of its host's ranks. TorchRec's own helper cuts columns
    no narrower than 128."""

    def generate(param: Tensor, local_size: int, world_size: int, device_type: str, sharder: Any) -> ParameterSharding:
        rows, width = -(-param.shape[0] // local_size), param.shape[1] // len(hosts)
        shards = [
            ShardMetadata(
                shard_offsets=[min(local * rows, param.shape[0]), column * width],
                shard_sizes=[max(0, min(rows, param.shape[0] - local * rows)), width],
                placement=f"rank:{host * local_size + local}/{device_type}",
            )
            for column, host in enumerate(hosts)
            for local in range(local_size)
        ]
        ranks = [host * local_size + local for host in hosts for local in range(local_size)]
        return ParameterSharding("grid_shard", "dense", ranks, EnumerableShardingSpec(shards))

    return generate


# name -> (plan of one table, ranks a host). Two ranks stand for one host of two or for two hosts of one.
SHARDINGS: dict[str, tuple[Any, int]] = {
    "tw0": (table_wise(rank=0), 2),
    "tw1": (table_wise(rank=1), 2),
    "cw": (column_wise(ranks=[0, 1]), 2),
    "cw_one_rank": (column_wise(ranks=[0, 0]), 2),
    "twcw": (column_wise(ranks=[0, 1]), 2),
    "rw": (row_wise(), 2),
    "twrw": (table_row_wise(host_index=0), 2),
    "grid": (grid(hosts=[0, 1]), 1),
    "grid_one_host": (grid(hosts=[0, 0]), 2),
    "dp": (data_parallel(), 2),
}
COLUMN_SHARDS = {"cw": 2, "cw_one_rank": 2, "twcw": 2, "grid": 2, "grid_one_host": 2}


@dataclass(frozen=True)
class Table:
    name: str
    sharding: str  # a key of SHARDINGS
    kernel: str = "fused_triton"
    rows: int = 10
    dim: int = 8
    features: int = 1
    pooling: PoolingType = PoolingType.SUM
    data_type: DataType = DataType.FP32

    def feature_names(self) -> list[str]:
        return [f"{self.name}_f{i}" for i in range(self.features)]

    def initial(self) -> Tensor:
        seed = zlib.crc32(self.name.encode())
        return torch.randn(self.rows, self.dim, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Case:
    tables: tuple[Table, ...]
    weighted: bool = False
    vbe: bool = False
    dtensor: bool = False
    steps: int = 3
    first_step: int = 0
    batch: int = 4
    learning_rate: float = 0.1
    optimizer: EmbOptimType = EmbOptimType.EXACT_ROWWISE_ADAGRAD
    fused_params: Mapping[str, Any] = field(default_factory=dict)

    def with_kernel(self, kernel: str) -> Case:
        """The same with `kernel` in the place of fused_triton."""
        swapped = [replace(t, kernel=kernel if t.kernel == "fused_triton" else t.kernel) for t in self.tables]
        return replace(self, tables=tuple(swapped))


@dataclass
class FeatureBatch:
    """One feature's bags on one rank; sample b of the batch reads bag inverse[b]."""

    ids: Tensor
    lengths: Tensor
    weights: Tensor
    inverse: Tensor
    grad: Tensor  # [batch, D], of the samples' embeddings


@dataclass
class Trained:
    """What is left after training: outputs[step][feature] of this rank, and (offsets, tensor) shards by table."""

    outputs: list[dict[str, Tensor]]
    weights: dict[str, list[tuple[list[int], Tensor]]]
    state: dict[str, list[tuple[list[int], Tensor]]]
    kernels: dict[str, str]


def batches(case: Case, step: int, rank: int) -> dict[str, FeatureBatch]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    # Gloo gathers equal sizes only, so under row-wise sharding both ranks have as many bags.
    alike = any(table.sharding in ("rw", "twrw") for table in case.tables)
    counts = torch.Generator().manual_seed(step if alike else 1000 * step + rank)
    result = {}
    for table in case.tables:
        for feature in table.feature_names():
            bags = int(torch.randint(1, case.batch + 1, (), generator=counts)) if case.vbe else case.batch
            lengths = torch.randint(0, 4, (bags,), generator=generator)
            # The square crowds ids at 0, so that rows repeat within bags, between bags, and between ranks.
            ids = (torch.rand(int(lengths.sum()), generator=generator) ** 2 * table.rows).long()
            inverse = torch.arange(case.batch)
            if case.vbe:
                inverse = torch.randint(0, bags, (case.batch,), generator=generator)
            result[feature] = FeatureBatch(
                ids,
                lengths,
                torch.rand(ids.numel(), generator=generator) + 0.5,
                inverse,
                torch.randn(case.batch, table.dim, generator=generator),
            )
    return result


def jagged(case: Case, features: Mapping[str, FeatureBatch]) -> KeyedJaggedTensor:
    parts = list(features.values())
    keys = list(features)
    vbe = {}
    if case.vbe:
        vbe["stride_per_key_per_rank"] = [[p.lengths.numel()] for p in parts]
        vbe["inverse_indices"] = (keys, torch.stack([p.inverse for p in parts]).to(rank_device()))
    return KeyedJaggedTensor(
        keys=keys,
        values=torch.cat([p.ids for p in parts]),
        lengths=torch.cat([p.lengths for p in parts]),
        weights=torch.cat([p.weights for p in parts]) if case.weighted else None,
        **vbe,
    ).to(rank_device())


class Model(nn.Module):
    def __init__(self, collection: nn.Module) -> None:
        super().__init__()
        self.ebc = collection

    def forward(self, features: KeyedJaggedTensor) -> Any:
        return self.ebc(features)


def collection(case: Case, on: str = "meta") -> EmbeddingBagCollection:
    return EmbeddingBagCollection(
        device=torch.device(on),
        is_weighted=case.weighted,
        tables=[
            EmbeddingBagConfig(
                name=t.name,
                num_embeddings=t.rows,
                embedding_dim=t.dim,
                feature_names=t.feature_names(),
                pooling=t.pooling,
                data_type=t.data_type,
            )
            for t in case.tables
        ],
    )


def fused_params(case: Case) -> dict[str, Any]:
    return {"optimizer": case.optimizer, "learning_rate": case.learning_rate, **case.fused_params}


def make_plan(case: Case, module: EmbeddingBagCollection, world_size: int | None = None) -> ShardingPlan:
    (on_host,) = {SHARDINGS[t.sharding][1] for t in case.tables}
    world_size = world_size or dist.get_world_size()
    plan = construct_module_sharding_plan(
        module,
        {t.name: SHARDINGS[t.sharding][0] for t in case.tables},
        sharder=EmbeddingBagCollectionSharder(),
        local_size=local_size(min(on_host, world_size), rank_device().type),
        world_size=world_size,
        device_type=rank_device().type,
    )
    for table in case.tables:
        if table.sharding == "twcw":
            plan[table.name].sharding_type = "table_column_wise"
    model_parallel = {t.name: t.kernel for t in case.tables if t.sharding != "dp"}
    return with_compute_kernel(ShardingPlan({PATH: plan}), model_parallel)


def shard(
    case: Case,
    module: nn.Module | None = None,
    inner: EmbeddingBagCollection | None = None,
    *,
    plan: ShardingPlan | None = None,
    registry: Any = None,
) -> DistributedModelParallel:
    """The model on this rank, its tables filled with their initial values.

    module: the collection, or one with feature processors around the collection `inner`.
    """
    use_local_size(min(SHARDINGS[case.tables[0].sharding][1], dist.get_world_size()))
    module = module or collection(case)
    group = dist.GroupMember.WORLD
    sharder = TritonEmbeddingBagCollectionSharder(fused_params=fused_params(case), qcomm_codecs_registry=registry)
    model = DistributedModelParallel(
        Model(module),
        env=ShardingEnv(dist.get_world_size(), dist.get_rank(), group, output_dtensor=case.dtensor),
        device=rank_device(),
        plan=plan or make_plan(case, inner or module),
        sharders=[sharder, TritonFeatureProcessedEmbeddingBagCollectionSharder(sharder)],
    )
    fill(model, {t.name: t.initial() for t in case.tables})
    return model


def local_shards(value: Any) -> list[tuple[list[int], Tensor]]:
    """(offsets, tensor) of what this rank holds of a ShardedTensor, DTensor or plain tensor."""
    if hasattr(value, "local_shards"):
        return [(list(s.metadata.shard_offsets), s.tensor) for s in value.local_shards()]
    if hasattr(value, "to_local"):
        shards = value.to_local().local_shards()  # an empty wrapper still has offsets
        return [(list(o), t) for o, t in zip(value.to_local().local_offsets(), shards, strict=False)]
    return [([0] * value.dim(), value)]


def table_of(key: str) -> str:
    return key.split(".")[-2]


def fill(model: nn.Module, full: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for key, value in model.state_dict().items():
            if "embedding_bags" in key:
                for offsets, shard_ in local_shards(value):
                    area = tuple(slice(o, o + n) for o, n in zip(offsets, shard_.shape, strict=True))
                    shard_.copy_(full[table_of(key)][area])


def assemble(shards: Iterable[tuple[list[int], Tensor]]) -> Tensor:
    """The full tensor from all ranks' shards; NaN where none covers it."""
    shards = [(o, t) for o, t in shards if t.numel()]
    shape = [max(o[d] + t.shape[d] for o, t in shards) for d in range(shards[0][1].dim())]
    full = torch.full(shape, float("nan"), dtype=shards[0][1].dtype)
    for offsets, tensor in shards:
        full[tuple(slice(o, o + n) for o, n in zip(offsets, tensor.shape, strict=True))] = tensor
    return full


def merged(parts: Sequence[Mapping[str, FeatureBatch]]) -> dict[str, FeatureBatch]:
    """The batches of several ranks as one rank's, for cases without VBE."""
    return {
        name: FeatureBatch(
            torch.cat([part[name].ids for part in parts]),
            torch.cat([part[name].lengths for part in parts]),
            torch.cat([part[name].weights for part in parts]),
            torch.arange(sum(part[name].lengths.numel() for part in parts)),
            torch.cat([part[name].grad for part in parts]) / len(parts),
        )
        for name in parts[0]
    }


def step(model: nn.Module, case: Case, number: int, ranks_merged: int = 1) -> dict[str, Tensor]:
    """Forward and backward of this rank's batch; one rank alone can do the work of `ranks_merged`."""
    if dist.get_world_size() == 1 and ranks_merged > 1:
        features = merged([batches(case, number, rank) for rank in range(ranks_merged)])
    else:
        features = batches(case, number, dist.get_rank())
    embeddings = model(jagged(case, features)).to_dict()
    sum((embeddings[name] * part.grad.to(rank_device())).sum() for name, part in features.items()).backward()
    return {name: embeddings[name].detach().cpu().clone() for name in features}


def lookups(model: DistributedModelParallel) -> list[nn.Module]:
    inner = model.module.ebc
    found = getattr(inner, "_embedding_bag_collection", inner)._lookups
    return [lookup.module if isinstance(lookup, DistributedDataParallel) else lookup for lookup in found]


def snapshot(model: DistributedModelParallel, outputs: list[dict[str, Tensor]]) -> Trained:
    weights, state = {}, {}
    for key, value in model.state_dict().items():
        if "embedding_bags" in key:
            weights[table_of(key)] = [(o, t.detach().cpu().clone()) for o, t in local_shards(value)]
    for key, entries in model.fused_optimizer.state_dict()["state"].items():
        for name, value in entries.items():
            if name.endswith("momentum1"):
                state[table_of(key)] = [(o, t.detach().cpu().clone()) for o, t in local_shards(value)]
    kernels = {
        table.name: type(kernel).__name__
        for lookup in lookups(model)
        for kernel in lookup._emb_modules
        for table in kernel.config.embedding_tables
    }
    return Trained(outputs, weights, state, kernels)


def train(case: Case) -> Trained:
    """On a rank: shard, train for case.steps, return what came of it."""
    model = shard(case)
    outputs = [step(model, case, case.first_step + i) for i in range(case.steps)]
    return snapshot(model, outputs)


@dataclass
class Expected:
    outputs: list[list[dict[str, Tensor]]]  # [step][rank][feature]
    weights: dict[str, Tensor]
    state: dict[str, Tensor]


def expected(case: Case, world_size: int = 2, gradient_division: bool = True) -> Expected:
    """The unsharded truth. A column shard has a row state of its own, so each is a table to the reference."""
    weights = {t.name: t.initial().double() for t in case.tables}
    columns = {t.name: COLUMN_SHARDS.get(t.sharding, 1) for t in case.tables}
    state = {t.name: torch.zeros(columns[t.name], t.rows, dtype=torch.float64) for t in case.tables}
    outputs = []
    for number in range(case.first_step, case.first_step + case.steps):
        parts = [batches(case, number, rank) for rank in range(world_size)]
        outputs.append([{} for _ in range(world_size)])
        for table in case.tables:
            names = table.feature_names()
            ids = torch.cat([parts[r][f].ids for f in names for r in range(world_size)])
            lengths = torch.cat([parts[r][f].lengths for f in names for r in range(world_size)])
            sample_weights = torch.cat([parts[r][f].weights for f in names for r in range(world_size)])
            common = {
                "mean": table.pooling == PoolingType.MEAN,
                "batch_sizes": [[parts[r][f].lengths.numel() for r in range(world_size)] for f in names],
            }
            offsets = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
            batch = ([0] * len(names), ids, offsets)
            width = table.dim // columns[table.name]
            flat_out = []
            for shard_ in range(columns[table.name]):
                area = slice(shard_ * width, (shard_ + 1) * width)
                piece = weights[table.name][:, area]
                flat_out.append(lookup_reference([piece], *batch, sample_weights if case.weighted else None, **common))
                grad = []
                for rank in range(world_size):
                    for name in names:
                        part = parts[rank][name]
                        block = torch.zeros(part.lengths.numel(), width, dtype=torch.float64)
                        block.index_add_(0, part.inverse, part.grad[:, area].double())
                        grad.append(block.flatten() / (world_size if gradient_division else 1))
                update = update_reference(
                    [piece],
                    [state[table.name][shard_]],
                    *batch,
                    torch.cat(grad),
                    sample_weights if case.weighted else None,
                    learning_rate=case.learning_rate,
                    optimizer=case.optimizer.name,
                    **common,
                )
                weights[table.name][:, area] = update.tables[0]
                state[table.name][shard_] = update.states[0]
            _spread(outputs[-1], parts, names, flat_out, width)
    return Expected(outputs, weights, {name: s.flatten() for name, s in state.items()})


def _spread(
    outputs: list[dict[str, Tensor]],
    parts: list[dict[str, FeatureBatch]],
    names: Sequence[str],
    flat_out: list[Tensor],
    width: int,
) -> None:
    start = 0
    for rank, of_rank in enumerate(parts):
        for name in names:
            count = of_rank[name].lengths.numel() * width
            bags = torch.cat([flat[start : start + count].view(-1, width) for flat in flat_out], dim=1)
            outputs[rank][name] = bags[of_rank[name].inverse]
            start += count


def close(got: Tensor, want: Tensor, rtol: float, atol: float, what: str) -> None:
    torch.testing.assert_close(got, want, rtol=rtol, atol=atol, check_dtype=False, msg=lambda m: f"{what}: {m}")


def check(case: Case, ranks: Sequence[Trained], want: Expected, rtol: float = 2e-6, atol: float = 2e-6) -> None:
    """Outputs of every step, weights and state after the last.

    fp32 throughout: a sum of at most 12 products and an update of a few operations a step err by some 1e-7 of the
    largest term; three steps and values up to about 5 make 2e-6.
    """
    replicated = {name for table in case.tables if table.sharding == "dp" for name in table.feature_names()}
    for number, of_ranks in enumerate(want.outputs):
        for rank, features in enumerate(of_ranks):
            for name, value in features.items():
                if name in replicated and number > 0:  # updated by an optimizer outside
                    continue
                close(
                    ranks[rank].outputs[number][name], value, rtol, atol, f"output {name}, step {number}, rank {rank}"
                )
    for table in case.tables:
        if table.sharding == "dp":
            continue
        got = assemble(s for r in ranks for s in r.weights[table.name])
        close(got, want.weights[table.name], rtol, atol, f"weights of {table.name}")
        if case.optimizer == EmbOptimType.EXACT_ROWWISE_ADAGRAD:
            got = assemble(s for r in ranks for s in r.state.get(table.name, []))
            close(got, want.state[table.name], rtol, atol, f"state of {table.name}")


def check_same(ours: Sequence[Trained], theirs: Sequence[Trained], rtol: float = 1e-6, atol: float = 1e-6) -> None:
    """Two runs agree in outputs, weights and state, and in the places and shapes of their shards."""
    for mine, other in zip(ours, theirs, strict=True):
        for got_step, want_step in zip(mine.outputs, other.outputs, strict=True):
            for name, want in want_step.items():
                close(got_step[name], want, rtol, atol, f"output {name}")
        for got_shards, want_shards in ((mine.weights, other.weights), (mine.state, other.state)):
            assert got_shards.keys() == want_shards.keys()
            for table, shards in got_shards.items():
                assert [o for o, _ in shards] == [o for o, _ in want_shards[table]], table
                for (_, got), (_, want) in zip(shards, want_shards[table], strict=True):
                    assert got.dtype == want.dtype, table
                    close(got, want, rtol, atol, table)


def plan_of(case: Case, **kwargs: Any) -> dict[str, ParameterSharding]:
    return make_plan(case, collection(case), **kwargs).plan[PATH]
