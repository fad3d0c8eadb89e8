"""The table of distributed cases."""

from __future__ import annotations

from tests.distributed.case import Case


def table() -> dict[str, Case]:
    cases = [*_tensor_parallel(), *_pipelines(), *_interleaved(), *_experts(), *_contexts()]
    cases += [*_router_losses(), *_models(), *_optimizers()]
    # ranks live from case to case: those of one world stand together
    return {case.name: case for case in sorted(cases, key=lambda case: -case.world)}


def _tensor_parallel() -> list[Case]:
    return [
        *(Case(f"tp2-sp-{r}", tp=2, recompute=r) for r in ("none", "full", "moe", "core_attn")),
        Case("tp2-sp-thd-full", tp=2, format="thd", recompute="full", dummy="spread"),
        Case("tp2-sp-thd-fp8-padding-moe", tp=2, format="thd", fp8="delayed", recompute="moe"),
        # 8 tokens on each rank and 8 experts: a mask of the wrong shape broadcasts
        *(
            Case(f"tp2-sp-tokens-equal-experts-{r}", tp=2, width=8, recompute=r, rounds=2)
            for r in ("none", "full")
        ),
        Case("tp2-sp-ties-full", tp=2, ties=True, recompute="full"),
        Case("tp2-sp-bf16-full", tp=2, dtype="bf16", recompute="full"),
        Case(
            "tp2-sp-allgather-moe",
            tp=2,
            recompute="moe",
            settings={"moe_token_dispatcher_type": "allgather"},
        ),
        Case("tp4-sp-full", world=4, tp=4, recompute="full"),
    ]


def _pipelines() -> list[Case]:
    return [
        Case("pp2-none", pp=2, microbatches=5),
        Case("pp2-full", pp=2, microbatches=5, recompute="full"),
        Case("pp2-vpp1-full", pp=2, vpp_given=True, microbatches=4, recompute="full"),
        Case("pp2-rounds-full", pp=2, microbatches=4, forward_only=1, rounds=2, recompute="full"),
        Case(
            "pp2-dynamic-thd-moe",
            pp=2,
            microbatches=4,
            recompute="moe",
            format="thd",
            dynamic=True,
            settings={"variable_seq_lengths": True},
        ),
        Case(
            "pp2-dense-first-full",
            pp=2,
            num_layers=4,
            dense=(0, 1),
            captured="moe_only",
            microbatches=4,
            recompute="full",
        ),
        Case(
            "pp2-every-second-layer-full",
            pp=2,
            num_layers=4,
            dense=(1, 3),
            captured="listed",
            microbatches=3,
            recompute="full",
        ),
        Case(
            "pp2-uneven-full",
            pp=2,
            num_layers=4,
            microbatches=3,
            recompute="full",
            settings={"num_layers_in_first_pipeline_stage": 1},
        ),
        Case(
            "pp2-embedding-in-split-moe",
            pp=2,
            num_layers=3,
            microbatches=3,
            recompute="moe",
            settings={"account_for_embedding_in_pipeline_split": True},
        ),
        Case(
            "pp2-layout-full",
            pp=2,
            num_layers=4,
            microbatches=3,
            recompute="full",
            settings={
                "pipeline_model_parallel_layout": [
                    ["embedding", "decoder"],
                    ["decoder", "decoder", "decoder", "loss"],
                ]
            },
        ),
        Case("pp2-ep2-full", world=4, pp=2, ep=2, microbatches=4, recompute="full"),
        Case("pp4-full", world=4, pp=4, num_layers=4, microbatches=5, recompute="full"),
    ]


