"""From what an engine returned for each trajectory to packed fields, checked whole on the host.

    pack_routes      [rows, L, K] a trajectory      -> rollout_expert_indices [N, L, K]
    pack_support     ids a response token           -> rollout_sample_support [N, C] int32
    check_logprobs   [response tokens] a trajectory -> float32 arrays

Everything is checked before anything is built: bad input is one error that names the function, the
field, the trajectory and the row. No input is written, and no result shares memory with one, except
float32 logprobs.

Sizes: L captured layers, K experts a token, E experts, V vocabulary, C width of the support.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from packhorse._nvtx import ranged
from packhorse.packed.host import (
    INT32_MAX,
    accumulate,
    check_total,
    host_count,
    row_place,
)
from packhorse.packed.host_arrays import (
    check_sequence,
    checked_lengths,
    float_array,
    integer_array,
    positive,
    rows_between,
)
from packhorse.packed.pool import count_threads, run_tasks
from packhorse.packed.route_checks import (
    check_all_routes,
    check_id_range,
    expert_layers,
)
from packhorse.packed.sentinels import NO_CANDIDATE
from packhorse.packed.support_checks import (
    SUPPORT_FIELD,
    SupportRows,
    checked_support,
)
from packhorse.packed.tensor import PackedTensor

ROUTES_FIELD: Final = "rollout_expert_indices"
LOGPROBS_FIELD: Final = "rollout_logprobs"

#: Bytes that one task of the pool writes; a result that is no larger is written by the caller.
_BYTES_OF_TASK: Final = 4 << 20


# --- routes ---------------------------------------------------------------------------------------


def routes_dtype(num_experts: int) -> torch.dtype:
    """The narrowest stored dtype that holds ids below ``num_experts``: uint8, int16 or int32."""
    if num_experts <= 256:
        return torch.uint8
    return torch.int16 if num_experts <= 32768 else torch.int32


@ranged
def pack_routes(
    routes: Sequence[np.ndarray | Tensor],
    lengths: Sequence[int],
    *,
    num_experts: int | None,
    topk: int,
    num_layers: int,
    moe_layers: Sequence[int] | None = None,
    check_content: bool = True,
    num_threads: int | None = None,
) -> PackedTensor:
    """Join the routes of B trajectories.

    Every shape and id is checked, then the rows are copied once, into the final allocation, by
    several threads, which also are the first to touch its pages.

    Args:
        routes: B host arrays or CPU tensors [rows_i, L, K] of any integer dtype (vLLM
            ``routed_experts``) and memory layout, rows_i at most ``lengths[i]``: row t is the route
            of token t, and the number of rows is the captured prefix. [0, L, K] where nothing was
            captured.
        lengths: B numbers of tokens, prompt and response.
        num_experts: E. Ids are in [0, E), and the dtype of the result holds E. None where it is not
            known: the dtype then holds the largest id that is there, so batches may differ in it.
        topk: K.
        num_layers: L.
        moe_layers: captured layers, from 0, that have experts; the others are dense and must hold
            zeros. By default all.
        check_content: False leaves the ids to ``validate_routes``, which counts the same faults on
            the device. Types and shapes are checked all the same, and so is the range of ids that
            change their dtype, since one out of range could become one in range.
        num_threads: by default one for each CPU that affinity and control groups let this process
            use, at most 16. Small batches take one.

    Returns:
        [N, L, K] uint8 for E <= 256, int16 for E <= 32768, else int32.

    Raises:
        TypeError: an argument or a trajectory has a wrong type, or is on a device.
        ValueError: a length is negative; a shape is wrong, or there are more rows than tokens; an
            id is negative or not below E, is repeated in a row, or stands in a dense layer; with
            K > 1, a layer of experts is all zeros, which is how an engine that captured nothing
            looks. Of several wrong trajectories the first is named.

    Example:
        >>> ids = np.array([[[3, 1]], [[0, 2]]])  # two tokens, one layer, two experts each
        >>> packed = pack_routes([ids, ids[:1]], [3, 1], num_experts=8, topk=2, num_layers=1)
        >>> packed.values[:, 0].tolist(), packed.lengths, packed.dtype
        ([[3, 1], [0, 2], [3, 1]], (2, 1), torch.uint8)
    """
    name = "pack_routes"
    if num_experts is not None:
        num_experts = positive(num_experts, f"{name}: num_experts")
        check_total(name, num_experts, "experts")
    topk, num_layers = (
        positive(value, f"{name}: {what}")
        for value, what in ((topk, "topk"), (num_layers, "num_layers"))
    )
    check_total(name, num_layers, "layers")
    if num_experts is not None and topk > num_experts:
        raise ValueError(f"{name}: topk={topk} is above num_experts={num_experts}")
    experts_at = expert_layers(name, moe_layers, num_layers)
    if not isinstance(check_content, bool):
        raise TypeError(f"{name}: check_content must be a bool, got {check_content!r}")
    if num_threads is not None:
        num_threads = count_threads(num_threads, name)
    tokens = checked_lengths(name, "lengths", lengths)
    check_sequence(name, ROUTES_FIELD, routes, tokens.size, "lengths")

    def where(i: int) -> str:
        return f"{name}: {ROUTES_FIELD} of trajectory {i}"

    arrays, wrong = _route_arrays(where, routes, tokens, (num_layers, topk))
    bounds = accumulate(name, np.array([ids.shape[0] for ids in arrays], dtype=np.int64))
    offsets = bounds.tolist()
    if num_threads is None:
        small = offsets[-1] * num_layers * topk <= _BYTES_OF_TASK
        num_threads = 1 if small else count_threads(None, name)
    limit = INT32_MAX + 1 if num_experts is None else num_experts
    if check_content:
        largest = check_all_routes(
            where, arrays, offsets, limit, experts_at, num_threads=num_threads
        )
    else:
        kept = np.uint8 if num_experts is None else _numpy_dtype(num_experts)
        if all(ids.dtype == kept for ids in arrays):
            largest = np.iinfo(kept).max
        else:
            largest = check_id_range(where, arrays, offsets, limit, num_threads=num_threads)
    if wrong is not None:
        raise wrong
    if num_experts is None:
        num_experts = largest + 1
    shape = (offsets[-1], num_layers, topk)
    rows = _joined_rows(arrays, offsets, shape, _numpy_dtype(num_experts), num_threads)
    return PackedTensor.from_lengths(torch.from_numpy(rows), np.diff(bounds).tolist())


def _route_arrays(
    where: Callable[[int], str], routes: Any, tokens: np.ndarray, row_shape: tuple[int, int]
) -> tuple[list[np.ndarray], TypeError | ValueError | None]:
    """The arrays of ``routes`` up to the first of a wrong type or shape, and what is wrong of it.

    The ids of those before it are still to be looked at: one of them is named first.
    """
    arrays: list[np.ndarray] = []
    for given, num_tokens in zip(routes, tokens.tolist(), strict=True):
        try:
            ids = given
            if type(given) is not np.ndarray or given.dtype.kind not in "iu":
                ids = _odd_array(given, where(len(arrays)))
            if ids.shape[1:] != row_shape or ids.shape[0] > num_tokens:
                _refuse_shape(where(len(arrays)), ids.shape, num_tokens, row_shape)
        except (TypeError, ValueError) as error:
            return arrays, error
        arrays.append(ids)
    return arrays, None


def _odd_array(given: Any, where: str) -> np.ndarray:
    if given is None:
        raise TypeError(f"{where} is None; pass [0, L, K] where nothing was captured")
    return integer_array(given, where)


def _refuse_shape(
    where: str, shape: tuple[int, ...], num_tokens: int, row_shape: tuple[int, int]
) -> None:
    if len(shape) != 3:
        raise ValueError(f"{where} must be [rows, L, K], got shape {shape}")
    for what, size, expected in zip(
        ("layers", "experts a token"), shape[1:], row_shape, strict=True
    ):
        if size != expected:
            raise ValueError(f"{where} has {size} {what}, expected {expected} (shape {shape})")
    raise ValueError(
        f"{where} has {shape[0]} rows for {num_tokens} tokens; a token has one at most"
    )


def _numpy_dtype(num_experts: int) -> np.dtype:
    return np.dtype(str(routes_dtype(num_experts)).removeprefix("torch."))


def _joined_rows(
    arrays: Sequence[np.ndarray],
    bounds: Sequence[int],
    shape: tuple[int, ...],
    dtype: np.dtype,
    num_threads: int,
) -> np.ndarray:
    """The rows of all ``arrays`` one behind another in new memory; ``dtype`` holds each number.

    The tasks are cut by bytes, not by arrays, so one long array is copied by all threads.
    """
    rows = np.empty(shape, dtype=dtype)  # NumPy asks for huge pages from 4 MiB on, torch does not
    at_once = max(1, _BYTES_OF_TASK // max(1, rows.nbytes // max(1, shape[0])))
    starts = range(0, shape[0], at_once)

    def copy_rows(number: int) -> None:
        part = rows[starts[number] : starts[number] + at_once]
        start = starts[number]
        parts = rows_between(arrays, bounds, start, start + part.shape[0])
        np.concatenate(parts, out=part, casting="unsafe")

    run_tasks(copy_rows, len(starts), num_threads)
    return rows


# --- support --------------------------------------------------------------------------------------


@ranged
def pack_support(
    support: SupportRows | Sequence[SupportRows | np.ndarray | Tensor | Sequence[Sequence[int]]],
    sampled_ids: Sequence[Sequence[int]],
    *,
    vocab_size: int,
    width: int | None = None,
    max_bytes: int = 4 * 2**30,
) -> PackedTensor:
    """Join the sampling supports of B trajectories into rows of one width.

    Args:
        support: for each trajectory one row a response token (vLLM ``sampling_mask.token_ids``): a
            sequence of id sequences, a ``SupportRows``, or a host array [response tokens, C]. One
            ``SupportRows`` may hold the rows of all trajectories, in order. Ids are in [0, V), none
            twice in a row. -1 (``NO_CANDIDATE``) is no id and is dropped. An empty row belongs to a
            token that was not sampled (an observation, an appended EOS).
        sampled_ids: B sequences of response token ids. Each is a member of its row unless that is
            empty.
        vocab_size: V.
        width: C, at least the widest row; by default as wide as that, and at least 1.
        max_bytes: what the result may take, 4 N C bytes. One row of the whole vocabulary (a token
            that no filter cut) makes every row as wide: leave such a row empty or score its batch
            on its own. ``pack_ragged_support`` carries such rows.

    Returns:
        [N, C] int32: the ids of a row in their given order from column 0, then -1.

    Raises:
        TypeError: an argument or a trajectory has a wrong type, or is on a device.
        ValueError: the rows of a trajectory are not as many as its response tokens; an id is out of
            range or repeated in its row; the sampled id is no member; a row does not fit ``width``,
            or makes the result larger than ``max_bytes``. Of several wrong rows the first is named.
    """
    name = "pack_support"
    vocab_size = positive(vocab_size, f"{name}: vocab_size")
    check_total(name, vocab_size, "token ids")
    if width is not None:
        width = positive(width, f"{name}: width")
    max_bytes = host_count(max_bytes, f"{name}: max_bytes")
    token_ids, counts, starts = checked_support(name, support, sampled_ids, vocab_size)
    widest = int(counts.max(initial=1))
    if width is None:
        width = widest
    if widest > width:
        row = int(np.argmax(counts > width))
        where = f"{name}: {SUPPORT_FIELD} of {row_place(row, starts)}"
        raise ValueError(f"{where}: {counts[row]} ids do not fit width={width}")
    num_bytes = 4 * counts.size * width
    if num_bytes > max_bytes:
        row = int(np.argmax(counts))
        where = f"{name}: {SUPPORT_FIELD} of {row_place(row, starts)}"
        raise ValueError(
            f"{where}: {counts[row]} ids are its widest row; all {counts.size} rows of width"
            f" {width} are {num_bytes} bytes, above max_bytes={max_bytes}"
        )
    values = np.empty((counts.size, width), dtype=np.int32)
    starts_of_ids = np.concatenate([[0], np.cumsum(counts)])
    at_once = max(1, _BYTES_OF_TASK // (4 * width))

    def write_rows(number: int) -> None:
        rows = slice(number * at_once, min((number + 1) * at_once, counts.size))
        part = values[rows]
        part.fill(NO_CANDIDATE)
        ids = token_ids[starts_of_ids[rows.start] : starts_of_ids[rows.stop]]
        part[np.arange(width) < counts[rows, None]] = ids  # row after row, as they stand in ids

    small = num_bytes <= _BYTES_OF_TASK
    run_tasks(write_rows, -(-counts.size // at_once), 1 if small else count_threads(None, name))
    return PackedTensor.from_lengths(torch.from_numpy(values), np.diff(starts).tolist())


# --- logprobs -------------------------------------------------------------------------------------


@ranged
def check_logprobs(
    logprobs: Sequence[np.ndarray | Tensor | Sequence[float]], response_lengths: Sequence[int]
) -> list[np.ndarray]:
    """The logprobs of sampled tokens, one a response token, as contiguous float32 arrays.

    Args:
        logprobs: B sequences, host arrays or CPU tensors of natural-log probabilities, each finite
            and at most 0.
        response_lengths: B numbers of response tokens.

    Returns:
        B arrays [response tokens]. One that was contiguous float32 already is returned as it is.

    Raises:
        TypeError: an argument or a trajectory has a wrong type, or is on a device.
        ValueError: a trajectory has another number of logprobs than response tokens, or one is
            missing, NaN, infinite (in float32) or positive.
    """
    name = "check_logprobs"
    tokens = checked_lengths(name, "response_lengths", response_lengths)
    check_sequence(name, LOGPROBS_FIELD, logprobs, tokens.size, "response_lengths")
    checked = []
    for i, given in enumerate(logprobs):
        where = f"{name}: {LOGPROBS_FIELD} of trajectory {i}"
        array = float_array(given, where)
        if array.shape != (tokens[i],):
            raise ValueError(f"{where} has shape {array.shape}, expected [{tokens[i]}]")
        bad = ~(np.isfinite(array) & (array <= 0))
        if bad.any():
            token = int(np.argmax(bad))
            value = array[token]
            problem = "positive" if value > 0 and np.isfinite(value) else "not finite"
            raise ValueError(f"{where}, token {token}: {value} is {problem}")
        checked.append(array)
    return checked
