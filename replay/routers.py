"""Which routers a model chunk holds, which captured layer each replays, and whether it can.

Routers are taken from the modules of the given chunks, never from Megatron's process-global list of
``RouterReplay`` instances: that list also holds those of discarded, reference and critic models,
and of MTP heads whose layer numbers collide with the decoder's.

Layer indices here are 0-based and global: ``router.layer_number - 1``. Sizes: L captured layers.
Sources: Megatron-core's ``TopKRouter``, ``TransformerConfig``; megatron-core 0.16.1 to 0.19.2.

Megatron is imported by the functions that need it.
"""

import itertools
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from packhorse.replay.aux_loss import AUX_LOSSES, can_replay_aux_loss
from packhorse.replay.host import is_int
from packhorse.replay.layout import TokenLayout

_IN_LAYERS = re.compile(r"^(.*?\blayers)\.(\d+)\.")


# --- the captured layer axis ----------------------------------------------------------------------


@dataclass(frozen=True)
class CapturedLayers:
    """What the layer axis of captured routes stands for. Described, never guessed.

    ``decoder(num_layers)``: every decoder layer in order; dense layers hold zeros (vLLM).
    ``moe_only()``: the model's MoE layers in order.
    ``listed(layers)``: entry i is the 0-based global layer of axis position i, or None where the
    position is no MoE layer of this model.
    """

    kind: Literal["decoder", "moe_only", "listed"]
    num_layers: int | None = None
    layers: tuple[int | None, ...] = ()

    @classmethod
    def decoder(cls, num_layers: int) -> "CapturedLayers":
        """All ``num_layers`` decoder layers of the model, dense ones included."""
        if not is_int(num_layers) or num_layers < 1:
            raise ValueError(
                f"CapturedLayers.decoder: num_layers must be an integer >= 1, got {num_layers!r}"
            )
        return cls("decoder", num_layers=int(num_layers))

    @classmethod
    def moe_only(cls) -> "CapturedLayers":
        """The MoE layers of the whole model, in order."""
        return cls("moe_only")

    @classmethod
    def listed(cls, layers: Sequence[int | None]) -> "CapturedLayers":
        """One 0-based global layer (Megatron's ``layer_number - 1``) or None a position."""
        named = [layer for layer in layers if layer is not None]
        for layer in named:
            if not is_int(layer) or layer < 0:
                raise ValueError(
                    f"CapturedLayers.listed: layers must be integers >= 0 or None, got {layer!r}"
                )
        listed = tuple(None if layer is None else int(layer) for layer in layers)
        if not named:
            raise ValueError("CapturedLayers.listed: no layer is named")
        if len(set(named)) != len(named):
            raise ValueError(f"CapturedLayers.listed: a layer is named twice in {listed}")
        return cls("listed", layers=listed)

    def __str__(self) -> str:
        if self.kind == "decoder":
            return f"decoder({self.num_layers})"
        return "moe_only()" if self.kind == "moe_only" else f"listed({list(self.layers)})"


# --- routers of a chunk ---------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class LocatedRouter:
    """A ``TopKRouter`` and where it stands.

    Attributes:
        path: its name among the chunk's modules.
        module: the router.
        layer: 0-based global decoder layer; of an MTP router the 1-based depth of its head.
        is_mtp: it belongs to a multi-token-prediction head.
    """

    path: str
    module: Any
    layer: int
    is_mtp: bool


def find_routers(chunk: nn.Module) -> list[LocatedRouter]:
    """The routers of ``chunk``: the decoder's in layer order, then those of MTP heads.

    Raises:
        ValueError: a router is not a ``TopKRouter``, has no layer number, or two have the same.
    """
    from megatron.core.transformer.moe.router import Router, TopKRouter

    found = []
    for path, module in chunk.named_modules():
        if not isinstance(module, Router):
            continue
        if not isinstance(module, TopKRouter):
            raise ValueError(
                f"find_routers: router {path} is a {type(module).__name__}; only TopKRouter"
                " can replay routes"
            )
        if module.layer_number is None:
            raise ValueError(f"find_routers: router {path} has no layer_number")
        is_mtp = _is_mtp(path, module)
        layer = _mtp_depth(path, module) if is_mtp else module.layer_number - 1
        found.append(LocatedRouter(path, module, layer, is_mtp))
    found.sort(key=lambda router: (router.is_mtp, router.layer))
    decoder = [router for router in found if not router.is_mtp]
    for router, following in itertools.pairwise(decoder):
        if router.layer == following.layer:
            raise ValueError(
                f"find_routers: routers {router.path} and {following.path} are both layer"
                f" {router.layer}"
            )
    return found


