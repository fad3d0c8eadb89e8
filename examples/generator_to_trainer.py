"""From your generator to the trainer: replies of vLLM in, replayed Megatron schedules out.

    python examples/generator_to_trainer.py           the data-parallel ranks one after another
    python examples/generator_to_trainer.py --ray     each a Ray actor that gets its part alone

    controller   replies -> Trace -> make_inputs -> validate_batch -> parts and a plan for each rank
    rank         microbatches -> old logprobs (forward only) -> training schedule

The replies are the packaged capture of vLLM 0.32.0: nine requests, of which two are the turns of
one conversation. To each trajectory the generator appends an end-of-sequence token that the engine
did not sample. Rewards are made up: the share of distinct tokens in a response.
"""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import packhorse.replay
from packhorse import (
    Batch,
    Capture,
    CapturedLayers,
    MicrobatchPlan,
    ReplayMicrobatch,
    ReplaySession,
    TokenLayout,
    Trace,
    Trajectory,
    generator_output,
    install_cpu_shims,
    load_hf_model,
    make_inputs,
    plan_ranks_by_tokens,
    score_microbatch,
    select_for_logprobs,
    single_process,
    token_masks,
    validate_batch,
)

DATA = Path(next(iter(packhorse.replay.__path__))) / "data"
EOS = 1
SIZES = {"num_experts": 8, "vocab_size": 512, "num_layers": 4, "topk": 2}

# --- the generator: what the engine replied becomes traces ----------------------------------------


def generate() -> list[Trajectory]:
    capture = Capture.load(DATA / "vllm_tiny_moe.npz", **SIZES)
    conversations = capture.optional["conv"].tolist()
    traces: dict[Any, Trace] = {}
    for i, conversation in enumerate(conversations):
        prompt, key = capture.prompt_ids[i], (conversation if conversation >= 0 else f"request {i}")
        if key not in traces:
            traces[key] = Trace(prompt, trajectory=key, **SIZES)
        else:  # a later turn: what its prompt has beyond all tokens so far was observed
            traces[key].add_observation(prompt[traces[key].length :])
        traces[key].add_turn(
            capture.response_ids[i],
            logprobs=capture.sampled_logprobs[i],
            support=capture.support[i],
            routes=capture.routes[i],  # of the whole prefix: rows that are known are cut off
            prompt_ids=prompt,
        )
    for trace in traces.values():
        trace.append_tokens([EOS])
    return [trace.finalize() for trace in traces.values()]


# --- the controller: one checked batch, and each rank's share of it -------------------------------


def make_batch(trajectories: Sequence[Trajectory]) -> Batch:
    rewards = np.array([np.unique(t.response_ids).size / t.response_ids.size for t in trajectories])
    output = generator_output(trajectories) | {
        "rewards": rewards,
        "advantages": np.float32((rewards - rewards.mean()) / rewards.std()),  # a field of your own
    }
    batch = make_inputs(output, **SIZES)
    validate_batch(batch, **SIZES)  # before anything is done with it
    return batch


def share_out(
    batch: Batch, num_ranks: int, max_tokens: int
) -> tuple[list[list[int]], tuple[MicrobatchPlan, ...]]:
    """Which trajectories are whose, and as many microbatches for each rank."""
    parts = [list(range(rank, len(batch), num_ranks)) for rank in range(num_ranks)]
    lengths = [[batch["lengths"][i] for i in part] for part in parts]
    return parts, plan_ranks_by_tokens(lengths, max_tokens=max_tokens, rectangle=True)


# --- a rank: your trainer -------------------------------------------------------------------------


