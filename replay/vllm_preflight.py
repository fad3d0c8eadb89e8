"""What the workers of a vLLM engine say of their mixture-of-experts layers.

``LayerReport`` runs in the workers, as vLLM's ``worker_extension_cls`` or sent there by
``collective_rpc``; ``read_layers`` checks what came back. Nothing of vLLM is changed.

Source: vLLM ``MoERunner``, ``BaseRouter.set_capture_fn``, ``RoutedExpertsCaptureSource`` (0.28 to
0.33); before, ``FusedMoE``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from packhorse.replay.rollout import EngineModel


class MoeLayer(NamedTuple):
    """A layer with experts, as the engine has it."""

    name: str  # of the module
    layer: int  # in the captured axis, from 0
    router: str  # its class
    topk: int | None
    num_experts: int | None
    kernel: str  # the class of the method that runs the experts
    monolithic: bool  # the kernel routes by itself
    bound: bool | None  # the capture is attached; None: cannot be seen


@dataclass(frozen=True)
class EngineLayers:
    """What an engine will capture."""

    model: EngineModel
    layers: tuple[MoeLayer, ...]
    device: str
    eager: bool

    def __str__(self) -> str:
        model = self.model
        kernels = sorted(
            {layer.kernel + " (monolithic)" * layer.monolithic for layer in self.layers}
        )
        return (
            f"{len(self.layers)} of {model.num_layers} layers have experts, {model.topk} of"
            f" {model.num_experts} a token, by {', '.join(kernels) or 'nothing'}"
        )


class LayerReport:
    """Mixed into the workers of vLLM."""

    def packhorse_layers(self) -> dict[str, Any]:
        """Plain numbers and strings, which any serializer takes."""
        runner = self.model_runner  # type: ignore[attr-defined]
        model = runner.get_model() if hasattr(runner, "get_model") else runner.model
        model_config = self.vllm_config.model_config  # type: ignore[attr-defined]
        rows = []
        for name, module in model.named_modules():
            layer = getattr(module, "layer_id", None)
            if not isinstance(layer, int):
                continue
            router = getattr(module, "router", None)
            if router is None and not hasattr(module, "capture_fn"):
                continue
            method = getattr(module, "_quant_method", getattr(module, "quant_method", None))
            monolithic = bool(getattr(method, "is_monolithic", False))
            sink = getattr(getattr(module, "routed_experts", None), "routing_sink", None)
            if monolithic:
                bound = sink is not None
            elif hasattr(module, "capture_fn"):
                bound = module.capture_fn is not None
            elif router is not None and hasattr(router, "capture_fn"):
                bound = router.capture_fn is not None
            else:
                bound = None
            rows.append(
                (
                    name,
                    layer,
                    type(router).__name__,
                    _size(router, module, "top_k"),
                    _size(router, module, "global_num_experts", "num_experts"),
                    type(method).__name__,
                    monolithic,
                    bound,
                )
            )
        return {
            "layers": rows,
            "num_layers": int(model_config.get_total_num_hidden_layers()),
            "vocab_size": int(model_config.get_vocab_size()),
            "eager": bool(model_config.enforce_eager),
            "device": str(getattr(self, "device", "")),
        }


def _size(router: Any, module: Any, *names: str) -> int | None:
    for source in (router, module):
        for name in names:
            value = getattr(source, name, None)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    return None


def read_layers(name: str, reports: Sequence[dict[str, Any]], routes: bool) -> EngineLayers:
    """Join the workers' reports; with ``routes`` refuse what would not be captured."""
    if not reports:
        raise RuntimeError(f"{name}: no worker answered")
    first = reports[0]
    layers = tuple(sorted((MoeLayer(*row) for row in first["layers"]), key=lambda at: at.layer))
    for rank, report in enumerate(reports):
        if [tuple(row)[1:5] for row in report["layers"]] != [
            tuple(row)[1:5] for row in first["layers"]
        ]:
            raise ValueError(f"{name}: worker {rank} has other MoE layers than worker 0")
    numbers = [layer.layer for layer in layers]
    wrong = []
    if routes:
        if not layers:
            wrong.append("the model has no layer with experts")
        if str(first["device"]).startswith("cpu") and not first["eager"]:
            wrong.append("on a CPU without enforce_eager every route is zero")
        unbound = [layer for layer in layers if layer.bound is False]
        if unbound:
            wrong.append(
                f"layers {', '.join(str(layer.layer) for layer in unbound)} are not captured"
                f" ({unbound[0].router}, {unbound[0].kernel})"
            )
        twice = sorted({layer for layer in numbers if numbers.count(layer) > 1})
        if twice:
            wrong.append(f"layer {twice[0]} is there twice: one overwrites the other")
        sizes = {(layer.topk, layer.num_experts) for layer in layers}
        if len(sizes) > 1:
            wrong.append(f"layers differ in their experts: {sorted(map(str, sizes))}")
    if wrong:
        raise ValueError(f"{name}: {'; '.join(wrong)}")
    model = EngineModel(
        num_layers=first["num_layers"],
        topk=layers[0].topk if layers else None,
        num_experts=layers[0].num_experts if layers else None,
        moe_layers=tuple(sorted(set(numbers))) or None,
        vocab_size=first["vocab_size"],
    )
    return EngineLayers(model, layers, str(first["device"]), bool(first["eager"]))