def _is_mtp(path: str, module: Any) -> bool:
    """By the router's own flag (Megatron 0.17 and later), else by the ``mtp`` block's name."""
    flag = getattr(module, "is_mtp_layer", None)
    return "mtp" in path.split(".") if flag is None else bool(flag)


def _mtp_depth(path: str, module: Any) -> int:
    """1 for the first head. Megatron 0.16 numbers heads on after the decoder, later ones from 1."""
    number = module.layer_number
    if not hasattr(module, "is_mtp_layer"):
        number -= module.config.num_layers
    heads = module.config.mtp_num_layers or 1
    in_path = _IN_LAYERS.match(path)
    if not 1 <= number <= heads and in_path:
        number = int(in_path[2]) + 1
    return min(max(number, 1), heads)


def unwrap(model: nn.Module) -> Iterator[nn.Module]:
    """``model`` and what it wraps, outermost first: DDP, Float16Module and their kind."""
    while True:
        yield model
        inner = [getattr(model, name, None) for name in ("module", "_orig_mod")]
        wrapped = [module for module in inner if isinstance(module, nn.Module)]
        if not wrapped:
            return
        model = wrapped[0]


def chunk_config(chunk: nn.Module, routers: Sequence[LocatedRouter]) -> Any:
    """The chunk's ``TransformerConfig``."""
    if routers:
        return routers[0].module.config
    config = getattr(chunk, "config", None)
    if config is None:
        raise ValueError(
            f"ReplaySession: {type(chunk).__name__} has no config; it must be a Megatron model"
        )
    return config


def scatters_padding_mask(chunk: nn.Module) -> bool:
    """Whether the model slices its ``padding_mask`` itself under sequence parallelism.

    ``GPTModel`` does so where it embeds; its later stages and ``HybridModel`` never do. The model
    is the outermost module with ``pre_process``: a wrapper of the user's own may hold it.
    """
    for module in chunk.modules():
        if hasattr(module, "pre_process"):
            return bool(module.pre_process) and not _is_hybrid(module)
    return False


# --- can it replay --------------------------------------------------------------------------------

_GRAPH_REPEATS = (
    "captures the router: a graph would repeat the routes of its capture; leave the router out of"
    " cuda_graph_modules (cuda_graph_scope)"
)


def check_replayable(router: LocatedRouter, *, allow_live_aux_loss: bool = False) -> None:
    """Refuse a router that would ignore replayed routes, or compute something else beside them.

    Args:
        allow_live_aux_loss: accept a load-balancing loss that balances the router's own top-k.

    Raises:
        ValueError: names the router and the setting.
    """
    module, config = router.module, router.module.config

    def refuse(setting: str, why: str) -> None:
        raise ValueError(f"ReplaySession: router {router.path}: {setting} {why}")

    if not hasattr(module, "router_replay"):
        refuse("this Megatron-core", "has no replay in its router; 0.16.1 is the first that has")
    if config.moe_router_fusion:
        refuse("moe_router_fusion=True", "chooses experts in a fused kernel that ignores replay")
    types = module.routing_type
    types = [types] if isinstance(types, str) else list(types)
    for kind in ("sinkhorn", "quantile_balancing"):
        if kind in types:
            refuse(
                f"moe_router_load_balancing_type={kind!r}", "chooses experts without asking replay"
            )
    for name in ("moe_expert_capacity_factor", "moe_expert_rank_capacity_factor"):
        if getattr(config, name, None) is not None:
            refuse(
                f"{name}={getattr(config, name)}",
                "drops tokens: padding would take capacity from real tokens",
            )
    if config.moe_router_force_load_balancing:
        refuse("moe_router_force_load_balancing=True", "replaces the scores by random ones")
    if getattr(config, "moe_router_force_biased", None) is not None:
        refuse("moe_router_force_biased", "replaces the scores by biased ones")
    if not allow_live_aux_loss:
        for kind in AUX_LOSSES:
            if module.get_aux_loss_coeff(kind) > 0 and not can_replay_aux_loss(module):
                refuse(
                    f"{kind} with coefficient {module.get_aux_loss_coeff(kind)}",
                    "balances the router's own top-k in this Megatron-core, which computes it"
                    " in no method that could be given the replayed routes: set"
                    " moe_aux_loss_coeff=0, or pass allow_live_aux_loss=True",
                )
    if getattr(config, "overlap_moe_expert_parallel_comm", False):
        refuse(
            "overlap_moe_expert_parallel_comm=True",
            "runs the layers from a schedule plan, after forward_step has returned and mixed with"
            " another microbatch's backward; replay under it has not been shown to be right",
        )
    for name in ("enable_cuda_graph", "external_cuda_graph"):  # the names before cuda_graph_impl
        if getattr(config, name, False) and not _graph_implementation(config):
            refuse(f"{name}=True", _GRAPH_REPEATS)
    if _in_cuda_graph(config):
        refuse(f"cuda_graph_impl={config.cuda_graph_impl!r}", _GRAPH_REPEATS)


