"""DLRM on Criteo's click logs, in the NumPy format of TorchRec's own scripts: a source of data for the A/B comparison.

The files are day_N_dense.npy (float32, 13 columns), day_N_sparse.npy (int32, 26) and day_N_labels.npy (int32, 1), as
torchrec.datasets.scripts.npy_preproc_criteo writes them from the logs. Who has none makes small random ones:

    python examples/criteo.py data/criteo --days 24 --samples 20000
    torchrec-triton ab --config configs/ab_criteo.yaml --output out    # takes 30 GB of GPU memory; fewer rows, less
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated

import numpy as np
from torchrec.datasets.criteo import (
    CAT_FEATURE_COUNT,
    DEFAULT_CAT_NAMES,
    INT_FEATURE_COUNT,
    InMemoryBinaryCriteoIterDataPipe,
)
from torchrec.datasets.utils import Batch

from torchrec_triton.config import Bounds, Config, ConfigError, Count

PARTS = ("dense", "sparse", "labels")


class Criteo:
    """TorchRec's data pipe over the files, which stay on disk. Ids are taken modulo the rows of their table."""

    dense = INT_FEATURE_COUNT

    @dataclass(frozen=True, kw_only=True)
    class Options:
        """folder: of the files, as seen from where the run is started; training_days; held_out_day: its first half is
        evaluated, up to evaluation_batches."""

        folder: str
        training_days: tuple[Annotated[int, Bounds(0)], ...] = (0,)
        held_out_day: Annotated[int, Bounds(0)] = 1
        evaluation_batches: Count = 100

    def __init__(self, config: Config, options: Options) -> None:
        rows = {feature: table.rows for table in config.model.tables for feature in table.features}
        if list(rows) != DEFAULT_CAT_NAMES or config.model.weighted:
            raise ConfigError("model: this data is unweighted and needs the features cat_0 to cat_25, in this order")
        self._options, self._batch_size, self._rows = options, config.data.batch_size, list(rows.values())
        for day in (*options.training_days, options.held_out_day):
            for path in self._files(day):
                if not Path(path).exists():
                    raise ConfigError(f"data.options.folder: there is no {path}; see examples/criteo.py")

    def training(self, rank: int, world_size: int) -> Iterator[Batch]:
        while True:
            yield from self._batches("train", self._options.training_days, rank, world_size)

    def evaluation(self, rank: int, world_size: int) -> Iterator[Batch]:
        held_out = self._batches("val", (self._options.held_out_day,), rank, world_size)
        return islice(held_out, self._options.evaluation_batches)

    def _files(self, day: int) -> list[str]:
        return [f"{self._options.folder}/day_{day}_{part}.npy" for part in PARTS]

    def _batches(self, stage: str, days: tuple[int, ...], rank: int, world_size: int) -> Iterator[Batch]:
        dense, sparse, labels = zip(*(self._files(day) for day in days))
        pipe = InMemoryBinaryCriteoIterDataPipe(
            stage,
            list(dense),
            list(sparse),
            list(labels),
            batch_size=self._batch_size,
            rank=rank,
            world_size=world_size,
            drop_last=True,
            mmap_mode=True,
            hashes=self._rows,
        )
        if not len(pipe):
            raise ConfigError(
                f"data.batch_size: {stage} has no {self._batch_size} samples for each of {world_size} ranks"
            )
        for batch in pipe:
            yield Batch(batch.dense_features, batch.sparse_features, batch.labels.float())


def generate(folder: Path, days: int, samples: int, seed: int = 0) -> None:
    """Random files in the same format, in which the first categorical feature decides most labels."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    for day in range(days):
        dense = random.random((samples, INT_FEATURE_COUNT), dtype=np.float32)
        sparse = random.zipf(1.2, (samples, CAT_FEATURE_COUNT)).clip(max=2**31 - 1).astype(np.int32)
        labels = ((sparse[:, :1] % 2 == 0) ^ (random.random((samples, 1)) < 0.1)).astype(np.int32)
        for part, values in zip(PARTS, (dense, sparse, labels)):
            np.save(folder / f"day_{day}_{part}.npy", values)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write small random files in the format of Criteo's click logs.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--days", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--samples", type=int, default=20000, help="a day; default: %(default)s")
    options = parser.parse_args()
    generate(options.folder, options.days, options.samples)
