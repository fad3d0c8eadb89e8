"""What cannot replay is refused by name before the first forward; nothing is silently live."""

import numpy as np
import pytest
import torch

from packhorse.packed.tensor import PackedTensor
from packhorse.replay.session import CapturedLayers, ReplayMicrobatch, ReplaySession
from tests.megatron.helpers import (
    EXPERTS,
    RouteLog,
    build_model,
    make_batch,
    make_session,
    megatron_version,
    routers_of,
    run_schedule,
)

# --- routers --------------------------------------------------------------------------------------

REFUSED_SETTINGS = {
    "moe_router_fusion": (
        {"moe_router_fusion": True},
        r"moe_router_fusion=True chooses experts in a fused kernel that ignores replay",
    ),
    "capacity factor": (
        {"moe_expert_capacity_factor": 1.0},
        r"moe_expert_capacity_factor=1.0 drops tokens",
    ),
    "rank capacity factor": (
        {"moe_expert_rank_capacity_factor": 1.5},
        r"moe_expert_rank_capacity_factor=1.5 drops tokens",
    ),
    "random scores": (
        {"moe_router_force_load_balancing": True},
        r"moe_router_force_load_balancing=True replaces the scores",
    ),
    "biased scores": ({"moe_router_force_biased": 0.5}, r"moe_router_force_biased replaces the"),
    "local CUDA graphs of whole layers": (
        {"cuda_graph_impl": "local", "cuda_graph_scope": [], "cuda_graph_modules": []},
        r"cuda_graph_impl='local' captures the router",
    ),
    "CUDA graphs of the router": (
        {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": ["attn", "moe_router"],
         "cuda_graph_modules": ["attn", "moe_router"]},
        r"cuda_graph_impl='transformer_engine' captures the router",
    ),
    "a CUDA graph of the iteration": (
        {"cuda_graph_impl": "full_iteration"},
        r"cuda_graph_impl='full_iteration' captures the router",
    ),
    "a CUDA graph of the iteration, by its scope": (
        {"cuda_graph_impl": "local", "cuda_graph_scope": ["full_iteration"],
         "cuda_graph_modules": ["full_iteration"]},
        r"cuda_graph_impl='local' captures the router",
    ),
    "local CUDA graphs of whole layers, as a string": (
        {"cuda_graph_impl": "local", "cuda_graph_scope": "full", "cuda_graph_modules": "full"},
        r"cuda_graph_impl='local' captures the router",
    ),
    "CUDA graphs of MoE layers": (
        {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": "attn,moe",
         "cuda_graph_modules": "attn,moe"},
        r"cuda_graph_impl='transformer_engine' captures the router",
    ),
    "CUDA graphs by their first name": (
        {"enable_cuda_graph": True}, r"enable_cuda_graph=True captures the router",
    ),
    "CUDA graphs by their second name": (
        {"external_cuda_graph": True}, r"external_cuda_graph=True captures the router",
    ),
    "schedule plans": (
        {"overlap_moe_expert_parallel_comm": True},
        r"overlap_moe_expert_parallel_comm=True runs the layers from a schedule plan",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED_SETTINGS)
def test_a_setting_that_replay_cannot_serve_is_refused_at_the_start(name):
    settings, message = REFUSED_SETTINGS[name]
    model = build_model()
    for setting, value in settings.items():
        setattr(model.config, setting, value)
    with pytest.raises(
        ValueError, match=r"ReplaySession: router decoder\.layers\.0\.mlp\.router: " + message
    ):
        make_session(model)


def test_a_setting_that_turns_bad_after_the_start_is_refused_by_the_next_schedule():
    model = build_model()
    session = make_session(model)
    batch = make_batch()
    run_schedule(session, model, [batch])
    model.config.moe_router_fusion = True
    with pytest.raises(ValueError, match="moe_router_fusion=True"):
        run_schedule(session, model, [batch])


@pytest.mark.parametrize("kind", ["sinkhorn", "quantile_balancing"])
@pytest.mark.parametrize("as_list", [False, True])
def test_routing_that_does_not_consult_replay_is_refused(kind, as_list):
    if kind == "sinkhorn" and not as_list:
        model = build_model(
            moe_router_load_balancing_type=kind, moe_router_enable_expert_bias=False
        )
    else:
        model = build_model()
        for router in routers_of(model):
            router.routing_type = [kind] if as_list else kind
    with pytest.raises(
        ValueError, match=f"moe_router_load_balancing_type='{kind}' chooses experts without asking"
    ):
        make_session(model)


def test_a_load_balancing_type_with_coefficient_zero_is_no_loss():
    make_session(
        build_model(
            moe_router_load_balancing_type="aux_loss",
            moe_aux_loss_coeff=0.0,
            moe_router_enable_expert_bias=False,
        )
    )


def test_a_megatron_without_replay_in_its_router_is_refused():
    model = build_model()
    for router in routers_of(model):
        del router.router_replay
    with pytest.raises(ValueError, match=r"this Megatron-core has no replay in its router; 0\.16"):
        make_session(model)


def test_a_router_of_another_class_is_refused():
    from megatron.core.transformer.moe.router import Router

    class HashRouter(Router):
        def routing(self, logits):
            raise NotImplementedError

        def forward(self, input):
            raise NotImplementedError

    model = build_model()
    old = routers_of(model)[1]
    new = HashRouter.__new__(HashRouter)
    new.__dict__.update(old.__dict__)
    model.decoder.layers[1].mlp.router = new
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.router is a HashRouter; only TopK"):
        make_session(model)


def test_routers_of_unlike_sizes_are_refused():
    model = build_model()
    routers_of(model)[2].topk = 3
    with pytest.raises(
        ValueError, match=r"layers\.2\.mlp\.router of chunk 0 has \(experts, topk\) ="
    ):
        make_session(model)


@pytest.mark.parametrize("implementation", ["local", "transformer_engine"])
def test_each_part_that_holds_a_router_is_refused_and_each_other_is_legal(implementation):
    """The names are Megatron's own, of whichever version runs."""
    from megatron.core.transformer import enums

    model = build_model()
    model.config.cuda_graph_impl = implementation
    field = (
        "cuda_graph_modules" if hasattr(model.config, "cuda_graph_modules") else "cuda_graph_scope"
    )
    parts = getattr(enums, "CudaGraphModule", None) or enums.CudaGraphScope
    legal = []
    for part in parts:
        setattr(model.config, field, [part])
        try:
            make_session(model)
        except ValueError:
            continue
        legal.append(part.name)
    assert legal == ["attn", "mlp", "mamba"]


def test_cuda_graphs_of_inference_are_legal():
    model = build_model()
    model.config.inference_cuda_graph_scope = "block"
    make_session(model)


def test_a_schedule_plan_is_refused_before_wrap_forward_step_is_asked_for_one():
    from packhorse.replay.wrap import wrap_forward_step

    model = build_model()
    session = make_session(model)
    model.config.overlap_moe_expert_parallel_comm = True

    def forward_step(data_iterator, model, *, step, return_schedule_plan=False):
        pytest.fail("a forward ran")

    wrapped = wrap_forward_step(forward_step, session)
    with (
        pytest.raises(ValueError, match="overlap_moe_expert_parallel_comm=True"),
        session.schedule([make_batch().microbatch]),
    ):
        wrapped(iter([]), model, return_schedule_plan=True)


def test_cuda_graphs_that_leave_the_router_out_are_legal():
    model = build_model()
    model.config.cuda_graph_impl = "local"
    model.config.cuda_graph_scope = model.config.cuda_graph_modules = ["attn"]
    make_session(model)


# --- microbatches ---------------------------------------------------------------------------------


def refused(batches, message, error=ValueError, model=None, session=None):
    model = model or build_model()
    session = session or make_session(model)
    with RouteLog() as log, pytest.raises(error, match=message):
        run_schedule(session, model, batches)
    assert not log.calls, "a forward ran"


def test_a_microbatch_that_lacks_the_routes_field_among_others_is_an_error_that_names_it():
    batches = [make_batch(), make_batch(with_routes=False), make_batch()]
    refused(batches, "microbatch 1 has no routes field, others have")


def test_replay_of_trained_tokens_without_any_row_is_an_error():
    batches = [
        make_batch((3, 2), captured=(0, 0), missing=[True, True], loss_masks=None),
        make_batch((1, 1), captured=(0, 0)),
    ]
    refused(batches, "no trajectory has any route row")


def test_no_microbatches_are_an_error():
    session = make_session(build_model())
    with (
        pytest.raises(ValueError, match="no microbatches were given"),
        session.schedule([]),
    ):
        pytest.fail("the schedule began")


def test_something_else_than_a_microbatch_is_an_error():
    session = make_session(build_model())
    with (
        pytest.raises(TypeError, match="microbatch 1 must be a ReplayMicrobatch, got NoneType"),
        session.schedule([make_batch().microbatch, None]),
    ):
        pytest.fail("the schedule began")


def with_rows(change, **options):
    """A second microbatch whose routes are changed in place."""
    batch = make_batch((6, 4), captured=(5, 4), seed=2, **options)
    change(batch.microbatch.routes.values)
    return [make_batch(), batch]


def test_an_expert_out_of_range_is_an_error_that_names_trajectory_row_and_layer():
    def change(values):
        values[7, 1, 0] = EXPERTS  # the third row of trajectory 1

    refused(
        with_rows(change),
        "ReplaySession: routes of microbatch 1, trajectory 1, row 2, captured layer 1: expert 8"
        " is not below num_experts=8",
    )


def test_a_negative_expert_is_an_error():
    def change(values):
        values[0, 2, 1] = -1

    refused(
        with_rows(change, dtype=torch.int16),
        "microbatch 1, trajectory 0, row 0, captured layer 2: expert -1 is not below",
    )


def test_a_repeated_expert_is_an_error():
    def change(values):
        values[4, 0] = 3

    refused(
        with_rows(change),
        r"microbatch 1, trajectory 0, row 4, captured layer 0: experts \[3, 3\] repeat",
    )


def test_a_moe_layer_of_zeros_is_an_engine_that_captured_nothing():
    def change(values):
        values[:, 1] = 0

    refused(
        with_rows(change),
        "trajectory 0, row 0, captured layer 1: every id is 0: the engine captured nothing",
    )


def test_zeros_of_one_expert_a_token_are_routes():
    model = build_model(moe_router_topk=1)
    batch = make_batch()
    values = torch.zeros(8, 3, 1, dtype=torch.uint8)
    packed = PackedTensor.from_lengths(values, batch.microbatch.captured)
    batch.microbatch = ReplayMicrobatch(batch.microbatch.layout, packed)
    with RouteLog() as log:
        run_schedule(make_session(model), model, [batch])
    assert all(call.rows == [[0]] * 12 for call in log.calls)


def test_wide_rows_are_checked_for_repeats_too():
    """K above 16 takes another path."""
    generator = np.random.default_rng(0)
    rows = generator.random((5, 1, 40)).argsort(-1)[..., :20]
    layout = make_batch((6,), captured=(5,)).microbatch.layout
    good = ReplayMicrobatch(layout, PackedTensor.from_segments([torch.tensor(rows).byte()]))
    good.check_content(0, 40, [0])
    rows[3, 0, 19] = rows[3, 0, 2]
    bad = ReplayMicrobatch(layout, PackedTensor.from_segments([torch.tensor(rows).byte()]))
    with pytest.raises(ValueError, match=r"trajectory 0, row 3, captured layer 0: .* repeat"):
        bad.check_content(0, 40, [0])


def test_another_number_of_experts_a_token_is_an_error():
    model = build_model(moe_router_topk=3)
    refused(
        [make_batch()],
        "microbatch 0: routes name 2 experts a token, the router takes 3",
        model=model,
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cp_size": 2, "cp_rank": 1}, "the layout has cp_size=2, the model's is 1"),
        (
            {"tp_size": 2, "sequence_parallel": True},
            "sequence_parallel over tp_size=2, the model has one TP rank",
        ),
    ],
    ids=["cp", "tp"],
)
def test_a_layout_of_other_ranks_is_an_error(settings, message):
    batch = make_batch((8, 8), captured=(7, 7), layout=settings)
    refused([make_batch(), batch], message)


