"""What one reply of an engine says of its sampled tokens, checked and brought to one form.

    read_routes      the rows after the captured prefix
    read_logprobs    float32, missing ones -9999.0
    read_support     ids and counts, the sampled id a member of its row

``where`` begins each error: function, field, trajectory and turn. No input is kept or written, but
``read_routes`` returns a view.

Sizes: R sampled tokens, C candidates, L captured layers, K experts a token, V vocabulary.
"""

from typing import Any, Final, NamedTuple

import numpy as np
from torch import Tensor

from packhorse._nvtx import ranged
from packhorse.packed.collate import SupportRows, routes_dtype
from packhorse.packed.host import as_int64, check_total, host_count, host_ints, tensor_array
from packhorse.packed.host_arrays import float_array, integer_array
from packhorse.packed.sentinels import NO_CANDIDATE
from packhorse.packed.support_checks import csr_rows, listed_rows

#: What a missing or non-finite logprob becomes, as in vLLM's HTTP replies.
LOGPROB_FLOOR: Final = -9999.0


class SupportReply(NamedTuple):
    """Support rows of the sampled tokens, as ids and counts."""

    token_ids: np.ndarray  # [total ids] int64
    counts: np.ndarray  # [R] int64
    added: np.ndarray  # [R] bool: the row lacked the sampled id


# --- tokens ---------------------------------------------------------------------------------------


def read_token_ids(where: str, given: Any, vocab_size: int | None) -> np.ndarray:
    """[n] int64, a copy; each in [0, V) where V is known."""
    ids = host_ints(given, where)
    outside = ids < 0 if vocab_size is None else (ids < 0) | (ids >= vocab_size)
    if outside.any():
        token = int(np.argmax(outside))
        problem = "negative" if ids[token] < 0 else f"not below vocab_size={vocab_size}"
        raise ValueError(f"{where}, token {token}: id {ids[token]} is {problem}")
    return ids


def read_loss_mask(where: str, given: Any, num_tokens: int) -> np.ndarray:
    """[num_tokens] bool from booleans, or from integers 0 and 1."""
    if isinstance(given, Tensor):
        given = tensor_array(given, where)
    if not isinstance(given, list | tuple | np.ndarray):
        raise TypeError(f"{where} must be a list or host array, got {type(given).__name__}")
    try:
        array = np.asarray(given)
    except ValueError:  # lists of different lengths
        raise TypeError(f"{where} must hold booleans, 0 or 1, got lists") from None
    if array.shape != (num_tokens,):
        raise ValueError(f"{where} has shape {array.shape}, expected [{num_tokens}]")
    if num_tokens and array.dtype.kind not in "biu":
        raise TypeError(f"{where} must hold booleans, 0 or 1, got {array.dtype}")
    wrong = (array != 0) & (array != 1)
    if wrong.any():
        token = int(np.argmax(wrong))
        raise ValueError(f"{where}, token {token}: {array[token]} is neither 0 nor 1")
    return array.astype(np.bool_)


def read_logprobs(where: str, given: Any, num_tokens: int) -> np.ndarray:
    """[num_tokens] float32; what is missing (None, not finite) becomes the floor."""
    array = float_array(given, where)
    if array.shape != (num_tokens,):
        raise ValueError(f"{where} has shape {array.shape}, expected [{num_tokens}]")
    with np.errstate(invalid="ignore"):
        missing = ~np.isfinite(array) | (array <= LOGPROB_FLOOR)
    positive = ~missing & (array > 0)
    if positive.any():
        token = int(np.argmax(positive))
        raise ValueError(f"{where}, token {token}: {array[token]} is positive")
    return np.where(missing, np.float32(LOGPROB_FLOOR), array)


# --- routes ---------------------------------------------------------------------------------------


def read_routes(
    where: str,
    given: Any,
    *,
    start: Any,
    evaluated: Any,
    captured: int,
    length: int,
    row_shape: tuple[int, int],
) -> np.ndarray:
    """The rows of a reply from row ``captured`` on, a view [new rows, L, K].

    A reply has the rows [start, evaluated), or all before ``evaluated`` from a server that ignores
    ``start``.
    """
    ids = integer_array(given, where)
    if ids.ndim != 3 or ids.shape[1:] != row_shape:
        raise ValueError(f"{where} must be [rows, {row_shape[0]}, {row_shape[1]}], got {ids.shape}")
    first = host_count(start, f"{where}: routes_start")
    if evaluated is None:
        evaluated = max(length - 1, 0)  # the last sampled token never is
    evaluated = host_count(evaluated, f"{where}: evaluated")
    if evaluated > length:
        raise ValueError(f"{where}: evaluated={evaluated} of {length} tokens")
    if first > captured:
        raise ValueError(
            f"{where} starts at row {first}, but {captured} rows are known; those between are"
            " missing"
        )
    expected = max(evaluated - first, 0)
    if ids.shape[0] == evaluated:
        first = 0
    elif ids.shape[0] != expected:
        raise ValueError(
            f"{where} has {ids.shape[0]} rows; {evaluated} evaluated of {length} tokens make"
            f" {expected} from row {first}" + (f", {evaluated} from row 0" if first else "")
        )
    return ids[captured - first :]