@dataclass
class Microbatch:
    batch: Batch  # on the device
    layout: TokenLayout
    replay: ReplayMicrobatch
    loss_masks: list[np.ndarray]  # on the host, of each trajectory [length] bool
    appended: list[np.ndarray]

    @classmethod
    def of(cls, batch: Batch, device: torch.device) -> "Microbatch":
        layout = TokenLayout.build(
            batch["lengths"],
            format="bshd",
            first_columns=batch["first_columns"],
            batch_width=batch["sequences"].shape[1],
            device=device,
        )
        loss_masks = token_masks(batch)
        replay = ReplayMicrobatch(
            layout,
            batch["rollout_expert_indices"],
            loss_masks=loss_masks,
            appended=token_masks(batch, "excused"),
            missing=batch["missing"],
        )
        return cls(batch.to(device), layout, replay, loss_masks, token_masks(batch, "appended"))


class Trainer:
    def __init__(self) -> None:
        install_cpu_shims()  # does nothing for a GPU with Transformer Engine
        self.groups = ExitStack()
        self.groups.enter_context(single_process())
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = load_hf_model(DATA / "tiny_moe", recompute="full")
        self.session = ReplaySession(
            self.model, captured_layers=CapturedLayers.decoder(SIZES["num_layers"])
        )

    def step(self, batch: Batch, plan: MicrobatchPlan, num_targets: int) -> dict[str, Any]:
        """One step of this rank's trajectories; ``num_targets`` are those of all ranks."""
        self.model.zero_grad(set_to_none=True)
        # old logprobs: the same routes, support and positions that run live as in training
        outputs = self.run(plan.split(select_for_logprobs(batch)), num_targets, forward_only=True)
        old = plan.restore([output["logprobs"] for output in outputs])
        batch = batch.with_fields({"old_logprobs": old.cpu()})
        outputs = self.run(plan.split(batch), num_targets, forward_only=False)
        report = self.session.report()
        sampled = (batch["loss_mask"] > 0) & ~batch["appended"]
        gaps = (batch["old_logprobs"] - batch["rollout_logprobs"])[sampled].abs()
        gradients = [p.grad for n, p in self.model.named_parameters() if "router.weight" in n]
        return {
            "gaps": gaps,
            "loss": sum(float(output["loss"]) for output in outputs) / len(outputs),
            "router_gradient": float(sum(g.double().square().sum() for g in gradients)) ** 0.5,
            "rows": (report.rows_replayed, report.rows_live, report.rows_dummy),
        }

    def run(self, parts: Sequence[Batch], num_targets: int, forward_only: bool) -> list[dict]:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self.model.train(not forward_only)
        microbatches = [Microbatch.of(part, self.device) for part in parts]
        share = len(microbatches) / num_targets  # the schedule takes the microbatches' mean
        with (
            torch.set_grad_enabled(not forward_only),
            self.session.schedule([m.replay for m in microbatches]),
        ):
            return get_forward_backward_func()(
                forward_step_func=partial(self.forward_step, share=share),
                data_iterator=iter(microbatches),
                model=self.model,
                num_microbatches=len(microbatches),
                seq_length=max(m.layout.num_tokens for m in microbatches),
                micro_batch_size=1,
                forward_only=forward_only,
            )

    def forward_step(self, data_iterator: Iterator[Microbatch], model: Any, share: float):
        step = self.session.begin(model)
        microbatch, layout = next(data_iterator), step.layout
        logits = model(
            layout.to_model(layout.align(microbatch.batch["sequences"], fill=0)),
            layout.to_model(layout.position_ids()),
            None,
            padding_mask=step.padding_mask,
        )
        return logits, partial(loss_func, microbatch, share)


def loss_func(microbatch: Microbatch, share: float, logits: Tensor) -> tuple[Tensor, dict]:
    batch = microbatch.batch
    scores = score_microbatch(
        logits,
        microbatch.layout,
        batch["sequences"],
        batch["rollout_sample_support"],
        loss_masks=microbatch.loss_masks,
        appended=microbatch.appended,
    )
    mask = batch["loss_mask"]
    logprobs = scores.logprobs.to_padded(0.0, mask.shape[1], side="left")  # [B, R], as the mask
    if "old_logprobs" not in batch:
        return logprobs.sum(), {"logprobs": logprobs.detach()}
    ratio = torch.exp(logprobs - batch["old_logprobs"])
    loss = -share * (ratio * batch["advantages"][:, None] * mask).sum()
    loss = loss + 0 * scores.logprobs.values.sum()  # a backward for synthetic trajectories alone
    return loss, {"loss": loss.detach().clone()}  # the schedule scales the loss in place


