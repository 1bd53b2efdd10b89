"""On a GPU: lookups on another stream than the backward of the model around them, and replays of a captured step."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import harness
import pytest
import torch
from distributed_harness import ranks
from test_torchrec_training import compare_pipelines
from torch import Tensor
from torchrec.distributed.train_pipeline import TrainPipelineFusedSparseDist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec_cases import Case, Table, Trained, batches, jagged, shard, snapshot

pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group("ranks")]


# --- streams ----------------------------------------------------------------------------------------------------------


def copied(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """In memory of the current stream."""
    weights = features.weights_or_none()
    return KeyedJaggedTensor(
        keys=features.keys(),
        values=features.values().clone(),
        lengths=features.lengths().clone(),
        weights=None if weights is None else weights.clone(),
    )


def churn() -> None:
    """Take whatever memory of the current stream is free, and overwrite it."""
    for size in (1 << 8, 1 << 10, 1 << 13, 1 << 16, 1 << 18):
        torch.full((size,), -1, device="cuda")


def lookups_aside(case: Case, steps: int, aside: bool) -> tuple[list[Tensor], Trained]:
    """On a rank: each step's embeddings, and the model at the end. aside: the lookups run on a stream of their own,
    which waits for the main one only where PyTorch sees to it."""
    model, side = shard(case), torch.cuda.Stream()
    prepared = [batches(case, number, 0) for number in range(20)]
    features = [jagged(case, batch) for batch in prepared]
    grads = [torch.cat([part.grad for part in batch.values()], dim=1).cuda() for batch in prepared]
    torch.cuda.synchronize()
    outputs = []
    for number in range(steps):
        on_side: AbstractContextManager[Any] = torch.cuda.stream(side) if aside else nullcontext()
        with on_side:
            ids = copied(features[number % 20])
            embeddings = model(ids).values()
            del ids
            churn()
        if aside:
            torch.cuda.current_stream().wait_stream(side)
        loss = (embeddings * grads[number % 20]).sum()
        churn()
        loss.backward()
        outputs.append(embeddings.detach())  # keeps the memory of the other stream from a third use
    torch.cuda.synchronize()
    return [output.cpu() for output in outputs], snapshot(model, [])


@pytest.mark.parametrize("weighted", [False, True])
def test_lookups_on_a_stream_of_their_own(weighted: bool) -> None:
    tables = (Table("a", "rw", rows=300, dim=64), Table("b", "tw0", rows=5000, dim=128, features=2))
    case = Case(tables, weighted=weighted, batch=512)
    (aside, trained), (beside, expected) = (
        ranks(1, "cuda").run(lookups_aside, case, 500, on_side)[0] for on_side in (True, False)
    )
    for number, (got, want) in enumerate(zip(aside, beside, strict=True)):
        assert torch.equal(got, want), f"step {number}"
    for got, want in ((trained.weights, expected.weights), (trained.state, expected.state)):
        for table, ((_, values),) in want.items():
            assert torch.equal(got[table][0][1], values), table


def alternating(module: Any, cases: list[harness.Case], streams: list[torch.cuda.Stream]) -> list[Tensor]:
    """Outputs and per-sample weight gradients of 200 steps on one stream after the other; each waits for the step
    before it, and for nothing else. Both streams overwrite what lies free in them while a step is on its way."""
    batches = [(case, harness.make_batch(case, "cuda", number)) for number, case in enumerate(cases)]
    torch.cuda.synchronize()
    results = []
    for number in range(200):
        here, there = streams[number % 2], streams[1 - number % 2]
        case, batch = batches[number % len(batches)]
        here.wait_stream(there)
        with torch.cuda.stream(here):
            weights = batch.per_sample_weights
            own = replace(  # in memory of this stream
                batch,
                indices=batch.indices.clone(),
                offsets=batch.offsets.clone(),
                per_sample_weights=None if weights is None else weights.clone().requires_grad_(),
            )
            out = module(own.indices, own.offsets, **own.kwargs(case))
        with torch.cuda.stream(there):
            churn()
        with torch.cuda.stream(here):
            gradient = batch.grad_output.clone()
            churn()
            out.backward(gradient)
            results.append(out.detach().clone())
            if own.per_sample_weights is not None:
                results.append(own.per_sample_weights.grad)
            del own, out, gradient
            churn()
        with torch.cuda.stream(there):
            churn()
    torch.cuda.synchronize()
    return results


@pytest.mark.parametrize("weighted", [False, True])
def test_a_module_whose_calls_alternate_between_two_streams(weighted: bool) -> None:
    """Batches of several sizes, so that whatever is kept between calls would have to grow."""
    cases = [
        harness.Case(
            rows=(300, 5000), dims=(64, 128), feature_table_map=(0, 1), lengths=(8,) * 2 * batch, weighted=weighted
        )
        for batch in (64, 1024, 256, 4096, 512)
    ]
    module, check = (harness.build(cases[0], "cuda", strict=True) for _ in range(2))
    one, two = torch.cuda.Stream(), torch.cuda.Stream()
    got, want = alternating(module, cases, [one, two]), alternating(check, cases, [one, one])
    for number, pair in enumerate(zip(got, want, strict=True)):
        assert torch.equal(*pair), f"result {number}"
    assert harness.same_bits(harness.contents(module), harness.contents(check))
    assert all(state.count_nonzero() for state in harness.contents(module).states)


@pytest.mark.parametrize("stream", ["new", "current"])
def test_the_fused_pipelines_streams(stream: str) -> None:
    """Its lookups run on the stream of the batches' exchange by default."""
    tables = (Table("a", "rw", rows=300, dim=64), Table("b", "tw0", rows=5000, dim=128), Table("c", "tw0", "fused"))
    pipeline: Any = partial(TrainPipelineFusedSparseDist, emb_lookup_stream=stream)
    compare_pipelines(ranks(1, "cuda"), Case(tables, steps=6, batch=32), pipeline)


