"""FBGEMM's table-batched embedding with our forward and backward.

The operator keeps FBGEMM's constructor, storage, state methods and FATAL input check, so whatever knows FBGEMM's class
knows this one: checkpoints, learning-rate calls, replica synchronisation. Only `forward` is ours, and where the kernels
don't take a configuration, FBGEMM's own `forward` runs in its place: one call takes one path for its forward and its
backward.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from torchrec_triton import _compat, support
from torchrec_triton.kernels import ops
from torchrec_triton.kernels.common import MAX_OUTPUT, Batch, TableLayout
from torchrec_triton.kernels.launch import current_stream

_fbgemm = _compat.fbgemm_tbe()
_Base: Any = _fbgemm.SplitTableBatchedEmbeddingBagsCodegen
logger = logging.getLogger("torchrec_triton")

_FATAL, _WARNING, _IGNORE = (getattr(_fbgemm.BoundsCheckMode, m).value for m in ("FATAL", "WARNING", "IGNORE"))
_SEED = 2**62  # the least seed of stochastic rounding
_WEIGHT_DECAY = {"NONE": 0, "L2": 1, "DECOUPLE": 2}


class TritonTableBatchedEmbeddingBags(_Base):
    """Drop-in for FBGEMM's `SplitTableBatchedEmbeddingBagsCodegen` that runs Triton kernels where they can.

    All keywords and defaults are FBGEMM's, with two additions:

    Args:
        embedding_specs: FBGEMM's (rows, dim, location, compute device) a table, or (rows, dim) for a table in the
            memory of `device` (default: the current GPU, or the CPU where there is none).
        strict: raise NotImplementedError, naming every reason, when the kernels can't take the configuration. By
            default one line is logged and FBGEMM's path runs.

    Attributes:
        triton_reasons: why FBGEMM's path runs; empty when Triton runs.
    """

    def __init__(self, embedding_specs: Sequence[tuple], *args: Any, strict: bool = False, **kwargs: Any) -> None:
        given = inspect.signature(_Base.__init__).bind(self, embedding_specs, *args, **kwargs).arguments
        given = {key: value for key, value in given.items() if key not in ("self", "embedding_specs")}
        specs = _checked_specs(embedding_specs, given.get("feature_table_map"), given.get("device"))
        reasons = _reasons(specs, given)
        if strict:
            _refuse(reasons, given.get("table_names"), len(specs))
        extra = {}
        if getattr(given.get("weights_precision"), "name", "") == "BF16" and "cache_precision" not in given:
            # FBGEMM has no bf16 cache and refuses the default; no table here has a cache.
            extra["cache_precision"] = _fbgemm.SparseType.FP32
        super().__init__(specs, **given, **extra)
        self._settle(reasons, strict)

    @classmethod
    def adopt(cls, tbe: torch.nn.Module, *, strict: bool = False) -> TritonTableBatchedEmbeddingBags:
        """Turns an FBGEMM TBE into this class in place, keeping its storage and state, and returns it.

        Raises:
            TypeError: `tbe` is not an FBGEMM SplitTableBatchedEmbeddingBagsCodegen.
            NotImplementedError: `strict` and the kernels can't take its configuration.
        """
        if type(tbe) is not _Base:
            raise TypeError(f"adopt takes FBGEMM's SplitTableBatchedEmbeddingBagsCodegen, not {type(tbe).__name__}")
        reasons = _reasons(tbe.embedding_specs, _given(tbe))  # type: ignore[arg-type]
        if strict:
            _refuse(reasons, tbe.table_names, len(tbe.embedding_specs))  # type: ignore[arg-type]
        tbe.__class__ = cls
        tbe._settle(reasons, strict)  # type: ignore[operator]
        return tbe  # type: ignore[return-value]

    def _settle(self, reasons: list[str], strict: bool) -> None:
        """Fixes the path at construction, so that all ranks decide alike."""
        self.triton_reasons: list[str] = reasons
        self._strict = strict
        self._said_weighted_mean = False
        self._layout: TableLayout | None = None
        self._rule: tuple[tuple, ops.Rule] | None = None  # and, before it, what it was made of
        self._repair_log = _RepairLog()
        # The check turns a wrong id into 0, which a table without rows does not have either.
        has_empty = any(spec[0] == 0 for spec in self.embedding_specs)
        self._repairs_ids = self.bounds_check_mode_int != _fbgemm.BoundsCheckMode.NONE.value and not has_empty
        if reasons:
            logger.warning("%s: FBGEMM's kernels run, because %s", self._names(), "; ".join(reasons))

    def _names(self) -> str:
        return _names(self.table_names, len(self.embedding_specs))

    @property
    def uses_triton(self) -> bool:
        """Whether calls take the Triton kernels. Those of MEAN tables with per-sample weights take FBGEMM's even so."""
        return not self.triton_reasons

    def flat_weights(self) -> Tensor:
        """All tables, flat and one after another, as they are now: callers may have replaced the storage."""
        return self._weights().detach()

    def flat_state(self) -> Tensor:
        """Row-wise state of all tables, flat, fp32; empty for SGD."""
        return self._state().detach()

    def _weights(self) -> Tensor:
        return self.weights_host if self.use_cpu else self.weights_dev

    def _state(self) -> Tensor:
        return self.momentum1_host if self.use_cpu else self.momentum1_dev

    def _repairs(self) -> Tensor | None:
        """The counter of repairs, int64 [1], where our kernels make them."""
        return self.bounds_check_warning if self.bounds_check_mode_int in (_WARNING, _IGNORE) else None

    def layout(self) -> TableLayout:
        """Where tables, states and output columns lie."""
        device = self.current_device
        if self._layout is None or self._layout.feature_meta.device != self.D_offsets.device:
            rows, dims, _, _ = zip(*self.embedding_specs)
            stateful = self.optimizer == _fbgemm.OptimType.EXACT_ROWWISE_ADAGRAD
            self._layout = TableLayout.build(
                rows=list(rows),
                dims=list(dims),
                weight_offsets=list(self.weights_physical_offsets),
                state_offsets=list(self.momentum1_physical_offsets) if stateful else [0] * len(rows),
                feature_table=self.feature_table_map,
                device=self.D_offsets.device if device.type == "cuda" else device,
            )
        return self._layout

    def warm_up(self, *, weighted: bool = False, vbe: bool = False, ids: torch.dtype = torch.int64) -> list[str]:
        """Compiles the kernels of a training step before the first one, without running them.

        weighted: calls come with per-sample weights; vbe: with a batch size for each feature and rank; ids: type of
        indices and offsets. Tables, states and random numbers stay as they are.

        Returns:
            Names of the kernels that were compiled or loaded from Triton's cache now; empty where FBGEMM's path runs.
        """
        if self.triton_reasons:
            return []
        optimizer, mean = self._optimizer_now(draw=False), self.pooling_mode == _fbgemm.PoolingMode.MEAN
        return ops.compile_step(
            self.layout(), self.flat_weights(), self.flat_state(),
            self._repairs(), optimizer, ids=ids, output=_torch_dtype(self.output_dtype),
            weighted=weighted and not mean, vbe=vbe, mean=mean, trusted=self._repairs_ids,
        )  # fmt: skip

    @torch.compiler.disable
    def forward(
        self,
        indices: Tensor,
        offsets: Tensor,
        per_sample_weights: Tensor | None = None,
        feature_requires_grad: Tensor | None = None,
        batch_size_per_feature_per_rank: list[list[int]] | None = None,
        total_unique_indices: int | None = None,
        hash_zch_identities: Tensor | None = None,
        hash_zch_runtime_meta: Tensor | None = None,
        vbe_output: Tensor | None = None,
        vbe_output_offsets: Tensor | None = None,
    ) -> Tensor:
        """Pooled rows of every bag.

        Args:
            indices: [N] int32 or int64, all features' ids one after another. -1 means pruned: no row.
            offsets: [bags + 1] int32 or int64, feature-major; bag b of feature f is number f * B + b.
            per_sample_weights: [N] floating point, the factor of each lookup; None or empty: all 1.
            feature_requires_grad: [F], 0 where the weights of a feature want no gradient.
            batch_size_per_feature_per_rank: VBE: F lists of one batch size a rank.
            total_unique_indices, hash_zch_identities, hash_zch_runtime_meta: not needed by the supported optimizers.
            vbe_output, vbe_output_offsets: VBE: a 1-D tensor to write into and, [ranks, F], where each block begins.

        Returns:
            [B, total dim]; under VBE 1-D, rank-major, then feature, then bag. `output_dtype`.

        Raises:
            ValueError: shapes that don't fit each other; the message names both numbers.
        """
        mean = self.pooling_mode == _fbgemm.PoolingMode.MEAN
        # Weights of an empty batch stay in the graph, so that what they come from gets its (zero) gradient.
        if per_sample_weights is not None and per_sample_weights.numel() == 0 and (mean or indices.numel() > 0):
            per_sample_weights = None
        weighted_mean = mean and per_sample_weights is not None
        if weighted_mean and self._strict:
            raise NotImplementedError(
                "MEAN pooling with per-sample weights has no agreed meaning; pool with SUM, or strict=False"
            )
        if weighted_mean and not self.triton_reasons and not self._said_weighted_mean:
            self._said_weighted_mean = True
            logger.warning("%s: FBGEMM's kernels run calls with weights, because the tables pool MEAN", self._names())
        if self.triton_reasons or weighted_mean:
            return super().forward(
                indices, offsets, per_sample_weights, feature_requires_grad, batch_size_per_feature_per_rank,
                total_unique_indices, hash_zch_identities, hash_zch_runtime_meta, vbe_output, vbe_output_offsets,
            )  # fmt: skip
        self._check(indices, offsets, per_sample_weights, feature_requires_grad, batch_size_per_feature_per_rank)
        layout, num_bags = self.layout(), offsets.numel() - 1
        indices, offsets, sample_weights, vbe = self._prepare(
            indices.contiguous(), offsets.contiguous(), per_sample_weights, batch_size_per_feature_per_rank, vbe_output,
            vbe_output_offsets,
        )  # fmt: skip
        bag_output = batch_offsets = None
        if vbe is None:
            batch_size = num_bags // layout.num_features
            shape: tuple[int, ...] = (batch_size, layout.total_dim)
            output_size = batch_size * layout.total_dim
        else:
            batch_size, batch_offsets = vbe.max_B, vbe.B_offsets
            block_output = vbe.output_offsets_feature_rank if vbe_output_offsets is None else vbe_output_offsets
            bag_output = ops.bag_output_offsets(
                layout, block_output, batch_offsets, vbe.B_offsets_rank_per_feature, num_bags
            )
            shape = (vbe.output_size,)
            output_size = vbe.output_size if vbe_output is None else vbe_output.numel()
            if output_size < vbe.output_size:
                raise ValueError(
                    f"vbe_output has {output_size} elements, the blocks of this call take {vbe.output_size}"
                )
        for name, tensor in (("vbe_output", vbe_output), ("vbe_output_offsets", vbe_output_offsets)):
            if tensor is not None and tensor.device != indices.device:
                raise ValueError(f"{name} is on {tensor.device}, the tables are on {indices.device}; move it there")
        if output_size > MAX_OUTPUT:
            raise ValueError(
                f"the output has {output_size:,} elements, the kernels reach {MAX_OUTPUT:,}; take a smaller batch, or "
                "put the tables into two groups"
            )
        batch = Batch(
            indices, offsets, sample_weights, bag_output, batch_offsets, batch_size, output_size, mean,
            self._repairs_ids,
        )  # fmt: skip
        repairs = self._repairs()
        if repairs is not None:
            ops.check_offsets(layout, batch, repairs)
        output = vbe_output
        if output is None:
            output = torch.empty(shape, dtype=_torch_dtype(self.output_dtype), device=indices.device)
        self._count_step()
        output = _Lookup.apply(
            self.placeholder_autograd_tensor, sample_weights, vbe_output, output, self, layout, batch, repairs,
            self._optimizer_now(), feature_requires_grad,
        )  # fmt: skip
        if self.bounds_check_mode_int == _WARNING:
            self._repair_log.look(self)
        return output

    def _prepare(
        self,
        indices: Tensor,
        offsets: Tensor,
        sample_weights: Tensor | None,
        batch_sizes: list[list[int]] | None,
        vbe_output: Tensor | None,
        vbe_output_offsets: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor | None, Any]:
        """Inputs cast as FBGEMM casts them, and its VBE metadata or None. FATAL's check is FBGEMM's: it must assert."""
        if vbe_output is not None or vbe_output_offsets is not None:
            _fbgemm.check_allocated_vbe_output(self.output_dtype, batch_sizes, vbe_output, vbe_output_offsets)
        if self.bounds_check_mode_int == _FATAL:
            indices, offsets, sample_weights, vbe = self.prepare_inputs(indices, offsets, sample_weights, batch_sizes)
            vbe = None if batch_sizes is None else vbe
        else:
            vbe = None if batch_sizes is None else self._generate_vbe_metadata(offsets, batch_sizes, None, None)
            if self.embedding_table_index_type == torch.int32:
                indices = indices.to(torch.int32)
        return indices, offsets, None if sample_weights is None else sample_weights.float().contiguous(), vbe

    def _check(
        self,
        indices: Tensor,
        offsets: Tensor,
        sample_weights: Tensor | None,
        wanted: Tensor | None,
        batch_sizes: list[list[int]] | None,
    ) -> None:
        features, tables = len(self.feature_table_map), self.D_offsets.device
        named = {"indices": indices, "offsets": offsets, "per_sample_weights": sample_weights}
        for name, tensor in named.items():
            if tensor is None and name == "per_sample_weights":
                continue
            if not isinstance(tensor, Tensor):
                raise TypeError(f"{name} is a {type(tensor).__name__}; it must be a torch.Tensor on {tables}")
            if tensor.device != tables:
                raise ValueError(f"{name} is on {tensor.device}, the tables are on {tables}; move it there")
            if tensor.dim() != 1:
                raise ValueError(f"{name} has shape {tuple(tensor.shape)}; it must be 1-D")
        bags = offsets.numel() - 1
        for name, tensor in (("indices", indices), ("offsets", offsets)):
            if tensor.dtype not in (torch.int32, torch.int64):
                raise ValueError(
                    f"{name} is {tensor.dtype}; it must be int32 or int64 (floating point loses odd values above 2^24)"
                )
        if sample_weights is not None and not sample_weights.is_floating_point():
            raise ValueError(f"per_sample_weights is {sample_weights.dtype}; it must be floating point")
        if wanted is not None and wanted.numel() != features:
            raise ValueError(f"feature_requires_grad has {wanted.numel()} values for {features} features")
        if sample_weights is not None and sample_weights.numel() != indices.numel():
            raise ValueError(f"per_sample_weights has {sample_weights.numel()} values for {indices.numel()} indices")
        if bags < 0:
            raise ValueError("offsets is empty; it must hold the number of bags plus one")
        if batch_sizes is None:
            if bags % features:
                raise ValueError(f"offsets describes {bags} bags, which {features} features can't share evenly")
            return
        if not isinstance(batch_sizes, list) or not all(isinstance(sizes, list) for sizes in batch_sizes):
            raise TypeError("batch_size_per_feature_per_rank must be a list, one list of ints a feature, an int a rank")
        if len(batch_sizes) != features:
            raise ValueError(f"batch_size_per_feature_per_rank has {len(batch_sizes)} entries for {features} features")
        if len({len(sizes) for sizes in batch_sizes}) != 1:
            raise ValueError(
                f"batch_size_per_feature_per_rank names {sorted({len(sizes) for sizes in batch_sizes})} ranks for "
                "different features; each feature needs one batch size for every rank"
            )
        if any(size < 0 for sizes in batch_sizes for size in sizes):
            raise ValueError(f"batch_size_per_feature_per_rank holds a negative batch size: {batch_sizes}")
        total = sum(map(sum, batch_sizes))
        if total != bags:
            raise ValueError(f"batch_size_per_feature_per_rank adds up to {total} bags, offsets describes {bags}")

    def _count_step(self) -> None:
        """Advances FBGEMM's counters as its own forward does, so that they agree after a switch of kernels."""
        self.step += 1
        if self.timesteps_prefetched:  # a pipeline called prefetch(), which has nothing to fetch here
            self.timesteps_prefetched.pop(0)
        if self.optimizer == _fbgemm.OptimType.EXACT_ROWWISE_ADAGRAD:
            if self.iter_cpu.device.type != "cpu":
                self.iter_cpu = self.iter_cpu.cpu()
            if self.iter_cpu.item() == 0:
                self.iter_cpu.fill_(self.iter.cpu().item())
            self.iter_cpu.add_(1)
            self.iter.add_(1)

    def _optimizer_now(self, draw: bool = True) -> ops.Optimizer:
        args, mode = self.optimizer_args, self.weight_decay_mode
        made_of = (args, mode, self.weights_precision)  # callers replace them
        if self._rule is None or any(a is not b for a, b in zip(self._rule[0], made_of)):
            rule = ops.Rule(
                adagrad=self.optimizer == _fbgemm.OptimType.EXACT_ROWWISE_ADAGRAD,
                eps=float(args.eps),
                weight_decay=float(args.weight_decay),
                weight_decay_mode=_WEIGHT_DECAY[mode.name],
                max_gradient=float(args.max_gradient) if args.gradient_clipping else None,
                stochastic_rounding=args.stochastic_rounding and self.weights_precision != _fbgemm.SparseType.FP32,
            )
            self._rule = made_of, rule
        rule = self._rule[1]
        seed = _SEED if rule.stochastic_rounding else 0
        if seed and draw and torch.is_grad_enabled():
            seed = _draw_seed(self.D_offsets.device, self.step)
        return ops.Optimizer(rule, float(self.get_learning_rate()), seed)


