"""Read a Hugging Face checkpoint folder: config.json, and weights one tensor at a time.

Nothing here imports Megatron or transformers. A folder is one model of a family of ``MODEL_TYPES``;
each setting that the trainer's model would not reproduce is refused by its name in config.json,
since a setting that is ignored shows only as a wrong logprob.

Source: transformers ``Qwen3MoeConfig`` and ``Glm4MoeConfig``. transformers 5 writes
``num_local_experts`` and ``rope_parameters``; older versions wrote ``num_experts``, ``rope_theta``
and ``rope_scaling``.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

MODEL_TYPES = ("qwen3_moe", "glm4_moe")

#: No size in a config.json is this large; the number of layers has a bound of its own.
_TOO_LARGE = 2**31
_MAX_LAYERS = 10_000

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


@dataclass(frozen=True)
class MoeConfig:
    """What a trainer needs of config.json. Layers count from 0."""

    model_type: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int
    topk: int
    moe_intermediate_size: int
    renormalise: bool
    rms_norm_eps: float
    rope_theta: float
    vocab_size: int
    max_positions: int
    moe_layers: tuple[int, ...]
    score_function: Literal["softmax", "sigmoid"] = "softmax"
    correction_bias: bool = False  # added to the scores that experts are chosen by
    num_groups: int = 1  # of the experts; a token uses those of ``group_topk``
    group_topk: int = 1
    scaling_factor: float = 1.0  # of the routed experts' weights
    shared_intermediate_size: int = 0  # of the expert that every token uses; 0: none
    rotary_percent: float = 1.0  # of a head's dimensions
    qk_norm: bool = True
    qkv_bias: bool = False


def read_config(directory: str | Path) -> MoeConfig:
    """Read and check ``directory``/config.json.

    Raises:
        ValueError: the file is missing or is no JSON object, the model family is not one of
            ``MODEL_TYPES``, a setting is missing, of another type or beyond any model's, or one
            that is not reproduced.
    """
    path = Path(directory) / "config.json"
    raw = _read_json(path)
    model_type = raw.get("model_type")
    if model_type not in MODEL_TYPES:
        raise ValueError(
            f"read_config: {path}: model_type {shown(model_type)} cannot be loaded;"
            f" known: {', '.join(MODEL_TYPES)}"
        )
    setting = _Settings(path, raw)
    rope = _rope(setting)
    _refuse_unsupported(setting)
    family, experts = _FAMILIES[model_type]

    num_layers = setting.count("num_hidden_layers")
    if num_layers >= _MAX_LAYERS:
        raise ValueError(
            f"read_config: {path}: num_hidden_layers={num_layers} must be below {_MAX_LAYERS}"
        )
    hidden_size = setting.count("hidden_size")
    num_heads = setting.count("num_attention_heads")
    theta = rope.get("rope_theta", raw.get("rope_theta"))
    if theta is None:
        raise ValueError(f"read_config: {path}: rope_theta is missing")
    topk = setting.count("num_experts_per_tok")
    num_experts = setting.count(*experts)
    if topk > num_experts:
        raise ValueError(
            f"read_config: {path}: num_experts_per_tok={topk} of {num_experts} experts"
        )
    num_kv_heads = setting.count("num_key_value_heads")
    if num_heads % num_kv_heads:
        raise ValueError(
            f"read_config: {path}: {num_heads} attention heads for {num_kv_heads} key-value heads"
        )
    config = MoeConfig(
        model_type=model_type,
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=setting.count("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=setting.count("head_dim", default=max(hidden_size // num_heads, 1)),
        num_experts=num_experts,
        topk=topk,
        moe_intermediate_size=setting.count("moe_intermediate_size"),
        renormalise=setting.flag("norm_topk_prob"),
        rms_norm_eps=setting.positive("rms_norm_eps", raw.get("rms_norm_eps", 1e-6)),
        rope_theta=setting.positive("rope_theta", theta),
        vocab_size=setting.count("vocab_size"),
        max_positions=setting.count("max_position_embeddings", default=32768),
        moe_layers=(),
    )
    config = family(setting, rope, config)
    if not config.moe_layers:
        raise ValueError(f"read_config: {path}: no layer has experts")
    return config


class Checkpoint:
    """The weights of a folder: one model.safetensors, or shards named by its index.

    Files are mapped and a tensor is read when it is asked for, so at most one weight is in memory
    beside the model. Use as a context manager.

    Raises:
        ValueError: there are no safetensors files, a file is missing or broken, or a tensor is
            asked for that is not there.
    """

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        self._files: dict[str, Any] = {}
        self._open: list[Any] = []
        try:
            self._map_files()
        except BaseException:
            self.close()
            raise

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._files)

    def tensor(self, name: str) -> Tensor:
        """The weight of that name, on the CPU, in the dtype of the file."""
        if name not in self._files:
            raise ValueError(f"Checkpoint: {self.directory}: weight {name} is missing")
        return self._files[name].get_tensor(name)

    def shape(self, name: str) -> list[int]:
        """Of the weight of that name, which is not read."""
        if name not in self._files:
            raise ValueError(f"Checkpoint: {self.directory}: weight {name} is missing")
        return list(self._files[name].get_slice(name).get_shape())

    def close(self) -> None:
        self._files.clear()
        for handle in self._open:
            handle.__exit__(None, None, None)
        self._open.clear()

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _map_files(self) -> None:
        index = self.directory / _INDEX
        if index.exists():
            where = _read_json(index).get("weight_map")
            if not isinstance(where, dict) or not set(map(type, where.values())) <= {str}:
                raise ValueError(f"Checkpoint: {index}: weight_map is missing or names no files")
            for file in sorted(set(where.values())):
                self._map_file(self.directory / file)
            for name, file in where.items():
                if name not in self._files:
                    raise ValueError(f"Checkpoint: {self.directory / file}: {name} is missing")
        elif (self.directory / _SINGLE).exists():
            self._map_file(self.directory / _SINGLE)
        else:
            raise ValueError(f"Checkpoint: {self.directory}: neither {_SINGLE} nor {_INDEX}")

    def _map_file(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        try:
            handle = safe_open(path, framework="pt")
            handle.__enter__()
        except (OSError, SafetensorError, ValueError) as error:
            raise ValueError(f"Checkpoint: {path}: {shown(error, str)}") from error
        self._open.append(handle)
        for name in handle.keys():  # noqa: SIM118  (not a mapping)
            if name in self._files:
                raise ValueError(f"Checkpoint: {path}: {name} is in two files")
            self._files[name] = handle


# --- config.json ----------------------------------------------------------------------------------


class _Settings:
    def __init__(self, path: Path, raw: dict[str, Any]):
        self.path, self.raw = path, raw

    def count(self, *names: str, default: int | None = None, least: int = 1) -> int:
        """The first of ``names`` that is set: an integer of at least ``least``."""
        for name in names:
            value = self.raw.get(name)
            if value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"read_config: {self.path}: {name}={shown(value)} is not a count")
            if value >= _TOO_LARGE:
                raise ValueError(f"read_config: {self.path}: {name}={shown(value)} is too large")
            return value
        if default is None:
            raise ValueError(f"read_config: {self.path}: {' or '.join(names)} is missing")
        return default

    def positive(self, name: str, value: Any) -> float:
        """A number above 0 that a float holds."""
        number = math.nan
        if isinstance(value, int | float) and not isinstance(value, bool):
            try:
                number = float(value)
            except OverflowError:
                number = math.inf
        if not 0 < number < math.inf:
            raise ValueError(
                f"read_config: {self.path}: {name}={shown(value)} is not a finite number above 0"
            )
        return number

    def flag(self, name: str) -> bool:
        value = self.raw.get(name)
        if value is not None and not isinstance(value, bool):
            raise ValueError(f"read_config: {self.path}: {name}={shown(value)} is not a flag")
        return bool(value)

    def refuse_unless(self, name: str, *allowed: Any) -> None:
        value = self.raw.get(name, allowed[0])
        if value not in allowed:
            raise ValueError(f"read_config: {self.path}: {name}={shown(value)} is not supported")


def shown(value: Any, form: Callable[[Any], str] = repr) -> str:
    """``value`` for an error message: one line, not long, whatever a file holds."""
    try:
        text = " ".join(form(value).split())
    except (RecursionError, ValueError):  # ValueError: an int of more digits than Python prints
        return f"a deep or long {type(value).__name__}"
    return text if len(text) <= 100 else f"{text[:97]}..."


def _refuse_unsupported(setting: _Settings) -> None:
    """What no family's model here has."""
    setting.refuse_unless("hidden_act", "silu")
    setting.refuse_unless("tie_word_embeddings", False, None)
    setting.refuse_unless("use_sliding_window", False, None)
    if setting.raw.get("use_sliding_window") is None:
        setting.refuse_unless("sliding_window", None)
    setting.refuse_unless("quantization_config", None)


def _rope(setting: _Settings) -> dict[str, Any]:
    """The rotary settings, of the kind without scaling; {} where they stand outside."""
    rope = setting.raw.get("rope_parameters") or setting.raw.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise ValueError(
            f"read_config: {setting.path}: rope_parameters={shown(rope)} is not supported"
        )
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type != "default":
        raise ValueError(
            f"read_config: {setting.path}: rope_type={shown(rope_type)} is not supported"
        )
    return rope


def _partial_rotary(setting: _Settings, rope: dict[str, Any], default: float) -> Any:
    return rope.get("partial_rotary_factor", setting.raw.get("partial_rotary_factor", default))


# --- families -------------------------------------------------------------------------------------


def _qwen3_moe(setting: _Settings, rope: dict[str, Any], config: MoeConfig) -> MoeConfig:
    setting.refuse_unless("attention_bias", False, None)
    partial = _partial_rotary(setting, rope, 1.0)
    if partial != 1.0:
        raise ValueError(
            f"read_config: {setting.path}: partial_rotary_factor={shown(partial)} is not supported"
        )
    # the rule of transformers' Qwen3MoeDecoderLayer
    dense = setting.raw.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise ValueError(
            f"read_config: {setting.path}: mlp_only_layers={shown(dense)} is not a list of layers"
        )
    step = setting.count("decoder_sparse_step", default=1)
    layers = [
        layer
        for layer in range(config.num_layers)
        if layer not in set(dense) and (layer + 1) % step == 0
    ]
    return replace(config, moe_layers=tuple(layers))


