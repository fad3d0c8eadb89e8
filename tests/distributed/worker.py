"""One rank of the distributed cases.

    python tests/distributed/worker.py RANK WORLD FOLDER

Reads a line of JSON a case from its standard input,
{"case": name, "run": number, "fault": null, "scenario": null}, joins the other ranks through a
file, and leaves FOLDER/RUN-RANK.pkl: what its routers did and how far losses and gradients are from
one rank's, or the traceback. Ends when its input does. Computes on the GPU that it sees, if any;
with PACKHORSE_TEST_NCCL=1 on the GPU of its rank, over NCCL.

A fault is for the tests of the tests, and the last rank's only: "raise" and "hang" in the first
training schedule, "row" gives one slot of one layer another microbatch's route, "mask" counts pads,
"live aux loss" balances the router's own choice.
"raise late" and "bypass" are those of ``faults.py``.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import pickle
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from packhorse.packed.tensor import PackedTensor
from packhorse.replay.cpu_megatron import install_cpu_shims
from packhorse.replay.layout import TokenLayout
from packhorse.replay.session import CapturedLayers, ReplayMicrobatch, ReplaySession
from tests.distributed.case import (
    EXPERTS,
    THD_TOKENS,
    Case,
    Trajectory,
    layout_arguments,
    trajectories,
)
from tests.distributed.cases import CASES, GPU_CASES, NCCL_CASES
from tests.distributed.faults import bypass, run_scenario
from tests.distributed.log import RouteLog
from tests.distributed.models import (
    all_routers_of,
    build_chunks,
    causal_mask,
    mtp_routers_of,
    routers_of,
    slice_like,
    start_ranks,
    whole_name,
)
from tests.distributed.reference import ADAM_EPS, LEARNING_RATE, Reference, ReferenceStep
from tests.distributed.router_losses import DEVICE, take_logged
from tests.oracle import OracleLayout


def run_case(case: Case, fault: str | None) -> dict[str, Any]:
    """Everything that the parent compares; plain Python and NumPy."""
    with prepare(case, fault) as (run, steps):
        return run.run(steps)


@contextlib.contextmanager
def prepare(
    case: Case, fault: str | None = None, **groups: Any
) -> Iterator[tuple[ParallelRun, list[ReferenceStep]]]:
    """This rank's part of the case and what one rank makes of each schedule.

    Args:
        groups: more arguments of ``initialize_model_parallel``.
    """
    from megatron.core import parallel_state

    start_ranks()
    reference = Reference(case)
    steps = [reference.run(number) for number in range(len(case.schedules))]
    if case.optimizer != "none":
        reference.unstepped = reference.without_steps(len(steps) - 1)
    parallel_state.destroy_model_parallel()
    if case.etp:
        groups["expert_tensor_parallel_size"] = case.etp
    start_ranks(
        tensor_model_parallel_size=case.tp,
        pipeline_model_parallel_size=case.pp,
        virtual_pipeline_model_parallel_size=case.vp_size,
        context_parallel_size=case.cp,
        expert_model_parallel_size=case.ep,
        **groups,
    )
    run = ParallelRun(case, reference, fault)
    try:
        yield run, steps
    finally:
        run.release()
        parallel_state.destroy_model_parallel()


class ParallelRun:
    """This rank's part of a case, through Megatron's own schedule."""

    def __init__(self, case: Case, reference: Reference, fault: str | None) -> None:
        from megatron.core import parallel_state
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
        )
        from megatron.core.transformer.module import Float16Module

        self.case, self.fault, self.unstepped = case, fault, reference.unstepped
        self.ranks = {
            "tp": parallel_state.get_tensor_model_parallel_rank(),
            "pp": parallel_state.get_pipeline_model_parallel_rank(),
            "cp": parallel_state.get_context_parallel_rank(),
            "dp": parallel_state.get_data_parallel_rank(),
            "ep": parallel_state.get_expert_model_parallel_rank(),
        }
        self.bare = build_chunks(case, parallel=True)
        self.config = config = self.bare[0].config
        self.load(reference.weights)
        config.finalize_model_grads_func = self.finalize
        settings = {
            "grad_reduce_in_fp32": True,
            "use_distributed_optimizer": case.optimizer == "distributed",
            **case.ddp,
        }
        inner = self.bare
        if case.dtype == "bf16":
            inner = [Float16Module(config, chunk) for chunk in self.bare]
        self.models = [
            DistributedDataParallel(
                config=config, ddp_config=DistributedDataParallelConfig(**settings), module=chunk
            )
            for chunk in inner
        ]
        if case.ddp.get("overlap_grad_reduce"):  # reduce after the last microbatch only
            no_sync = [model.no_sync for model in self.models]
            config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
        self.optimizer = None if case.optimizer == "none" else self.make_optimizer()
        self.counted: dict[int, list[float]] = {}
        captured = {
            "decoder": CapturedLayers.decoder(case.depth),
            "moe_only": CapturedLayers.moe_only(),
            "listed": CapturedLayers.listed(case.axis),
        }
        self.session = ReplaySession(
            self.models if case.vp_size else self.models[0],
            captured_layers=captured[case.captured],
            allow_live_aux_loss=fault == "live aux loss",
        )
        take_logged()  # a list of the process, as long as the layers of the model before

    def release(self) -> None:
        """Let go of what would keep the models, and with them their groups and threads of gloo, for
        good: DDP's hooks on gradients and the last graph, held by the dispatchers, are a cycle that
        no collector sees; Megatron caches rotary positions by their module."""
        from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

        for model in self.models:
            model.grad_accs.clear()
            for module in model.modules():
                if hasattr(module, "token_dispatcher"):
                    vars(module.token_dispatcher).clear()
        for cached in vars(RotaryEmbedding).values():
            if hasattr(cached, "cache_clear"):
                cached.cache_clear()

    def finalize(self, *args: Any, **options: Any) -> None:
        """Megatron's own; before it, tokens that each expert counted (heads by minus depth)."""
        from megatron.core.distributed import finalize_model_grads

        self.counted = self.counters()
        finalize_model_grads(*args, **options)

    def counters(self) -> dict[int, list[float]]:
        return {
            layer: router.local_tokens_per_expert.tolist()
            for chunk in self.bare
            for layer, router in all_routers_of(chunk).items()
        }

    def make_data(self, number: int) -> tuple[list[dict[str, Any]], list[ReplayMicrobatch]]:
        """Model inputs and replayed microbatches of the schedule of this number."""
        inputs, microbatches = [], []
        for m in range(self.case.count(number)):
            given = trajectories(self.case, self.ranks["dp"], m, number)
            each = layout_arguments(self.case, given, self.ranks["tp"], self.ranks["cp"])
            made = make_inputs(given, OracleLayout(**each), self.case.mtp > 0)
            inputs.append(made)
            layout = layout_of(self.config, each, made.get("packed_seq_params"))
            microbatches.append(make_microbatch(given, layout, self.case.dummy))
        return inputs, microbatches

    def parameters(self) -> Iterator[tuple[str, Any, Any]]:
        """Name in the whole model, the parameter, and how the whole one is sliced for it."""
        for chunk in self.bare:
            for name, parameter in chunk.named_parameters():
                whole = whole_name(chunk, name, self.case, self.ranks["ep"])

                def cut(tensor: Any, parameter: Any = parameter, whole: str = whole) -> Any:
                    return slice_like(tensor, parameter, whole, self.case, self.ranks["tp"])

                yield whole, parameter, cut

    def load(self, weights: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, parameter, cut in self.parameters():
                parameter.copy_(cut(weights[name]))

    def make_optimizer(self) -> Any:
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        config = OptimizerConfig(
            optimizer="adam",
            lr=LEARNING_RATE,
            weight_decay=0.0,
            adam_beta1=0.9,
            adam_beta2=0.999,
            adam_eps=ADAM_EPS,
            params_dtype=torch.float32,
            use_distributed_optimizer=True,
            clip_grad=0.0,
        )
        return get_megatron_optimizer(config, self.models)

    def run(self, steps: list[ReferenceStep]) -> dict[str, Any]:
        schedules = [self.schedule(number, step) for number, step in enumerate(steps)]
        return {"ranks": self.ranks, "schedules": schedules, "unstepped": self.unstepped}

    def schedule(self, number: int, step: ReferenceStep) -> dict[str, Any]:
        case, training = self.case, self.case.schedules[number] == "training"
        inputs, microbatches = self.make_data(number)
        with RouteLog(self.bare) as log:
            losses = self.run_schedule(inputs, microbatches, training)
        logged = take_logged()
        gradients = self.compare_gradients(step) if training else {}
        if training and self.optimizer is not None:
            assert self.optimizer.step()[0]
        bias = {
            layer: float((router.expert_bias - step.expert_bias[layer]).abs().max())
            for chunk in self.bare
            for layer, router in all_routers_of(chunk).items()
        }
        report = self.session.report()
        return {
            "kind": case.schedules[number],
            "calls": log.calls,
            "routers": [sorted(routers_of(chunk)) for chunk in self.bare],
            "heads": [sorted(mtp_routers_of(chunk)) for chunk in self.bare],
            "losses": losses,
            "expected_losses": step.losses,
            "expected_mtp_routes": step.mtp_routes,
            "changed": step.changed,
            "logged": logged,
            "expected_router_losses": step.router_losses,
            "share": step.share,
            "gradients": gradients,
            "bias_error": bias,
            "counts": self.counted if training else self.counters(),
            "completed": report.completed,
            "objects_left": self.objects_left(),
        }

    def objects_left(self) -> list[int]:
        return [
            layer
            for chunk in self.bare
            for layer, router in all_routers_of(chunk).items()
            if router.router_replay is not None
        ]

    def run_schedule(
        self, inputs: list[dict[str, Any]], microbatches: list[ReplayMicrobatch], training: bool
    ) -> list[float]:
        """One of Megatron's schedules inside one of the session's; losses of a last stage."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        case = self.case
        losses: list[float] = []
        for model in self.models:
            model.zero_grad_buffer()
        if self.optimizer is not None:
            self.optimizer.zero_grad()

        def forward_step(data: Iterator[dict[str, Any]], model: Any) -> tuple[Any, Any]:
            replayed = self.session.begin(model)
            if self.fault is not None and training:
                self.do_wrong(replayed.index, len(microbatches))
            inputs = dict(next(data))
            trained = inputs.pop("trained")
            output = model(**inputs, padding_mask=replayed.padding_mask)

            def loss(values: torch.Tensor) -> tuple:
                total = (values * trained).sum()
                losses.append(float(total.detach()))
                if case.router_losses:
                    return total, {}
                return total, trained.sum().int(), {}

            return output, loss

        iterators = [iter(list(inputs)) for _ in self.models]
        many = case.vp_size is not None
        with (
            self.session.schedule(microbatches),
            contextlib.nullcontext() if training else torch.no_grad(),
        ):
            get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=iterators if many else iterators[0],
                model=self.models if many else self.models[0],
                num_microbatches=len(microbatches),
                seq_length=case.width if case.format == "bshd" else THD_TOKENS,
                micro_batch_size=2 if case.format == "bshd" else 1,
                forward_only=not training,
            )
        return losses

    def do_wrong(self, microbatch: int, number: int) -> None:
        """Args:
        number: microbatches of the schedule.
        """
        if self.fault == "raise" or (self.fault == "raise late" and microbatch == 1):
            raise RuntimeError("a fault on purpose")
        if self.fault == "hang":
            time.sleep(3600)
        if self.fault == "bypass" and microbatch == number - 1:
            bypass(self)
        if self.fault not in ("row", "mask"):
            return
        if microbatch != 1:
            return
        routers = routers_of(self.bare[-1])
        opened = routers[max(routers)].router_replay._open
        if self.fault == "row":
            last = opened.targets[-1]  # of the chunk's layers
            last[2] = (last[2] + 1) % EXPERTS
        else:
            for mask in opened.padding_masks:
                mask[:] = False

    def compare_gradients(self, step: ReferenceStep) -> dict[str, tuple[float, float]]:
        """(largest error, largest expected) of each parameter that DDP holds whole on this rank."""
        compared = {}
        for name, parameter, cut in self.parameters():
            wanted, actual = cut(step.gradients[name]), parameter.main_grad
            if self.case.optimizer != "none":
                continue  # reduced into shards: the next steps' losses tell
            error = (actual - wanted).abs().max()
            compared[name] = float(error), float(wanted.abs().max())
        return compared


def layout_of(config: Any, arguments: dict[str, Any], packed: Any) -> TokenLayout:
    """From Megatron's own state, which must agree with the sizes and ranks of the case."""
    padded_lengths = arguments.get("padded_lengths")
    if packed is not None and DEVICE.type == "cpu":
        padded_lengths = None  # the packer's offsets say so; on a GPU nobody may read them
    elif packed is not None and padded_lengths is None:
        padded_lengths = OracleLayout(**arguments).padded()
    layout = TokenLayout.from_megatron(
        arguments["lengths"],
        config,
        packed_seq_params=packed,
        format=arguments["format"],
        cp_order=arguments["cp_order"],
        padded_lengths=padded_lengths,
        device=DEVICE,
    )
    explicit = TokenLayout.build(**arguments, device=DEVICE)
    for name in ("lengths", "padded_lengths", "num_tokens", "num_rank_tokens", "cu_seqlens_padded"):
        assert getattr(layout, name) == getattr(explicit, name), name
    for name in ("format", "tp_size", "cp_size", "cp_rank", "cp_order", "sequence_parallel"):
        assert getattr(layout, name) == getattr(explicit, name), name
    assert layout.tp_rank == explicit.tp_rank
    assert (layout.cp_group is None) == (layout.cp_size == 1)
    return layout


def make_inputs(given: list[Trajectory], layout: OracleLayout, mtp: bool) -> dict[str, Any]:
    """Model inputs of this rank, slot by slot."""
    slots = layout.slots()
    ids, labels, trained = (np.zeros(len(slots), np.int64) for _ in range(3))
    for slot, (sequence, position) in enumerate(slots):
        if layout.is_real(sequence, position):
            ids[slot] = given[sequence].tokens[position]
        if layout.is_real(sequence, position + 1):
            labels[slot] = given[sequence].tokens[position + 1]
            trained[slot] = given[sequence].trained[position + 1]

    def to_model(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(layout.to_model(values)).to(DEVICE)

    padded = layout.padded()
    width = padded[0]
    inputs: dict[str, Any] = {
        "input_ids": to_model(ids),
        "position_ids": to_model(np.array(layout.position_ids())),
        "labels": to_model(labels),
        "trained": to_model(trained.astype(np.float32)),
        "attention_mask": None,
    }
    if mtp:
        inputs["loss_mask"] = inputs["trained"]
    if layout.format == "thd":
        from megatron.core.packed_seq_params import PackedSeqParams

        bounds = torch.tensor(np.cumsum([0, *padded]), dtype=torch.int32, device=DEVICE)
        inputs["packed_seq_params"] = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=bounds,
            cu_seqlens_kv=bounds,
            cu_seqlens_q_padded=bounds,
            cu_seqlens_kv_padded=bounds,
            max_seqlen_q=max(padded),
            max_seqlen_kv=max(padded),
        )
    elif layout.cp_size == 1:
        inputs["attention_mask"] = causal_mask(width)
    return inputs


def make_microbatch(given: list[Trajectory], layout: TokenLayout, dummy: Any) -> ReplayMicrobatch:
    return ReplayMicrobatch(
        layout,
        PackedTensor.from_segments([torch.from_numpy(t.routes).to(torch.uint8) for t in given]),
        loss_masks=[trajectory.trained for trajectory in given],
        appended=[trajectory.appended for trajectory in given],
        missing=[trajectory.missing for trajectory in given],
        dummy=dummy,
    )


# --- the process ----------------------------------------------------------------------------------


def reduce_gradients_one_by_one() -> None:
    """DDP joins its all-reduces into one; gloo has that for tensors of a CPU only."""
    from megatron.core.distributed import param_and_grad_buffer

    def joins_nothing(*args: Any, **options: Any) -> contextlib.nullcontext:
        return contextlib.nullcontext()

    param_and_grad_buffer._coalescing_manager = joins_nothing


def serve(rank: int, world: int, folder: Path) -> None:
    backend = "nccl" if os.environ.get("PACKHORSE_TEST_NCCL") == "1" else "gloo"
    torch.set_num_threads(1)
    install_cpu_shims()
    if backend == "nccl":
        torch.cuda.set_device(rank)
    elif DEVICE.type == "cuda":
        reduce_gradients_one_by_one()
    (folder / f"ready-{os.getpid()}").touch()
    for line in sys.stdin:
        asked = json.loads(line)
        run = asked["run"]
        fault = asked["fault"] if rank == world - 1 else None
        dist.init_process_group(
            backend, init_method=f"file://{folder}/store-{run}", rank=rank, world_size=world
        )
        try:
            case = (CASES | GPU_CASES | NCCL_CASES)[asked["case"]]
            if asked["scenario"]:
                store = f"file://{folder}/store-{run}-again"
                made = run_scenario(asked["scenario"], case, rank == world - 1, store)
            else:
                made = run_case(case, fault)
            result = {"result": made}
        except BaseException:
            result = {"error": traceback.format_exc()}
        partial = folder / f"{run}-{rank}.partial"
        partial.write_bytes(pickle.dumps(result))
        partial.rename(folder / f"{run}-{rank}.pkl")
        if "error" in result:
            return  # its peers may wait for it: the parent ends them
        gc.collect()  # models in cycles hold groups, and a group holds threads
        dist.destroy_process_group()


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
