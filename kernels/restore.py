"""Where each cell of a ``[B, S-1]`` batch finds its value among the tokens of all ranks.

    cell (b, c) -> position s = c - first_columns[b]
    restore_row_ids[b, c] = rank(s) * T + slot(b, s)   where 0 <= s < lengths[b] - 1, else -1

The inverse of ``make_row_ids``: the values of the R context-parallel ranks stand one after another,
T each, and ``gather_rows`` with these ids puts them back. The last position of a sequence predicts
no token, so S - 1 columns remain.

Sizes: B sequences with a trajectory, S columns, T tokens a rank.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from packhorse.kernels.layout import check_tables

# --- reference: the specification, and what CPU tensors run ---------------------------------------


def restore_row_ids_reference(
    offsets: Tensor,
    columns: Tensor,
    width: int,
    num_tokens: int,
    cp_size: int,
    zigzag: bool,
    position_major: bool,
) -> Tensor:
    num_sequences = columns.shape[1]
    sequence = torch.arange(num_sequences, device=offsets.device)[:, None]
    first_columns, lengths = columns.long()[:, :, None]
    position = torch.arange(width, device=offsets.device)[None, :] - first_columns
    present = (position >= 0) & (position < lengths - 1)
    position = position.clamp(min=0)
    offsets = offsets.long()
    if position_major:
        local_length = offsets[1]
    else:
        local_length = (offsets[1:] - offsets[:-1])[sequence]
    if zigzag:
        half = (local_length // 2).clamp(min=1)
        chunk = position // half
        rank = torch.where(chunk < cp_size, chunk, 2 * cp_size - 1 - chunk)
        local = position % half + torch.where(chunk < cp_size, 0, half)
    else:
        rank = position // local_length.clamp(min=1)
        local = position - rank * local_length
    slot = local * num_sequences + sequence if position_major else offsets[sequence] + local
    return torch.where(present, rank * num_tokens + slot, -1).flatten()


# --- Triton ---------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["num_cells", "width", "num_sequences", "num_tokens", "cp_size"])
def _make_restore_row_ids_kernel(
    offsets_ptr,  # [>= B + 1] int32; with POSITION_MAJOR [2]
    columns_ptr,  # [2, B] int32: first columns, lengths
    row_ids_ptr,  # [B * width] int64
    num_cells,  # B * width
    width,  # S - 1
    num_sequences,  # B
    num_tokens,  # T
    cp_size,
    ZIGZAG: tl.constexpr,
    POSITION_MAJOR: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    cells = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    in_bounds = cells < num_cells
    sequence = (cells // width).to(tl.int32)
    column = (cells % width).to(tl.int32)
    first_column = tl.load(columns_ptr + sequence, mask=in_bounds, other=0)
    length = tl.load(columns_ptr + num_sequences + sequence, mask=in_bounds, other=0)
    position = column - first_column
    present = in_bounds & (position >= 0) & (position < length - 1)
    position = tl.maximum(position, 0)
    if POSITION_MAJOR:
        local_length = tl.load(offsets_ptr + 1) + tl.zeros([BLOCK_M], dtype=tl.int32)
        begin = local_length * 0
    else:
        begin = tl.load(offsets_ptr + sequence, mask=in_bounds, other=0)
        local_length = tl.load(offsets_ptr + sequence + 1, mask=in_bounds, other=0) - begin
    if ZIGZAG:
        half = tl.maximum(local_length // 2, 1)
        chunk = position // half
        first = chunk < cp_size
        rank = tl.where(first, chunk, 2 * cp_size - 1 - chunk)
        local = position % half + tl.where(first, 0, half)
    else:
        rank = position // tl.maximum(local_length, 1)
        local = position - rank * local_length
    if POSITION_MAJOR:
        slot = local * num_sequences + sequence
    else:
        slot = begin + local
    rows = rank.to(tl.int64) * num_tokens + slot
    tl.store(row_ids_ptr + cells, tl.where(present, rows, -1), mask=in_bounds)


_BLOCK_M = 512


def _restore_row_ids_cuda(
    offsets: Tensor,
    columns: Tensor,
    width: int,
    num_tokens: int,
    cp_size: int,
    zigzag: bool,
    position_major: bool,
) -> Tensor:
    num_sequences = columns.shape[1]
    num_cells = num_sequences * width
    out = offsets.new_empty(num_cells, dtype=torch.int64)
    if num_cells == 0:
        return out
    with torch.cuda.device_of(offsets):
        _make_restore_row_ids_kernel[((num_cells + _BLOCK_M - 1) // _BLOCK_M,)](
            offsets, columns, out, num_cells, width, num_sequences, num_tokens, cp_size,
            ZIGZAG=zigzag, POSITION_MAJOR=position_major, BLOCK_M=_BLOCK_M,
        )  # fmt: skip
    return out


# --- operator -------------------------------------------------------------------------------------

torch.library.define(
    "packhorse::restore_row_ids",
    "(Tensor offsets, Tensor columns, SymInt width, SymInt num_tokens, int cp_size, bool zigzag,"
    " bool position_major) -> Tensor",
)
torch.library.impl("packhorse::restore_row_ids", "CPU", restore_row_ids_reference)
torch.library.impl("packhorse::restore_row_ids", "CUDA", _restore_row_ids_cuda)


@torch.library.register_fake("packhorse::restore_row_ids")
def _restore_row_ids_fake(
    offsets, columns, width, num_tokens, cp_size, zigzag, position_major
) -> Tensor:
    return offsets.new_empty(columns.shape[1] * width, dtype=torch.int64)


_restore_row_ids_op = torch.ops.packhorse.restore_row_ids.default


# --- public API -----------------------------------------------------------------------------------


def make_restore_row_ids(
    offsets: Tensor,
    columns: Tensor,
    width: int,
    num_tokens: int,
    *,
    cp_size: int = 1,
    zigzag: bool = False,
    position_major: bool = False,
) -> Tensor:
    """Row of each batch cell in the concatenated values of all ranks; see ``TokenLayout.restore``.

    Args:
        offsets: [B + 1] int32 or longer, contiguous: where each sequence begins among one rank's
            tokens, 0 first. With ``position_major`` [2]: 0 and the tokens of one sequence.
        columns: [2, B] int32, contiguous, on ``offsets.device``: first columns, lengths.
        width: S - 1, columns of the result.
        num_tokens: T, tokens of one context-parallel rank.
        cp_size: context-parallel ranks.
        zigzag, position_major: as in ``make_row_ids``.

    Returns:
        [B * (S - 1)] int64, -1 where the cell has no value.

    Raises:
        TypeError, ValueError: a dtype, shape or device is wrong, or a number is out of range.
            The values of the tables are not read.
    """
    name = "make_restore_row_ids"
    check_tables(name, offsets, "columns", columns, num_rows=2)
    fewest = 2 if position_major else columns.shape[1] + 1
    if offsets.dim() != 1 or offsets.shape[0] < fewest:
        raise ValueError(
            f"{name}: offsets must be [{fewest}] or longer, got {tuple(offsets.shape)}"
        )
    if width < 0 or num_tokens < 0 or cp_size < 1:
        raise ValueError(
            f"{name}: width={width}, num_tokens={num_tokens} must be >= 0, cp_size={cp_size} >= 1"
        )
    return _restore_row_ids_op(
        offsets, columns, width, num_tokens, cp_size, zigzag and cp_size > 1, position_major
    )