class _RepairLog:
    """One log line when the bounds check repaired something, without ever waiting for the device.

    The count is copied to the host beside other work and looked at some calls later. The line comes again after
    `bounds_check_warning` was set back to 0.
    """

    def __init__(self) -> None:
        self._calls = 0
        self._logged = False
        self._count: Tensor | None = None
        self._arrived: torch.cuda.Event | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]

    def look(self, module: TritonTableBatchedEmbeddingBags) -> None:
        counter = module.bounds_check_warning
        if counter.device.type == "cpu":
            self._report(int(counter), module)
            return
        self._calls += 1
        if torch.cuda.is_current_stream_capturing():
            return
        if self._arrived is not None:
            if self._arrived.query():
                self._arrived = None
                self._report(int(self._count), module)  # type: ignore[arg-type]
        elif self._calls & (self._calls - 1) == 0 or self._calls % 64 == 0:
            self._count = torch.empty(1, dtype=counter.dtype, pin_memory=True) if self._count is None else self._count
            self._count.copy_(counter, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def _report(self, count: int, module: TritonTableBatchedEmbeddingBags) -> None:
        if count > 0 and not self._logged:
            logger.warning(
                "%s: %d ids or offsets out of range were repaired (ids set to 0); bounds_check_mode FATAL stops at the "
                "first",
                module._names(),
                count,
            )
        self._logged = count > 0


class _Lookup(torch.autograd.Function):
    """The call between FBGEMM's front and the kernels. Weights and state are read from the module when kernels launch:
    callers swap their storage between forward and backward."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        placeholder: Tensor,  # requires grad, so that a lookup without weights has a backward too
        sample_weights: Tensor | None,
        vbe_output: Tensor | None,
        output: Tensor,
        module: TritonTableBatchedEmbeddingBags,
        layout: TableLayout,
        batch: Batch,
        repairs: Tensor | None,
        optimizer: ops.Optimizer,
        wanted: Tensor | None,
    ) -> Tensor:
        ops.lookup(layout, module._weights(), batch, output, repairs)
        ctx.module, ctx.layout, ctx.optimizer, ctx.wanted = module, layout, optimizer, wanted
        ctx.writes_into_input = vbe_output is not None
        ctx.save_for_backward(batch.indices, batch.offsets, sample_weights, batch.bag_output, batch.batch_offsets)
        ctx.rest = (batch.batch_size, batch.output_size, batch.mean, batch.trusted, batch.kind)
        if vbe_output is not None:
            ctx.mark_dirty(vbe_output)
            return vbe_output
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple:  # type: ignore[override]
        return (_backward_of_graph if torch.is_grad_enabled() else _backward)(ctx, grad_output)


def _backward(ctx: Any, grad_output: Tensor) -> tuple:
    module, layout, optimizer = ctx.module, ctx.layout, ctx.optimizer
    batch, grad, weight_grad = Batch(*ctx.saved_tensors, *ctx.rest), grad_output.contiguous(), None
    if not module.use_cpu and current_stream(grad.device.index):
        # Not the default stream, in which TorchRec's exchange of gradients makes this one, in memory that it lets go of
        # without a word of any other.
        grad_output.record_stream(torch.cuda.current_stream(grad.device))
    weights = module._weights()
    if ctx.needs_input_grad[1]:
        wanted = None if ctx.wanted is None else ctx.wanted.to(weights.device, torch.int32)
        weight_grad = ops.sample_weight_grad(layout, weights, grad, batch, wanted, optimizer.rule.max_gradient)
    ops.update(layout, weights, module._state(), grad, batch, optimizer)
    return None, weight_grad, grad_output if ctx.writes_into_input else None, None, None, None, None, None, None, None


_backward_of_graph = torch.autograd.function.once_differentiable(_backward)  # for create_graph


@functools.cache
def _torch_dtype(sparse_type: int) -> torch.dtype:
    """Of one of FBGEMM's numbers of types."""
    return _fbgemm.SparseType.from_int(sparse_type).as_dtype()  # type: ignore[no-any-return]


def _names(table_names: list[str] | None, count: int) -> str:
    return ", ".join(table_names or []) or f"{count} tables"


def _refuse(reasons: list[str], table_names: list[str] | None, count: int) -> None:
    if reasons:
        raise NotImplementedError(f"Triton cannot run {_names(table_names, count)}: " + "; ".join(reasons))


def _reasons(specs: Sequence[tuple], given: dict[str, Any]) -> list[str]:
    """Why the kernels can't run these tables with FBGEMM's keywords `given`. Needs no memory of the device."""
    rows, dims, locations, compute = zip(*specs)
    device_type = "cpu" if compute[0] == _fbgemm.ComputeDevice.CPU else compute[0].name.lower()
    cuda = device_type == "cuda" and torch.cuda.is_available()
    reasons = support.unsupported_reasons(
        device_type=device_type,
        interpreter=_compat.interpreter_enabled(),
        capability=torch.cuda.get_device_capability(given.get("device")) if cuda else None,
        rows=rows,
        dims=dims,
        locations=locations,
        **{key: value for key, value in given.items() if key not in ("device", "feature_table_map")},
    )
    problem = _compat.launch_problem(device_type)
    return reasons if problem is None else [*reasons, problem]


def _given(tbe: Any) -> dict[str, Any]:
    """The keywords that an FBGEMM TBE was built with, as far as they bear on the kernels."""
    given = {
        "optimizer": tbe.optimizer,
        "weights_precision": tbe.weights_precision,
        "output_dtype": _fbgemm.SparseType.from_int(tbe.output_dtype),
        "pooling_mode": tbe.pooling_mode,
        "weight_decay_mode": tbe.weight_decay_mode,
        "max_norm": tbe.optimizer_args.max_norm,
        "device": tbe.current_device,
        "stats_reporter_config": tbe.stats_reporter,
        "tbe_input_multiplexer_config": tbe.tbe_input_multiplexer,
        "enable_raw_embedding_streaming": tbe.enable_raw_embedding_streaming,
        "is_qr_tbe": getattr(tbe, "is_qr_tbe", False),
    }
    if tbe.use_writeback_bwd_prehook:
        given["extra_optimizer_config"] = SimpleNamespace(use_writeback_bwd_prehook=True)
    return given


def _checked_specs(specs: Sequence[tuple], feature_table_map: list[int] | None, device: Any) -> list[tuple]:
    """FBGEMM's 4-tuples, after what it would fail on without saying so."""
    if not specs:
        raise ValueError("embedding_specs is empty; it needs one (rows, dim) or FBGEMM 4-tuple a table")
    if negative := [spec[0] for spec in specs if spec[0] < 0]:
        raise ValueError(f"embedding_specs has tables of {negative} rows; allowed: 0 and more")
    if wrong := [t for t in feature_table_map or [] if not 0 <= t < len(specs)]:
        raise ValueError(f"feature_table_map names tables {wrong}; there are {len(specs)}, numbered from 0")
    return [_full_spec(spec, device) for spec in specs]


def _full_spec(spec: tuple, device: Any) -> tuple:
    if len(spec) == 4:
        return tuple(spec)
    if len(spec) != 2:
        raise ValueError(
            f"embedding_specs entry {spec!r}; allowed: (rows, dim) or (rows, dim, location, compute device)"
        )
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if torch.device(device).type == "cpu":
        return (*spec, _fbgemm.EmbeddingLocation.HOST, _fbgemm.ComputeDevice.CPU)
    return (*spec, _fbgemm.EmbeddingLocation.DEVICE, _fbgemm.ComputeDevice.CUDA)


def _draw_seed(device: torch.device, step: int) -> int:
    """A seed for one step's stochastic rounding, from the device's default generator, which it advances.

    A graph under capture can't read the generator, so its seed follows from the step and every replay rounds alike.
    Always between _SEED and 2^63, so that the kernels see one integer type.
    """
    if device.type == "cpu":
        mixed = int(torch.randint(0, 2**62, (), dtype=torch.int64))
    elif torch.cuda.is_current_stream_capturing():
        mixed = step * 0x9E3779B97F4A7C15
    else:
        generator = torch.cuda.default_generators[device.index or 0]
        offset = generator.get_offset()
        generator.set_offset(offset + 4)
        mixed = generator.initial_seed() * 0x9E3779B97F4A7C15 + offset
    return _SEED | mixed & (_SEED - 1)
