"""Trajectories that an engine sampled, read from one file and checked whole.

    capture = Capture.load("rollout.npz", num_experts=128, vocab_size=151936)

docs/capture.md describes the fields. Everything is checked while loading, on the host: a capture
that loads can be replayed, and one that cannot ends in one ValueError that names the field and the
trajectory. No pickle is read.

Sizes: B trajectories; P_i prompt, R_i response tokens of trajectory i; L captured layers; K experts
a token.
"""

import itertools
import json
import math
import warnings
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from packhorse._nvtx import ranged_methods
from packhorse.packed.collate import (
    LOGPROBS_FIELD,
    ROUTES_FIELD,
    SUPPORT_FIELD,
    SupportRows,
    check_logprobs,
    pack_routes,
    pack_support,
)
from packhorse.packed.tensor import PackedTensor
from packhorse.replay.capture_save import CAPTURE_VERSION, META_KEY
from packhorse.replay.checkpoint import shown

#: Fields that every capture has: name -> number of dimensions.
REQUIRED = {
    "prompt_ids": 1,
    "prompt_offsets": 1,
    "response_ids": 1,
    "response_offsets": 1,
    "routed_experts": 3,
    "route_offsets": 1,
    "sampled_logprobs": 1,
    "support_ids": 1,
    "support_offsets": 1,
}
#: Fields that may be there: name -> (what its first dimension counts, number of dimensions).
OPTIONAL = {
    "topk_ids": ("response tokens", 2),
    "topk_logprobs": ("response tokens", 2),
    "hf_fp32_routes": ("route rows", 3),
    "conv": ("trajectories", 1),
    "turn": ("trajectories", 1),
    "num_cached_tokens": ("trajectories", 1),
    "request_seed": ("trajectories", 1),
}

_NAME = "Capture.load"

#: npy format -> reader of its header. (3.0 is for structured dtypes with other letters.)
_READ_HEADER = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
#: No deflated byte stands for more than this many (zlib's technical notes: 1032).
_DEFLATE_RATIO = 1040