def _glm4_moe(setting: _Settings, rope: dict[str, Any], config: MoeConfig) -> MoeConfig:
    for name in ("num_nextn_predict_layers", "num_mtp_layers"):
        setting.refuse_unless(name, 0, None)
    if config.renormalise != (config.topk > 1):  # Megatron's rule for sigmoid scores
        raise ValueError(
            f"read_config: {setting.path}: norm_topk_prob={config.renormalise} with"
            f" num_experts_per_tok={config.topk} is not supported"
        )
    percent = setting.positive("partial_rotary_factor", _partial_rotary(setting, rope, 0.5))
    if percent > 1 or int(config.head_dim * percent) % 2 or int(config.head_dim * percent) < 2:
        raise ValueError(
            f"read_config: {setting.path}: partial_rotary_factor={shown(percent)} of"
            f" head_dim={config.head_dim} is not supported"
        )
    num_groups = setting.count("n_group", default=1)
    group_topk = setting.count("topk_group", default=1)
    _check_groups(setting, config, num_groups, group_topk)
    first = setting.count("first_k_dense_replace", default=1, least=0)
    shared = setting.count("n_shared_experts", default=1) * config.moe_intermediate_size
    return replace(
        config,
        moe_layers=tuple(range(first, config.num_layers)),
        score_function="sigmoid",
        correction_bias=True,
        num_groups=num_groups,
        group_topk=group_topk,
        scaling_factor=setting.positive(
            "routed_scaling_factor", setting.raw.get("routed_scaling_factor", 1.0)
        ),
        shared_intermediate_size=shared,
        rotary_percent=percent,
        qk_norm=setting.flag("use_qk_norm"),
        qkv_bias=setting.flag("attention_bias"),
    )


#: model type -> how its own settings are read, the names of its number of experts
_FAMILIES = {
    "qwen3_moe": (_qwen3_moe, ("num_experts", "num_local_experts")),
    "glm4_moe": (_glm4_moe, ("n_routed_experts", "num_local_experts")),
}


def _check_groups(setting: _Settings, config: MoeConfig, num_groups: int, group_topk: int) -> None:
    """Megatron ranks groups by the sum of their topk / topk_group best scores, the checkpoint's
    model by that of their best two."""
    fits = (
        config.num_experts % num_groups == 0
        and group_topk <= num_groups
        and config.topk <= group_topk * (config.num_experts // num_groups)
    )
    alike = group_topk == num_groups or (
        config.topk // group_topk == 2 <= config.num_experts // num_groups
    )
    if not fits or not alike:
        raise ValueError(
            f"read_config: {setting.path}: n_group={num_groups}, topk_group={group_topk} of"
            f" {config.num_experts} experts, {config.topk} a token, is not supported"
        )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"read_config: {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"read_config: {path}: not JSON ({shown(error, str)})") from error
    if not isinstance(value, dict):
        raise ValueError(f"read_config: {path}: not a JSON object")
    return value