# --- with Ray, and without ------------------------------------------------------------------------


def step_here(batch: Batch, parts: list, plans: Sequence[MicrobatchPlan], num_targets: int) -> list:
    trainer = Trainer()
    with trainer.groups:
        work = zip(parts, plans, strict=True)
        return [trainer.step(batch[part], plan, num_targets) for part, plan in work]


def step_with_ray(
    batch: Batch, parts: list, plans: Sequence[MicrobatchPlan], num_targets: int
) -> list:
    import ray

    from packhorse.packed.transport import put_parts

    ray.init(num_cpus=len(parts), include_dashboard=False, log_to_driver=False)
    try:
        refs = put_parts(batch, parts)  # once into the store; each rank maps its own part
        trainers = [ray.remote(num_cpus=1)(Trainer).remote() for _ in parts]
        work = zip(trainers, refs, plans, strict=True)
        return ray.get([t.step.remote(ref, plan, num_targets) for t, ref, plan in work])
    finally:
        ray.shutdown()


def shown(batch: Batch, trajectories: Sequence[Trajectory]) -> Iterator[str]:
    kinds = np.bincount(np.concatenate([t.kinds for t in trajectories]), minlength=3)
    yield (
        f"traces    {len(batch)} trajectories of 9 requests: {sum(batch['lengths'])} tokens,"
        f" {kinds[0]} sampled, {kinds[1]} observed, {kinds[2]} appended"
    )
    routes, support = batch["rollout_expert_indices"], batch["rollout_sample_support"]
    yield (
        f"inputs    sequences {list(batch['sequences'].shape)} left padded, response fields"
        f" {list(batch['loss_mask'].shape)}; routes {list(routes.values.shape)} {routes.dtype},"
        f" support {list(support.values.shape)} {support.dtype}"
    )
    padded = batch["attention_mask"].numel() * routes.row_shape.numel() * routes.dtype.itemsize
    stored = routes.values.nbytes
    yield f"bytes     routes {stored}, as a padded rectangle {padded} ({padded / stored:.1f} x)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ray", action="store_true", help="each rank is a Ray actor")
    parser.add_argument("--ranks", type=int, default=2, help="data-parallel ranks; default: 2")
    parser.add_argument("--max-tokens", type=int, default=400, help="of a microbatch, padded")
    args = parser.parse_args()

    trajectories = generate()
    batch = make_batch(trajectories)
    print("\n".join(shown(batch, trajectories)))  # noqa: T201
    parts, plans = share_out(batch, args.ranks, args.max_tokens)
    step = step_with_ray if args.ray else step_here
    results = step(batch, parts, plans, int(batch["loss_mask"].sum()))
    for rank, (part, plan, result) in enumerate(zip(parts, plans, results, strict=True)):
        print(  # noqa: T201
            f"rank {rank}    {len(part)} trajectories in {len(plan)} microbatches of"
            f" {list(plan.sizes)}, {sum(plan.synthetic)} of them synthetic; rows replayed / live /"
            f" dummy {' / '.join(map(str, result['rows']))}"
        )
    gaps = torch.cat([result["gaps"] for result in results])
    print(  # noqa: T201
        f"logprobs  |trainer - rollout| of {gaps.numel()} sampled tokens: mean {gaps.mean():.4f},"
        f" max {gaps.max():.3f}"
    )
    norms = " / ".join(f"{result['router_gradient']:.2e}" for result in results)
    loss = sum(result["loss"] for result in results)
    print(f"trained   loss {loss:.4f}, norm of the routers' gradients {norms}")  # noqa: T201


if __name__ == "__main__":
    main()
