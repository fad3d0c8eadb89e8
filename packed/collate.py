"""From what an engine returned for each trajectory to packed fields, checked whole on the host.

    pack_routes      [rows, L, K] a trajectory      -> rollout_expert_indices [N, L, K]
    pack_support     ids a response token           -> rollout_sample_support [N, C] int32
    check_logprobs   [response tokens] a trajectory -> float32 arrays

Everything is checked before anything is built: bad input is one error that names the function, the
field, the trajectory and the row. No input is written, and no result shares memory with one, except
float32 logprobs.

Sizes: L captured layers, K experts a token, E experts, V vocabulary, C width of the support.
"""

import sys
from collections.abc import Sequence
from itertools import chain
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from packhorse._nvtx import ranged
from packhorse.packed.host import (
    accumulate,
    as_int64,
    check_total,
    host_count,
    host_ints,
    row_place,
    tensor_array,
)
from packhorse.packed.sentinels import MISSING_EXPERT, NO_CANDIDATE
from packhorse.packed.tensor import PackedTensor

ROUTES_FIELD: Final = "rollout_expert_indices"
SUPPORT_FIELD: Final = "rollout_sample_support"
LOGPROBS_FIELD: Final = "rollout_logprobs"

#: (row, layer) pairs that one look for repeated experts covers: K planes of them stay in the cache.
_PAIRS_AT_ONCE: Final = 1 << 16


class SupportRows(NamedTuple):
    """Support rows of different widths: row r holds ``token_ids[row_offsets[r]:row_offsets[r+1]]``.

    As vLLM's ``sampling_mask`` returns them (ids and counts).
    """

    token_ids: np.ndarray  # [total ids] integers
    row_offsets: np.ndarray  # [rows + 1] integers: first 0, last total ids, non-decreasing


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
    num_experts: int,
    topk: int,
    num_layers: int,
    moe_layers: Sequence[int] | None = None,
) -> PackedTensor:
    """Join the routes of B trajectories.

    Args:
        routes: B host arrays or CPU tensors [rows_i, L, K] of any integer dtype (vLLM
            ``routed_experts``), rows_i at most ``lengths[i]``: row t is the route of token t, and
            the number of rows is the captured prefix. [0, L, K] where nothing was captured.
        lengths: B numbers of tokens, prompt and response.
        num_experts: E. Ids are in [0, E), and the dtype of the result holds E.
        topk: K.
        num_layers: L.
        moe_layers: captured layers, from 0, that have experts; the others are dense and must hold
            zeros. By default all.

    Returns:
        [N, L, K] uint8 for E <= 256, int16 for E <= 32768, else int32.

    Raises:
        TypeError: an argument or a trajectory has a wrong type, or is on a device.
        ValueError: a length is negative; a shape is wrong, or there are more rows than tokens; an
            id is negative or not below E, is repeated in a row, or stands in a dense layer; with
            K > 1, a layer of experts is all zeros, which is how an engine that captured nothing
            looks.
    """
    name = "pack_routes"
    num_experts, topk, num_layers = (
        _positive(value, f"{name}: {what}")
        for value, what in (
            (num_experts, "num_experts"),
            (topk, "topk"),
            (num_layers, "num_layers"),
        )
    )
    check_total(name, num_experts, "experts")
    check_total(name, num_layers, "layers")
    if topk > num_experts:
        raise ValueError(f"{name}: topk={topk} is above num_experts={num_experts}")
    experts_at = _moe_layers(name, moe_layers, num_layers)
    tokens = _lengths(name, "lengths", lengths)
    _check_sequence(name, ROUTES_FIELD, routes, tokens.size, "lengths")

    arrays = []
    for i, given in enumerate(routes):
        where = f"{name}: {ROUTES_FIELD} of trajectory {i}"
        if given is None:
            raise TypeError(f"{where} is None; pass [0, L, K] where nothing was captured")
        ids = _integer_array(given, where)
        if ids.ndim != 3:
            raise ValueError(f"{where} must be [rows, L, K], got shape {ids.shape}")
        for what, size, expected in (
            ("layers", ids.shape[1], num_layers),
            ("experts a token", ids.shape[2], topk),
        ):
            if size != expected:
                raise ValueError(
                    f"{where} has {size} {what}, expected {expected} (shape {ids.shape})"
                )
        if ids.shape[0] > tokens[i]:
            raise ValueError(
                f"{where} has {ids.shape[0]} rows for {tokens[i]} tokens; a token has one at most"
            )
        arrays.append(ids)
    bounds = accumulate(name, np.array([ids.shape[0] for ids in arrays], dtype=np.int64))
    for i, ids in enumerate(arrays):
        _check_routes(f"{name}: {ROUTES_FIELD} of trajectory {i}", ids, num_experts, experts_at)

    values = torch.empty((int(bounds[-1]), num_layers, topk), dtype=routes_dtype(num_experts))
    rows = values.numpy()
    for ids, start, stop in zip(arrays, bounds[:-1], bounds[1:], strict=True):
        np.copyto(rows[start:stop], ids, casting="unsafe")  # every id is known to fit
    return PackedTensor.from_lengths(values, np.diff(bounds).tolist())


