"""FBGEMM's way of testing its training TBE, with only the class swapped.

Calls, names and checks are those that its users and its own tests make: a module built from 4-tuples, weights copied
in through `split_embedding_weights`, `torch.nn.EmbeddingBag` as the reference, states read back by name, parameters
frozen, `gradcheck` over the per-sample weights.
"""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType as OptimType
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen
from harness import specs
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from torchrec_triton import TritonTableBatchedEmbeddingBags

MODE = {PoolingMode.SUM: "sum", PoolingMode.MEAN: "mean"}
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

shapes = {
    "T": st.integers(1, 3),
    "D": st.integers(1, 16),
    "B": st.integers(1, 8),
    "log_E": st.integers(1, 3),
    "L": st.integers(0, 6),
    "weighted": st.booleans(),
    "mixed": st.booleans(),
    "mixed_B": st.booleans(),
    "pooling_mode": st.sampled_from([PoolingMode.SUM, PoolingMode.MEAN]),
    "weights_precision": st.sampled_from([SparseType.FP32, SparseType.FP16]),
    "output_dtype": st.sampled_from([SparseType.FP32, SparseType.FP16, SparseType.BF16]),
}


class Problem:
    """Random tables, one of them read by two features, dense bags of L ids each, and the EmbeddingBags that match."""

    def __init__(
        self, T: int, D: int, B: int, log_E: int, L: int, mixed: bool, mixed_B: bool, pooling_mode: PoolingMode,
        weights_precision: SparseType, weighted: bool,
    ) -> None:  # fmt: skip
        rng = np.random.RandomState(T * 1000 + D * 100 + B * 10 + L)
        self.Ds = [4 * int(rng.randint(1, D + 1)) if mixed else 4 * D for _ in range(T)]
        self.Es = [int(rng.randint(10**log_E // 2, 2 * 10**log_E)) if mixed else 10**log_E for _ in range(T)]
        self.feature_table_map = sorted([*range(T), T // 2])
        ranks = 2 if mixed_B else 1
        self.Bs = [[int(rng.randint(1, B + 1)) if mixed_B else B for _ in range(ranks)] for _ in self.feature_table_map]
        self.batch_size_per_feature_per_rank = self.Bs if mixed_B else None
        dtype = weights_precision.as_dtype()
        torch.manual_seed(T + D + B)
        self.weights = [torch.randn(E, D_, device=DEVICE).to(dtype) for E, D_ in zip(self.Es, self.Ds, strict=True)]
        self.bags = [
            torch.nn.EmbeddingBag.from_pretrained(w.float(), freeze=False, mode=MODE[pooling_mode])
            for w in self.weights
        ]
        self.xs = [
            torch.from_numpy(rng.randint(0, self.Es[t], size=(sum(bs), L))).to(DEVICE)
            for t, bs in zip(self.feature_table_map, self.Bs, strict=True)
        ]
        self.xws = [torch.randn(x.shape, device=DEVICE) for x in self.xs] if weighted else None
        lengths = torch.full((sum(map(sum, self.Bs)),), L, dtype=torch.int64, device=DEVICE)
        self.offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        self.indices = torch.cat([x.flatten() for x in self.xs])

    @property
    def per_sample_weights(self) -> Tensor | None:
        return None if self.xws is None else torch.cat([xw.flatten() for xw in self.xws])

    def pooled(self) -> list[Tensor]:
        """fp32, one tensor a feature, differentiable to the EmbeddingBags."""
        weights = [None] * len(self.xs) if self.xws is None else self.xws
        return [
            self.bags[t](x, per_sample_weights=xw)
            if x.numel()
            else torch.zeros(len(x), self.Ds[t], device=DEVICE) * self.bags[t].weight.sum() * 0
            for t, x, xw in zip(self.feature_table_map, self.xs, weights, strict=True)
        ]

    def laid_out(self, per_feature: list[Tensor]) -> Tensor:
        """Features side by side, or under mixed batch sizes flat over rank, feature, bag."""
        if self.batch_size_per_feature_per_rank is None:
            return torch.cat(per_feature, dim=1)
        blocks = [f.split(bs) for f, bs in zip(per_feature, self.Bs, strict=True)]
        return torch.cat([block[rank].flatten() for rank in range(len(self.Bs[0])) for block in blocks])

    def module(self, cls: type, **kwargs: object) -> torch.nn.Module:
        location = EmbeddingLocation.DEVICE if DEVICE.type == "cuda" else EmbeddingLocation.HOST
        device = ComputeDevice.CUDA if DEVICE.type == "cuda" else ComputeDevice.CPU
        cc = cls(
            embedding_specs=[(E, D, location, device) for E, D in zip(self.Es, self.Ds, strict=True)],
            feature_table_map=self.feature_table_map,
            **kwargs,
        )
        for view, weights in zip(cc.split_embedding_weights(), self.weights, strict=True):
            view.data.copy_(weights)
        return cc

    def run(self, cc: torch.nn.Module, per_sample_weights: Tensor | None = None, **kwargs: object) -> Tensor:
        weights = self.per_sample_weights if per_sample_weights is None else per_sample_weights
        return cc(
            self.indices,
            self.offsets,
            weights,
            batch_size_per_feature_per_rank=self.batch_size_per_feature_per_rank,
            **kwargs,
        )


def tolerance(*dtypes: SparseType) -> float:
    """Randn sums of at most 6 terms, or rows with a handful of gradients: a few roundings of the coarsest type."""
    coarsest = max(torch.finfo(dtype.as_dtype()).eps for dtype in dtypes)
    return 40 * max(coarsest, 2.0**-20)


def skip_weighted_mean(weighted: bool, pooling_mode: PoolingMode) -> bool:
    """EmbeddingBag weighs sums only, and so do FBGEMM's tests."""
    return weighted and pooling_mode == PoolingMode.SUM


@settings(max_examples=20)
@given(**shapes)
def test_forward(output_dtype: SparseType, **shape: object) -> None:
    shape["weighted"] = skip_weighted_mean(shape["weighted"], shape["pooling_mode"])
    problem = Problem(**shape)
    precision = shape["weights_precision"]
    cc = problem.module(
        TritonTableBatchedEmbeddingBags,
        weights_precision=precision,
        pooling_mode=shape["pooling_mode"],
        output_dtype=output_dtype,
        strict=True,
    )
    fc2 = problem.run(cc)
    assert fc2.dtype == output_dtype.as_dtype()
    f = problem.laid_out(problem.pooled())
    torch.testing.assert_close(fc2.float(), f.detach(), atol=tolerance(output_dtype), rtol=tolerance(output_dtype))


def backward(optimizer: OptimType, output_dtype: SparseType, lr: float, eps: float, shape: dict) -> tuple:
    shape["weighted"] = skip_weighted_mean(shape["weighted"], shape["pooling_mode"])
    problem = Problem(**shape)
    fs = problem.pooled()
    # Gradients that the output's type holds exactly, so that both sides start from the same.
    gos = [torch.randn_like(f).to(output_dtype.as_dtype()).float() for f in fs]
    for f, go in zip(fs, gos, strict=True):
        f.backward(go)
    cc = problem.module(
        TritonTableBatchedEmbeddingBags,
        optimizer=optimizer,
        learning_rate=lr,
        eps=eps,
        weights_precision=shape["weights_precision"],
        pooling_mode=shape["pooling_mode"],
        output_dtype=output_dtype,
        stochastic_rounding=False,
        strict=True,
    )
    problem.run(cc).backward(problem.laid_out(gos).to(output_dtype.as_dtype()))
    cc.flush()
    return problem, cc, [bag.weight.grad for bag in problem.bags]


@settings(max_examples=15)
@given(**shapes)
def test_backward_sgd(output_dtype: SparseType, **shape: object) -> None:
    lr = 0.05
    problem, cc, grads = backward(OptimType.EXACT_SGD, output_dtype, lr, 1e-8, shape)
    close = tolerance(shape["weights_precision"])
    for t, grad in enumerate(grads):
        expected = problem.weights[t].float() - lr * grad
        torch.testing.assert_close(cc.split_embedding_weights()[t].float(), expected, atol=close, rtol=close)


@settings(max_examples=15)
@given(**shapes)
def test_backward_rowwise_adagrad(output_dtype: SparseType, **shape: object) -> None:
    lr, eps = 0.5, 0.2
    problem, cc, grads = backward(OptimType.EXACT_ROWWISE_ADAGRAD, output_dtype, lr, eps, shape)
    states = cc.split_optimizer_states()
    assert len(states) == len(problem.Es) == len(cc.get_optimizer_state())
    close = tolerance(shape["weights_precision"])
    for t, grad in enumerate(grads):
        (m1,) = states[t]
        assert set(cc.get_optimizer_state()[t]) == {"sum"} and m1.shape == (problem.Es[t],)
        torch.testing.assert_close(m1, grad.pow(2).mean(dim=1), atol=1e-5, rtol=1e-5)
        expected = problem.weights[t].float() - lr * grad / (m1.sqrt() + eps)[:, None]
        torch.testing.assert_close(cc.split_embedding_weights()[t].float(), expected, atol=close, rtol=close)


@pytest.mark.filterwarnings("ignore:Input #0 requires gradient and is not a double")
@pytest.mark.parametrize("mixed_B", [False, True])
def test_gradcheck_of_per_sample_weights(mixed_B: bool) -> None:
    problem = Problem(1, 2, 2, 1, 2, True, mixed_B, PoolingMode.SUM, SparseType.FP32, True)
    cc = problem.module(
        TritonTableBatchedEmbeddingBags, optimizer=OptimType.EXACT_ROWWISE_ADAGRAD, learning_rate=0.0, strict=True
    )
    for param in cc.parameters():
        param.requires_grad = False
    weights = problem.per_sample_weights.requires_grad_()
    # The output is linear in the weights: a wide step has no truncation error, and fp32 rounding is 1e-6 of it.
    assert torch.autograd.gradcheck(lambda w: problem.run(cc, w), (weights,), eps=0.5, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("mixed_B", [False, True])
def test_feature_requires_grad(mixed_B: bool) -> None:
    problem = Problem(2, 2, 3, 1, 2, True, mixed_B, PoolingMode.SUM, SparseType.FP32, True)
    cc = problem.module(
        TritonTableBatchedEmbeddingBags, optimizer=OptimType.EXACT_ROWWISE_ADAGRAD, learning_rate=0.0, strict=True
    )
    grads = []
    for mask in (None, torch.tensor([0, 1, 0], dtype=torch.int32, device=DEVICE)):
        weights = problem.per_sample_weights.requires_grad_()
        problem.run(cc, weights, feature_requires_grad=mask).sum().backward()
        grads.append(weights.grad.split([x.numel() for x in problem.xs]))
    for wanted, everything, masked in zip([0, 1, 0], *grads, strict=True):
        torch.testing.assert_close(masked, everything if wanted else torch.zeros_like(everything))


@pytest.mark.parametrize("optimizer", [OptimType.EXACT_SGD, OptimType.EXACT_ROWWISE_ADAGRAD])
def test_methods_answer_as_fbgemms(optimizer: OptimType) -> None:
    problem = Problem(2, 4, 4, 1, 3, True, False, PoolingMode.SUM, SparseType.FP32, False)
    ours, theirs = (
        problem.module(cls, optimizer=optimizer, learning_rate=0.3, table_names=["a", "b"])
        for cls in (TritonTableBatchedEmbeddingBags, SplitTableBatchedEmbeddingBagsCodegen)
    )
    for cc in (ours, theirs):
        problem.run(cc).sum().backward()
        cc.set_learning_rate(0.2)
        cc.set_optimizer_step(17)
        problem.run(cc).sum().backward()
        cc.flush()
        cc.reset_cache_states()
    assert isinstance(ours, SplitTableBatchedEmbeddingBagsCodegen) and ours.uses_triton
    assert ours.get_learning_rate() == theirs.get_learning_rate()
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in theirs.named_parameters()]
    assert [n for n, _ in ours.named_buffers()] == [n for n, _ in theirs.named_buffers()]
    for mine, its in (
        (ours.split_embedding_weights(), theirs.split_embedding_weights()),
        ([s for split in ours.split_optimizer_states() for s in split],
         [s for split in theirs.split_optimizer_states() for s in split]),
    ):  # fmt: skip
        assert len(mine) == len(its)
        for a, b in zip(mine, its, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    saved = io.BytesIO()
    torch.save(ours.state_dict(), saved)
    saved.seek(0)
    theirs.load_state_dict(torch.load(saved))
    for a, b in zip(ours.split_embedding_weights(), theirs.split_embedding_weights(), strict=True):
        assert torch.equal(a, b)


def test_uniform_initialisation() -> None:
    cc = TritonTableBatchedEmbeddingBags(specs([200, 50], [8, 4], DEVICE), strict=True)
    cc.init_embedding_weights_uniform(-0.25, 0.5)
    for weights in cc.split_embedding_weights():
        assert -0.25 <= weights.min() < -0.1 and 0.35 < weights.max() <= 0.5


@pytest.mark.parametrize("mode", [BoundsCheckMode.WARNING, BoundsCheckMode.IGNORE])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("mixed_B", [False, True])
def test_bounds_check_repairs_the_callers_tensors(mode: BoundsCheckMode, weighted: bool, mixed_B: bool) -> None:
    results = []
    for cls in (TritonTableBatchedEmbeddingBags, SplitTableBatchedEmbeddingBagsCodegen):
        problem = Problem(2, 2, 4, 1, 3, False, mixed_B, PoolingMode.SUM, SparseType.FP32, weighted)
        cc = problem.module(cls, bounds_check_mode=mode)
        problem.indices[:] = 10**9
        problem.indices[1] = -5
        out = problem.run(cc)
        assert problem.indices.eq(0).all()
        out.sum().backward()
        results.append((out.detach(), [w.clone() for w in cc.split_embedding_weights()]))
    torch.testing.assert_close(*results, atol=1e-5, rtol=1e-5)


def test_a_linear_layer_of_weights_learns_through_the_lookup() -> None:
    """Weights made by another module, as feature processors make them, get their gradient from the lookup."""
    problem = Problem(1, 2, 4, 1, 3, False, False, PoolingMode.SUM, SparseType.FP32, True)
    base = problem.per_sample_weights
    grads = []
    for cls in (TritonTableBatchedEmbeddingBags, SplitTableBatchedEmbeddingBagsCodegen):
        cc = problem.module(cls, optimizer=OptimType.EXACT_ROWWISE_ADAGRAD, learning_rate=0.1)
        scale = torch.ones(1, device=DEVICE, requires_grad=True)
        problem.run(cc, base * scale).square().sum().backward()
        grads.append(scale.grad)
    torch.testing.assert_close(*grads)
