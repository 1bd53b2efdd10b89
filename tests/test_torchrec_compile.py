"""torch.compile over a sharded model: what our operator adds to TorchRec's own behaviour is nothing."""

from __future__ import annotations

import warnings

import pytest
import torch
from distributed_harness import ranks
from test_torchrec_training import Result, dense_of, optimizers, same_results, samples, tower
from torch._dynamo.utils import counters
from torchrec_cases import Case, Table, snapshot

pytestmark = pytest.mark.xdist_group("ranks")

CASE = Case((Table("a", "rw", features=2), Table("b", "tw0")), steps=6)


def trained(case: Case, compiled: bool) -> tuple[Result, list[int], int]:
    """On a rank: what came of it, the graphs that were made until each step, and the breaks between graphs."""
    warnings.simplefilter("ignore", FutureWarning)  # TorchRec's, one a trace
    torch._dynamo.reset()
    counters.clear()
    model = tower(case)
    optimizer = optimizers(model)
    run = torch.compile(model, backend="aot_eager") if compiled else model
    losses, graphs = [], []
    for sample in samples(case):  # the number of ids changes from step to step
        optimizer.zero_grad()
        loss, _ = run(sample)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        graphs.append(counters["stats"]["unique_graphs"])
    torch._dynamo.reset()
    return (losses, dense_of(model), snapshot(model, [])), graphs, sum(counters["graph_break"].values())


def test_a_compiled_model_trains_as_an_eager_one() -> None:
    """One rank: tracing takes half a minute as it is."""
    eager, compiled = (ranks(1).run(trained, CASE, compiled) for compiled in (False, True))
    same_results([result for result, _, _ in compiled], [result for result, _, _ in eager])
    stock = ranks(1).run(trained, CASE.with_kernel("fused"), True)
    for (_, ours, our_breaks), (_, theirs, their_breaks) in zip(compiled, stock, strict=True):
        assert ours[0] > 0 and our_breaks <= their_breaks
        # The third step may still find TorchRec's sizes to vary; after it nothing is compiled that stock doesn't.
        assert ours[-1] - ours[2] <= theirs[-1] - theirs[2] and ours[-1] == ours[-2]