class MadeElsewhere(torch.autograd.Function):
    """Hands on the gradient as TorchRec's exchange does: made in the current stream, and unknown to autograd, which
    therefore keeps no record of the lookup's stream."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, gradient: list[Tensor]) -> Tensor:  # type: ignore[override]
        ctx.gradient = gradient
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, unused: Tensor) -> tuple:  # type: ignore[override]
        return ctx.gradient.pop(), None


@pytest.mark.parametrize("wide", [False, True])
def test_a_gradient_that_was_made_in_another_stream(wide: bool) -> None:
    """Its memory is let go of, and taken again in its own stream, before the backward has read it; wide: it is columns
    of a larger one, as where TorchRec puts the outputs of several operators side by side."""
    case = harness.Case(rows=(5000,), dims=(128,), feature_table_map=(0,), lengths=(8,) * 4096)
    (module, check), side = (harness.build(case, "cuda", strict=True) for _ in range(2)), torch.cuda.Stream()
    batch = harness.make_batch(case, "cuda", 0)
    for number in range(20):
        torch.cuda.synchronize()
        gradient = batch.grad_output * (number + 1)
        made = [torch.cat([gradient] * 2, dim=1)[:, : gradient.shape[1]] if wide else gradient]
        size = made[0].untyped_storage().size() // 4
        del gradient
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            out = MadeElsewhere.apply(module(batch.indices, batch.offsets, **batch.kwargs(case)), made)
            torch.cuda._sleep(20_000_000)  # about 10 ms, for which the backward waits
            out.backward(torch.empty_like(out))
        del made, out
        torch.full((size,), float("nan"), device="cuda")
    torch.cuda.synchronize()
    for number in range(20):
        check(batch.indices, batch.offsets, **batch.kwargs(case)).backward(batch.grad_output * (number + 1))
    assert harness.same_bits(harness.contents(module), harness.contents(check))


# --- graphs -----------------------------------------------------------------------------------------------------------


def captured(module: Any, case: harness.Case, static: harness.Batch) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        harness.step(module, case, static)
    return graph


def test_a_captured_step_keeps_the_learning_rate_of_its_capture() -> None:
    """Rates are run-time arguments of the kernels, and a graph holds the arguments of its launches."""
    case = harness.Case(rows=(1000, 50), dims=(64, 8), feature_table_map=(0, 1), lengths=(8,) * 1024)
    module, eager = (harness.build(case, "cuda", strict=True) for _ in range(2))
    static = harness.make_batch(case, "cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for one in (module, eager):
            for _ in range(3):
                harness.step(one, case, static)
    torch.cuda.current_stream().wait_stream(side)
    graph = captured(module, case, static)
    module.set_learning_rate(0.5)
    for number, (ids, pruned) in enumerate((("uniform", 0), ("skewed", 5000), ("equal", 0))):  # as if padded to fit
        batch = harness.make_batch(replace(case, ids=ids), "cuda", number + 1)
        batch.indices[len(batch.indices) - pruned :] = -1
        for name in ("indices", "offsets", "grad_output"):
            getattr(static, name).copy_(getattr(batch, name))
        graph.replay()
        harness.step(eager, case, batch)
        assert harness.same_bits(harness.contents(module), harness.contents(eager)), ids
    eager.set_learning_rate(0.5)
    captured(module, case, static).replay()  # has the new one
    harness.step(eager, case, static)
    assert harness.same_bits(harness.contents(module), harness.contents(eager))