def _moe_layers(name: str, moe_layers: Sequence[int] | None, num_layers: int) -> np.ndarray:
    """[L] bool: whether a captured layer has experts."""
    if moe_layers is None:
        return np.ones(num_layers, dtype=np.bool_)
    layers = host_ints(moe_layers, f"{name}: moe_layers")
    outside = (layers < 0) | (layers >= num_layers)
    if outside.any():
        raise ValueError(f"{name}: moe_layers has {layers[outside][0]}, not in [0, {num_layers})")
    mask = np.zeros(num_layers, dtype=np.bool_)
    mask[layers] = True
    if mask.sum() != layers.size:
        raise ValueError(f"{name}: moe_layers names a layer twice")
    return mask


def _check_routes(where: str, ids: np.ndarray, num_experts: int, experts_at: np.ndarray) -> None:
    """The content of one trajectory's ``ids`` [rows, L, K]."""
    if ids.size == 0:
        return
    if ids.min() < 0 or ids.max() >= num_experts:
        outside = (ids < 0) | (ids >= num_experts)
        row, layer, k = np.unravel_index(np.argmax(outside), ids.shape)
        where = f"{where}, row {row}, layer {layer}"
        expert = ids[row, layer, k]
        if expert >= num_experts:
            raise ValueError(f"{where}: expert {expert} is not below num_experts={num_experts}")
        if expert != MISSING_EXPERT:
            raise ValueError(f"{where}: expert {expert} is negative")
        if (ids[row, layer] == MISSING_EXPERT).all():
            raise ValueError(f"{where}: no route (all -1); rows end where the captured prefix ends")
        raise ValueError(f"{where}: a partial -1, {ids[row, layer].tolist()}")

    if not experts_at.all():
        dense = ids[:, ~experts_at]
        if dense.any():
            row, nth, _ = np.unravel_index(np.argmax(dense != 0), dense.shape)
            layer = np.flatnonzero(~experts_at)[nth]
            raise ValueError(
                f"{where}, row {row}, layer {layer}: {ids[row, layer].tolist()} in a dense layer; "
                "name it in moe_layers if it has experts"
            )
        ids = ids[:, experts_at]
    topk = ids.shape[2]
    pairs = ids.reshape(-1, topk)
    for start in range(0, pairs.shape[0], _PAIRS_AT_ONCE):
        planes = np.ascontiguousarray(pairs[start : start + _PAIRS_AT_ONCE].T)
        if not any((planes[k:] == planes[:-k]).any() for k in range(1, topk)):
            continue
        in_order = np.sort(planes, axis=0)
        repeated = in_order[1:] == in_order[:-1]
        pair = int(np.argmax(repeated.any(axis=0)))
        row, nth = divmod(start + pair, ids.shape[1])
        layer = np.flatnonzero(experts_at)[nth]
        if not ids[:, nth].any():
            raise ValueError(
                f"{where}, row {row}, layer {layer}: all zeros, as in all {ids.shape[0]} rows: the "
                "engine captured nothing there (or the layer is dense: leave it out of moe_layers)"
            )
        expert = in_order[np.argmax(repeated[:, pair]), pair]
        raise ValueError(
            f"{where}, row {row}, layer {layer}: expert {expert} is repeated in "
            f"{ids[row, nth].tolist()}"
        )


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
            or makes the result larger than ``max_bytes``.
    """
    name = "pack_support"
    vocab_size = _positive(vocab_size, f"{name}: vocab_size")
    check_total(name, vocab_size, "token ids")
    if width is not None:
        width = _positive(width, f"{name}: width")
    max_bytes = host_count(max_bytes, f"{name}: max_bytes")
    token_ids, rows, counts, starts = checked_support(name, support, sampled_ids, vocab_size)
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
    values = torch.full((counts.size, width), NO_CANDIDATE, dtype=torch.int32)
    columns = np.arange(rows.size, dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)
    values.numpy()[rows, columns] = token_ids
    return PackedTensor.from_lengths(values, np.diff(starts).tolist())


def checked_support(
    name: str, support: Any, sampled_ids: Any, vocab_size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The rows of all trajectories, checked as ``pack_support`` says.

    Returns:
        ids [total] int64 and the row of each, ids of each row [N], and where each trajectory's rows
        begin [B + 1].
    """
    if not isinstance(sampled_ids, Sequence) or isinstance(sampled_ids, str | bytes):
        raise TypeError(f"{name}: sampled_ids must be a sequence of one id sequence a trajectory")
    sampled = [
        host_ints(ids, f"{name}: sampled_ids of trajectory {i}")
        for i, ids in enumerate(sampled_ids)
    ]
    starts = accumulate(name, np.array([ids.size for ids in sampled], dtype=np.int64))
    token_ids, counts = _support_rows(name, support, np.diff(starts))

    def place(row: np.integer | int) -> str:
        return f"{name}: {SUPPORT_FIELD} of {row_place(row, starts)}"

    rows = np.repeat(np.arange(counts.size, dtype=np.int64), counts)
    present = token_ids != NO_CANDIDATE
    if not present.all():
        rows, token_ids = rows[present], token_ids[present]
        counts = np.bincount(rows, minlength=counts.size)
    outside = (token_ids < 0) | (token_ids >= vocab_size)
    if outside.any():
        first = int(np.argmax(outside))
        token = token_ids[first]
        problem = f"not below vocab_size={vocab_size}" if token > 0 else "negative"
        raise ValueError(f"{place(rows[first])}: id {token} is {problem}")
    keys = np.sort(rows * vocab_size + token_ids)  # rows < 2**31 and ids < 2**31: int64 holds it
    repeated = np.flatnonzero(keys[1:] == keys[:-1])
    if repeated.size:
        row, token = divmod(int(keys[repeated[0]]), vocab_size)
        raise ValueError(f"{place(row)}: id {token} is repeated")
    sampled_flat = np.concatenate([np.empty(0, dtype=np.int64), *sampled])
    is_member = np.zeros(counts.size, dtype=np.bool_)
    is_member[rows[token_ids == sampled_flat[rows]]] = True
    missing = np.flatnonzero((counts > 0) & ~is_member)
    if missing.size:
        row = missing[0]
        raise ValueError(
            f"{place(row)}: the sampled id {sampled_flat[row]} is not among its {counts[row]} ids"
        )
    return token_ids, rows, counts, starts


