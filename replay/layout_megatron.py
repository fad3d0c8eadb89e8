"""A ``TokenLayout`` from what a Megatron trainer holds: config, groups, and its packer's lengths.

    layout = TokenLayout.from_megatron(lengths, model.config, packed_seq_params=packed)

Sizes, ranks and the context-parallel group come from ``parallel_state`` or a
``ProcessGroupCollection``, sequence parallelism and the fp8 recipe from the ``TransformerConfig``,
padded lengths from ``PackedSeqParams``. Nothing here reads a device: a packer's offsets that are
there already are given as ``padded_lengths`` from the host.

Megatron is imported by the function. Megatron-core 0.16.1 to 0.19.2.
"""

from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from packhorse.replay.host import HostInts, host_array
from packhorse.replay.layout import TokenLayout
from packhorse.replay.layout_checks import Fp8

_NAME = "TokenLayout.from_megatron"
_RECIPES: dict[str, Fp8] = {
    "delayed": "delayed",
    "tensorwise": "tensorwise",
    "mxfp8": "mxfp8",
    "blockwise": "blockwise",
}


def layout_from_megatron(
    lengths: HostInts,
    config: Any,
    *,
    process_groups: Any = None,
    packed_seq_params: Any = None,
    format: Literal["thd", "bshd"] = "thd",
    cp_order: Literal["zigzag", "contiguous"] = "zigzag",
    padded_lengths: HostInts | None = None,
    batch_width: int | None = None,
    first_columns: HostInts | None = None,
    device: torch.device | str | None = None,
) -> TokenLayout:
    """The layout of this rank's tokens for one microbatch.

    Args:
        lengths: [B] real tokens of each trajectory; host integers.
        config: the model's ``TransformerConfig``.
        process_groups: a ``ProcessGroupCollection`` with ``tp`` and ``cp``; by default
            ``parallel_state``'s.
        packed_seq_params: the packer's, "thd" only. Its ``cu_seqlens_q_padded`` (else
            ``cu_seqlens_q``) on the host give the padded lengths, ``total_tokens`` the pad of the
            slab; ``cp_group`` (or ``local_cp_size`` 1) stands for the group of this microbatch.
        format, cp_order, batch_width, first_columns: as ``TokenLayout.build``.
        padded_lengths: as ``build``; wins over ``packed_seq_params``, whose offsets are not read.
        device: by default the current GPU, else the CPU.

    Raises:
        TypeError: ``config`` is no Megatron config, or the offsets are on a device.
        ValueError: no process groups, their sizes are not the config's; offsets that do not fit
            the lengths; ``tokens_per_sample`` of several samples, which re-orders the router's
            rows; an fp8 or fp4 recipe whose alignment is unknown; what ``build`` raises.
    """
    for field in ("tensor_model_parallel_size", "context_parallel_size", "sequence_parallel"):
        if not hasattr(config, field):
            raise TypeError(
                f"{_NAME}: config must be a TransformerConfig, got {type(config).__name__} without"
                f" {field}"
            )
    tp_group, cp_group = _groups(process_groups)
    tp_size, tp_rank = tp_group.size(), tp_group.rank()
    cp_size, cp_rank = cp_group.size(), cp_group.rank()
    _check_size("tp", tp_size, "tensor_model_parallel_size", config)
    _check_size("cp", cp_size, "context_parallel_size", config)
    if packed_seq_params is not None:
        _check_format(packed_seq_params, format)
        own_group = getattr(packed_seq_params, "cp_group", None)
        local_size = getattr(packed_seq_params, "local_cp_size", None)
        if own_group is not None:
            cp_group, cp_size, cp_rank = own_group, own_group.size(), own_group.rank()
        elif local_size is not None and int(local_size) == 1:
            cp_size, cp_rank = 1, 0
        elif local_size is not None:
            raise ValueError(
                f"{_NAME}: packed_seq_params.local_cp_size={int(local_size)} without its cp_group"
            )
        if padded_lengths is None:
            padded_lengths = _padded_lengths(lengths, packed_seq_params, cp_size)
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    layout = TokenLayout.build(
        lengths,
        format=format,
        tp_size=tp_size,
        tp_rank=tp_rank,
        cp_size=cp_size,
        cp_rank=cp_rank,
        cp_order=cp_order,
        sequence_parallel=bool(config.sequence_parallel) and tp_size > 1,
        fp8=False if padded_lengths is not None else _fp8(config),
        padded_lengths=padded_lengths,
        batch_width=batch_width,
        first_columns=first_columns,
        device=device,
        cp_group=cp_group if cp_size > 1 else None,
    )
    if packed_seq_params is not None:
        _check_samples(packed_seq_params, layout)
    return layout


# --- groups ---------------------------------------------------------------------------------------


