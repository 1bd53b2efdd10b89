"""Do both sides compute the same, and is it right? No shape is timed before this says yes.

Both sides are FBGEMM's class and ours with equal tables. Two steps must agree within rounding, the second with FBGEMM's
opt-in forward; and a sample of our bags and rows must agree with float64 arithmetic written here, without either.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen

from torchrec_triton.bench.workloads import Batch, Workload
from torchrec_triton.module.tbe import TritonTableBatchedEmbeddingBags

LEARNING_RATE, EPS = 0.01, 1e-8
SAMPLES = 16  # bags and rows of each table in the float64 check

# Largest differences of the sides: of an output as a share of its largest value, of weights absolute, of state as a
# share of itself. Tables begin in [-1, 1], where fp16 is spaced by 2^-11: the sides may round a weight apart, and the
# second output shows it, and by three spacings of numbers above 1 once each has rounded stochastically in its own way.
# State is fp32 sums in different orders; a lookup lost of a run of n moves it by 1/sqrt(n).
LIMITS = {"output1": 2e-6, "output2": 1e-3, "weights": 2e-3, "stochastic weights": 3e-3, "state": 3e-4}

Call = Callable[[Batch], torch.Tensor]


class GateError(AssertionError):
    """The sides disagree, or are wrong: their times mean nothing."""


def module(cls: Any, workload: Workload, device: torch.device, **more: Any) -> Any:
    """A TBE of either class. Whatever is not said here is FBGEMM's default on both sides, bounds checks among it."""
    cuda = device.type == "cuda"
    place = (EmbeddingLocation.DEVICE, ComputeDevice.CUDA) if cuda else (EmbeddingLocation.HOST, ComputeDevice.CPU)
    return cls(
        [(rows, dim, *place) for rows, dim in zip(workload.rows, workload.dims)],
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=LEARNING_RATE,
        eps=EPS,
        weights_precision=SparseType[workload.data_type],
        output_dtype=SparseType.FP32,
        stochastic_rounding=True,
        device=device,
        **more,
    )


