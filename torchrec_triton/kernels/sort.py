"""Stable sort of lookups by row key.

Where NVIDIA's cuda-cccl package is installed it is CUB's radix sort, which looks only at the bits that keys have and
moves the payload along: on an H200 2.1 ms for 66.5 M pairs, where torch.sort and the gather behind it take 3.5. CUB is
compiled at the first use, 6 s once for a kind of GPU and of pairs, and kept in Triton's cache. Without the package
torch.sort runs. Both are stable, so both give the same bits.
"""
from __future__ import annotations

import functools
import hashlib
import logging
import threading

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
        self._buffer = compute.DoubleBuffer
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
        key_places, payload_places = (self._buffer(_Place(g), _Place(s)) for g, s in zip(given, spare))
        begin = key_places.current()
        sort = functools.partial(
            self._sort, d_in_keys=key_places, d_out_keys=None, d_in_values=payload_places, d_out_values=None,
            begin_bit=0, end_bit=bits, stream=_Stream(current_stream(keys.device.index)),
        )  # fmt: skip
        size = keys.numel().bit_length()
        with self._calls:
            if (size, bits) not in self._scratch:
                self._scratch[size, bits] = sort(temp_storage=None, num_items=2**size - 1)
            scratch = keys.new_empty(max(1, self._scratch[size, bits]), dtype=torch.uint8)
            sort(temp_storage=_Place(scratch), num_items=keys.numel())
        return given if key_places.current() is begin else spare


class _Place:
    """Where an array lies, as cuda.compute asks for it. Its sort keeps what it was given until the next call: with this
    in place of the tensors their memory is free when the caller lets go of them."""

    __slots__ = ("_address", "nbytes")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._address, self.nbytes = tensor.data_ptr(), tensor.nbytes

    def data_ptr(self) -> int:
        return self._address


class _Stream:
    """A stream as cuda.compute asks for it."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle
