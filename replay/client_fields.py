"""The fields of a vLLM reply that say what was decided at each token, read from JSON and packed.

    field             JSON of the server                       packed
    routed_experts    base64 of a .npy file, or lists (0.21)   array [rows, L, K]
    sampling_mask     a list of ids a token                    {token_ids [N], offsets [R + 1]}
    token_ids,        a list of ids                            array [R], [P]
      prompt_token_ids
    logprobs          one object a token, or one a field       {token_ids [R], logprobs [R],
                                                                top_token_ids [N],
                                                                top_logprobs [N], offsets [R + 1]}

``read_*`` take either form; ``pack_reply`` makes the second out of the first. ``place`` is where a
field stands in the reply, a JSON pointer, which every error names. Numbers that are none (null)
become NaN; vLLM writes -9999.0 for -inf and NaN.

Sizes: P prompt, R response tokens, L captured layers, K experts a token, N entries in all.
"""

import itertools
import math
import re
from typing import Any, Final, NamedTuple

import numpy as np

from packhorse.packed.wire_base64 import decode_base64
from packhorse.packed.wire_format import WireArray, malformed

#: .npy format -> bytes of its header's length
_NPY_LENGTHS: Final = {b"\x93NUMPY\x01\x00": 2, b"\x93NUMPY\x02\x00": 4}
#: a header as ``numpy.save`` writes it, of integers in C order
_NPY_HEADER: Final = re.compile(
    rb"\{'descr': '([<>|][iu][1248])', 'fortran_order': False,"
    rb" 'shape': \(((?:[0-9]{1,19}, ?){1,8}(?:[0-9]{1,19})?)\), \} *\n"
)
_NPY_HEADER_BYTES: Final = 4096
_TOKEN_ID: Final = "token_id:"
_INT32_MAX: Final = 2**31 - 1
_IDS_KEYS: Final = frozenset({"token_ids", "offsets"})
_LOGPROB_KEYS: Final = frozenset(
    {"token_ids", "logprobs", "top_token_ids", "top_logprobs", "offsets"}
)


class Rows(NamedTuple):
    """Rows of ids of any length: row i is ``token_ids[offsets[i] : offsets[i + 1]]``."""

    token_ids: np.ndarray  # [N] int32
    offsets: np.ndarray  # [R + 1] int64


class LogprobRows(NamedTuple):
    """The logprob of each sampled token, and its best candidates in the server's order."""

    token_ids: np.ndarray  # [R] int32
    logprobs: np.ndarray  # [R] float32, or float64 where those are not exact; NaN: null
    top: Rows
    top_logprobs: np.ndarray  # [N]


# --- routes ---------------------------------------------------------------------------------------


def read_routes(function: str, place: str, given: Any, *, max_bytes: int) -> np.ndarray | None:
    """[rows, L, K] integers; None where the reply has none."""
    if given is None:
        return None
    if isinstance(given, WireArray):
        routes = given.values
    elif isinstance(given, str):
        routes = _read_npy(function, place, given, max_bytes)
    elif isinstance(given, list):
        routes = _nested(function, place, given)
    else:
        malformed(function, f"it is {type(given).__name__}, no routes", place)
    if routes.ndim != 3 or routes.dtype.kind not in "iu":
        malformed(
            function,
            f"routes must be integers [rows, layers, K], got {routes.dtype} {list(routes.shape)}",
            place,
        )
    if routes.nbytes > max_bytes:
        malformed(function, f"{routes.nbytes} bytes are above max_bytes={max_bytes}", place)
    return routes


def _read_npy(function: str, place: str, text: str, max_bytes: int) -> np.ndarray:
    """Of base64 of a ``.npy`` file, its header checked against what is there; no pickle."""
    num_bytes = len(text) // 4 * 3
    if num_bytes > max_bytes + _NPY_HEADER_BYTES:
        malformed(function, f"{num_bytes} bytes are above max_bytes={max_bytes}", place)
    data = decode_base64(text)
    if data is None:
        malformed(function, "its base64 is damaged", place)
    version = bytes(data[:8])
    length = _NPY_LENGTHS.get(version)
    if length is None:
        malformed(function, f"its base64 holds no .npy file: {version!r}", place)
    begin = len(version) + length
    end = begin + int.from_bytes(data[len(version) : begin], "little")
    header = bytes(data[begin : min(end, begin + _NPY_HEADER_BYTES)])
    described = _NPY_HEADER.fullmatch(header)
    if described is None or end > data.nbytes:
        malformed(
            function, f"its .npy file does not hold integers in C order: {header[:60]!r}", place
        )
    dtype = np.dtype(described[1].decode())
    shape = tuple(int(size) for size in described[2].split(b",") if size.strip())
    needed = math.prod(shape) * dtype.itemsize
    if needed != data.nbytes - end:
        malformed(
            function,
            f"its .npy file holds {data.nbytes - end} bytes, {shape!r:.60} of {dtype} is"
            f" {needed!r:.30}",
            place,
        )
    if len(shape) != 3:
        malformed(function, f"routes must be [rows, layers, K], got {shape!r:.60}", place)
    values = np.frombuffer(data[end:], dtype=dtype)
    try:
        values = values.reshape(shape)
    except ValueError:  # no bytes, and the other sizes past int64
        malformed(function, f"its .npy file has shape {shape!r:.60}", place)
    return values if dtype.isnative else values.astype(dtype.newbyteorder("="))


