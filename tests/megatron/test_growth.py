"""A session keeps nothing from schedule to schedule, however many there are."""

import gc
import tracemalloc

import pytest

from tests.megatron.helpers import DEVICE, build_model, make_batch, make_session, routers_of

SCHEDULES = 1000


@pytest.mark.parametrize("losses", [False, True])
def test_a_thousand_schedules_leave_no_object_and_no_memory(losses):
    """Schedules without a forward: begin, one answer a router, end; every tenth fails."""
    import torch

    extra = {"moe_z_loss_coeff": 0.1, "moe_router_load_balancing_type": "aux_loss",
             "moe_aux_loss_coeff": 0.1, "moe_router_enable_expert_bias": False}  # fmt: skip
    model = build_model(num_layers=2, **(extra if losses else {}))
    session = make_session(model, 2, sample_routes_every=50)
    batch = make_batch((3, 2), num_layers=2)
    scores = torch.rand(6, 8, device=DEVICE)

    def schedule(i):
        try:
            with session.schedule([batch.microbatch]):
                session.begin(model)
                for router in routers:
                    router.router_replay.get_replay_topk(scores, 2, None, None, topk)
                if i % 10 == 0:
                    raise RuntimeError("in the middle")
        except RuntimeError:
            pass

    def topk(values, count, *_):
        return torch.topk(values, count, dim=1)

    routers = routers_of(model)
    for i in range(100):
        schedule(i)
    gc.collect()
    before = len(gc.get_objects())
    tracemalloc.start()
    try:
        for i in range(200):  # the interpreter fills its caches, which are traced too
            schedule(i)
        gc.collect()
        filled, _ = tracemalloc.get_traced_memory()
        for i in range(SCHEDULES):
            schedule(i)
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - filled
    finally:
        tracemalloc.stop()
    assert len(gc.get_objects()) - before < 50  # a GPU's pinned tables leave 20, once
    assert grown < 48 * SCHEDULES  # bytes: less than one small object each
