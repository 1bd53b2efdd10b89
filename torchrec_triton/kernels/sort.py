"""Stable sort of lookups by row key.

Where NVIDIA's cuda-cccl package is installed it is CUB's radix sort, which looks only at the bits that keys have and
moves the payload along: on an H200 2.1 ms for 66.5 M pairs, where torch.sort and the gather behind it take 3.5. CUB is
compiled at the first use, 6 s once for a kind of GPU and of pairs, and kept in Triton's cache. Without the package
torch.sort runs. Both are stable, so both give the same bits.
"""
from __future__ import annotations

import hashlib
import logging
import threading
from dataclasses import dataclass

import torch
from triton.runtime.cache import get_cache_manager

from torchrec_triton import _compat
from torchrec_triton.kernels.launch import current_stream

logger = logging.getLogger("torchrec_triton")


def sort_pairs(keys: torch.Tensor, payload: torch.Tensor, num_keys: int) -> tuple[torch.Tensor, torch.Tensor]:
    """keys [N] in [0, num_keys], ascending, and their payload [N]; equal keys stay in order. May overwrite both."""
    radix = _radix_sort(keys.device, keys.dtype, payload.dtype) if keys.device.type == "cuda" else None
    if radix is not None:
        return radix(keys, payload, num_keys.bit_length())
    keys, order = torch.sort(keys, stable=True)
    return keys, payload.index_select(0, order)


_built: dict[tuple, _RadixSort | None] = {}


def _radix_sort(device: torch.device, key: torch.dtype, payload: torch.dtype) -> _RadixSort | None:
    """CUB's sort of such pairs, or None without the package. A graph under capture takes it only if it is there."""
    kind = (device, key, payload)
    if kind not in _built:
        if torch.cuda.is_current_stream_capturing():
            return None
        _built[kind] = None
        if _compat.cub_problem() is None:
            try:
                _built[kind] = _RadixSort(*kind)
            except Exception as error:  # of the compiler or the driver; the other sort gives the same
                logger.warning("torch.sort runs in place of CUB's, which cannot be built: %s", error)
    return _built[kind]


class _RadixSort:
    """CUB's sort of pairs of two types on one device."""

    def __init__(self, device: torch.device, key: torch.dtype, payload: torch.dtype) -> None:
        self._calls = threading.Lock()  # the object holds the arguments of a call until it has launched
        self._scratch: dict[tuple[int, int], int] = {}  # bytes by power of two of pairs, and bits
        compute = _compat.cuda_compute()
        self._keys, self._payload = (compute.DoubleBuffer(_Place(), _Place()) for _ in range(2))
        self._free, self._stream = _Place(), _Stream()
        major, minor = torch.cuda.get_device_capability(device)
        name = f"sort-{_compat.installed_version('cuda-cccl')}-sm{major}{minor}-{key}-{payload}"
        cache = get_cache_manager(hashlib.sha256(name.encode()).hexdigest())
        with torch.cuda.device(device):
            if path := cache.get_file(name):
                with open(path, "rb") as file:
                    self._sort = compute.deserialize(file.read())
                return
            keys, values = torch.empty(1, dtype=key, device=device), torch.empty(1, dtype=payload, device=device)
            self._sort = compute.make_radix_sort(
                d_in_keys=keys, d_out_keys=keys, d_in_values=values, d_out_values=values,
                order=compute.SortOrder.ASCENDING,
            )  # fmt: skip
            cache.put(compute.serialize(self._sort), name, binary=True)

    def __call__(self, keys: torch.Tensor, payload: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
        given, spare = (keys, payload), (torch.empty_like(keys), torch.empty_like(payload))
        num_items = keys.numel()
        size = num_items.bit_length()
        with self._calls:
            for buffer, one, other in zip((self._keys, self._payload), given, spare):
                buffer.selector = 0
                buffer.current().address, buffer.alternate().address = one.data_ptr(), other.data_ptr()
            self._stream.handle = current_stream(keys.device.index)
            if (scratch := self._scratch.get((size, bits))) is None:
                scratch = self._scratch[size, bits] = self._run(None, 2**size - 1, bits)
            memory = keys.new_empty(max(1, scratch), dtype=torch.uint8)
            self._free.address, self._free.nbytes = memory.data_ptr(), memory.numel()
            self._run(self._free, num_items, bits)
            return spare if self._keys.selector else given

    def _run(self, scratch: _Place | None, num_items: int, bits: int) -> int:
        """Launches the sort; without scratch memory it only says how many bytes it takes."""
        return self._sort(  # type: ignore[no-any-return]
            temp_storage=scratch, d_in_keys=self._keys, d_out_keys=None, d_in_values=self._payload, d_out_values=None,
            num_items=num_items, begin_bit=0, end_bit=bits, stream=self._stream,
        )  # fmt: skip


@dataclass(slots=True)
class _Place:
    """Where an array lies, as cuda.compute asks for it. Its sort keeps what it was given until the next call: with this
    in place of the tensors their memory is free when the caller lets go of them."""

    address: int = 0
    nbytes: int = 0

    def data_ptr(self) -> int:
        return self.address


@dataclass(slots=True)
class _Stream:
    """A stream as cuda.compute asks for it."""

    handle: int = 0

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle
