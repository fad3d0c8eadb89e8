"""Hidden states and LM head of a Megatron model, for ``score_microbatch``.

    head = lm_head_of(model)
    with hidden_states_of(model):
        hidden = model(tokens, position_ids, attention_mask, ...)    # [B, T / B, H]: no logits
    scores = score_microbatch(hidden, layout, token_ids, support, lm_head=head)

Only the output layer is passed over: what stands before it runs as it is, so the hidden states are
those that it would be given. Nothing is patched outside the block. In a pipeline schedule the block
stands around the schedule, and stages without an output layer are left alone.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from packhorse._nvtx import ranged
from packhorse.replay.scoring_sources import LmHead


@ranged
def lm_head_of(model: Any, *, main_grad: bool = False, softcap: float | None = None) -> LmHead:
    """The LM head of a ``GPTModel``, bare or wrapped: this rank's shard, its group.

    Args:
        model: the model or pipeline stage that holds the output layer.
        main_grad: add the weight's gradient to ``weight.main_grad``, as Megatron's fused
            accumulation does. Not with ``overlap_grad_reduce``, which wants a gradient from
            autograd.
        softcap: of the logits, where the model has one; Megatron-core itself has none.

    Raises:
        ValueError: the model has no output layer on this stage, or no ``main_grad`` where it is
            asked for.
    """
    name = "lm_head_of"
    gpt = _with_output_layer(model)
    if gpt is None:
        raise ValueError(f"{name}: {type(model).__name__} has no output layer on this stage")
    layer = gpt.output_layer
    weight = layer.weight
    if getattr(gpt, "share_embeddings_and_output_weights", False):
        weight = gpt.shared_embedding_or_output_weight()
    buffer = getattr(weight, "main_grad", None) if main_grad else None
    if main_grad and buffer is None:
        raise ValueError(f"{name}: the output layer's weight has no main_grad")
    group = getattr(layer, "tp_group", None)
    if group is None:
        from megatron.core import parallel_state

        group = parallel_state.get_tensor_model_parallel_group()
    return LmHead(
        weight=weight,
        bias=getattr(layer, "bias", None),
        group=group if group.size() > 1 else None,
        main_grad=buffer,
        softcap=softcap,
        sequence_parallel=bool(layer.sequence_parallel) and group.size() > 1,
    )


@contextmanager
@ranged
def hidden_states_of(model: Any) -> Iterator[None]:
    """Inside the block ``model`` returns, in place of logits, the hidden states that its output
    layer is given: [1, T, H] or [B, T / B, H], of a sequence-parallel rank its 1/TP of them.

    Args:
        model: a ``GPTModel``, bare or wrapped, or a list of a pipeline's chunks. Give it no labels:
            a loss would be made of them. ``Float16Module`` makes its outputs float32: take them
            ``.to(weight.dtype)``, which changes no value.

    Raises:
        ValueError: a model has multi-token prediction, whose loss needs the output layer.
    """
    chunks = model if isinstance(model, list | tuple) else [model]
    found = [gpt for gpt in map(_with_output_layer, chunks) if gpt is not None]
    for gpt in found:
        if getattr(gpt.config, "mtp_num_layers", None):
            raise ValueError(
                "hidden_states_of: the model has multi-token prediction, which uses its output"
                " layer for a loss of its own"
            )
    with _passing_through(gpt.output_layer for gpt in found):
        yield


@contextmanager
def _passing_through(layers: Iterable[Any]) -> Iterator[None]:
    changed = []
    try:
        for layer in layers:
            if "forward" in vars(layer):
                raise ValueError("hidden_states_of: the output layer's forward is replaced already")
            layer.forward = _pass_through
            changed.append(layer)
        yield
    finally:
        for layer in changed:
            del layer.forward


def _pass_through(input_: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    return input_, None


def _with_output_layer(model: Any) -> Any:
    """The module under the wrappers of ``model`` that has an output layer; None: it has none."""
    while model is not None and not hasattr(model, "output_layer"):
        model = getattr(model, "module", None)
    if model is None or not getattr(model, "post_process", True):
        return None
    return model