def _groups(process_groups: Any) -> tuple[Any, Any]:
    """The tensor- and context-parallel groups."""
    if process_groups is not None:
        groups = [getattr(process_groups, name, None) for name in ("tp", "cp")]
        for name, group in zip(("tp", "cp"), groups, strict=True):
            if group is None:
                raise ValueError(f"{_NAME}: process_groups has no {name} group")
        return groups[0], groups[1]
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        raise ValueError(
            f"{_NAME}: Megatron's parallel_state is not initialized; call initialize_model_parallel"
            " first, or pass process_groups="
        )
    return (
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_context_parallel_group(),
    )


def _check_size(kind: str, size: int, field: str, config: Any) -> None:
    if size != getattr(config, field):
        raise ValueError(
            f"{_NAME}: the {kind} group has {size} ranks, config.{field} is"
            f" {getattr(config, field)}"
        )


# --- precision ------------------------------------------------------------------------------------


def _fp8(config: Any) -> Fp8:
    if getattr(config, "fp4", None):
        raise ValueError(
            f"{_NAME}: the alignment of fp4={config.fp4!r} is not known here; pass padded_lengths,"
            " or packed_seq_params with offsets on the host"
        )
    if not getattr(config, "fp8", None):
        return False
    recipe = getattr(config, "fp8_recipe", None) or "delayed"
    recipe = getattr(recipe, "value", recipe)
    if recipe not in _RECIPES:
        raise ValueError(
            f"{_NAME}: the alignment of fp8_recipe={recipe!r} is not known here; pass"
            " padded_lengths, or packed_seq_params with offsets on the host"
        )
    return _RECIPES[recipe]


# --- the packer's lengths -------------------------------------------------------------------------


def _check_format(packed: Any, format: str) -> None:
    given = getattr(packed, "qkv_format", None)
    if given != "thd" or format != "thd":
        raise ValueError(
            f"{_NAME}: packed_seq_params with qkv_format={given!r} for format={format!r}; they"
            " describe 'thd' only"
        )


def _padded_lengths(lengths: HostInts, packed: Any, cp_size: int) -> np.ndarray | None:
    """[B], or with a pad of the slab [B + 1]; None where there are no offsets."""
    real = host_array(_NAME, "lengths", lengths)
    field = "cu_seqlens_q_padded"
    if getattr(packed, field, None) is None:
        field = "cu_seqlens_q"
    values = getattr(packed, field, None)
    if values is None:
        return None
    if isinstance(values, Tensor) and values.device.type != "cpu":
        raise TypeError(
            f"{_NAME}: packed_seq_params.{field} is on {values.device}, where reading it would wait"
            " for the device; pass padded_lengths= from the host"
        )
    offsets = host_array(_NAME, f"packed_seq_params.{field}", values)
    if not offsets.size or offsets[0] != 0 or (np.diff(offsets) < 0).any():
        raise ValueError(
            f"{_NAME}: packed_seq_params.{field} must begin at 0 and ascend, got {offsets.tolist()}"
        )
    padded = np.diff(offsets)
    if padded.size < real.size:
        raise ValueError(
            f"{_NAME}: packed_seq_params.{field} describes {padded.size} sequences for {real.size}"
            " trajectories"
        )
    total = _total_tokens(packed, int(offsets[-1]), cp_size)
    if total > offsets[-1]:
        padded = np.append(padded, total - offsets[-1])
    while padded.size > real.size and padded[-1] == 0:  # offsets that fill a static buffer
        padded = padded[:-1]
    return padded


def _total_tokens(packed: Any, end: int, cp_size: int) -> int:
    """Tokens of the slab over all context-parallel ranks."""
    total = getattr(packed, "total_tokens", None)
    if total is None or (cp_size > 1 and int(total) * cp_size == end):  # of one rank
        return end
    if int(total) < end or (cp_size > 1 and int(total) != end):
        raise ValueError(
            f"{_NAME}: packed_seq_params.total_tokens={int(total)} does not fit offsets that end at"
            f" {end} with cp_size={cp_size}; pass padded_lengths="
        )
    return int(total)


def _check_samples(packed: Any, layout: TokenLayout) -> None:
    """Megatron 0.19 re-orders the rows of a MoE layer to [tokens_per_sample, samples]."""
    tokens = getattr(packed, "tokens_per_sample", None)
    if tokens is None or layout.num_rank_tokens // int(tokens) <= 1:
        return
    raise ValueError(
        f"{_NAME}: packed_seq_params.tokens_per_sample={int(tokens)} makes"
        f" {layout.num_rank_tokens // int(tokens)} samples of this rank's"
        f" {layout.num_rank_tokens} tokens, which Megatron re-orders before the router: set it to"
        " None (it serves the sequence-level auxiliary loss only)"
    )
