"""The launcher of the kernels, and the sort that has two ways to run."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import pickle
import weakref
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType

from torchrec_triton import TritonTableBatchedEmbeddingBags
from torchrec_triton.kernels import launch, sort
from torchrec_triton.kernels.launch import Launcher
from torchrec_triton.module.tbe import _fbgemm


class FakeKernel:
    """Stands in for a Triton kernel of two arguments and three constants; notes what is launched, and by which way."""

    params = tuple(SimpleNamespace(name=name) for name in ("x", "n", "WIDTH", "MEAN", "EARLY"))

    def __init__(self) -> None:
        self.log: list[tuple] = []

    def __getitem__(self, grid: tuple) -> Any:
        def run(*args: Any, **constants: Any) -> Any:
            self.log.append(("triton", grid, args, constants))
            return FakeCompiled(self.log)

        return run

    def warmup(self, *args: Any, grid: tuple, **constants: Any) -> Any:
        self.log.append(("warmup", grid, args, constants))
        return FakeCompiled(self.log)

    __name__ = "fake_kernel"


class FakeCompiled:
    n_regs = 60  # allocated by eights: 64
    metadata = SimpleNamespace(num_warps=2, shared=0)

    def __init__(self, log: list[tuple]) -> None:
        self.log = log

    function, packed_metadata = 11, (2, 1, 0)

    def __getitem__(self, grid: tuple) -> Any:
        return lambda *args: self.log.append(("hooked", grid, args))

    def run(self, x: int, y: int, z: int, stream: int, function: int, packed: tuple, *rest: Any) -> None:
        assert (y, z, stream, function, packed, rest[:3]) == (1, 1, 7, 11, (2, 1, 0), (None, None, None))
        self.log.append(("compiled", (x,), rest[3:]))


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "current_stream", lambda device: 7)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    gpu = SimpleNamespace(
        multi_processor_count=132,
        max_threads_per_multi_processor=2048,
        regs_per_multiprocessor=65536,
        shared_memory_per_multiprocessor=233472,
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)


def one() -> dict[str, Any]:
    return {"WIDTH": 1, "MEAN": True}


def test_a_place_takes_triton_once_and_then_its_compiled_kernel(h200):
    kernel, launcher = FakeKernel(), Launcher(torch.device("cuda", 0))
    for n in (5, 6, 7):
        launcher("here", kernel, n, lambda: {"WIDTH": 128, "MEAN": True, "num_warps": 2}, "x", n)
    launcher("there", kernel, 1, lambda: {"WIDTH": 64, "MEAN": False, "num_warps": 2}, "x", 1)
    assert kernel.log == [
        ("triton", (5,), ("x", 5), {"WIDTH": 128, "MEAN": True, "num_warps": 2, "EARLY": False}),
        ("compiled", (6,), ("x", 6, 128, True, False)),
        ("compiled", (7,), ("x", 7, 128, True, False)),
        ("triton", (1,), ("x", 1), {"WIDTH": 64, "MEAN": False, "num_warps": 2, "EARLY": False}),
    ]


@pytest.mark.parametrize("capability, early", [((8, 0), False), ((9, 0), True), ((10, 0), True)])
def test_programs_get_in_place_early_where_the_gpu_can(h200, monkeypatch, capability, early):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    launch._programmatic.cache_clear()
    kernel, launcher = FakeKernel(), Launcher(torch.device("cuda", 0))
    launcher("here", kernel, 1, one, "x", 1, early=True)
    launch._programmatic.cache_clear()
    assert kernel.log[0][3] == {"WIDTH": 1, "MEAN": True, "EARLY": early, **({"launch_pdl": True} if early else {})}


def test_tensors_are_passed_by_address(h200):
    kernel, launcher = FakeKernel(), Launcher(torch.device("cuda", 0))
    first, second = torch.zeros(3), torch.ones(4)
    for tensor in (first, second):
        launcher("here", kernel, 1, one, tensor, None)
    assert kernel.log[1][2] == (second.data_ptr(), None, 1, True, False)


def test_hooks_of_a_profiler_are_called(h200, monkeypatch):
    """Triton calls them in its own launch of a compiled kernel."""
    kernel, launcher = FakeKernel(), Launcher(torch.device("cuda", 0))
    launcher("here", kernel, 1, one, "x", 1)
    monkeypatch.setattr(launch.knobs.runtime.launch_enter_hook, "calls", [print])
    launcher("here", kernel, 2, one, "x", 2)
    assert kernel.log[1] == ("hooked", (2, 1, 1), ("x", 2, 1, True, False))


def test_a_copy_compiles_for_itself(h200):
    kernel, launcher = FakeKernel(), Launcher(torch.device("cuda", 0))
    launcher("here", kernel, 1, one, "x", 1)
    for copy in (deepcopy(launcher), pickle.loads(pickle.dumps(launcher))):
        copy("here", kernel, 1, one, "x", 1)
    assert [entry[0] for entry in kernel.log] == ["triton"] * 3


def test_compile_only_launches_nothing_and_is_taken_up_later(h200):
    kernel, launcher = FakeKernel(), Launcher(torch.device("cuda", 0))
    with launch.compile_only() as names:
        for n in (5, 6):
            launcher("here", kernel, n, one, "x", n)
    assert names == ["fake_kernel"]
    launcher("here", kernel, 7, one, "x", 7)
    assert [entry[:2] for entry in kernel.log] == [("warmup", (5,)), ("compiled", (7,))]


def test_resident_programs_are_what_the_gpu_holds(h200):
    kernel, launcher = FakeKernel(), Launcher(torch.device("cuda", 0))
    for programs in (10**6, 10**6, 100):
        launcher("here", kernel, programs, one, "x", 1, resident=True)
    # 65536 registers / (64 a thread * 64 threads) = 16 programs on each of 132 multiprocessors.
    assert [entry[1] for entry in kernel.log[1:]] == [(16 * 132,), (100,)]


def test_hyper_parameters_make_no_new_launcher(device):
    """eps and the like are arguments of the kernels; what the kernels are compiled for is read anew."""
    tbe = TritonTableBatchedEmbeddingBags(
        [(50, 8)], strict=True, device=device, optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD, learning_rate=0.1
    )
    ids, offsets = torch.tensor([1, 2], device=device), torch.tensor([0, 1, 2], device=device)
    known = 0
    for step in range(4):
        tbe.update_hyper_parameters({"eps": 0.1 / (step + 1), "lr": 0.1})
        tbe(ids, offsets).sum().backward()
        known = known or len(tbe.layout().launchers)
        assert tbe._optimizer_now().rule.eps == pytest.approx(0.1 / (step + 1))
    assert len(tbe.layout().launchers) == known
    for name, value, field in (
        ("weight_decay_mode", _fbgemm.WeightDecayMode.DECOUPLE, "weight_decay_mode"),
        ("weights_precision", SparseType.FP16, "stochastic_rounding"),
    ):
        before = getattr(tbe._optimizer_now().rule, field)
        setattr(tbe, name, value)
        assert getattr(tbe._optimizer_now().rule, field) != before


def test_kernels_meet_the_same_kinds_of_arguments_at_the_same_place(device, monkeypatch):
    """What the launcher relies on: whatever a caller changes that Triton distinguishes is part of the kind of the call
    or of the place. Triton's own view of all arguments is taken here, in calls that differ in all there is."""
    seen: dict[tuple, tuple] = {}
    real = Launcher.__call__

    def record(self: Launcher, place: Any, kernel: Any, programs: int, constants: Any, *args: Any, **how: Any) -> None:
        early = how.get("early", False)
        view = (kernel, *_view(kernel, args), *sorted({**constants(), "early": early}.items()))
        assert seen.setdefault((id(self), place), view) == view
        kept.append(self)  # an id is one object's only while it lives
        real(self, place, kernel, programs, constants, *args, **how)

    kept: list[Launcher] = []
    monkeypatch.setattr(Launcher, "__call__", record)
    for dims, rows in (((8, 8), (50, 7)), ((8, 20, 40), (16, 3, 32))):
        tbe = TritonTableBatchedEmbeddingBags(
            list(zip(rows, dims)), strict=True, device=device, optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            weights_precision=SparseType.FP16, learning_rate=0.1,
        )  # fmt: skip
        features = len(dims)
        for bags, length, ids, weighted, vbe, shift in (
            (16, 1, torch.int64, False, False, 0),
            (1, 3, torch.int64, False, False, 0),
            (5, 40, torch.int64, False, False, 1),
            (5, 2, torch.int32, True, False, 0),
            (16, 7, torch.int32, True, False, 3),
            (8, 2, torch.int64, True, True, 0),
            (3, 5, torch.int64, True, True, 1),
        ):
            count = features * bags * length
            offsets = torch.arange(0, count + 1, length, dtype=ids, device=device)
            indices = torch.randint(0, 3, (count,), dtype=ids, device=device)
            weights = torch.rand(count, device=device, requires_grad=True) if weighted else None
            sizes = [[1, bags - 1]] * features if vbe else None
            out = tbe(indices, offsets, weights, batch_size_per_feature_per_rank=sizes)
            # Gradients that begin at any float of their storage.
            grad = torch.empty(out.numel() + shift, device=device)[shift:].view(out.shape).normal_()
            out.backward(grad)
    assert len(seen) > 30


