"""What Megatron's main branch does and no release up to 0.19.2: reproduced on whichever runs."""

import pytest
import torch

from packhorse.replay.expert_bias import expert_bias_needs_shim
from tests.megatron.helpers import (
    DEVICE,
    EXPERTS,
    RECOMPUTE,
    TOPK,
    WIDTH,
    RouteLog,
    assert_clean,
    assert_replayed,
    build_model,
    make_batch,
    make_session,
    replay_objects,
    routers_of,
    run_schedule,
)


@pytest.fixture
def fixed_expert_bias(monkeypatch):
    """main: ``routing_map & ~padding_mask.unsqueeze(-1)``; a [T, 1] mask is an error there."""
    from megatron.core.transformer.moe.router import TopKRouter

    def _apply_expert_bias(self, routing_map, padding_mask=None):
        if self.enable_expert_bias and torch.is_grad_enabled():
            with torch.no_grad():
                if padding_mask is not None:
                    assert padding_mask.dim() == 1
                    routing_map = routing_map & ~padding_mask.unsqueeze(-1)
                self.local_tokens_per_expert += routing_map.sum(dim=0)

    monkeypatch.setattr(TopKRouter, "_apply_expert_bias", _apply_expert_bias)


@pytest.mark.parametrize("mode", RECOMPUTE)
@pytest.mark.parametrize("lengths", [(6, 4), (4, 3)], ids=["T=12", "T=E"])
def test_counts_are_those_of_real_tokens_where_the_broadcast_is_right_already(
    fixed_expert_bias, mode, lengths
):
    assert not expert_bias_needs_shim()
    model = build_model(**RECOMPUTE[mode])
    batches = [make_batch(lengths, seed=seed) for seed in range(2)]
    run_schedule(make_session(model), model, batches)
    for position, router in enumerate(routers_of(model)):
        counts = [0] * EXPERTS
        for batch in batches:
            for row in batch.rows(position):
                for expert in row if isinstance(row, list) else ():
                    counts[expert] += 1
        assert router.local_tokens_per_expert.tolist() == counts
        assert sum(counts) == 2 * TOPK * (sum(lengths) - 2)


def test_a_layer_number_that_the_router_writes_on_its_replay_object_stays_there():
    """``Router.set_layer_number`` writes ``router_replay.layer_number``, from 0.19 on."""
    model = build_model(moe_enable_routing_replay=True)
    before = replay_objects(model)
    session = make_session(model)
    numbers = []

    def renumber(_, chunk):
        for router in routers_of(chunk):
            router.router_replay.layer_number = router.layer_number
            router.set_layer_number(router.layer_number)
            numbers.append(router.router_replay.layer_number)

    with RouteLog() as log:
        run_schedule(session, model, [make_batch()], before_forward=renumber)
    assert numbers == [1, 2, 3]
    assert_replayed(log, model, [make_batch()])
    assert_clean(model, before)


def test_a_keyword_that_routing_grows_is_passed_on():
    """The loss shim stands over ``routing`` of routers that compute a loss."""
    model = build_model(moe_z_loss_coeff=0.1)
    router = routers_of(model)[0]
    seen = []

    def routing(logits, padding_mask=None, **options):
        seen.append(options)
        return type(router).routing(router, logits, padding_mask=padding_mask)

    router.routing = routing
    session = make_session(model)
    batch = make_batch()
    with session.schedule([batch.microbatch]):
        session.begin(model)
        router.routing(torch.randn(6, 2, EXPERTS, device=DEVICE), later=True)
        for other in routers_of(model)[1:]:
            other(torch.randn(6, 2, WIDTH, device=DEVICE))
    assert seen == [{"later": True}]
    assert router.routing is routing