def _support_rows(
    name: str, support: Any, response_lengths: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(ids [total] int64, ids of each row [N]) over all trajectories."""
    if isinstance(support, SupportRows):
        token_ids, counts = _csr_rows(f"{name}: {SUPPORT_FIELD}", support)
        if counts.size != response_lengths.sum():
            raise ValueError(
                f"{name}: {SUPPORT_FIELD} has {counts.size} rows for {response_lengths.sum()} "
                f"response tokens of {response_lengths.size} trajectories"
            )
        return token_ids, counts
    _check_sequence(name, SUPPORT_FIELD, support, response_lengths.size, "sampled_ids")
    parts = []
    for i, (given, num_tokens) in enumerate(zip(support, response_lengths, strict=True)):
        where = f"{name}: {SUPPORT_FIELD} of trajectory {i}"
        if isinstance(given, SupportRows):
            part = _csr_rows(where, given)
        elif isinstance(given, np.ndarray | Tensor):
            array = _integer_array(given, where)
            if array.ndim != 2:
                raise ValueError(f"{where} must be [response tokens, C], got shape {array.shape}")
            if array.shape[0] != num_tokens:
                raise ValueError(
                    f"{where} has {array.shape[0]} rows for {num_tokens} response tokens"
                )
            part = as_int64(array, where).reshape(-1), np.full(array.shape[0], array.shape[1])
        else:
            part = _listed_rows(where, given)
        if part[1].size != num_tokens:
            raise ValueError(f"{where} has {part[1].size} rows for {num_tokens} response tokens")
        parts.append(part)
    empty = np.empty(0, dtype=np.int64)
    token_ids = np.concatenate([empty, *(part[0] for part in parts)])
    return token_ids, np.concatenate([empty, *(part[1] for part in parts)])


def _csr_rows(where: str, given: SupportRows) -> tuple[np.ndarray, np.ndarray]:
    token_ids = host_ints(given.token_ids, f"{where}: token_ids")
    offsets = host_ints(given.row_offsets, f"{where}: row_offsets")
    ends = (0, token_ids.size)
    if offsets.size == 0 or (offsets[0], offsets[-1]) != ends or (offsets[1:] < offsets[:-1]).any():
        raise ValueError(f"{where}: row_offsets must rise from 0 to its {token_ids.size} ids")
    return token_ids, np.diff(offsets)


def _listed_rows(where: str, given: Any) -> tuple[np.ndarray, np.ndarray]:
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        raise TypeError(f"{where} must be a sequence of rows, got {type(given).__name__}")
    if all(isinstance(ids, list | tuple) for ids in given):  # engines': one pass over all ids
        flat = list(chain.from_iterable(given))
        if all(type(token) is int for token in flat):
            counts = np.fromiter(map(len, given), dtype=np.int64, count=len(given))
            return host_ints(flat, where), counts
    rows = [host_ints(ids, f"{where}, row {row}") for row, ids in enumerate(given)]
    counts = np.array([ids.size for ids in rows], dtype=np.int64)
    return np.concatenate([np.empty(0, dtype=np.int64), *rows]), counts


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
    tokens = _lengths(name, "response_lengths", response_lengths)
    _check_sequence(name, LOGPROBS_FIELD, logprobs, tokens.size, "response_lengths")
    checked = []
    for i, given in enumerate(logprobs):
        where = f"{name}: {LOGPROBS_FIELD} of trajectory {i}"
        array = _float_array(given, where)
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


def _float_array(given: Any, where: str) -> np.ndarray:
    if isinstance(given, Tensor):
        if given.device.type != "cpu":
            raise TypeError(f"{where} is on {given.device}; it must be on the host")
        if not given.dtype.is_floating_point or given.is_nested or given.layout != torch.strided:
            raise TypeError(f"{where} must hold floats, got {given.dtype}, {given.layout}")
        given = given.detach().to(torch.float32).numpy()
    elif isinstance(given, np.ndarray):
        if given.dtype.kind != "f":
            raise TypeError(f"{where} must hold floats, got {given.dtype}")
    elif not isinstance(given, list | tuple):
        raise TypeError(f"{where} must be an array or list of floats, got {type(given).__name__}")
    try:
        with np.errstate(over="ignore"):  # an overflow is reported as infinite
            return np.ascontiguousarray(given, dtype=np.float32)  # None becomes NaN
    except OverflowError:  # an int past float64
        for token, value in enumerate(given):
            if isinstance(value, int) and abs(value) > sys.float_info.max:
                sign = "-" if value < 0 else ""
                raise ValueError(f"{where}, token {token}: {sign}inf is not finite") from None
        raise TypeError(f"{where} must hold floats only") from None
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor with a gradient
        raise TypeError(f"{where} must hold floats only") from None


# --- validation -----------------------------------------------------------------------------------


def _positive(value: Any, where: str) -> int:
    count = host_count(value, where)
    if count == 0:
        raise ValueError(f"{where} must be positive, got 0")
    return count


def _lengths(name: str, what: str, given: Any) -> np.ndarray:
    """[B] int64, none negative."""
    lengths = host_ints(given, f"{name}: {what}")
    if (lengths < 0).any():
        i = int(np.argmax(lengths < 0))
        raise ValueError(f"{name}: {what} of trajectory {i} is negative: {lengths[i]}")
    return lengths


def _check_sequence(name: str, field: str, given: Any, expected: int, beside: str) -> None:
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        raise TypeError(
            f"{name}: {field} must be a sequence of one item a trajectory, got "
            f"{type(given).__name__}"
        )
    if len(given) != expected:
        raise ValueError(f"{name}: {field} has {len(given)} trajectories, {beside} has {expected}")


def _integer_array(given: Any, where: str) -> np.ndarray:
    if isinstance(given, Tensor):
        if given.dtype == torch.bool:
            raise TypeError(f"{where} must hold integers, got {given.dtype}")
        return tensor_array(given, where)
    if not isinstance(given, np.ndarray):
        raise TypeError(f"{where} must be an array or a tensor, got {type(given).__name__}")
    if given.dtype.kind not in "iu":
        raise TypeError(f"{where} must hold integers, got {given.dtype}")
    return given