def narrow_routes(where: str, ids: np.ndarray, num_experts: int | None) -> np.ndarray:
    """A read-only copy in the narrowest stored dtype: by E where known, else by the ids."""
    if num_experts is None:
        num_experts = int(ids.max(initial=0)) + 1
        check_total(where, num_experts - 1, "as an expert id")
    rows = np.ascontiguousarray(ids).astype(numpy_dtype(num_experts), copy=True)
    rows.flags.writeable = False
    return rows


def numpy_dtype(num_experts: int) -> np.dtype:
    """``routes_dtype`` of NumPy."""
    return np.dtype(str(routes_dtype(num_experts)).removeprefix("torch."))


# --- support --------------------------------------------------------------------------------------


def read_support(where: str, given: Any, sampled: np.ndarray, vocab_size: int) -> SupportReply:
    """One row a sampled token, of distinct ids in [0, V); its own id is added where it is not."""
    token_ids, counts = _rows_of(where, given)
    if counts.size != sampled.size:
        raise ValueError(f"{where} has {counts.size} rows for {sampled.size} sampled tokens")
    rows = np.repeat(np.arange(counts.size), counts)
    present = token_ids != NO_CANDIDATE
    rows, token_ids = rows[present], token_ids[present]
    outside = (token_ids < 0) | (token_ids >= vocab_size)
    if outside.any():
        first = int(np.argmax(outside))
        problem = "negative" if token_ids[first] < 0 else f"not below vocab_size={vocab_size}"
        raise ValueError(f"{where}, row {rows[first]}: id {token_ids[first]} is {problem}")
    keys = np.sort(rows * vocab_size + token_ids)
    repeated = np.flatnonzero(keys[1:] == keys[:-1])
    if repeated.size:
        row, token = divmod(int(keys[repeated[0]]), vocab_size)
        raise ValueError(f"{where}, row {row}: id {token} is repeated")

    counts = np.bincount(rows, minlength=sampled.size)
    is_member = np.zeros(sampled.size, dtype=np.bool_)
    is_member[rows[token_ids == sampled[rows]]] = True
    lacking = np.flatnonzero(~is_member)
    token_ids = np.insert(token_ids, np.cumsum(counts)[lacking], sampled[lacking])
    counts[lacking] += 1
    return SupportReply(token_ids, counts, ~is_member)


def _rows_of(where: str, given: Any) -> tuple[np.ndarray, np.ndarray]:
    """(ids [total] int64, counts [rows] int64) of any form that ``pack_support`` takes."""
    if isinstance(given, SupportRows):
        return csr_rows(where, given)
    if not isinstance(given, np.ndarray | Tensor):
        return listed_rows(where, given)
    array = integer_array(given, where)
    if array.ndim != 2:
        raise ValueError(f"{where} must be [sampled tokens, C], got shape {array.shape}")
    return as_int64(array, where).reshape(-1), np.full(array.shape[0], array.shape[1])


@ranged
def finite_candidates(
    candidate_ids: np.ndarray | Tensor, candidate_logprobs: np.ndarray | Tensor
) -> SupportRows:
    """Support rows from an engine's best candidates: those that its filters left.

    Args:
        candidate_ids: [R, C] integers: the C best candidates at each token. -1: none.
        candidate_logprobs: [R, C] floats beside them (vLLM ``logprobs_mode="processed_logprobs"``).
            -inf, NaN and -9999.0 (vLLM's HTTP form of both) mean filtered out.

    Returns:
        R rows, in the given order, from which filtered ids and repeats (vLLM's flat logprobs list
        the sampled token twice) are dropped. A row may be empty: ``Trace.add_turn`` makes the
        sampled id a member.

    Raises:
        TypeError: an argument has a wrong type, or is on a device.
        ValueError: the shapes are not [R, C] alike.
    """
    name = "finite_candidates"
    ids = integer_array(candidate_ids, f"{name}: candidate_ids")
    logprobs = float_array(candidate_logprobs, f"{name}: candidate_logprobs")
    if ids.ndim != 2 or ids.shape != logprobs.shape:
        raise ValueError(
            f"{name}: candidate_ids and candidate_logprobs must be [R, C] alike, got {ids.shape}"
            f" and {logprobs.shape}"
        )
    ids = as_int64(ids, f"{name}: candidate_ids")
    with np.errstate(invalid="ignore"):
        kept = np.isfinite(logprobs) & (logprobs > LOGPROB_FLOOR) & (ids != NO_CANDIDATE)
    ids = np.where(kept, ids, NO_CANDIDATE)
    order = np.argsort(ids, axis=1, kind="stable")
    in_order = np.take_along_axis(ids, order, axis=1)
    again = np.zeros_like(kept)
    again[:, 1:] = in_order[:, 1:] == in_order[:, :-1]
    repeated = np.empty_like(kept)
    np.put_along_axis(repeated, order, again, axis=1)
    kept &= ~repeated
    offsets = np.zeros(ids.shape[0] + 1, dtype=np.int64)
    np.cumsum(kept.sum(axis=1), out=offsets[1:])
    return SupportRows(ids[kept], offsets)