@dataclass(frozen=True, eq=False)
@ranged_methods()
class Capture:
    """The trajectories of one file: for each a host array, and the two packed fields."""

    path: Path
    num_experts: int
    vocab_size: int
    prompt_ids: tuple[np.ndarray, ...]  # [P_i] int64
    response_ids: tuple[np.ndarray, ...]  # [R_i] int64
    sampled_logprobs: tuple[np.ndarray, ...]  # [R_i] float32
    routes: (
        PackedTensor  # [route rows, L, K] uint8, int16 or int32; rows are P_i + R_i - 1 or + R_i
    )
    support: PackedTensor  # [response tokens, C] int32, -1 filled
    optional: dict[str, np.ndarray] = field(default_factory=dict)  # fields of ``OPTIONAL``
    meta: dict[str, Any] = field(default_factory=dict)

    @property
    def num_trajectories(self) -> int:
        return len(self.prompt_ids)

    @property
    def lengths(self) -> tuple[int, ...]:
        """[B] tokens of each trajectory, prompt and response."""
        pairs = zip(self.prompt_ids, self.response_ids, strict=True)
        return tuple(len(prompt) + len(response) for prompt, response in pairs)

    @property
    def response_lengths(self) -> tuple[int, ...]:
        return tuple(len(response) for response in self.response_ids)

    @property
    def num_layers(self) -> int:
        return self.routes.row_shape[0]

    @property
    def topk(self) -> int:
        return self.routes.row_shape[1]

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        num_experts: int | None = None,
        vocab_size: int | None = None,
        num_layers: int | None = None,
        topk: int | None = None,
        moe_layers: Sequence[int] | None = None,
    ) -> "Capture":
        """Read and check a capture.

        Args:
            path: an ``.npz`` file, or a ``.safetensors`` one, with the fields of docs/capture.md.
            num_experts, vocab_size: of the model. By default those of ``model_config`` in the
                file's ``meta``.
            num_layers, topk: of the model: the file must have as many. By default the file's own.
            moe_layers: captured layers that have experts, from 0; the others hold zeros. By default
                all.

        Raises:
            TypeError: an argument has a wrong type.
            ValueError: the file is missing, truncated or no archive; a field is missing, of another
                type or shape, or does not fit the others; an id is not below ``num_experts`` or
                ``vocab_size``; an expert is repeated in a row; a trajectory has more route rows
                than tokens, or too few for its last response token; a response token has no
                candidates, or was sampled from outside them; a logprob is not finite or above 0.
                One line, naming the file, the field and the trajectory.
        """
        path = Path(path)
        fields = _read(path)
        fail = _Failure(path)
        meta = _meta(fail, fields)
        model = meta.get("model_config", {})
        if num_experts is None:
            names = ("num_experts", "num_local_experts", "n_routed_experts")
            num_experts = next((model[key] for key in names if key in model), None)
        if vocab_size is None:
            vocab_size = model.get("vocab_size")
        experts = _count(fail, "num_experts", num_experts)
        vocabulary = _count(fail, "vocab_size", vocab_size)

        _check_shapes(fail, fields)
        prompts = _split(fail, fields, "prompt_ids", "prompt_offsets")
        count = len(prompts)
        responses = _split(fail, fields, "response_ids", "response_offsets", count)
        routes = _split(fail, fields, "routed_experts", "route_offsets", count)
        _check_tokens(fail, "prompt_ids", prompts, vocabulary)
        _check_tokens(fail, "response_ids", responses, vocabulary)
        logprobs = _per_response(fail, fields, "sampled_logprobs", responses)
        _check_support_offsets(fail, fields, responses)
        _check_optional(fail, fields, count)
        lengths = [len(p) + len(r) for p, r in zip(prompts, responses, strict=True)]
        _check_coverage(fail, prompts, responses, routes)

        with _naming(fail, LOGPROBS_FIELD, "sampled_logprobs"):
            checked_logprobs = check_logprobs(logprobs, [len(r) for r in responses])
        with _naming(fail, ROUTES_FIELD, "routed_experts"):
            packed_routes = pack_routes(
                routes,
                lengths,
                num_experts=experts,
                topk=fields["routed_experts"].shape[2] if topk is None else topk,
                num_layers=fields["routed_experts"].shape[1] if num_layers is None else num_layers,
                moe_layers=moe_layers,
            )
        with _naming(fail, SUPPORT_FIELD, "support_ids"):
            packed_support = pack_support(
                SupportRows(fields["support_ids"], fields["support_offsets"]),
                [ids.tolist() for ids in responses],
                vocab_size=vocabulary,
            )
        return cls(
            path=path,
            num_experts=experts,
            vocab_size=vocabulary,
            prompt_ids=tuple(prompts),
            response_ids=tuple(responses),
            sampled_logprobs=tuple(checked_logprobs),
            routes=packed_routes,
            support=packed_support,
            optional={name: fields[name] for name in OPTIONAL if name in fields},
            meta=meta,
        )


# --- the file -------------------------------------------------------------------------------------


class _Failure:
    """Makes the one-line ValueError of ``Capture.load`` for a file."""

    def __init__(self, path: Path):
        self.path = path

    def __call__(self, message: str) -> ValueError:
        return ValueError(f"{_NAME}: {self.path}: {message}")


@contextmanager
def _naming(fail: _Failure, field: str, own: str) -> Iterator[None]:
    """Errors of the functions that pack, in the words of the file: ``field`` is its ``own``."""
    try:
        yield
    except TypeError as error:  # an argument: the fields' dtypes are known to be right
        raise TypeError(f"{_NAME}: {_without_function(error)}") from error
    except ValueError as error:
        raise fail(_without_function(error).replace(field, own)) from error
    except (MemoryError, RuntimeError) as error:  # RuntimeError: torch has no memory either
        raise fail(f"{own} cannot be packed ({_first_line(error)})") from error


def _without_function(error: Exception) -> str:
    head, _, tail = str(error).partition(": ")
    return tail or head


def _read(path: Path) -> dict[str, np.ndarray]:
    """The fields that are read here, each with the size its header and the archive agree on."""
    fail = _Failure(path)
    if path.suffix == ".safetensors":
        return _read_safetensors(path, fail)
    # zipfile, zlib, tokenize and numpy raise what they like for broken bytes, and warn
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            file_bytes = path.stat().st_size
            archive = zipfile.ZipFile(path)
        except OSError as error:
            raise fail(error.strerror or _first_line(error)) from error
        except Exception as error:
            raise fail(f"truncated, or not an .npz archive ({_first_line(error)})") from error
        with archive:
            members: dict[str, zipfile.ZipInfo] = {}
            for member in archive.infolist():
                name = member.filename.removesuffix(".npy")
                if name in members:
                    raise fail(f"field {name!r} is twice in the archive")
                members[name] = member
            missing = [name for name in REQUIRED if name not in members]
            if missing:
                raise fail(f"field {missing[0]} is missing")
            fields = {}
            for name in (*REQUIRED, *OPTIONAL, "meta"):
                if name not in members:
                    continue
                try:
                    fields[name] = _read_field(archive, members[name], file_bytes)
                except Exception as error:
                    raise fail(f"field {name} cannot be read ({_first_line(error)})") from error
    return fields