def _graph_implementation(config: Any) -> str | None:
    implementation = getattr(config, "cuda_graph_impl", "none")
    return None if implementation in (None, "none") else implementation


def _in_cuda_graph(config: Any) -> bool:
    """Whether a graph of this config holds a router.

    The graphs of inference (``inference_cuda_graph_scope``, "full_iteration_inference") do not run
    in a schedule.
    """
    implementation = _graph_implementation(config)
    if implementation is None:
        return False
    parts = getattr(config, "cuda_graph_modules", None)
    if parts is None:
        parts = getattr(config, "cuda_graph_scope", None)
    if isinstance(parts, str):
        parts = parts.split(",")
    names = {getattr(part, "name", part) for part in parts or ()}
    without_router = {"attn", "mlp", "mamba"}
    return implementation == "full_iteration" or not names or not names <= without_router


def check_layout(layout: TokenLayout, config: Any, router: LocatedRouter | None) -> str | None:
    """What is wrong with ``layout`` for a model of this config, or None.

    A layout of other ranks has, mostly, the right number of rows: nothing else would notice.
    """
    sizes = {
        "cp_size": (layout.cp_size, config.context_parallel_size),
        "tp_size": (layout.tp_size, config.tensor_model_parallel_size),
    }
    if getattr(config, "hybrid_context_parallel", False):
        sizes.pop("cp_size")  # chosen for each microbatch
    if config.tensor_model_parallel_size == 1:
        sizes.pop("tp_size")
        if layout.sequence_parallel and layout.tp_size > 1:
            return f"sequence_parallel over tp_size={layout.tp_size}, the model has one TP rank"
    elif layout.sequence_parallel != bool(config.sequence_parallel):
        return (
            f"sequence_parallel={layout.sequence_parallel}, the model's is"
            f" {bool(config.sequence_parallel)}"
        )
    elif not layout.sequence_parallel:
        sizes.pop("tp_size")
    for name, (given, wanted) in sizes.items():
        if given != wanted:
            return f"{name}={given}, the model's is {wanted}"
    if router is None:
        return None
    ranks = [("cp", layout.cp_size, layout.cp_rank, "cp_group")]
    if layout.sequence_parallel:
        ranks.append(("tp", layout.tp_size, layout.tp_rank, "tp_group"))
    for name, size, rank, group_name in ranks:
        group = getattr(router.module, group_name, None)
        if size > 1 and group is not None and group.rank() != rank:
            return f"{name}_rank={rank}, this process is {name} rank {group.rank()}"
    return None


def spread_offset(layout: TokenLayout, topk: int) -> int:
    """Where this rank's "spread" dummies begin: ranks that hold different tokens begin apart."""
    if "megatron.core.parallel_state" not in sys.modules:  # no ranks without it
        return 0
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        return 0
    rank = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    if layout.sequence_parallel:
        rank = rank * layout.tp_size + layout.tp_rank
    return rank * topk


def rank_of(kind: Literal["tp", "pp"], model: Any) -> int:
    """This process's tensor- or pipeline-parallel rank, as ``model`` or else Megatron knows it."""
    group = getattr(getattr(model, "pg_collection", None), kind, None)
    if group is not None:
        return group.rank()
    if "megatron.core.parallel_state" not in sys.modules:  # no ranks without it
        return 0
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        return 0
    if kind == "tp":
        return parallel_state.get_tensor_model_parallel_rank()
    return parallel_state.get_pipeline_model_parallel_rank()


# --- captured layers of routers -------------------------------------------------------------------