def _interleaved() -> list[Case]:
    return [
        *(
            Case(f"pp2-vpp2-{r}", pp=2, vpp=2, num_layers=4, microbatches=8, recompute=r)
            for r in ("none", "full", "moe")
        ),
        Case(
            "pp2-vpp2-rounds-full",
            pp=2,
            vpp=2,
            num_layers=4,
            microbatches=4,
            forward_only=2,
            rounds=2,
            recompute="full",
        ),
        Case(
            "pp2-vpp2-chunk-without-router",
            pp=2,
            vpp=2,
            num_layers=4,
            dense=(0,),
            microbatches=8,
            recompute="full",
        ),
        Case(
            "pp2-vpp2-layout-chunk-without-layer",
            pp=2,
            vpp=2,
            num_layers=4,
            microbatches=4,
            recompute="full",
            settings={
                "pipeline_model_parallel_layout": [
                    ["embedding", "decoder"],
                    ["decoder", "decoder"],
                    ["decoder"],
                    ["loss"],
                ]
            },
        ),
        Case(
            "pp2-vpp2-overlap-full",
            pp=2,
            vpp=2,
            num_layers=4,
            microbatches=6,
            recompute="full",
            settings={"overlap_p2p_comm": True},
        ),
        Case(
            "pp2-vpp2-groups-of-3-full",
            pp=2,
            vpp=2,
            num_layers=4,
            microbatches=6,
            recompute="full",
            settings={"microbatch_group_size_per_vp_stage": 3},
        ),
        Case(
            "pp2-vpp2-bf16-moe",
            pp=2,
            vpp=2,
            num_layers=4,
            microbatches=4,
            dtype="bf16",
            recompute="moe",
        ),
        Case("pp2-vpp4-block", pp=2, vpp=4, num_layers=8, microbatches=4, recompute="block"),
        Case(
            "tp2-pp2-vpp2-full",
            world=4,
            tp=2,
            pp=2,
            vpp=2,
            num_layers=4,
            microbatches=4,
            recompute="full",
        ),
    ]


def _experts() -> list[Case]:
    return [
        *(Case(f"ep2-{r}", ep=2, recompute=r, dummy="spread") for r in ("none", "full", "moe")),
        Case(
            "ep2-allgather-full",
            ep=2,
            recompute="full",
            settings={"moe_token_dispatcher_type": "allgather"},
        ),
        Case("ep2-ties-moe", ep=2, ties=True, recompute="moe"),
        Case("ep2-bf16-full", ep=2, dtype="bf16", recompute="full"),
        Case("ep2-rounds-moe", ep=2, forward_only=1, rounds=2, recompute="moe"),
        Case("tp2-ep4-etp1-moe", world=4, tp=2, ep=4, etp=1, recompute="moe", dummy="spread"),
        Case(
            "pp2-vpp2-ep2-moe",
            world=4,
            pp=2,
            vpp=2,
            ep=2,
            num_layers=4,
            microbatches=4,
            recompute="moe",
            dummy="spread",
        ),
    ]


def _contexts() -> list[Case]:
    return [
        Case("cp2-thd-full", cp=2, format="thd", recompute="full"),
        Case("cp2-bshd-full", cp=2, recompute="full"),
        Case("cp2-thd-moe", cp=2, format="thd", recompute="moe", dummy="spread"),
        Case(
            "cp2-contiguous-thd-full", cp=2, cp_order="contiguous", format="thd", recompute="full"
        ),
        Case("cp2-contiguous-bshd-moe", cp=2, cp_order="contiguous", recompute="moe"),
        Case("cp2-tp2-thd-full", world=4, cp=2, tp=2, format="thd", recompute="full"),
        Case("cp2-thd-bf16-moe", cp=2, format="thd", dtype="bf16", recompute="moe"),
        Case(
            "pp2-vpp2-cp2-thd-full",
            world=4,
            pp=2,
            vpp=2,
            cp=2,
            format="thd",
            num_layers=4,
            microbatches=4,
            recompute="full",
        ),
        Case("cp2-ep4-full", world=4, cp=2, ep=4, format="thd", recompute="full"),
    ]


def _router_losses() -> list[Case]:
    return [
        Case("tp2-sp-aux-loss-full", tp=2, aux="aux_loss", recompute="full"),
        Case("tp2-sp-seq-aux-loss-moe", tp=2, aux="seq_aux_loss", recompute="moe"),
        Case("tp2-sp-aux-and-z-loss-full", tp=2, aux="aux_loss", z_loss=True, recompute="full"),
        Case("cp2-thd-aux-loss-full", cp=2, format="thd", aux="aux_loss", recompute="full"),
        Case("cp2-bshd-seq-aux-loss-none", cp=2, aux="seq_aux_loss"),
        Case(
            "cp2-thd-aux-and-z-loss-moe",
            cp=2,
            format="thd",
            aux="aux_loss",
            z_loss=True,
            recompute="moe",
        ),
        Case("tp2-sp-bf16-aux-loss-moe", tp=2, dtype="bf16", aux="aux_loss", recompute="moe"),
        Case("ep2-aux-and-z-loss-none", ep=2, aux="aux_loss", z_loss=True),
        Case(
            "pp2-vpp2-seq-aux-and-z-loss-full",
            pp=2,
            vpp=2,
            num_layers=4,
            microbatches=4,
            aux="seq_aux_loss",
            z_loss=True,
            recompute="full",
        ),
        Case(
            "hybrid-tp2-sp-aux-loss-full",
            tp=2,
            pattern="*-*E*E",
            captured="moe_only",
            aux="aux_loss",
            recompute="full",
            since=(0, 18),
        ),
        Case(
            "dp2-aux-and-z-loss-distributed-optimizer-full",
            aux="aux_loss",
            z_loss=True,
            recompute="full",
            optimizer="distributed",
        ),
    ]


