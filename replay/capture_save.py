"""Write rollouts as a capture that ``Capture.load`` reads and the demo replays."""

import json
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from packhorse._nvtx import ranged
from packhorse.replay.rollout import Rollout

#: Of the files written here, as ``capture_version`` in their meta; older ones have none.
CAPTURE_VERSION: Final = 1
#: Where a safetensors file keeps ``meta``: its metadata is a map of strings.
META_KEY: Final = "meta"


@ranged
def save_capture(
    path: str | Path,
    rollouts: Sequence[Rollout],
    *,
    meta: Mapping[str, Any] | None = None,
    columns: Mapping[str, Sequence[int]] | None = None,
) -> int:
    """Write one file: ``.npz``, or ``.safetensors`` (needs that package).

    Args:
        path: ends in one of these. A file that is there is replaced, whole, at the end.
        rollouts: B, each with its routes from row 0, logprobs and support.
        meta: JSON: what the engine was and what was asked of it (docs/capture.md).
        columns: optional fields of one integer a trajectory (``conv``, ``turn``, ``request_seed``).

    Returns:
        Bytes of the file.

    Raises:
        ValueError: there is no rollout; one lacks a field, or begins past row 0; they differ in
            layers or experts a token; the suffix is another; meta is no JSON.
    """
    name = "save_capture"
    path = Path(path)
    if path.suffix not in (".npz", ".safetensors"):
        raise ValueError(f"{name}: {path} must end in .npz or .safetensors")
    fields = _fields(name, rollouts)
    for column, values in (columns or {}).items():
        if len(values) != len(rollouts):
            raise ValueError(f"{name}: {column} has {len(values)} entries for {len(rollouts)}")
        fields[column] = np.asarray(values, dtype=np.int64)
    try:
        text = json.dumps({"capture_version": CAPTURE_VERSION} | dict(meta or {}), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: meta is no JSON ({error})") from error
    # beside the file, so that a reader sees the old one or the new one
    beside = path.with_name(f".{path.stem}.{secrets.token_hex(4)}{path.suffix}")
    try:
        if path.suffix == ".npz":
            arrays: dict[str, Any] = fields | {"meta": np.array(text)}
            np.savez_compressed(beside, **arrays)
        else:
            from safetensors.numpy import save_file

            save_file(fields, beside, metadata={META_KEY: text})
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
    return path.stat().st_size


def _fields(name: str, rollouts: Sequence[Rollout]) -> dict[str, np.ndarray]:
    if not rollouts:
        raise ValueError(f"{name}: there is no rollout")
    routes, logprobs, support_ids, support_counts = [], [], [], []
    for i, rollout in enumerate(rollouts):
        if rollout.routes is None or rollout.logprobs is None or rollout.support is None:
            lacks = [
                field
                for field in ("routes", "logprobs", "support")
                if getattr(rollout, field) is None
            ]
            raise ValueError(f"{name}: rollout {i} has no {lacks[0]}")
        if rollout.routes_start:
            raise ValueError(f"{name}: the routes of rollout {i} begin at {rollout.routes_start}")
        if rollout.routes.shape[1:] != rollouts[0].routes.shape[1:]:  # type: ignore[union-attr]
            raise ValueError(
                f"{name}: the routes of rollout {i} are {rollout.routes.shape}, of other layers or"
                " experts a token than those of rollout 0"
            )
        routes.append(rollout.routes)
        logprobs.append(rollout.logprobs)
        support_ids.append(rollout.support.token_ids)
        support_counts.append(np.diff(rollout.support.row_offsets))
    prompts = [rollout.prompt_ids for rollout in rollouts]
    responses = [rollout.response_ids for rollout in rollouts]
    cached = [rollout.num_cached_tokens or 0 for rollout in rollouts]
    return {
        "prompt_ids": np.concatenate(prompts).astype(np.int32),
        "prompt_offsets": _offsets([ids.size for ids in prompts]),
        "response_ids": np.concatenate(responses).astype(np.int32),
        "response_offsets": _offsets([ids.size for ids in responses]),
        "routed_experts": np.concatenate(routes),
        "route_offsets": _offsets([rows.shape[0] for rows in routes]),
        "sampled_logprobs": np.concatenate(logprobs),
        "support_ids": np.concatenate(support_ids).astype(np.int32),
        "support_offsets": _offsets(np.concatenate(support_counts)),
        "num_cached_tokens": np.array(cached, dtype=np.int32),
    }


def _offsets(counts: Any) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
