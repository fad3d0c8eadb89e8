"""What a session knows of its model: chunks, routers, layers. Found once, kept while it holds.

A survey walks every module of the model several times: 13 ms for 48 layers of 16 experts each on
one CPU core. ``Survey`` keeps what it found together with what it saw: every module's children, and
the settings that it read. The next schedule compares those (0.3 ms there) and surveys again where
anything differs: a layer added, removed or rebuilt, a router replaced, a chunk wrapped anew, a
setting changed. What is inside a MoE layer's ``experts`` is not watched: no router stands there.
The kept survey holds its modules: a layer that was taken out is freed by the next schedule.

Not noticed: a router whose class is exchanged in place, and one kept in a plain list, which is no
module of the model for Megatron either.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from torch import nn

from packhorse.replay import routers as _routers
from packhorse.replay.aux_loss import has_losses
from packhorse.replay.microbatch import ReplayMicrobatch
from packhorse.replay.routers import CapturedLayers, LocatedRouter

_NAME = "ReplaySession"

#: what a survey reads of a ``TransformerConfig``
CONFIG_SETTINGS = (
    "cuda_graph_impl",
    "cuda_graph_modules",
    "cuda_graph_scope",
    "enable_cuda_graph",
    "expert_model_parallel_size",
    "external_cuda_graph",
    "moe_aux_loss_coeff",
    "moe_expert_capacity_factor",
    "moe_expert_rank_capacity_factor",
    "moe_layer_freq",
    "moe_router_force_biased",
    "moe_router_force_load_balancing",
    "moe_router_fusion",
    "moe_router_load_balancing_type",
    "moe_z_loss_coeff",
    "mtp_num_layers",
    "num_layers",
    "num_moe_experts",
    "overlap_moe_expert_parallel_comm",
    "recompute_granularity",
)
#: what it reads of routers, layers and models themselves
MODULE_SETTINGS = (
    "enable_expert_bias",
    "hybrid_layer_pattern",
    "hybrid_override_pattern",
    "is_mtp_layer",
    "layer_number",
    "num_experts",
    "pre_process",
    "routing_type",
    "topk",
)
_ABSENT = object()
_children_of = attrgetter("_modules")


@dataclass(eq=False)
class Chunk:
    """One model chunk of this rank, as it stands at the start of a schedule."""

    index: int
    module: nn.Module
    config: Any
    routers: list[LocatedRouter]  # of the decoder, in layer order
    positions: tuple[int, ...]  # of each on the captured layer axis
    masked_mtp_routers: list[LocatedRouter]  # run live; their counters or losses need the mask
    axis_length: int  # L that the captured axis must have
    num_experts: int
    topk: int
    scatters_mask: bool
    has_losses: bool  # its routers compute losses of their own


class Survey:
    """The chunks of ``models``, found anew only where the models changed.

    Args:
        models: chunks of this rank, perhaps wrapped.
        captured_layers, allow_live_aux_loss: as ``ReplaySession``.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        captured_layers: CapturedLayers,
        *,
        allow_live_aux_loss: bool,
    ) -> None:
        self._models = models
        self._captured_layers = captured_layers
        self._allow_live_aux_loss = allow_live_aux_loss
        self._chunks: list[Chunk] = []
        self._seen: _Seen | None = None
        #: surveys made so far
        self.count = 0

    def chunks(self) -> list[Chunk]:
        """The chunks as the models are now.

        Raises:
            ValueError: as ``ReplaySession``.
        """
        if self._seen is None or not self._seen.holds():
            self._seen = None  # a survey that raises leaves nothing
            self._chunks = self._survey()
            self._seen = _Seen(self._models, self._chunks)
            self.count += 1
        return self._chunks

    def _survey(self) -> list[Chunk]:
        """Find and check the routers as they are now."""
        chunks = []
        seen: dict[int, str] = {}
        positions: dict[int, str] = {}
        for index, model in enumerate(self._models):
            *_, module = _routers.unwrap(model)
            found = _routers.find_routers(module)
            config = _routers.chunk_config(module, found)
            for router in found:
                name = router_name(index, router)
                if id(router.module) in seen:
                    raise ValueError(f"{_NAME}: {name} is also {seen[id(router.module)]}")
                seen[id(router.module)] = name
                if not router.is_mtp:
                    _routers.check_replayable(router, allow_live_aux_loss=self._allow_live_aux_loss)
            decoder = [router for router in found if not router.is_mtp]
            num_experts, topk = _router_sizes(index, decoder)
            places = _routers.captured_positions(module, found, self._captured_layers)
            for router, place in zip(decoder, places, strict=True):
                name = router_name(index, router)
                if place in positions:
                    raise ValueError(
                        f"{_NAME}: {name} and {positions[place]} both replay captured layer {place}"
                    )
                positions[place] = name
            chunks.append(
                Chunk(
                    index=index,
                    module=module,
                    config=config,
                    routers=decoder,
                    positions=places,
                    masked_mtp_routers=[
                        router
                        for router in found
                        if router.is_mtp
                        and (router.module.enable_expert_bias or has_losses(router.module))
                    ],
                    axis_length=_routers.captured_axis_length(
                        module, config, self._captured_layers
                    ),
                    num_experts=num_experts,
                    topk=topk,
                    scatters_mask=_routers.scatters_padding_mask(module),
                    has_losses=any(has_losses(router.module) for router in found),
                )
            )
        if not any(chunk.config.num_moe_experts for chunk in chunks):
            raise ValueError(f"{_NAME}: the model has no MoE layer, so nothing to replay")
        return chunks


def router_name(chunk: int, router: LocatedRouter) -> str:
    """How messages name a router."""
    return f"router {router.path} of chunk {chunk}"


def _router_sizes(chunk: int, routers: Sequence[LocatedRouter]) -> tuple[int, int]:
    """E and K, which all routers of a chunk share."""
    sizes = [(router.module.num_experts, router.module.topk) for router in routers]
    for router, size in zip(routers, sizes, strict=True):
        if size != sizes[0]:
            raise ValueError(
                f"{_NAME}: {router_name(chunk, router)} has (experts, topk) = {size},"
                f" {routers[0].path} has {sizes[0]}"
            )
    return sizes[0] if sizes else (0, 0)


# --- microbatches for it --------------------------------------------------------------------------


def check_microbatches(
    name: str, chunks: Sequence[Chunk], microbatches: Sequence[ReplayMicrobatch]
) -> None:
    """What this rank can say of the microbatches of a schedule for these chunks.

    Raises:
        TypeError, ValueError: names the microbatch.
    """
    if not microbatches:
        raise ValueError(f"{name}: no microbatches were given")
    for i, microbatch in enumerate(microbatches):
        if not isinstance(microbatch, ReplayMicrobatch):
            raise TypeError(
                f"{name}: microbatch {i} must be a ReplayMicrobatch, got"
                f" {type(microbatch).__name__}"
            )
    absent = [i for i, microbatch in enumerate(microbatches) if microbatch.routes is None]
    if absent and len(absent) < len(microbatches):
        raise ValueError(
            f"{name}: microbatch {absent[0]} has no routes field, others have; all microbatches"
            " of a schedule have routes or none has (routes without rows are legal)"
        )
    for chunk in chunks:
        first = chunk.routers[0] if chunk.routers else None
        device = None if first is None else first.module.weight.device
        for i, microbatch in enumerate(microbatches):
            wrong = _routers.check_layout(microbatch.layout, chunk.config, first)
            if wrong:
                raise ValueError(f"{name}: microbatch {i}: the layout has {wrong}")
            wanted = microbatch.layout.device
            moves = wanted.type == "cuda" and device is not None and device.type == "cpu"
            if first is not None and device != wanted and not moves:  # in its first forward
                raise ValueError(
                    f"{name}: microbatch {i}: the layout is on {wanted}, router {first.path} on"
                    f" {device}"
                )
            if microbatch.routes is not None:
                _check_axes(name, i, microbatch, chunk)
                microbatch.check_content(i, chunk.num_experts, chunk.positions)


def _check_axes(name: str, i: int, microbatch: ReplayMicrobatch, chunk: Chunk) -> None:
    assert microbatch.routes is not None
    num_layers, topk = microbatch.routes.row_shape
    if num_layers != chunk.axis_length:
        raise ValueError(
            f"{name}: microbatch {i}: routes have {num_layers} layers, captured_layers describes"
            f" {chunk.axis_length}"
        )
    if chunk.routers and topk != chunk.topk:
        raise ValueError(
            f"{name}: microbatch {i}: routes name {topk} experts a token, the router takes"
            f" {chunk.topk}"
        )


# --- whether it still holds -----------------------------------------------------------------------


class _Seen:
    """What a survey saw. Modules are held, so that none can be mistaken for a later one."""

    def __init__(self, models: Sequence[nn.Module], chunks: Sequence[Chunk]) -> None:
        self._models = models
        self._levels = [tuple(_routers.unwrap(model)) for model in models]
        modules = [module for chunk in chunks for module in _watched(chunk.module)]
        self._leaves = [module for module in modules if not module._modules]
        self._parents = [(m, tuple(m._modules.values())) for m in modules if m._modules]
        self._configs = [
            (module, module.config)
            for module in modules
            if "config" in vars(module) and (_is_router(module) or "pre_process" in vars(module))
        ]
        configs = {id(config): config for _, config in self._configs}
        configs |= {id(chunk.config): chunk.config for chunk in chunks}
        self._config_settings = [
            (config, name, _copy(getattr(config, name, _ABSENT)))
            for config in configs.values()
            for name in CONFIG_SETTINGS
        ]
        self._module_settings = []
        for module in modules:
            # twice the first: with one name attrgetter gives no tuple
            if names := [name for name in MODULE_SETTINGS if name in vars(module)]:
                read = attrgetter(names[0], *names)
                self._module_settings.append((module, read, tuple(map(_copy, read(module)))))

    def holds(self) -> bool:
        """Whether the models are as they were."""
        for model, levels in zip(self._models, self._levels, strict=True):
            if tuple(_routers.unwrap(model)) != levels:
                return False
        if any(map(_children_of, self._leaves)):
            return False
        for parent, children in self._parents:
            if tuple(parent._modules.values()) != children:
                return False
        for module, config in self._configs:
            if module.config is not config:
                return False
        for module, read, values in self._module_settings:
            if read(module) != values:
                return False
        return all(
            getattr(config, name, _ABSENT) == value for config, name, value in self._config_settings
        )


def _copy(setting: Any) -> Any:
    return list(setting) if isinstance(setting, list) else setting  # it may change in place


def _is_router(module: nn.Module) -> bool:
    return "routing_type" in vars(module)


def _watched(chunk: nn.Module) -> Iterator[nn.Module]:
    """Every module of the chunk but those inside the experts beside a router."""
    seen: set[int] = set()
    left = [chunk]
    while left:
        module = left.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield module
        children = {name: child for name, child in module._modules.items() if child is not None}
        if any(_is_router(child) for child in children.values()):
            children.pop("experts", None)
        left += children.values()