def _models() -> list[Case]:
    """Multi-token prediction and ``HybridModel``."""
    return [
        *(Case(f"pp2-mtp-{r}", pp=2, mtp=1, microbatches=4, recompute=r) for r in ("none", "full")),
        Case("tp2-sp-mtp-full", tp=2, mtp=1, recompute="full"),
        Case("ep2-mtp2-moe", ep=2, mtp=2, recompute="moe"),
        Case("tp2-sp-thd-mtp-moe", tp=2, mtp=1, format="thd", recompute="moe"),
        Case(
            "pp2-vpp2-mtp-full",
            pp=2,
            vpp=2,
            num_layers=4,
            mtp=1,
            microbatches=4,
            recompute="full",
        ),
        Case(
            "dp2-mtp-distributed-optimizer-full", mtp=1, recompute="full", optimizer="distributed"
        ),
        Case(
            "hybrid-ep2-full",
            ep=2,
            pattern="*-*E*E",
            captured="moe_only",
            recompute="full",
            since=(0, 18),
        ),
        Case(
            "hybrid-tp2-sp-moe",
            tp=2,
            pattern="*-*E*E",
            captured="moe_only",
            recompute="moe",
            since=(0, 18),
        ),
        Case(
            "hybrid-pp2-vpp2-full",
            pp=2,
            vpp=2,
            pattern="*-|*E|*E|*E",
            captured="listed",
            microbatches=4,
            recompute="full",
            since=(0, 18),
        ),
        Case(
            "hybrid-cp2-thd-moe",
            cp=2,
            format="thd",
            pattern="*-*E*E",
            captured="moe_only",
            recompute="moe",
            since=(0, 18),
        ),
        Case(
            "hybrid-pp2-bf16-full",
            pp=2,
            pattern="*-*E|*E",
            captured="moe_only",
            dtype="bf16",
            recompute="full",
            since=(0, 18),
        ),
        Case(
            "hybrid-dp2-distributed-optimizer-full",
            pattern="*-*E*E",
            captured="moe_only",
            recompute="full",
            optimizer="distributed",
            since=(0, 18),
        ),
    ]


def _optimizers() -> list[Case]:
    return [
        Case("dp2-distributed-optimizer-full", recompute="full", optimizer="distributed"),
        Case("ep2-distributed-optimizer-moe", ep=2, recompute="moe", optimizer="distributed"),
        Case(
            "cp2-thd-distributed-optimizer-full",
            cp=2,
            format="thd",
            recompute="full",
            optimizer="distributed",
        ),
        Case(
            "tp2-sp-distributed-optimizer-moe",
            world=4,
            tp=2,
            recompute="moe",
            optimizer="distributed",
        ),
        Case(
            "dp2-bf16-distributed-optimizer-full",
            dtype="bf16",
            recompute="full",
            optimizer="distributed",
        ),
        Case(
            "dp2-overlapped-distributed-optimizer-full",
            recompute="full",
            microbatches=3,
            optimizer="distributed",
            ddp={"overlap_grad_reduce": True},
        ),
        Case(
            "pp2-vpp2-dp2-distributed-optimizer-full",
            world=4,
            pp=2,
            vpp=2,
            num_layers=4,
            microbatches=4,
            recompute="full",
            optimizer="distributed",
        ),
    ]


CASES = table()

#: of these `make test` runs on the oldest Megatron-core too: one at least of each parallelism, kind
#: of model, recompute and loss
ON_OLDEST = (
    *("tp2-sp-none", "tp2-sp-full", "tp2-sp-moe", "tp2-sp-thd-full", "tp2-sp-bf16-full"),
    *("tp2-sp-tokens-equal-experts-full", "tp2-sp-allgather-moe"),
    *("pp2-full", "pp2-dynamic-thd-moe", "pp2-every-second-layer-full", "pp2-vpp1-full"),
    *("pp2-vpp2-full", "pp2-vpp2-chunk-without-router", "pp2-vpp2-layout-chunk-without-layer"),
    *("pp2-vpp4-block", "ep2-full", "ep2-moe", "ep2-allgather-full"),
    *("cp2-thd-full", "cp2-bshd-full", "cp2-contiguous-thd-full"),
    *("tp2-sp-aux-and-z-loss-full", "cp2-thd-aux-loss-full", "pp2-mtp-full", "tp2-sp-mtp-full"),
    *("dp2-distributed-optimizer-full", "cp2-thd-distributed-optimizer-full"),
    *("tp2-pp2-vpp2-full", "tp2-ep4-etp1-moe", "cp2-tp2-thd-full"),
)

