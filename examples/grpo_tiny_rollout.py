"""Rollouts for ``grpo_tiny.py``: sampled responses, and what was decided while they were sampled.

``TransformersRollout`` runs the trainer's weights, rounded to bf16, in transformers' own Qwen3-MoE
and ``generate``. Routes come from a forward hook on each router, the support and the logprobs from
the processed logits, so that both are what the rollout did and nothing is recomputed.

Sizes: B responses, P prompt tokens, R the longest response, L layers, K experts a token, C the
sampler's top-k, V vocabulary.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from grpo_tiny_model import EOS, PAD, ModelSizes
from torch import Tensor

from packhorse import Trace, Trajectory


@dataclass(frozen=True)
class Sampling:
    """Of the rollout; the temperature is 1."""

    top_k: int
    top_p: float
    max_tokens: int


class TransformersRollout:
    """A bf16 copy of the trainer's model that samples; it has no weights before ``load_weights``.

    Args:
        folder: with config.json.
        sizes: the same.
    """

    def __init__(self, folder: Path, sizes: ModelSizes, sampling: Sampling) -> None:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.utils import logging

        logging.set_verbosity_error()
        self.sizes, self.sampling = sizes, sampling
        self.about = {"rollout": "transformers", "transformers": version("transformers")}
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        config = AutoConfig.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        self.model.eval().requires_grad_(False).to(self.device)
        self._stored = dict(self.model.named_parameters())
        self._chosen: list[list[Tensor]] = [[] for _ in range(sizes.num_layers)]
        for kept, layer in zip(self._chosen, self.model.model.layers, strict=True):
            layer.mlp.gate.register_forward_hook(
                # (router logits, weights, experts [tokens, K])
                lambda router, inputs, outputs, kept=kept: kept.append(outputs[2])
            )

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take over the trainer's weights; each of this model's is set.

        Raises:
            ValueError: one has no place, or one of this model's got none.
        """
        given = dict(weights)
        targets, sources = [], []
        for name, stored in self._stored.items():
            block, _, kind = name.rpartition(".")
            if name in given:
                source = given.pop(name)
            elif kind in ("gate_up_proj", "down_proj"):  # [E, out, in]
                source = torch.stack([
                    torch.cat([
                        given.pop(f"{block}.{expert}.{part}_proj.weight")
                        for part in kind.removesuffix("_proj").split("_")
                    ])
                    for expert in range(len(stored))
                ])  # fmt: skip
            else:
                raise ValueError(f"load_weights: {name} is not given")
            if source.shape != stored.shape:
                raise ValueError(
                    f"load_weights: {name} is {list(stored.shape)}, {list(source.shape)} is given"
                )
            targets.append(stored)
            sources.append(source)
        if given:
            raise ValueError(f"load_weights: no place for {', '.join(sorted(given)[:3])}")
        torch._foreach_copy_(targets, sources)

    @torch.no_grad()
    def generate(self, prompts: np.ndarray, seed: int) -> list[Trajectory]:
        """One response for each row of ``prompts`` [B, P]."""
        for kept in self._chosen:
            kept.clear()
        torch.manual_seed(seed)
        input_ids = torch.from_numpy(prompts).to(self.device)
        output = self.model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            do_sample=True,
            temperature=1.0,
            top_k=self.sampling.top_k,
            top_p=self.sampling.top_p,
            max_new_tokens=self.sampling.max_tokens,
            eos_token_id=EOS,
            pad_token_id=PAD,
            output_scores=True,
            return_dict_in_generate=True,
        )
        responses = output.sequences[:, input_ids.shape[1] :]
        # the processed logits: -inf where a filter took the id out
        logprobs = torch.stack(output.scores, dim=1).log_softmax(-1)  # [B, R, V]
        kept, ids = logprobs.topk(self.sampling.top_k)
        support = ids.masked_fill(kept.isneginf(), -1).int()
        sampled = logprobs.gather(-1, responses[..., None]).squeeze(-1)
        return make_trajectories(
            prompts,
            responses.cpu().numpy(),
            sampled.cpu().numpy(),
            support.cpu().numpy(),
            self._routes(*input_ids.shape).cpu().numpy(),
            self.sizes,
        )

    def close(self) -> None:
        """Nothing is held."""

    def _routes(self, batch: int, prompt: int) -> Tensor:
        """[B, P + R - 1, L, K] uint8: all positions that were evaluated."""
        layers = []
        for kept in self._chosen:
            parts = [kept[0].view(batch, prompt, -1), *(ids.view(batch, 1, -1) for ids in kept[1:])]
            layers.append(torch.cat(parts, dim=1).to(torch.uint8))
        return torch.stack(layers, dim=2)


def make_trajectories(
    prompts: np.ndarray,
    responses: np.ndarray,
    logprobs: np.ndarray,
    support: np.ndarray,
    routes: np.ndarray,
    sizes: ModelSizes,
) -> list[Trajectory]:
    """Cut each response after its end token, and check what was captured of it.

    Args:
        prompts: [B, P].
        responses: [B, R], anything after the end token.
        logprobs: [B, R] of the sampled ids, over their support.
        support: [B, R, C] ids, -1 filled.
        routes: [B, P + R - 1, L, K].
    """
    ended = responses == EOS
    lengths = np.where(ended.any(1), ended.argmax(1) + 1, responses.shape[1])
    trajectories = []
    for i, length in enumerate(lengths.tolist()):
        trace = Trace(prompts[i], trajectory=i, **sizes.checks)
        trace.add_turn(
            responses[i, :length],
            # of a single id that is kept the logprob is 0; rounding must not make it positive
            logprobs=np.minimum(logprobs[i, :length], 0.0),
            support=support[i, :length],
            routes=routes[i, : prompts.shape[1] + length - 1],
        )
        trajectories.append(trace.finalize())
    return trajectories