def captured_positions(
    chunk: nn.Module, routers: Sequence[LocatedRouter], captured: CapturedLayers
) -> tuple[int, ...]:
    """Position on the captured layer axis of each decoder router of ``routers``, in their order.

    Raises:
        ValueError: a router has no captured layer, a captured MoE layer of this chunk has no
            router, or the axis does not fit the model; names the layer.
    """
    config = chunk_config(chunk, routers)
    decoder = [router for router in routers if not router.is_mtp]
    moe_layers = _moe_layers(chunk, config)
    if captured.kind == "decoder" and captured.num_layers != config.num_layers:
        raise ValueError(
            f"ReplaySession: captured_layers={captured}, but the model has {config.num_layers}"
            " layers; a stack that counts its layers otherwise needs moe_only() or listed()"
        )
    by_layer = _axis(captured, config.num_layers, moe_layers)
    positions = []
    for router in decoder:
        if router.layer not in by_layer or (
            captured.kind == "moe_only" and router.layer not in moe_layers
        ):
            raise ValueError(
                f"ReplaySession: router {router.path} (layer {router.layer}) has no captured layer"
                f" in {captured}"
            )
        positions.append(by_layer[router.layer])
    local = _local_layers(chunk, decoder)
    if local is None and not decoder and moe_layers:
        raise ValueError(
            f"ReplaySession: {type(chunk).__name__} has MoE layers by its config, but neither a"
            " router nor a decoder.layers stack that says which layers stand here; nothing of it"
            " would replay"
        )
    if local is not None:
        wanted = set(by_layer) if captured.kind == "listed" else set(moe_layers)
        lacking = sorted((wanted & local) - {router.layer for router in decoder})
        if lacking:
            raise ValueError(
                f"ReplaySession: layer {lacking[0]} is captured in {captured} and stands in this"
                " chunk, but has no router; where the model does not follow its config's MoE"
                " pattern, use listed()"
            )
    return tuple(positions)


def captured_axis_length(chunk: nn.Module, config: Any, captured: CapturedLayers) -> int:
    """L that routes must have."""
    if captured.kind == "listed":
        return len(captured.layers)
    if captured.kind == "decoder":
        return captured.num_layers or 0
    return len(_moe_layers(chunk, config))


def _axis(captured: CapturedLayers, num_layers: int, moe_layers: tuple[int, ...]) -> dict[int, int]:
    if captured.kind == "decoder":
        return {layer: layer for layer in range(num_layers)}
    layers = moe_layers if captured.kind == "moe_only" else captured.layers
    return {layer: position for position, layer in enumerate(layers) if layer is not None}


def _is_hybrid(chunk: nn.Module) -> bool:
    return _hybrid_pattern(chunk) is not None


def _hybrid_pattern(chunk: nn.Module) -> str | None:
    for name in ("hybrid_layer_pattern", "hybrid_override_pattern"):
        pattern = getattr(chunk, name, None)
        if isinstance(pattern, str):
            return pattern
    return None


def _moe_layers(chunk: nn.Module, config: Any) -> tuple[int, ...]:
    """0-based MoE layers of the whole model, from its pattern."""
    pattern = _hybrid_pattern(chunk)
    if pattern is not None:
        symbols = pattern.split("/")[0].replace("|", "")  # after "/": MTP; "|": pipeline cuts
        return tuple(layer for layer, symbol in enumerate(symbols) if symbol == "E")
    if not config.num_moe_experts:
        return ()
    frequency = config.moe_layer_freq
    if isinstance(frequency, int):
        return tuple(layer for layer in range(config.num_layers) if layer % frequency == 0)
    return tuple(layer for layer, is_moe in enumerate(frequency) if is_moe)


def _local_layers(chunk: nn.Module, decoder: Sequence[LocatedRouter]) -> set[int] | None:
    """0-based layers that stand in ``chunk``, or None where its stack cannot be told."""
    matches = [_IN_LAYERS.match(router.path) for router in decoder]
    if all(matches) and matches:
        stacks = {match[1] for match in matches if match}
    else:
        stacks = {
            name
            for name, _ in chunk.named_modules()
            if name.endswith("decoder.layers") and "mtp" not in name
        }
    if len(stacks) != 1:
        return None
    layers = list(chunk.get_submodule(stacks.pop()).children())
    numbers = [getattr(layer, "layer_number", None) for layer in layers]
    if any(number is None for number in numbers):
        return None
    return {number - 1 for number in numbers if number is not None}