def _read_safetensors(path: Path, fail: _Failure) -> dict[str, np.ndarray]:
    """The same of a safetensors file, whose reader holds its header to its size."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as archive:
            names = set(archive.keys())
            missing = [name for name in REQUIRED if name not in names]
            if missing:
                raise fail(f"field {missing[0]} is missing")
            fields = {
                name: archive.get_tensor(name) for name in (*REQUIRED, *OPTIONAL) if name in names
            }
            text = (archive.metadata() or {}).get(META_KEY)
    except (OSError, SafetensorError) as error:
        raise fail(f"truncated, or no safetensors file ({_first_line(error)})") from error
    if text is not None:
        fields["meta"] = np.array(text)
    return fields


def _read_field(archive: zipfile.ZipFile, member: zipfile.ZipInfo, file_bytes: int) -> np.ndarray:
    """One array. Nothing is allocated before its size is known to be in the file."""
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"compression method {member.compress_type}")
    most = member.compress_size
    if member.compress_type == zipfile.ZIP_DEFLATED:
        most *= _DEFLATE_RATIO
    if member.compress_size > file_bytes or member.file_size > most:
        raise ValueError(f"{member.file_size} bytes in a file of {file_bytes}")
    with archive.open(member) as stream:
        version = np.lib.format.read_magic(stream)
        if version not in _READ_HEADER:
            raise ValueError(f"format {version[0]}.{version[1]}")
        shape, _, dtype = _READ_HEADER[version](stream)
        if dtype.hasobject:
            raise ValueError("pickled objects")
        num_bytes, held = math.prod(shape) * dtype.itemsize, member.file_size - stream.tell()
        if min(shape, default=0) < 0 or num_bytes != held:
            raise ValueError(f"{dtype} {list(shape)} in {held} bytes")
    with archive.open(member) as stream:
        return np.lib.format.read_array(stream, allow_pickle=False)


def _first_line(error: BaseException) -> str:
    """What an error says, or else what it is."""
    return (str(error).splitlines() or [""])[0] or type(error).__name__


def _meta(fail: _Failure, fields: dict[str, np.ndarray]) -> dict[str, Any]:
    raw = fields.get("meta")
    if raw is None:
        return {}
    if raw.shape != () or raw.dtype.kind != "U":
        raise fail(f"meta must be one string, got {raw.dtype} {list(raw.shape)}")
    try:
        meta = json.loads(str(raw))
    except (ValueError, RecursionError) as error:
        raise fail(f"meta is not JSON ({_first_line(error)})") from error
    if not isinstance(meta, dict) or not isinstance(meta.get("model_config", {}), dict):
        raise fail("meta and its model_config must be JSON objects")
    version = meta.get("capture_version", 0)
    if type(version) is not int or not 0 <= version <= CAPTURE_VERSION:
        raise fail(
            f"capture_version is {shown(version)}; this packhorse reads up to {CAPTURE_VERSION}"
        )
    return meta


# --- checks ---------------------------------------------------------------------------------------


def _count(fail: _Failure, name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**31:
        raise fail(f"{name} is {shown(value)}: give it, or keep the model's config in meta")
    return value


def _check_shapes(fail: _Failure, fields: dict[str, np.ndarray]) -> None:
    dimensions = REQUIRED | {name: dim for name, (_, dim) in OPTIONAL.items() if name in fields}
    for name, dim in dimensions.items():
        value = fields[name]
        kinds = "f" if name.endswith("logprobs") else "iu"
        if value.ndim != dim or value.dtype.kind not in kinds:
            kind = "floating" if kinds == "f" else "integer"
            raise fail(
                f"{name} must be {dim}-dimensional, {kind}, got {value.dtype} {list(value.shape)}"
            )


def _split(
    fail: _Failure,
    fields: dict[str, np.ndarray],
    name: str,
    offsets_name: str,
    count: int | None = None,
) -> list[np.ndarray]:
    """The rows of ``name`` for each trajectory."""
    values, offsets = fields[name], fields[offsets_name]
    if count is not None and len(offsets) != count + 1:
        raise fail(f"{offsets_name} has {len(offsets)} entries for {count} trajectories")
    if len(offsets) < 2:
        raise fail(f"{offsets_name} has {len(offsets)} entries: there is no trajectory")
    if offsets[0] != 0:
        raise fail(f"{offsets_name} begins with {offsets[0]}, not 0, in trajectory 0")
    falling = np.flatnonzero(offsets[1:] < offsets[:-1])  # a difference may wrap around
    if len(falling):
        raise fail(f"{offsets_name} falls in trajectory {falling[0]}")
    if offsets[-1] != len(values):
        raise fail(
            f"{offsets_name} ends with {offsets[-1]} in trajectory {len(offsets) - 2}, but"
            f" {name} has {len(values)} rows"
        )
    return [values[start:end] for start, end in itertools.pairwise(offsets.tolist())]


def _check_tokens(fail: _Failure, name: str, segments: list[np.ndarray], vocab_size: int) -> None:
    """Check the ids in place, and widen them."""
    for i, ids in enumerate(segments):
        wrong = np.flatnonzero((ids < 0) | (ids >= vocab_size))
        if len(wrong):
            raise fail(
                f"{name} of trajectory {i}, token {wrong[0]}: id {ids[wrong[0]]} is not in"
                f" [0, vocab_size={vocab_size})"
            )
        if name == "prompt_ids" and not len(ids):
            raise fail(f"{name} of trajectory {i} is empty: nothing predicts its first token")
        segments[i] = ids.astype(np.int64)


def _per_response(
    fail: _Failure, fields: dict[str, np.ndarray], name: str, responses: list[np.ndarray]
) -> list[np.ndarray]:
    values, ends = fields[name], np.cumsum([len(response) for response in responses])
    if len(values) != ends[-1]:
        trajectory = int(np.searchsorted(ends, len(values), side="right"))
        raise fail(
            f"{name} has {len(values)} entries for {ends[-1]} response tokens, wrong from"
            f" trajectory {min(trajectory, len(responses) - 1)} on"
        )
    return np.split(values, ends[:-1])


def _check_support_offsets(
    fail: _Failure, fields: dict[str, np.ndarray], responses: list[np.ndarray]
) -> None:
    offsets, ids = fields["support_offsets"], fields["support_ids"]
    ends = np.cumsum([len(response) for response in responses])
    if len(offsets) != ends[-1] + 1:
        trajectory = int(np.searchsorted(ends, max(len(offsets) - 1, 0), side="right"))
        raise fail(
            f"support_offsets has {len(offsets)} entries for {ends[-1]} response tokens, wrong"
            f" from trajectory {min(trajectory, len(responses) - 1)} on"
        )
    if offsets[0] != 0 or offsets[-1] != len(ids):
        raise fail(
            f"support_offsets goes from {offsets[0]} in trajectory 0 to {offsets[-1]} in"
            f" trajectory {len(responses) - 1}, but support_ids has {len(ids)} entries"
        )
    wrong = offsets[1:] <= offsets[:-1]  # a difference may wrap around
    if wrong.any():
        row = int(wrong.argmax())
        trajectory = int(np.searchsorted(ends, row, side="right"))
        token = row - (ends[trajectory] - len(responses[trajectory]))
        where = f"response token {token} of trajectory {trajectory}"
        if offsets[row + 1] < offsets[row]:
            raise fail(f"support_offsets falls at {where}")
        raise fail(f"support_offsets leaves {where} without a candidate")


def _check_optional(fail: _Failure, fields: dict[str, np.ndarray], count: int) -> None:
    counts = {
        "response tokens": len(fields["response_ids"]),
        "route rows": len(fields["routed_experts"]),
        "trajectories": count,
    }
    for name, (domain, _) in OPTIONAL.items():
        if name in fields and len(fields[name]) != counts[domain]:
            raise fail(
                f"{name} has {len(fields[name])} rows for the {counts[domain]} {domain} of"
                f" trajectories 0 to {count - 1}"
            )


def _check_coverage(
    fail: _Failure,
    prompts: list[np.ndarray],
    responses: list[np.ndarray],
    routes: list[np.ndarray],
) -> None:
    """The logits of the last response token come from the token before it."""
    for i, (prompt, response, rows) in enumerate(zip(prompts, responses, routes, strict=True)):
        needed = len(prompt) + len(response) - 1
        if len(response) and len(rows) < needed:
            raise fail(
                f"routed_experts of trajectory {i} has {len(rows)} rows; the last of its"
                f" {needed + 1} tokens needs {needed}"
            )