def test_a_layout_on_another_device_is_an_error():
    batch = make_batch()
    layout = batch.microbatch.layout
    elsewhere = type(layout).build(layout.lengths, format="bshd", device="meta")
    batch.microbatch = ReplayMicrobatch(elsewhere, batch.microbatch.routes)
    refused([batch], r"microbatch 0: the layout is on meta, router decoder\.layers\.0\.mlp\.router")


# --- found in the first forward -------------------------------------------------------------------


def test_a_rectangle_under_a_packed_layout_is_an_error():
    """As many rows, in another order: nothing else would notice."""
    model = build_model()
    packed = make_batch((5, 5), format="thd")
    rectangle = make_batch((5, 5), format="bshd")
    packed.inputs = rectangle.inputs
    with pytest.raises(
        ValueError,
        match=r"microbatch 0: the router's input is \[sequence, batch\] = \[5, 2\], the layout's"
        r" \[10, 1\]",
    ):
        run_schedule(make_session(model), model, [packed], pass_mask=False)


def test_a_packed_row_under_a_rectangular_layout_is_an_error():
    model = build_model()
    rectangle = make_batch((5, 5), format="bshd")
    rectangle.inputs = make_batch((5, 5), format="thd").inputs
    with pytest.raises(ValueError, match=r"= \[10, 1\], the layout's \[5, 2\]"):
        run_schedule(make_session(model), model, [rectangle], pass_mask=False)