def _view(kernel: Any, args: tuple) -> list:
    """What Triton specialises a launch on."""
    options = kernel.kwargs if hasattr(kernel, "kwargs") else {}
    fixed = options.get("do_not_specialize") or []
    unaligned = options.get("do_not_specialize_on_alignment") or []
    view: list = []
    for name, value in zip(kernel.arg_names, args):
        if isinstance(value, torch.Tensor):
            view.append((value.dtype, name in unaligned or value.data_ptr() % launch.ALIGNMENT == 0))
        elif isinstance(value, int) and not isinstance(value, bool):
            view.append((value >= 2**31, None if name in fixed else (value == 1, value % 16 == 0)))
        else:
            view.append(type(value))
    return view


@pytest.mark.parametrize("payload", [torch.int32, torch.int64])
def test_sort_keeps_equal_keys_in_order(device, payload):
    keys = torch.randint(0, 50, (5000,), dtype=torch.int32, device=device)
    values = torch.arange(5000, dtype=payload, device=device)
    expected, order = torch.sort(keys.clone(), stable=True)
    got, moved = sort.sort_pairs(keys, values, 50)
    assert torch.equal(got, expected)
    assert torch.equal(moved, order.to(payload))


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1500, 5000, 300_000])
def test_a_sort_of_few_bits_leaves_enough_for_one_of_many(device, count):
    """The scratch memory of CUB's sort grows with the bits of the keys, and its size is asked for once."""
    for num_keys in (1, 2**28, 3):
        keys = torch.randint(0, num_keys, (count,), dtype=torch.int32, device=device)
        expected, order = torch.sort(keys.clone(), stable=True)
        got, moved = sort.sort_pairs(keys, torch.arange(count, dtype=torch.int32, device=device), num_keys)
        assert torch.equal(got, expected) and torch.equal(moved, order.int())


