"""Where batches come from. A source is a class; the one that `data.source` names is made with (config, options).

It has the attribute `Options`, a frozen keyword-only dataclass of what may stand under data.options, and

    dense: int                              how many dense features a sample has
    training(rank, world_size)              this rank's batches, without end; the same at each call
    evaluation(rank, world_size)            held-out batches, as many and as large on each rank; the same at each call

Batches are TorchRec's `Batch`, on the CPU: dense_features fp32 [B, dense], sparse_features with the features of the
tables in their order, labels fp32 [B]. A source may check that the configured tables fit, and raise ConfigError.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, cycle, islice
from pathlib import Path
from typing import Annotated, Any, Protocol

import numpy as np
import torch
from torchrec import KeyedJaggedTensor
from torchrec.datasets.utils import Batch

from torchrec_triton.config import Bounds, Config, ConfigError, Count, NonNegative, build


class Source(Protocol):
    dense: int

    def training(self, rank: int, world_size: int) -> Iterator[Batch]: ...
    def evaluation(self, rank: int, world_size: int) -> Iterator[Batch]: ...


def open_source(config: Config) -> Source:
    """The configured source.

    Raises:
        ConfigError: there is no such file or class, or an option is wrong.
    """
    path, colon, name = config.data.source.rpartition(":")
    if config.data.source == "synthetic":
        kind: Any = Synthetic
    elif not colon or not path.endswith(".py"):
        raise ConfigError(f"data.source: {config.data.source!r} is neither synthetic nor FILE.py:CLASS")
    else:
        kind = getattr(_module(Path(path)), name, None)
        if not hasattr(kind, "Options"):
            raise ConfigError(f"data.source: {path} has no class {name!r} with a dataclass Options")
    return kind(config, build(kind.Options, config.data.options, "data.options"))


def _module(path: Path) -> Any:
    if not path.exists():
        raise ConfigError(f"data.source: there is no file {path}")
    spec = importlib.util.spec_from_file_location(f"torchrec_triton_source_{path.stem}", path)
    assert spec is not None and spec.loader is not None  # a path that ends in .py has both
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


class Synthetic:
    """Random ids for the configured tables, and labels that depend on them through a hidden number of each row, so
    that a model which looks up or updates the wrong rows learns less."""

    @dataclass(frozen=True, kw_only=True)
    class Options:
        """dense: features; zipf: exponent of the law of the ids, 0 for uniform; jagged: bag sizes are Poisson, not all
        equal to pooling_factor (where that is no whole number, to one of the two beside it); training_batches: how many
        are drawn, after which they come again, or 0 for a new one at every step; evaluation_batches."""

        dense: Annotated[int, Bounds(0)] = 13
        zipf: NonNegative = 1.05
        jagged: bool = False
        training_batches: Annotated[int, Bounds(0)] = 0
        evaluation_batches: Count = 4

    def __init__(self, config: Config, options: Options) -> None:
        self.dense, self._options, self._seed = options.dense, options, config.seed
        self._batch_size, self._weighted = config.data.batch_size, config.model.weighted
        self._features = [(feature, table) for table in config.model.tables for feature in table.features]

    def training(self, rank: int, world_size: int) -> Iterator[Batch]:
        drawn = (self._batch(0, rank, number) for number in count())
        some = self._options.training_batches
        return cycle(islice(drawn, some)) if some else drawn

    def evaluation(self, rank: int, world_size: int) -> Iterator[Batch]:
        return (self._batch(1, rank, number) for number in range(self._options.evaluation_batches))

    def _batch(self, split: int, rank: int, number: int) -> Batch:
        random = np.random.default_rng((self._seed, split, rank, number))
        size, ids, lengths = self._batch_size, [], []
        dense = random.standard_normal((size, self.dense), dtype=np.float32)
        score = dense.sum(1) / max(self.dense, 1) ** 0.5
        for at, (_, table) in enumerate(self._features):
            mean = table.pooling_factor
            length = random.poisson(mean, size) if self._options.jagged else np.full(size, int(mean))
            if not self._options.jagged and mean % 1:
                length += random.random(size) < mean % 1
            drawn = _zipf(random, int(length.sum()), table.rows, self._options.zipf)
            bag = np.repeat(np.arange(size), length)
            score += np.bincount(bag, _hidden(drawn, at), size) / np.maximum(length, 1) ** 0.5
            ids.append(drawn)
            lengths.append(length)
        logit = 3 * score / (len(self._features) + 1) ** 0.5
        values = torch.from_numpy(np.concatenate(ids))
        sparse = KeyedJaggedTensor(
            keys=[feature for feature, _ in self._features],
            values=values,
            weights=torch.from_numpy(random.random(len(values), dtype=np.float32)) if self._weighted else None,
            lengths=torch.from_numpy(np.concatenate(lengths).astype(np.int32)),
        )
        labels = random.random(size) < 1 / (1 + np.exp(-logit))
        return Batch(torch.from_numpy(dense), sparse, torch.from_numpy(labels.astype(np.float32)))


def _zipf(random: np.random.Generator, size: int, rows: int, alpha: float) -> np.ndarray:
    """`size` ids of [0, rows) by the continuous law's inverse; hot rows are scattered over the table, as real ones."""
    u = random.random(size)
    if not alpha:
        return (u * rows).astype(np.int64)
    power = 1 - alpha or 1e-9
    rank = ((u * ((rows + 1.0) ** power - 1) + 1) ** (1 / power)).astype(np.int64) - 1
    step = next(step for step in count(int(rows * 0.618) | 1, 2) if np.gcd(step, rows) == 1)
    return rank.clip(0, rows - 1) * step % rows


def _hidden(ids: np.ndarray, table: int) -> np.ndarray:
    """A fixed number in [-1, 1) for each row of a table."""
    mixed = (ids.astype(np.uint64) + np.uint64(1 + table)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    return (mixed >> np.uint64(40)).astype(np.float64) / 2**23 - 1
