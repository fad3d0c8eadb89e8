"""One of two ranks that hold half of a batch's rows each: their router's losses, to a file.

usage: python -m tests.megatron.loss_worker RANK STORE OUT KIND
"""

import sys
from types import SimpleNamespace

import torch
import torch.distributed as dist

from packhorse.replay.aux_loss import install_loss_shim
from packhorse.replay.cpu_megatron import install_cpu_shims
from packhorse.replay.targets import OpenMicrobatch, RouterTargets

EXPERTS, TOPK, ROWS, BATCH = 8, 2, 8, 2


def inputs():
    """logits [s, b, E], replayed ids [s, b, K], padding [s, b], live [s, b] of the whole batch."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(ROWS, BATCH, EXPERTS, generator=generator)
    ids = torch.rand(ROWS, BATCH, EXPERTS, generator=generator).argsort(-1)[..., :TOPK]
    padding = torch.zeros(ROWS, BATCH, dtype=torch.bool)
    padding[5:, 0] = padding[7:, 1] = True  # the second rank holds most of it
    live = torch.zeros(ROWS, BATCH, dtype=torch.bool)
    live[3, 0] = live[6, 1] = True
    return logits, ids, padding, live


def run(kind, rows, group):
    """Losses attached by the router of a rank that holds ``rows``, and d(losses)/d(logits)."""
    from megatron.core.transformer.moe.router import TopKRouter

    from tests.megatron.helpers import make_config

    config = make_config(
        moe_router_load_balancing_type=kind, moe_aux_loss_coeff=0.5,
        moe_router_enable_expert_bias=False,
    )  # fmt: skip
    groups = SimpleNamespace(tp=group, cp=group, tp_cp=group, tp_dp_cp=group)
    router = TopKRouter(config, pg_collection=groups)
    router.layer_number = 1
    losses = []
    attach = router.attach_and_log_load_balancing_loss

    def kept(activation, coefficient, loss, *args, **options):
        losses.append(loss.item())
        return attach(activation, coefficient, loss, *args, **options)

    router.attach_and_log_load_balancing_loss = kept
    logits, ids, padding, live = (part[rows] for part in inputs())
    logits.requires_grad_()
    target = RouterTargets("router", num_experts=EXPERTS, topk=TOPK)
    ids = ids.reshape(-1, TOPK)
    target.open(
        OpenMicrobatch(
            0, (ids,), live.flatten(), (padding.flatten(),), (True,), tuple(padding.shape), True
        )
    )
    router.router_replay = target
    undo = install_loss_shim(router, target, live_aux_loss=False)
    probs, _ = router.routing(logits)
    undo()
    (0.0 * probs).sum().backward()  # what is left are the losses' own gradients
    return losses, logits.grad


def main(rank, store, out, kind):
    torch.set_num_threads(1)
    install_cpu_shims()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    half = ROWS // 2
    single = [dist.new_group([0]), dist.new_group([1])][rank]
    result = {
        "joined": run(kind, slice(rank * half, (rank + 1) * half), dist.group.WORLD),
        "alone": run(kind, slice(None), single),
    }
    torch.save(result, out)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