def _nested(function: str, place: str, given: list[Any]) -> np.ndarray:
    """Of lists in lists, as vLLM 0.21 writes them."""
    # looked at first: NumPy would give each element the room of the longest string
    flat = itertools.chain.from_iterable
    lists = {list}.issuperset(map(type, given)) and {list}.issuperset(map(type, flat(given)))
    if lists and {int}.issuperset(map(type, flat(flat(given)))):
        try:
            return np.array(given)
        except (ValueError, OverflowError):
            pass
    malformed(function, "its lists make no array; routes must be integers [rows, layers, K]", place)


# --- ids ------------------------------------------------------------------------------------------


def read_ids(function: str, place: str, given: Any) -> np.ndarray | None:
    """[n] int32 token ids; None where the reply has none."""
    if given is None:
        return None
    if isinstance(given, WireArray):
        return _ids_of(function, place, given.values)
    if not isinstance(given, list):
        malformed(function, f"it is {type(given).__name__}, no list of token ids", place)
    return _ids_of_list(function, place, given)


def _ids_of_list(function: str, place: str, given: list[Any]) -> np.ndarray:
    if not {int}.issuperset(map(type, given)):
        wrong = next(value for value in given if type(value) is not int)
        malformed(function, f"{wrong!r:.40} is no token id", place)
    if given and not (min(given) >= 0 and max(given) <= _INT32_MAX):
        wrong = next(value for value in given if not 0 <= value <= _INT32_MAX)
        malformed(function, f"{_short(wrong)} is no token id", place)
    return np.array(given, dtype=np.int32)


def _short(value: int) -> str:
    return str(value) if abs(value) < 2**64 else "an integer past int64"


def _ids_of(function: str, place: str, values: np.ndarray) -> np.ndarray:
    if values.ndim != 1 or values.dtype.kind not in "iu":
        shape = list(values.shape)
        malformed(function, f"token ids must be integers [n], got {values.dtype} {shape}", place)
    outside = (values < 0) | (values > _INT32_MAX)
    if outside.any():
        malformed(function, f"{values[int(np.argmax(outside))]} is no token id", place)
    return values.astype(np.int32, copy=False)


def read_mask(function: str, place: str, given: Any) -> Rows | None:
    """The sampler's support: one row of ids a token; None where the reply has none."""
    if given is None:
        return None
    if isinstance(given, dict):
        return _packed_rows(function, place, given, _IDS_KEYS, "token_ids")
    if not isinstance(given, list):
        malformed(function, f"it is {type(given).__name__}, no lists of token ids", place)
    if not {list}.issuperset(map(type, given)):
        wrong = next(i for i, row in enumerate(given) if type(row) is not list)
        malformed(function, "it is no list of token ids", f"{place}/{wrong}")
    ids = _ids_of_list(function, place, list(itertools.chain.from_iterable(given)))
    return Rows(ids, _offsets(map(len, given), len(given)))


def _offsets(counts: Any, num_rows: int) -> np.ndarray:
    offsets = np.zeros(num_rows + 1, dtype=np.int64)
    np.cumsum(np.fromiter(counts, dtype=np.int64, count=num_rows), out=offsets[1:])
    return offsets


def _packed_rows(
    function: str, place: str, given: dict[str, Any], keys: frozenset[str], ids_key: str
) -> Rows:
    if given.keys() != keys or not all(isinstance(value, WireArray) for value in given.values()):
        malformed(function, f"it must hold the arrays {', '.join(sorted(keys))}", place)
    ids = _ids_of(function, f"{place}/{ids_key}", given[ids_key].values)
    offsets = given["offsets"].values
    good = offsets.ndim == 1 and offsets.dtype.kind in "iu" and offsets.size > 0
    if good:
        good = (
            offsets[0] == 0
            and offsets[-1] == ids.size
            and bool(np.all(offsets[1:] >= offsets[:-1]))
        )
    if not good:
        malformed(function, f"its offsets do not rise from 0 to {ids.size}", f"{place}/offsets")
    return Rows(ids, offsets.astype(np.int64, copy=False))