def flat(tbe: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and row-wise state of all tables, in place."""
    names = ("weights_host", "momentum1_host") if tbe.use_cpu else ("weights_dev", "momentum1_dev")
    weights, state = (getattr(tbe, name).detach() for name in names)
    return weights, state


@dataclass(frozen=True)
class Pair:
    """The two modules of a set of tables, and the three sides that are timed."""

    ours: Any
    theirs: Any
    no_weight_grad: torch.Tensor  # FBGEMM would compute the gradient of weights that want none, unless told so

    @staticmethod
    def build(workload: Workload, device: torch.device) -> Pair:
        gc.collect()  # modules are in reference cycles: what is left of the last pair may be most of the memory
        torch.cuda.empty_cache()
        return Pair(
            module(TritonTableBatchedEmbeddingBags, workload, device, strict=True),
            module(SplitTableBatchedEmbeddingBagsCodegen, workload, device),
            torch.zeros(len(workload.rows), dtype=torch.int32, device=device),
        )

    def calls(self) -> dict[str, Call]:
        """The forward of each side: ours, FBGEMM's, FBGEMM's opt-in one (which it takes where there is no VBE)."""

        def triton(batch: Batch) -> torch.Tensor:
            return self.ours(
                batch.indices, batch.offsets, batch.weights, batch_size_per_feature_per_rank=batch.batch_sizes
            )

        def fbgemm(batch: Batch, experimental: bool = False) -> torch.Tensor:
            self.theirs.is_experimental = experimental
            wanted = None if batch.weights is None else self.no_weight_grad
            return self.theirs(
                batch.indices, batch.offsets, batch.weights, wanted, batch_size_per_feature_per_rank=batch.batch_sizes
            )

        return {"triton": triton, "fbgemm": fbgemm, "fbgemm2": lambda batch: fbgemm(batch, True)}

    def reset(self) -> None:
        """Equal random weights, state 0."""
        weights, state = flat(self.ours)
        weights.uniform_(-1.0, 1.0)
        state.zero_()
        for mine, other in zip((weights, state), flat(self.theirs)):
            other.copy_(mine)

    def set_stochastic_rounding(self, on: bool) -> None:
        for tbe in (self.ours, self.theirs):
            tbe.optimizer_args = tbe.optimizer_args._replace(stochastic_rounding=on)


def gate(pair: Pair, workload: Workload, batches: list[Batch], grad: torch.Tensor) -> dict[str, float]:
    """Two steps on both sides, from equal weights, rounding to nearest, then one with stochastic rounding, as timed.

    Returns: largest differences of the sides (see LIMITS), and the sample's errors as shares of what is allowed.

    Raises:
        GateError: a difference is larger than rounding explains.
    """
    pair.reset()
    calls = pair.calls()
    result: dict[str, float] = {}
    shares = []
    (weights, state), (their_weights, their_state) = flat(pair.ours), flat(pair.theirs)
    for step, other in enumerate(("fbgemm", "fbgemm2", "fbgemm"), start=1):
        batch, stochastic = batches[(step - 1) % len(batches)], step == 3
        pair.set_stochastic_rounding(stochastic)
        samples = [_sample(pair.ours, workload, batch, grad, f, step) for f in range(len(workload.rows))]
        out, expected = calls["triton"](batch), calls[other](batch)
        if not stochastic:
            largest = float(expected.detach().abs().max()) + 1e-30
            result[f"output{step}"] = _largest_difference(out.detach(), expected.detach()) / largest
        out.backward(grad)
        expected.backward(grad)
        result["stochastic weights" if stochastic else "weights"] = _largest_difference(weights, their_weights)
        shares += [
            _errors(pair.ours, workload, out.detach(), f, sample, stochastic) for f, sample in enumerate(samples)
        ]
        del out, expected
    scale = their_state.clamp(min=1e-30)
    result["state"] = _largest_difference(state / scale, their_state / scale)
    limits = dict(LIMITS)
    for name, share in zip(("output", "weights", "state"), torch.stack(shares).amax(0).tolist()):
        result[f"float64 {name}"], limits[f"float64 {name}"] = share, 1.0
    if wrong := [name for name, limit in limits.items() if not result[name] <= limit]:  # NaN is wrong too
        found = (f"{name} differs by {result[name]:.3g} (allowed {limits[name]:g})" for name in wrong)
        raise GateError(f"the gate failed: {', '.join(found)}")
    return result


def _largest_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest |a - b| of two tensors, in pieces: tables take most of the memory. NaN if there is one."""
    a, b = a.reshape(-1), b.reshape(-1)
    pieces = zip(a.split(2**28), b.split(2**28))
    largest = [(x.float() - y.float()).abs().max() for x, y in pieces if x.numel()]
    return float(torch.stack(largest).max()) if largest else 0.0


@dataclass(frozen=True)
class _Sample:
    """What a step has to give for some bags and rows of one table, in float64, computed before it."""

    bags: torch.Tensor  # [S]
    output: torch.Tensor  # [S, D]
    output_error: torch.Tensor  # [S, D], what an fp32 sum may be off
    rows: torch.Tensor  # [R]
    weights: torch.Tensor  # [R, D]
    state: torch.Tensor  # [R]


def _table(tbe: Any, workload: Workload, f: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[rows, D] and [rows] of a table, views."""
    weights, state = flat(tbe)
    rows, dim = workload.rows[f], workload.dims[f]
    at, state_at = tbe.weights_physical_offsets[f], tbe.momentum1_physical_offsets[f]
    return weights.view(-1)[at : at + rows * dim].view(rows, dim), state.view(-1)[state_at : state_at + rows]


def _sample(tbe: Any, workload: Workload, batch: Batch, grad: torch.Tensor, f: int, seed: int) -> _Sample:
    """Random bags, and the rows of random lookups with the most used row among them."""
    device = batch.indices.device
    generator = torch.Generator(device=device).manual_seed(seed)
    table, state = _table(tbe, workload, f)
    first, count = sum(workload.bags[:f]), workload.bags[f]
    offsets = batch.offsets[first : first + count + 1]
    begin, end = int(offsets[0]), int(offsets[-1])
    ids, bag_of = batch.indices[begin:end], torch.repeat_interleave(offsets.diff())
    scale = (torch.ones(end - begin, device=device) if batch.weights is None else batch.weights[begin:end]).double()

    bags, at, kept = _pick(torch.randint(count, (SAMPLES,), generator=generator, device=device), bag_of, count)
    terms = table[ids[kept]].double() * scale[kept, None]
    output = torch.zeros(bags.numel(), table.shape[1], dtype=torch.float64, device=device)
    size = torch.zeros_like(output).index_add_(0, at, terms.abs())
    output.index_add_(0, at, terms)
    # A sum of n fp32 terms, in any order, is off by at most n - 1 roundings of the sum of their sizes, and each
    # product by one.
    error = size * (offsets.diff()[bags, None] + 1) * 2.0**-24

    chosen = ids[torch.randint(ids.numel(), (SAMPLES,), generator=generator, device=device)] if ids.numel() else ids
    hottest = torch.bincount(ids, minlength=1).argmax()[None]
    rows, at, kept = _pick(torch.cat([chosen, hottest]), ids, table.shape[0])
    share = torch.zeros(rows.numel() * count, dtype=torch.float64, device=device)
    share.index_add_(0, at * count + bag_of[kept], scale[kept])
    gradient = share.view(-1, count) @ workload.feature(grad, f).double()
    touched = torch.bincount(at, minlength=rows.numel()) > 0
    new_state = state[rows].double() + gradient.square().mean(1)
    step = torch.where(touched, LEARNING_RATE / (new_state.sqrt() + EPS), 0.0)
    return _Sample(bags, output, error, rows, table[rows].double() - step[:, None] * gradient, new_state)


def _pick(wanted: torch.Tensor, values: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Distinct `wanted` [W] of `count`; for each of the `values` that is among them its place in W; their positions."""
    wanted = wanted.unique()
    place = torch.full((count,), -1, device=wanted.device)
    place[wanted] = torch.arange(wanted.numel(), device=wanted.device)
    at = place[values]
    kept = (at >= 0).nonzero()[:, 0]
    return wanted, at[kept], kept


def _errors(
    tbe: Any, workload: Workload, output: torch.Tensor, f: int, sample: _Sample, stochastic: bool = False
) -> torch.Tensor:
    """[3]: largest error of output, weights and state as a share of what is allowed."""
    table, state = _table(tbe, workload, f)
    out, weights = workload.feature(output, f)[sample.bags].double(), table[sample.rows].double()
    # Half a spacing of the weights' type (a whole one, stochastically), and what fp32 costs on the way: a state off by
    # 5e-5 of itself moves a step of lr * G / sqrt(m), a few hundredths at most, by 2e-6 at most.
    spacing = torch.finfo(table.dtype).eps * torch.exp2(sample.weights.abs().clamp(min=2.0**-14).log2().floor())
    # fp32 sums of up to a million gradients of either sign, blockwise on both sides.
    state_error = 5e-5 * sample.state
    pairs = (
        (out - sample.output, sample.output_error),
        (weights - sample.weights, (spacing if stochastic else spacing / 2) + 2e-6),
        (state[sample.rows].double() - sample.state, state_error),
    )
    worst = [(error.abs() / (allowed + 1e-30)).reshape(-1) for error, allowed in pairs]
    return torch.stack([torch.cat([share, share.new_zeros(1)]).max() for share in worst])
