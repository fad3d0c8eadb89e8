"""Real GRPO on a tiny mixture of experts: does it learn, and how far is it from its rollout?

    python examples/grpo_tiny.py --mode both --seed 0          one run; again: goes on where it was
    python examples/grpo_tiny.py --all --jobs 12 --minutes 8   4 modes x 3 seeds at once, one GPU
    python examples/grpo_tiny.py --short --mode both           a small one, for a CPU
    ... --rollout vllm|transformers                            default: vLLM where it is installed

A task that a program can check: two numbers are given digit by digit, wanted are the sums of their
digits without carry. A Qwen3-MoE learns it from nothing in a short supervised warm-up, the end of
which is on answers with wrong digits; GRPO gets them right again. The trainer is Megatron-core in
fp32, the rollout vLLM or transformers on the same weights in bf16, handed over before every step.
Nothing is disturbed on purpose: routes and logprobs differ by rounding, and by the ids that the
sampler's top-p leaves out.

    mode       routers of the trainer     logprobs of the trainer
    off        choose for themselves      over the vocabulary
    routes     the rollout's routes       over the vocabulary
    support    choose for themselves      over the ids that the sampler kept
    both       the rollout's routes       over the ids that the sampler kept

All modes of a seed begin with one warm-up and see the same prompts. Each step is one line of JSON
in OUT/MODE-sSEED.jsonl; grpo_tiny_plot.py draws them, docs/grpo.md says what to look for.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

# Megatron's small functions are not worth a compiler's time here
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

import numpy as np
import torch
from grpo_tiny_model import (
    BOS,
    DIGIT,
    EOS,
    EQUALS,
    PLUS,
    ModelSizes,
    build_model,
    build_optimizer,
    first_weights,
    named_weights,
    write_folder,
)
from grpo_tiny_rollout import Sampling
from grpo_tiny_vllm import make_rollout
from torch import Tensor

from packhorse import (
    Batch,
    CapturedLayers,
    ReplayMicrobatch,
    ReplaySession,
    TokenLayout,
    Trajectory,
    generator_output,
    install_cpu_shims,
    make_inputs,
    merge_tallies,
    plan_by_tokens,
    score_microbatch,
    single_process,
    tally_logprobs,
    tally_metrics,
    token_masks,
    validate_batch,
)

MODES = ("off", "routes", "support", "both")
CLIP = 0.2
LEARNT = 0.02
WRONG = 0.7  # of the digits of a spoilt answer are drawn anew
SAMPLE_ROUTES_EVERY = 10


@dataclass(frozen=True)
class Setup:
    sizes: ModelSizes
    task: str  # "sums" or "copy"
    digits: int  # of each number
    prompts: int  # a step
    samples: int  # of each prompt
    max_tokens: int  # of a microbatch, padded
    warmup_steps: int  # on right answers, at most; fewer once the loss is below ``LEARNT``
    wrong_steps: int  # after them, on answers with wrong digits
    warmup_lr: float
    steps: int
    lr: float
    sampling: Sampling
    save_every: int


FULL = Setup(
    sizes=ModelSizes(
        vocab_size=32, hidden_size=128, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=32,
        num_experts=16, topk=2, moe_intermediate_size=64,
    ),
    task="sums", digits=8, prompts=16, samples=8, max_tokens=2048, warmup_steps=600, wrong_steps=60,
    warmup_lr=1e-3, steps=140, lr=5e-5, sampling=Sampling(top_k=10, top_p=0.8, max_tokens=9),
    save_every=20,
)  # fmt: skip
SHORT = Setup(
    sizes=ModelSizes(
        vocab_size=32, hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32,
        num_experts=8, topk=2, moe_intermediate_size=32,
    ),
    task="copy", digits=6, prompts=8, samples=8, max_tokens=512, warmup_steps=200, wrong_steps=20,
    warmup_lr=3e-3, steps=12, lr=1e-3, sampling=Sampling(top_k=10, top_p=0.8, max_tokens=7),
    save_every=4,
)  # fmt: skip


# --- the task -------------------------------------------------------------------------------------


def draw_prompts(setup: Setup, count: int, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    """[count, P] prompts and [count, digits + 1] answers.

    "sums": two numbers, the sums of their digits without carry. "copy": a number, from its end.
    """
    one, other = rng.integers(0, 10, (2, count, setup.digits))

    def column(token: int) -> np.ndarray:
        return np.full((count, 1), token)

    if setup.task == "sums":
        given = [one + DIGIT, column(PLUS), other + DIGIT]
        wanted = (one + other) % 10
    else:
        given, wanted = [one + DIGIT], one[:, ::-1]
    prompts = np.concatenate([column(BOS), *given, column(EQUALS)], axis=1)
    answers = np.concatenate([wanted + DIGIT, column(EOS)], axis=1)
    return prompts, answers


def spoil(answers: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The answers with ``WRONG`` of their digits drawn anew."""
    drawn = rng.integers(DIGIT, DIGIT + 10, answers.shape)
    spoilt = (rng.random(answers.shape) < WRONG) & (answers != EOS)
    return np.where(spoilt, drawn, answers)


def reward(response: np.ndarray, answer: np.ndarray) -> float:
    """The share of the answer's tokens that stand where they belong, the end token included."""
    count = min(len(response), len(answer))
    return float((response[:count] == answer[:count]).sum()) / len(answer)


def group_advantages(rewards: np.ndarray, samples: int) -> np.ndarray:
    """[B] float32: against the other samples of the same prompt."""
    groups = rewards.reshape(-1, samples)
    spread = groups.std(1, keepdims=True)
    return ((groups - groups.mean(1, keepdims=True)) / (spread + 1e-4)).ravel().astype(np.float32)


# --- the trainer ----------------------------------------------------------------------------------


@dataclass
class Microbatch:
    batch: Batch  # on the device
    layout: TokenLayout
    replay: ReplayMicrobatch
    loss_masks: list[np.ndarray]  # on the host, of each trajectory [length] bool

    @classmethod
    def of(cls, batch: Batch, device: torch.device, replays_routes: bool) -> "Microbatch":
        layout = TokenLayout.build(
            batch["lengths"],
            format="bshd",
            first_columns=batch["first_columns"],
            batch_width=batch["sequences"].shape[1],
            device=device,
        )
        loss_masks = token_masks(batch)
        routes = batch["rollout_expert_indices"] if replays_routes else None
        replay = ReplayMicrobatch(layout, routes, loss_masks=loss_masks)
        return cls(batch.to(device), layout, replay, loss_masks)


class Trainer:
    """Megatron's model of a checkpoint folder, and a GRPO step of it."""

    def __init__(self, folder: Path, setup: Setup, mode: str, lr: float) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.setup, self.mode = setup, mode
        self.model, self.config = build_model(folder)
        self.optimizer = build_optimizer(self.model, lr)
        layers = CapturedLayers.decoder(setup.sizes.num_layers)
        # the steps' number says which are sampled, whenever a run began
        self.sampled_session = ReplaySession(
            self.model, captured_layers=layers, sample_routes_every=1
        )
        self.plain_session = ReplaySession(self.model, captured_layers=layers)

    def step(
        self, number: int, trajectories: Sequence[Trajectory], advantages: np.ndarray
    ) -> dict[str, Any]:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        output = generator_output(trajectories) | {"advantages": advantages}
        batch = make_inputs(output, **self.setup.sizes.checks)
        validate_batch(batch, **self.setup.sizes.checks)
        plan = plan_by_tokens(
            batch["lengths"], max_tokens=self.setup.max_tokens, rectangle=True, overlong="refuse"
        )
        replays_routes = self.mode in ("routes", "both")
        microbatches = [
            Microbatch.of(part, self.device, replays_routes) for part in plan.split(batch)
        ]
        sampled = number % SAMPLE_ROUTES_EVERY == 0
        self.session = self.sampled_session if sampled else self.plain_session
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        with self.session.schedule([m.replay for m in microbatches]):
            results = get_forward_backward_func()(
                forward_step_func=self.forward_step,
                data_iterator=iter(microbatches),
                model=self.model,
                num_microbatches=len(microbatches),
                seq_length=max(m.layout.num_tokens for m in microbatches),
                micro_batch_size=1,
                forward_only=False,
            )
        updated, grad_norm, _ = self.optimizer.step()
        if not updated:
            raise RuntimeError("the optimizer refused the step: a gradient is not finite")
        return self.figures(results, batch, float(grad_norm))

    def forward_step(self, data_iterator: Iterator[Microbatch], model: Any) -> tuple[Tensor, Any]:
        step = self.session.begin(model)
        microbatch, layout = next(data_iterator), step.layout
        logits = model(
            layout.to_model(layout.align(microbatch.batch["sequences"], fill=0)),
            layout.to_model(layout.position_ids()),
            None,
            padding_mask=step.padding_mask,
        )
        scores_support = self.mode in ("support", "both")
        return logits, partial(loss_func, microbatch, scores_support)

    def figures(self, results: list[dict], batch: Batch, grad_norm: float) -> dict[str, Any]:
        """The figures of a step, in one copy from the device."""
        merged = tally_metrics(merge_tallies(result["tally"] for result in results))
        merged |= {
            name: sum(result[name] for result in results) / merged["logprobs/tokens"]
            for name in ("loss", "clipped", "outside")
        }
        metrics = self.session.metrics()
        if "routes/row_mismatch" in metrics:  # of a sampled step
            merged["route_mismatch"] = metrics["routes/row_mismatch"]
        values = torch.stack([value.double() for value in merged.values()]).tolist()
        report = self.session.report()
        support = (batch["rollout_sample_support"].values >= 0).sum(1).float()
        return {
            **{name.removeprefix("logprobs/"): v for name, v in zip(merged, values, strict=True)},
            "grad_norm": grad_norm,
            "support_mean": float(support.mean()),
            "support_max": int(support.max()),
            "microbatches": len(results),
            "rows_replayed": report.rows_replayed,
            "rows_live": report.rows_live,
            "rows_dummy": report.rows_dummy,
        }

    def warm_up_step(self, prompts: np.ndarray, answers: np.ndarray) -> float:
        """One supervised step on worked examples, the routers live; its loss."""
        ids = torch.from_numpy(np.concatenate([prompts, answers], axis=1)).to(self.device)
        positions = torch.arange(ids.shape[1], device=self.device).expand_as(ids)
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        logits = self.model(ids, positions, None)[:, prompts.shape[1] - 1 : -1]
        targets = ids[:, prompts.shape[1] :]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        loss.backward()
        self.model.finish_grad_sync()
        self.optimizer.step()
        return float(loss.detach())

    # --- what goes on after an interruption ------------------------------------------------------

    def state(self) -> dict[str, Any]:
        return {"model": self.model.module.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state(self, state: dict[str, Any]) -> None:
        self.model.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def loss_func(
    microbatch: Microbatch, scores_support: bool, logits: Tensor
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    batch, mask = microbatch.batch, microbatch.batch["loss_mask"]
    scores = score_microbatch(
        logits,
        microbatch.layout,
        batch["sequences"],
        batch["rollout_sample_support"] if scores_support else None,
        response_lengths=batch["response_lengths"],
        loss_masks=microbatch.loss_masks,
    )
    logprobs = scores.logprobs.to_padded(0.0, mask.shape[1], side="left")  # [B, R], as the mask
    rollout = batch["rollout_logprobs"]
    advantages = batch["advantages"][:, None]
    ratio = torch.exp(logprobs - rollout)
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    loss = -(torch.minimum(ratio * advantages, clipped * advantages) * mask).sum()
    num_tokens = mask.sum().int()
    kept = {
        "loss": loss.detach().clone(),  # the schedule scales the loss in place
        "clipped": ((ratio * advantages > clipped * advantages) & (mask > 0)).sum(),
        "outside": ((ratio != clipped) & (mask > 0)).sum(),
        "tally": tally_logprobs(logprobs.detach(), rollout, mask),
    }
    return loss, num_tokens, kept


# --- one run --------------------------------------------------------------------------------------


def warm_up(folder: Path, setup: Setup, seed: int) -> Path:
    """The checkpoint folder that all modes of a seed begin with."""
    if (folder / "warm" / "model.safetensors").exists():
        return folder / "warm"
    write_folder(folder / "first", setup.sizes, first_weights(setup.sizes, seed))
    trainer = Trainer(folder / "first", setup, "off", setup.warmup_lr)
    begin, learnt_at = time.monotonic(), setup.warmup_steps
    for step in range(setup.warmup_steps + setup.wrong_steps):
        rng = np.random.default_rng([seed, 0, step])
        prompts, answers = draw_prompts(setup, setup.prompts * setup.samples, rng)
        if step >= learnt_at:
            answers = spoil(answers, rng)
        loss = trainer.warm_up_step(prompts, answers)
        if loss < LEARNT:
            learnt_at = min(learnt_at, step + 1)
        if (step + 1) % 50 == 0 or step + 1 == learnt_at:
            say(f"warm-up {step + 1}: loss {loss:.3f}, {time.monotonic() - begin:.1f} s")
        if step + 1 == learnt_at + setup.wrong_steps:
            break
    made = folder / f"warm.{os.getpid()}"
    write_folder(made, setup.sizes, dict(named_weights(trainer.model, trainer.config)))
    if not (folder / "warm").exists():
        made.rename(folder / "warm")
    return folder / "warm"


def run(
    out: Path,
    setup: Setup,
    mode: str,
    seed: int,
    until: float,
    sampler: str = "transformers",
    vllm_python: Path | None = None,
) -> int:
    """Steps until all are done or the clock says ``until``; how many are done.

    Raises:
        ValueError: the run that goes on was sampled by another rollout.
    """
    name = f"{mode}-s{seed}"
    lines_path, saved_path = out / f"{name}.jsonl", out / f"{name}.pt"
    start = warm_up(out / f"start-s{seed}", setup, seed)
    with closing(make_rollout(sampler, start, setup.sizes, setup.sampling, vllm_python)) as rollout:
        about = environment(setup) | rollout.about
        (out / "environment.json").write_text(json.dumps(about, indent=1), encoding="utf-8")
        trainer = Trainer(start, setup, mode, setup.lr)
        done, lines = 0, []
        if saved_path.exists():
            saved = torch.load(saved_path, map_location="cpu", weights_only=False)
            before, now = saved.get("rollout", "transformers"), rollout.about["rollout"]
            if before != now:
                raise ValueError(f"{name} was begun with --rollout {before}, this is {now}")
            trainer.load_state(saved["trainer"])
            done = saved["steps"]
            lines = lines_path.read_text(encoding="utf-8").splitlines()[:done]
        lines_path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")

        def save() -> None:
            state = {"steps": done, "rollout": rollout.about["rollout"], "trainer": trainer.state()}
            scratch = saved_path.with_suffix(".new")
            torch.save(state, scratch)
            scratch.rename(saved_path)

        with lines_path.open("a", encoding="utf-8") as file:
            while done < setup.steps and time.monotonic() < until:
                line = {"mode": mode, "seed": seed, "step": done}
                line |= one_step(trainer, rollout, seed, done)
                file.write(json.dumps(line) + "\n")
                file.flush()
                done += 1
                if done % setup.save_every == 0:
                    save()
                if done % 10 == 0:
                    say(
                        f"{name} step {done}: reward {line['reward']:.3f}, |d| mean"
                        f" {line['abs_diff_mean']:.4f} p99 {line['abs_diff_p99']:.3f}, k3"
                        f" {line['k3']:.2e}, {line['seconds']:.2f} s"
                    )
        save()
    return done


def one_step(trainer: Trainer, rollout: Any, seed: int, step: int) -> dict[str, Any]:
    """The rollout gets the weights, samples, and is trained on; all from ``seed`` and ``step``."""
    setup, begin = trainer.setup, time.monotonic()
    rng = np.random.default_rng([seed, 1, step])
    prompts, answers = (
        np.repeat(rows, setup.samples, axis=0) for rows in draw_prompts(setup, setup.prompts, rng)
    )
    rollout.load_weights(named_weights(trainer.model, trainer.config))
    trajectories = rollout.generate(prompts, seed=1_000_003 * seed + step)
    sampled = time.monotonic()
    rewards = np.array(
        [reward(t.response_ids, answer) for t, answer in zip(trajectories, answers, strict=True)]
    )
    line = trainer.step(step, trajectories, group_advantages(rewards, setup.samples))
    return {
        "reward": float(rewards.mean()),
        "exact": float((rewards == 1.0).mean()),
        "response_mean": float(np.mean([t.response_ids.size for t in trajectories])),
        **line,
        "seconds": round(time.monotonic() - begin, 4),
        "rollout_seconds": round(sampled - begin, 4),
    }


def environment(setup: Setup) -> dict[str, Any]:
    from importlib.metadata import version

    cuda = torch.cuda.is_available()
    done = subprocess.run(
        ["git", "describe", "--always"],
        cwd=Path(__file__).parent, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return {
        "gpu": torch.cuda.get_device_name() if cuda else "CPU",
        "torch": torch.__version__,
        "megatron_core": version("megatron-core"),
        "python": ".".join(map(str, sys.version_info[:3])),
        "commit": os.environ.get("BENCH_COMMIT") or done.stdout.strip() or "unknown",
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "setup": asdict(setup),
    }


def say(text: str) -> None:
    print(text, flush=True)  # noqa: T201


# --- several runs ---------------------------------------------------------------------------------


def run_all(args: argparse.Namespace, seeds: Sequence[int], until: float) -> int:
    """The warm-ups of all seeds, then all modes and seeds, at most ``args.jobs`` at once."""
    common = [sys.executable, __file__, "--out", str(args.out)]
    common += ["--short"] * args.short + ["--rollout", args.rollout]
    if args.vllm_python is not None:
        common += ["--vllm-python", str(args.vllm_python)]
    if args.steps is not None:
        common += ["--steps", str(args.steps)]
    warm_ups = [(f"warm-up-s{seed}", ["--warm-up", "--seed", str(seed)]) for seed in seeds]
    runs = [
        (f"{mode}-s{seed}", ["--mode", mode, "--seed", str(seed)])
        for seed in seeds
        for mode in MODES
    ]
    failed = run_processes(common, warm_ups, args, until)
    return failed or run_processes(common, runs, args, until)


def run_processes(
    common: list[str], work: list[tuple[str, list[str]]], args: argparse.Namespace, until: float
) -> int:
    """How many failed; the output of each goes to OUT/NAME.log."""
    waiting, running, failed = list(work), {}, 0
    while waiting or running:
        if waiting and time.monotonic() > until:
            say(f"no time is left for {', '.join(name for name, _ in waiting)}")
            waiting.clear()
        while waiting and len(running) < args.jobs:
            name, options = waiting.pop(0)
            minutes = max((until - time.monotonic()) / 60, 0.0)
            with (args.out / f"{name}.log").open("a", encoding="utf-8") as log:
                running[name] = subprocess.Popen(
                    [*common, *options, "--minutes", f"{minutes:.3f}"],
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                )
        time.sleep(0.2)
        for name, process in list(running.items()):
            if process.poll() is None:
                continue
            del running[name]
            log = (args.out / f"{name}.log").read_text(encoding="utf-8").splitlines()
            say(f"{name}: exit code {process.returncode}; {log[-1] if log else ''}")
            if process.returncode:
                failed += 1
                say("\n".join(log[-15:]))
    return failed


def main() -> None:
    begin = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mode", choices=MODES, default="both")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--all", action="store_true", help="all modes and three seeds")
    parser.add_argument("--jobs", type=int, default=12, help="of --all: processes at once")
    parser.add_argument("--out", type=Path, default=Path("build/grpo_tiny"))
    parser.add_argument("--minutes", type=float, default=60.0, help="stop, to go on another time")
    parser.add_argument("--steps", type=int, help="of GRPO, in all")
    parser.add_argument("--short", action="store_true", help="sizes for a CPU")
    parser.add_argument("--warm-up", action="store_true", help="the warm-up of this seed alone")
    parser.add_argument("--rollout", choices=("auto", "vllm", "transformers"), default="auto",
                        help="auto: vLLM where it is installed")  # fmt: skip
    parser.add_argument("--vllm-python", type=Path, metavar="PYTHON",
                        help="that has vLLM; default: this one, or tools/vllm.sh's")  # fmt: skip
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    setup = SHORT if args.short else FULL
    if args.steps is not None:
        setup = replace(setup, steps=args.steps)
    until = begin + 60 * args.minutes
    if args.all:
        sys.exit(run_all(args, range(3), until))
    if os.environ.get("OMP_NUM_THREADS") == "1":
        torch.set_num_threads(1)
    install_cpu_shims()  # does nothing for a GPU with Transformer Engine
    with single_process(seed=args.seed):
        if args.warm_up:
            warm_up(args.out / f"start-s{args.seed}", setup, args.seed)
        else:
            done = run(args.out, setup, args.mode, args.seed, until, args.rollout, args.vllm_python)
            say(f"{done} of {setup.steps} steps, {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