# --- logprobs -------------------------------------------------------------------------------------


def read_logprobs(function: str, place: str, given: Any) -> LogprobRows | None:
    """Those of /inference/v1/generate, of chat and of completions, or packed ones.

    Ids must be there as numbers: the request of the latter two needs
    ``"return_tokens_as_token_ids": true``, since several tokens may be the same string.
    """
    if given is None:
        return None
    if not isinstance(given, dict):
        malformed(function, f"it is {type(given).__name__}, no logprobs", place)
    if "top_token_ids" in given:
        return _packed_logprobs(function, place, given)
    if "content" in given:
        entries = given["content"]
        return None if entries is None else _listed_logprobs(function, f"{place}/content", entries)
    if "token_logprobs" in given:
        return _completion_logprobs(function, place, given)
    malformed(function, f"its members are {', '.join(given)!r:.60}, no logprobs", place)


def _packed_logprobs(function: str, place: str, given: dict[str, Any]) -> LogprobRows:
    top = _packed_rows(function, place, given, _LOGPROB_KEYS, "top_token_ids")
    token_ids = _ids_of(function, f"{place}/token_ids", given["token_ids"].values)
    logprobs, top_logprobs = given["logprobs"].values, given["top_logprobs"].values
    for key, values, size in (
        ("logprobs", logprobs, token_ids.size), ("top_logprobs", top_logprobs, top.token_ids.size)
    ):  # fmt: skip
        if values.dtype.kind != "f" or values.shape != (size,):
            shape = list(values.shape)
            malformed(
                function, f"it must be floats [{size}], got {values.dtype} {shape}",
                f"{place}/{key}",
            )  # fmt: skip
    if top.offsets.size != token_ids.size + 1:
        rows = top.offsets.size - 1
        malformed(function, f"it has {rows} rows for {token_ids.size} tokens", f"{place}/offsets")
    return LogprobRows(token_ids, logprobs, top, top_logprobs)


def _listed_logprobs(function: str, place: str, entries: Any) -> LogprobRows:
    """One object a token: ``token_id`` (generate), or ``token`` = ``token_id:N`` (chat)."""
    if not isinstance(entries, list):
        malformed(function, f"it is {type(entries).__name__}, no list", place)
    ids: list[int] = []
    logprobs: list[Any] = []
    top_ids: list[int] = []
    top_logprobs: list[Any] = []
    counts: list[int] = []
    for i, entry in enumerate(entries):
        where = f"{place}/{i}"
        _take_entry(function, where, entry, ids, logprobs)
        best = entry.get("top_logprobs") or []
        if not isinstance(best, list):
            malformed(function, f"it is {type(best).__name__}, no list", f"{where}/top_logprobs")
        for j, other in enumerate(best):
            _take_entry(function, f"{where}/top_logprobs/{j}", other, top_ids, top_logprobs)
        counts.append(len(best))
    return _logprob_rows(function, place, ids, logprobs, top_ids, top_logprobs, counts)


def _take_entry(function: str, place: str, entry: Any, ids: list[int], logprobs: list[Any]) -> None:
    if not isinstance(entry, dict) or "logprob" not in entry:
        malformed(function, "it has no logprob", place)
    token = entry.get("token_id")
    ids.append(token if type(token) is int else _id_of(function, place, entry.get("token")))
    logprobs.append(entry["logprob"])


def _completion_logprobs(function: str, place: str, given: dict[str, Any]) -> LogprobRows:
    tokens, logprobs = given.get("tokens"), given["token_logprobs"]
    best = given.get("top_logprobs")
    if not isinstance(tokens, list) or not isinstance(logprobs, list):
        malformed(function, "tokens and token_logprobs must be lists", place)
    if len(tokens) != len(logprobs):
        malformed(function, f"{len(logprobs)} token_logprobs of {len(tokens)} tokens", place)
    if best is None:
        best = [None] * len(tokens)
    if not isinstance(best, list) or len(best) != len(tokens):
        malformed(function, "top_logprobs must be a list of one entry a token", place)
    ids = [_id_of(function, f"{place}/tokens/{i}", token) for i, token in enumerate(tokens)]
    top_ids: list[int] = []
    top_logprobs: list[Any] = []
    counts: list[int] = []
    for i, entry in enumerate(best):
        where = f"{place}/top_logprobs/{i}"
        if entry is not None and not isinstance(entry, dict):
            malformed(function, f"it is {type(entry).__name__}, no object", where)
        top_ids += [_id_of(function, where, token) for token in entry or ()]
        top_logprobs += (entry or {}).values()
        counts.append(len(entry or ()))
    return _logprob_rows(function, place, ids, logprobs, top_ids, top_logprobs, counts)


