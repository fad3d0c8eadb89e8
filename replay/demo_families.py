"""Which model a capture was sampled from: the packaged ones, a capture and a model a family."""

import hashlib
import json
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packhorse.replay.capture import _Failure, _read_field, _read_safetensors
from packhorse.replay.checkpoint import MoeConfig, shown

DATA = Path(__file__).parent / "data"


@dataclass(frozen=True)
class Family:
    """A model_type of config.json: the folder of its packaged checkpoint, and its capture."""

    model: Path
    capture: Path


FAMILIES = {
    "qwen3_moe": Family(DATA / "tiny_moe", DATA / "vllm_tiny_moe.npz"),
    "glm4_moe": Family(DATA / "tiny_glm4_moe", DATA / "vllm_tiny_glm4_moe.npz"),
}
DEFAULT = "qwen3_moe"


def choose(
    capture: str | None, model: str | None = None, family: str | None = None
) -> tuple[Path, Path]:
    """The capture and the checkpoint folder that the demo's options mean.

    Args:
        capture: a file; None: the packaged one of ``family``.
        model: a folder; None: the packaged one of the family that the capture's meta names.
        family: of ``FAMILIES``; None: what the capture's meta says, else ``DEFAULT``.

    Raises:
        ValueError: the capture was sampled from no packaged model, or not from that of ``family``.
    """
    path = FAMILIES[family or DEFAULT].capture if capture is None else Path(capture)
    if model is not None:
        return path, Path(model)
    meta = _read_meta(path)
    config = meta.get("model_config")
    sampled = config.get("model_type") if isinstance(config, dict) else None
    if sampled is None:
        sampled = family or DEFAULT
    if sampled not in FAMILIES:
        raise ValueError(
            f"{path}: sampled from a model of type {shown(sampled)}, none is packaged: name its"
            " folder with --model"
        )
    if family not in (None, sampled):
        raise ValueError(f"{path}: sampled from a model of type {sampled}, not --family {family}")
    folder = FAMILIES[sampled].model
    digest = meta.get("model_sha256")
    if digest not in (None, _sha256(folder)):
        raise ValueError(
            f"{path}: sampled from weights with sha256 {shown(digest)[:20]}..., not from the"
            f" packaged {folder.name}: name their folder with --model"
        )
    return path, folder


def described(config: MoeConfig) -> str:
    """What the family has beside a softmax router, or nothing."""
    parts = []
    if config.score_function == "sigmoid":
        parts.append("sigmoid scores" + " with a correction bias" * config.correction_bias)
    if config.group_topk < config.num_groups:
        parts.append(f"experts of {config.group_topk} of {config.num_groups} groups")
    if config.shared_intermediate_size:
        parts.append("a shared expert")
    return ", ".join(parts)


def _read_meta(path: Path) -> dict[str, Any]:
    """The capture's meta; {} where it has none, and of a broken file: ``Capture.load`` says why."""
    try:
        if path.suffix == ".safetensors":
            raw = _read_safetensors(path, _Failure(path))["meta"]
        else:
            with zipfile.ZipFile(path) as archive:
                raw = _read_field(archive, archive.getinfo("meta.npy"), path.stat().st_size)
        meta = json.loads(str(raw))
    except Exception:
        return {}
    return meta if isinstance(meta, dict) else {}


def _sha256(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