def test_tokens_that_megatron_reorders_before_the_router_are_an_error():
    """``PackedSeqParams.tokens_per_sample``: packed samples become a rectangle for the router."""
    if megatron_version() < (0, 19):
        pytest.skip("came with 0.19")
    from megatron.core.packed_seq_params import PackedSeqParams

    model = build_model()
    batch = make_batch((5, 5), format="thd")
    batch.inputs["packed_seq_params"] = PackedSeqParams(
        qkv_format="thd",
        tokens_per_sample=5,
        cu_seqlens_q=torch.tensor([0, 5, 10], dtype=torch.int32),
        cu_seqlens_kv=torch.tensor([0, 5, 10], dtype=torch.int32),
        max_seqlen_q=5,
        max_seqlen_kv=5,
    )
    for layer in model.decoder.layers:  # the local attention takes no packed sequences
        core = layer.self_attention.core_attention
        core.forward = unpacked(core.forward)
    with pytest.raises(ValueError, match=r"= \[5, 2\], the layout's \[10, 1\]"):
        run_schedule(make_session(model), model, [batch])


def unpacked(attention):
    def forward(query, key, value, *args, packed_seq_params=None, **options):
        rows = [part.unsqueeze(1) if part.dim() == 3 else part for part in (query, key, value)]
        return attention(*rows, *args, **options)

    return forward


def test_more_tokens_than_the_layout_has_are_an_error():
    model = build_model()
    batch = make_batch((6, 4))
    batch.inputs = make_batch((7, 4)).inputs
    with pytest.raises(ValueError, match=r"= \[7, 2\], the layout's \[6, 2\]"):
        run_schedule(make_session(model), model, [batch], pass_mask=False)


def test_a_router_whose_topk_changes_within_a_schedule_is_an_error():
    model = build_model()
    session = make_session(model)

    def widen(_, chunk):
        routers_of(chunk)[0].topk = 3

    with pytest.raises(ValueError, match=r"was called with scores .* and topk=3; it had 8 experts"):
        run_schedule(session, model, [make_batch()], before_forward=widen)


def test_captured_layers_of_a_session_are_keyword_only():
    with pytest.raises(TypeError):
        ReplaySession(build_model(), CapturedLayers.decoder(3))