def _id_of(function: str, place: str, token: Any) -> int:
    """N of ``token_id:N``."""
    if isinstance(token, str) and token.startswith(_TOKEN_ID):
        digits = token[len(_TOKEN_ID) :]
        if digits.isascii() and digits.isdigit() and len(digits) < 20:
            return int(digits)
    malformed(
        function,
        f'{token!r:.40} is no token_id:N; send "return_tokens_as_token_ids": true: several tokens'
        " may be the same text",
        place,
    )


def _logprob_rows(
    function: str,
    place: str,
    ids: list[int],
    logprobs: list[Any],
    top_ids: list[int],
    top_logprobs: list[Any],
    counts: list[int],
) -> LogprobRows:
    return LogprobRows(
        _ids_of_list(function, place, ids),
        _floats(function, place, logprobs),
        Rows(_ids_of_list(function, place, top_ids), _offsets(counts, len(counts))),
        _floats(function, place, top_logprobs),
    )


def _floats(function: str, place: str, values: list[Any]) -> np.ndarray:
    """float32, as vLLM computes them, or float64 where that is not exact; null is NaN."""
    if not {float, int, type(None)}.issuperset(map(type, values)):
        wrong = next(value for value in values if type(value) not in (float, int, type(None)))
        malformed(function, f"{wrong!r:.40} is no logprob", place)
    try:
        wide = np.array(values, dtype=np.float64)
    except OverflowError:
        malformed(function, "a logprob is past any float", place)
    with np.errstate(over="ignore"):
        narrow = wide.astype(np.float32)
    return narrow if np.array_equal(narrow, wide, equal_nan=True) else wide


# --- packing --------------------------------------------------------------------------------------


def pack_reply(tree: Any, *, max_bytes: int, keep_fields: bool = True) -> Any:
    """A copy of a reply or of a streamed chunk whose fields above are packed, beside the rest.

    A field of another form than those above stays as it is: its reader refuses it by name.
    ``keep_fields=False`` leaves out ``routed_experts`` and ``sampling_mask`` (an evaluation).
    """
    if not isinstance(tree, dict):
        return tree
    packed = dict(tree)
    _pack_ids(packed, "prompt_token_ids")
    choices = tree.get("choices")
    if isinstance(choices, list):
        packed["choices"] = [
            _pack_choice(choice, max_bytes, keep_fields) if isinstance(choice, dict) else choice
            for choice in choices
        ]
    return packed


def _pack_choice(choice: dict[str, Any], max_bytes: int, keep_fields: bool) -> dict[str, Any]:
    packed = dict(choice)
    for key in ("token_ids", "prompt_token_ids"):
        _pack_ids(packed, key)
    if not keep_fields:
        for key in ("routed_experts", "sampling_mask"):
            if key in packed:
                packed[key] = None
    try:
        routes = read_routes("", "", packed.get("routed_experts"), max_bytes=max_bytes)
        if routes is not None:
            packed["routed_experts"] = WireArray(routes)
    except ValueError:
        pass
    try:
        mask = read_mask("", "", packed.get("sampling_mask"))
        if mask is not None:
            packed["sampling_mask"] = {
                "token_ids": WireArray(mask.token_ids), "offsets": WireArray(mask.offsets)
            }  # fmt: skip
    except ValueError:
        pass
    try:
        rows = read_logprobs("", "", packed.get("logprobs"))
        if rows is not None:
            packed["logprobs"] = {
                "token_ids": WireArray(rows.token_ids),
                "logprobs": WireArray(rows.logprobs),
                "top_token_ids": WireArray(rows.top.token_ids),
                "top_logprobs": WireArray(rows.top_logprobs),
                "offsets": WireArray(rows.top.offsets),
            }
    except ValueError:
        pass
    return packed


def _pack_ids(packed: dict[str, Any], key: str) -> None:
    try:
        ids = read_ids("", "", packed.get(key))
    except ValueError:
        return
    if ids is not None:
        packed[key] = WireArray(ids)
