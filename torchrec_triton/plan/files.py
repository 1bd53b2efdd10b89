"""Sharding plans as JSON files: everything that a plan says of a table, readable, and the same plan when read back."""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import typing
from pathlib import Path
from typing import Any

from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    EnumerableShardingSpec,
    ParameterSharding,
    ShardingPlan,
    ShardingSpec,
    ShardingType,
    ShardMetadata,
)

from torchrec_triton._compat import installed_version


def save_plan(plan: ShardingPlan, path: str | Path) -> None:
    """
    Raises:
        ValueError: a table's sharding holds an object that has no form in JSON (such as cache statistics), or a module
            of the plan is no collection of tables.
    """
    modules = []
    for module, params in plan.plan.items():
        if not isinstance(params, EmbeddingModuleShardingPlan):
            raise ValueError(f"module {module!r}: a {type(params).__name__} is no plan of tables")
        tables = {table: json.dumps(_encode(sharding, f"table {table}")) for table, sharding in params.items()}
        lines = ",\n".join(f"   {json.dumps(table)}: {sharding}" for table, sharding in tables.items())
        modules.append(f"  {json.dumps(module)}: {{\n{lines}\n  }}")  # a line a table
    head = f'{{\n "torchrec": {json.dumps(installed_version("torchrec"))},\n "plan": {{\n'
    Path(path).write_text(head + ",\n".join(modules) + "\n }\n}\n")


def load_plan(path: str | Path) -> ShardingPlan:
    """
    Raises:
        ValueError: the file is not one that `save_plan` wrote; the message says what is wrong.
    """
    try:
        modules = json.loads(Path(path).read_text(encoding="utf-8"))["plan"]
        return ShardingPlan(
            {
                module: EmbeddingModuleShardingPlan({t: _sharding(t, v) for t, v in tables.items()})
                for module, tables in modules.items()
            }
        )
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"there is no {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{path} is no saved plan: {what}") from error


def extent(sharding: ParameterSharding) -> list[int]:
    """[rows, dim] that the shards of a table reach to; empty where it has none."""
    shards = getattr(sharding.sharding_spec, "shards", [])
    ends = [[at + size for at, size in zip(shard.shard_offsets, shard.shard_sizes)] for shard in shards]
    return [max(end) for end in zip(*ends)]


def _sharding(table: str, value: Any) -> ParameterSharding:
    """As `save_plan` wrote it, checked."""
    try:
        sharding: ParameterSharding = _decode(ParameterSharding, value)
        ranks, replicated = sharding.ranks, sharding.sharding_type == ShardingType.DATA_PARALLEL.value
        for kind, name in ((ShardingType, sharding.sharding_type), (EmbeddingComputeKernel, sharding.compute_kernel)):
            if name not in (allowed := [member.value for member in kind]):
                raise ValueError(f"{name!r} is none of {', '.join(allowed)}")
        if ranks is not None and not (isinstance(ranks, list) and all(isinstance(rank, int) for rank in ranks)):
            raise ValueError(f"ranks: {ranks!r} is no list of ranks")
        if sharding.sharding_spec is None and not replicated:
            raise ValueError("sharding_spec is missing")
        if not ranks and not replicated:
            raise ValueError("ranks: at least one is needed")
        shards = getattr(sharding.sharding_spec, "shards", [])
        for shard in shards:
            if shard.placement is None or shard.placement.rank() is None:
                raise ValueError(f"placement {shard.placement} is none such as rank:0/cuda:0")
            if ranks and shard.placement.rank() not in ranks:
                raise ValueError(f"placement {shard.placement} is on none of the ranks {ranks}")
        if shards and sum(math.prod(shard.shard_sizes) for shard in shards) != math.prod(extent(sharding)):
            raise ValueError("sharding_spec: its shards leave a part of the table out, or overlap")
    except KeyError as error:
        raise ValueError(f"table {table}: there is no {error}") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"table {table}: {error}") from error
    return sharding


def _encode(value: Any, at: str) -> Any:
    """Enum members by name, dataclasses as mappings without what is None, placements as "rank:0/cuda:0"."""
    if value is None or (isinstance(value, (bool, int, float, str)) and not isinstance(value, enum.Enum)):
        return value
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, EnumerableShardingSpec):
        return [
            {"offsets": list(s.shard_offsets), "sizes": list(s.shard_sizes), "placement": str(s.placement)}
            for s in value.shards
        ]
    if dataclasses.is_dataclass(value):
        items = {item.name: getattr(value, item.name) for item in dataclasses.fields(value)}
        return {name: _encode(item, f"{at}: {name}") for name, item in items.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [_encode(item, at) for item in value]
    raise ValueError(f"{at} is a {type(value).__name__}, which a plan file cannot hold; set it after loading")


def _decode(kind: Any, value: Any) -> Any:
    """`value`, as it stands in the file, as a `kind`."""
    if typing.get_origin(kind) is typing.Union:  # Optional
        kind = typing.get_args(kind)[0]
    if typing.get_origin(kind) is tuple:
        return tuple(tuple(item) if isinstance(item, list) else item for item in value)
    if not isinstance(kind, type):  # List[int]
        return value
    if issubclass(kind, ShardingSpec):
        return EnumerableShardingSpec([ShardMetadata(s["offsets"], s["sizes"], s["placement"]) for s in value])
    if issubclass(kind, enum.Enum):
        return kind[value]
    if issubclass(kind, tuple):  # named
        return kind(*value)
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        if unknown := [name for name in value if name not in hints]:
            raise ValueError(f"{kind.__name__} has no {unknown[0]!r} in this TorchRec")
        return kind(**{name: _decode(hints[name], item) for name, item in value.items()})
    return value