class FakeBuffer:
    """Two arrays that a sort moves between, as in cuda.compute."""

    def __init__(self, current: Any, alternate: Any) -> None:
        self.buffers, self.selector = (current, alternate), 0

    def current(self) -> Any:
        return self.buffers[self.selector]

    def alternate(self) -> Any:
        return self.buffers[1 - self.selector]


class FakeSort:
    """cuda.compute's sort, on the host: it knows its arrays by data_ptr() alone, keeps what it was given until the next
    call, and leaves the sorted pairs in the buffer `ends_in`."""

    def __init__(self, ends_in: int) -> None:
        self.ends_in = ends_in

    def __call__(self, *, temp_storage: Any, num_items: int, begin_bit: int, end_bit: int, **given: Any) -> int:
        self.kept = given, temp_storage
        need = 100 * -(-end_bit // 8) * num_items.bit_length()  # histograms of every digit
        if temp_storage is None:
            return need
        assert temp_storage.nbytes == need and temp_storage.data_ptr() and begin_bit == 0
        keys, values = given["d_in_keys"], given["d_in_values"]
        order = np.argsort(self._array(keys.current(), num_items) & (2**end_bit - 1), kind="stable")
        for buffer in (keys, values):
            ordered = self._array(buffer.current(), num_items)[order]
            buffer.selector = self.ends_in
            self._array(buffer.current(), num_items)[:] = ordered
        return need

    @staticmethod
    def _array(place: Any, count: int) -> np.ndarray:
        return np.ctypeslib.as_array((ctypes.c_int32 * count).from_address(place.data_ptr()))


@pytest.mark.parametrize("ends_in", [0, 1])
def test_what_cubs_sort_keeps_holds_no_memory(monkeypatch: pytest.MonkeyPatch, ends_in: int) -> None:
    fake = SimpleNamespace(DoubleBuffer=FakeBuffer, deserialize=lambda stored: FakeSort(ends_in))
    monkeypatch.setattr(sort._compat, "cuda_compute", lambda: fake)
    monkeypatch.setattr(sort, "get_cache_manager", lambda key: SimpleNamespace(get_file=lambda name: __file__))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(sort, "current_stream", lambda device: 7)
    radix = sort._RadixSort(torch.device("cpu"), torch.int32, torch.int32)
    empty_like, spares = torch.empty_like, []

    def noted(tensor: torch.Tensor) -> torch.Tensor:
        spares.append(weakref.ref(spare := empty_like(tensor)))
        return spare

    monkeypatch.setattr(torch, "empty_like", noted)
    for count, bits in ((1, 6), (700, 6), (701, 20), (702, 6)):
        keys = torch.randint(0, 2**bits, (count,), dtype=torch.int32)
        values = torch.arange(count, dtype=torch.int32)
        expected, order = torch.sort(keys, stable=True)
        got, moved = radix(keys, values, bits)
        assert torch.equal(got, expected) and torch.equal(moved, order.int())
        assert (got is keys, moved is values) == (ends_in == 0,) * 2
        held = [weakref.ref(tensor) for tensor in (keys, values)]
        del keys, values, got, moved
        assert [tensor() for tensor in held + spares] == [None] * len(held + spares)


def test_a_sort_that_cannot_be_built_is_said_once_and_replaced(monkeypatch, caplog):
    def fail(*kind: Any) -> None:
        raise RuntimeError("no nvrtc")

    monkeypatch.setattr(sort, "_built", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(sort, "_RadixSort", fail)
    monkeypatch.setattr(sort._compat, "cub_problem", lambda: None)
    with caplog.at_level(logging.WARNING, "torchrec_triton"):
        for _ in range(2):
            assert sort._radix_sort(torch.device("cuda", 0), torch.int32, torch.int32) is None
    assert [r.getMessage() for r in caplog.records] == [
        "torch.sort runs in place of CUB's, which cannot be built: no nvrtc"
    ]


def test_without_the_package_torch_sort_runs_and_nothing_is_said(monkeypatch, caplog):
    monkeypatch.setattr(sort, "_built", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(sort._compat, "cub_problem", lambda: "cuda-cccl cannot be imported")
    assert sort._radix_sort(torch.device("cuda", 0), torch.int32, torch.int32) is None
    assert not caplog.records


@pytest.mark.gpu
@pytest.mark.parametrize("payload", [torch.int32, torch.int64])
@pytest.mark.parametrize("key", [torch.int32, torch.int64])
def test_cub_sorts_as_torch_does(device, key, payload):
    """Built or loaded from the cache, for few pairs, on both sides of a power of two that its scratch is kept for, and
    in a graph."""
    if problem := sort._compat.cub_problem():
        pytest.skip(problem)
    num_keys = 2**33 if key == torch.int64 else 1000
    for count in (1, 1000, 2**17 - 1, 2**17):
        keys = torch.randint(0, num_keys + 1, (count,), dtype=key, device=device)
        values = torch.randint(0, 2**31, (count,), device=device).to(payload)
        expected, order = torch.sort(keys, stable=True)
        for _ in range(2):
            got, moved = sort.sort_pairs(keys.clone(), values.clone(), num_keys)
            assert sort._built[keys.device, key, payload] is not None
            assert torch.equal(got, expected)
            assert torch.equal(moved, values[order])
            sort._built.clear()
    sort.sort_pairs(keys.clone(), values.clone(), num_keys)
    graph, keys_in, values_in = torch.cuda.CUDAGraph(), keys.clone(), values.clone()
    with torch.cuda.graph(graph):
        got, moved = sort.sort_pairs(keys_in.clone(), values_in.clone(), num_keys)
    graph.replay()
    assert torch.equal(got, expected)
    assert torch.equal(moved, values[order])
