"""Launches kernels with little work on the host.

Triton examines every argument of a launch anew to find the variant that was compiled for its kind. A `Launcher` belongs
to calls whose arguments are of one kind (`kind_of`): it takes Triton's way once for each place that launches, and from
then on starts the kernel found there with the addresses of its tensors, and without the calls around a launch that
only profilers have use for.
"""
from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from triton import knobs
from triton.runtime import JITFunction, driver

ALIGNMENT = 16  # bytes: what Triton distinguishes
_BLOCKS = 32  # resident programs a multiprocessor, at most


def kind_of(*tensors: torch.Tensor | None) -> tuple:
    """What Triton distinguishes in tensors that a caller gave: type, and whether they are aligned."""
    return tuple([None if t is None else (t.dtype, t.data_ptr() % ALIGNMENT == 0) for t in tensors])


class _ThisThread(threading.local):
    compiled: list[str] | None = None  # names of kernels, where they are compiled only


_this_thread = _ThisThread()


@contextlib.contextmanager
def compile_only() -> Iterator[list[str]]:
    """Within it this thread's launches compile their kernels and run none. Yields the names of those compiled."""
    names = _this_thread.compiled = []
    try:
        yield names
    finally:
        _this_thread.compiled = None


class Launcher:
    """Launches of calls of one kind, on one device. kept: for the caller, what it worked out at the first call."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.kept: Any = None
        self._found: dict[Hashable, _Found] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"device": self._device}  # what was compiled belongs to this process

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def __call__(
        self,
        place: Hashable,
        kernel: JITFunction,
        programs: int,
        constants: Callable[[], dict[str, Any]],
        *args: Any,
        resident: bool = False,
        early: bool = False,
    ) -> None:
        """Launches `programs` programs; resident: no more than run at a time, for kernels that stride over their work;
        early: they get in place before the kernel before has ended, see common.begin_kernel.

        place: distinguishes launches of a call whose constants or argument types differ.
        constants: gives the constexpr arguments and options; asked at a place's first launch.
        args: the arguments before the constexpr ones, of one type at a place.
        """
        names = _this_thread.compiled
        if found := self._found.get(place):
            if names is not None:
                return
            if resident and programs > found.most:
                programs = found.most
            if _hooked():
                found.compiled[(programs, 1, 1)](*args, *found.tail)
                return
            values = list(args)
            for i in found.pointers:
                values[i] = values[i].data_ptr()
            found.run(
                programs, 1, 1, current_stream(self._device.index), found.function, found.metadata, None, None, None,
                *values, *found.tail,
            )  # fmt: skip
            return
        if resident:
            programs = min(programs, 8 * _multiprocessors(self._device))
        given = constants()
        given["EARLY"] = early = early and _programmatic(self._device)
        if early:
            given["launch_pdl"] = True
        if names is None:
            compiled = kernel[(programs,)](*args, **given)
        elif compiled := kernel.warmup(*args, grid=(programs,), **given):
            compiled[(1, 1, 1)]  # loads it
            names.append(kernel.__name__)
        if compiled is not None:  # Triton's interpreter compiles nothing
            pointers = tuple(i for i, value in enumerate(args) if isinstance(value, torch.Tensor))
            tail = tuple(given[p.name] for p in kernel.params[len(args) :])
            self._found[place] = _Found(compiled, pointers, tail, _resident(compiled, self._device))


class _Found:
    """A kernel that was compiled for a place. What starts it is looked up once."""

    __slots__ = ("compiled", "function", "metadata", "most", "pointers", "run", "tail")

    def __init__(self, compiled: Any, pointers: tuple[int, ...], tail: tuple, most: int) -> None:
        self.compiled, self.run = compiled, compiled.run
        self.function, self.metadata = compiled.function, compiled.packed_metadata
        self.pointers = pointers  # the arguments that are tensors
        self.tail = tail  # the constexpr arguments
        self.most = most  # programs that run at a time


_runtime = knobs.runtime


def _hooked() -> bool:
    """Whether a profiler, or anybody, wants to be called at launches."""
    before, after = _runtime.launch_enter_hook, _runtime.launch_exit_hook
    return bool(getattr(before, "calls", before) or getattr(after, "calls", after))


def current_stream(device: int) -> int:
    """Handle of the stream that work for this GPU goes to."""
    return driver.active.get_current_stream(device)


def _resident(compiled: Any, device: torch.device) -> int:
    """Programs of a kernel that the device holds at a time, by its registers, shared memory and threads."""
    gpu = torch.cuda.get_device_properties(device)
    threads = 32 * compiled.metadata.num_warps
    registers = -(-compiled.n_regs // 8) * 8 * threads
    shared = compiled.metadata.shared + 1024  # what the system takes of each program's
    each = min(
        _BLOCKS,
        gpu.max_threads_per_multi_processor // threads,
        gpu.regs_per_multiprocessor // registers,
        gpu.shared_memory_per_multiprocessor // shared,
    )
    return each * gpu.multi_processor_count


@functools.cache
def _programmatic(device: torch.device) -> bool:
    """Whether a kernel's programs may get in place before the kernel before has ended; see common.begin_kernel."""
    cuda = device.type == "cuda" and torch.version.hip is None
    return cuda and torch.cuda.get_device_capability(device) >= (9, 0)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    """Multiprocessors of the device; 1 where there is none and the interpreter runs one program after another."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