#: two processes on one GPU over gloo, or one process; the functions that Megatron compiles compile
GPU_CASES = {
    case.name: case
    for case in (
        Case("gpu-ep2-full", ep=2, recompute="full", dummy="spread", timeout_s=300),
        Case("gpu-tp2-sp-full", tp=2, recompute="full", timeout_s=300),
        Case("gpu-ep4-full", world=4, ep=4, recompute="full", dummy="spread", timeout_s=300),
        Case(
            "gpu-cp2-tp2-thd-full",
            world=4,
            cp=2,
            tp=2,
            format="thd",
            recompute="full",
            timeout_s=300,
        ),
        Case("gpu-one-rank-full", world=1, recompute="full", timeout_s=300),
        Case("gpu-one-rank-moe", world=1, recompute="moe", dummy="spread", timeout_s=300),
        Case("gpu-one-rank-bf16-full", world=1, dtype="bf16", recompute="full", timeout_s=300),
    )
}

#: one GPU a rank, over NCCL. Of the cases above at least one of each parallelism, kind of model,
#: recompute, loss and optimizer, and what needs four GPUs
_ON_NCCL = (
    *("tp2-sp-none", "tp2-sp-full", "tp2-sp-moe", "tp2-sp-thd-full", "tp2-sp-bf16-full"),
    *("tp2-sp-allgather-moe", "tp2-sp-aux-and-z-loss-full", "tp2-sp-mtp-full"),
    *("ep2-none", "ep2-full", "ep2-moe", "ep2-allgather-full", "ep2-bf16-full", "ep2-mtp2-moe"),
    *("ep2-aux-and-z-loss-none", "ep2-distributed-optimizer-moe"),
    *("pp2-none", "pp2-full", "pp2-dynamic-thd-moe", "pp2-uneven-full", "pp2-rounds-full"),
    *("pp2-mtp-full", "pp2-vpp2-none", "pp2-vpp2-full", "pp2-vpp2-bf16-moe", "pp2-vpp4-block"),
    *("pp2-vpp2-chunk-without-router", "pp2-vpp2-overlap-full", "hybrid-pp2-vpp2-full"),
    *("cp2-thd-full", "cp2-bshd-full", "cp2-thd-bf16-moe", "cp2-contiguous-thd-full"),
    *("cp2-thd-aux-loss-full", "cp2-thd-distributed-optimizer-full", "hybrid-cp2-thd-moe"),
    *("hybrid-tp2-sp-moe", "dp2-overlapped-distributed-optimizer-full"),
    *("dp2-bf16-distributed-optimizer-full",),
    *("tp2-pp2-vpp2-full", "cp2-tp2-thd-full", "pp2-vpp2-ep2-moe", "tp2-ep4-etp1-moe"),
    *("pp2-vpp2-cp2-thd-full", "cp2-ep4-full"),
)
NCCL_CASES = {name: CASES[name] for name in _ON_NCCL} | {
    case.name: case
    for case in (
        Case("one-rank-nccl-full", world=1, recompute="full"),
        Case("pp2-bf16-full", pp=2, microbatches=4, dtype="bf16", recompute="full"),
        Case("tp2-pp2-full", world=4, tp=2, pp=2, microbatches=4, recompute="full"),
        Case(
            "tp2-pp2-bf16-full", world=4, tp=2, pp=2, microbatches=4, dtype="bf16", recompute="full"
        ),
        Case("ep4-full", world=4, ep=4, recompute="full", dummy="spread"),
        Case("ep4-bf16-moe", world=4, ep=4, dtype="bf16", recompute="moe", dummy="spread"),
        Case(
            "cp2-tp2-thd-bf16-full",
            world=4,
            cp=2,
            tp=2,
            format="thd",
            dtype="bf16",
            recompute="full",
        ),
        Case(
            "pp2-vpp2-ep2-bf16-moe",
            world=4,
            pp=2,
            vpp=2,
            ep=2,
            num_layers=4,
            microbatches=4,
            dtype="bf16",
            recompute="moe",
        ),
    )
}
