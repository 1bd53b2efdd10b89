"""Ranks for the tests of TorchRec's side: a pool of processes that start once and run many cases.

Starting a rank costs about eight seconds of imports, a case about one.
"""

from __future__ import annotations

import functools
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from typing import Any

import torch
from torch import distributed as dist
from torch import multiprocessing

SECONDS_A_CASE = 90
SECONDS_AFTER_A_FAILURE = 3  # for the other ranks, which may wait for the failed one in a collective


class Ranks:
    """`world_size` processes in one group, which compute on the CPU or on this machine's GPUs. With a GPU for each they
    talk over NCCL, else over gloo, which lets them share one.

    run(function, *args) calls function(*args) on every rank and returns the results, rank 0 first. An error on any rank
    is raised here with every rank's traceback; the processes are then replaced, as a collective may be half done.
    """

    def __init__(self, world_size: int, device_type: str = "cpu") -> None:
        self.world_size, self.device_type = world_size, device_type
        self._workers: list[tuple[Any, Any]] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        if not self._workers:
            self._start()
        waiting = {connection: rank for rank, (_, connection) in enumerate(self._workers)}
        for connection in waiting:
            connection.send((function, args))
        results: list[Any] = [None] * self.world_size
        failures: dict[int, str] = {}
        patience = SECONDS_A_CASE
        while waiting and (ready := wait(list(waiting), patience)):
            for connection in ready:
                rank = waiting.pop(connection)
                ok, result = self._receive(connection)
                results[rank] = result
                if not ok:
                    failures[rank] = result
                    patience = SECONDS_AFTER_A_FAILURE
        failures |= {rank: f"no answer within {patience} s" for rank in waiting.values()}
        if failures:
            self.close()
            raise AssertionError("\n".join(f"rank {rank}:\n{what}" for rank, what in sorted(failures.items())))
        return results

    def close(self) -> None:
        for process, connection in self._workers:
            connection.close()
            process.terminate()
            process.join()
        self._workers = []

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory(prefix="torchrec_triton_ranks_")
        store = os.path.join(self._folder.name, "store")
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self.world_size, self.device_type, store, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._workers.append((process, ours))

    @staticmethod
    def _receive(connection: Any) -> tuple[bool, Any]:
        try:
            return connection.recv()
        except EOFError:
            return False, "the process died"


@functools.cache
def ranks(world_size: int, device_type: str = "cpu") -> Ranks:
    """The one pool of this size in this process; its processes start at the first case and end with this one."""
    return Ranks(world_size, device_type)


def _serve(rank: int, world_size: int, device_type: str, store: str, connection: Any) -> None:
    on_host = local_size(world_size, device_type)
    local_rank = rank % on_host
    os.environ.update(
        RANK=f"{rank}", LOCAL_RANK=f"{local_rank}", WORLD_SIZE=f"{world_size}", LOCAL_WORLD_SIZE=f"{on_host}",
        RANK_DEVICE=f"cuda:{local_rank}" if device_type == "cuda" else "cpu",
    )  # fmt: skip
    torch.set_num_threads(1)
    # Shorter than SECONDS_A_CASE, so that a rank left alone in a collective says so itself.
    limit = timedelta(seconds=SECONDS_A_CASE - 30)
    if device_type == "cuda":
        torch.cuda.set_device(local_rank)
    backend = "nccl" if device_type == "cuda" and on_host == world_size else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=limit)
    while True:
        try:
            function, args = connection.recv()
        except EOFError:
            return
        try:
            outcome = (True, function(*args))
        except BaseException:
            outcome = (False, traceback.format_exc())
        connection.send(outcome)


def rank_device() -> torch.device:
    """Where this rank computes; on the parent the CPU."""
    return torch.device(os.environ.get("RANK_DEVICE", "cpu"))


def local_size(wanted: int, device_type: str) -> int:
    """Ranks to a host: no more than it has GPUs, as TorchRec numbers a rank's GPU by its place in the host."""
    return min(wanted, torch.cuda.device_count()) if device_type == "cuda" else wanted


def use_local_size(wanted: int) -> None:
    """On a rank: count so many ranks to a host from now on, if it has the GPUs. TorchRec keeps its groups in module
    globals."""
    from torchrec.distributed import comm

    size = local_size(wanted, rank_device().type)
    if os.environ["LOCAL_WORLD_SIZE"] != str(size):
        os.environ["LOCAL_WORLD_SIZE"] = str(size)
        comm._INTRA_PG = comm._CROSS_PG = None
