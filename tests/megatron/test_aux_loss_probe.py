"""Which routers' losses can be given the replayed routes: asked of the class, before a schedule."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from packhorse.replay.aux_loss import aux_loss_maps, can_replay_aux_loss
from tests.megatron.helpers import (
    EXPERTS,
    RouteLog,
    make_batch,
    make_session,
    routers_of,
    run_schedule,
)
from tests.megatron.loss_helpers import KINDS, LossLog, build, log_of_megatron

ROOT = Path(__file__).parents[2]


def test_every_release_balances_its_own_choice():
    """None that is supported knows of replayed routes in its loss; one that does needs no shim."""
    from megatron.core.transformer.moe.router import TopKRouter

    assert aux_loss_maps(TopKRouter) == dict.fromkeys(KINDS, "own")


def later_router():
    """A router whose loss sees the replayed routes by itself."""
    from megatron.core.transformer.moe.router import TopKRouter

    class LaterRouter(TopKRouter):
        def routing(self, logits, padding_mask=None):
            taken = {}

            class Keeps:
                def get_replay_topk(_, *args, **options):
                    scores, ids = replay.get_replay_topk(*args, **options)
                    taken["ids"] = ids
                    return scores, ids

            def with_taken(name):
                under = getattr(self, name)

                def apply(probs, scores, routing_map, *args, **options):
                    routing_map = torch.zeros_like(routing_map).scatter(1, taken["ids"], True)
                    if padding_mask is not None:
                        routing_map = routing_map & ~padding_mask.reshape(-1, 1)
                    return under(probs, scores, routing_map, *args, **options)

                return apply

            replay = self.router_replay
            methods = {f"_apply_{kind}": with_taken(f"_apply_{kind}") for kind in KINDS}
            vars(self).update(methods)
            if replay is not None:
                self.router_replay = Keeps()
            try:
                return TopKRouter.routing(self, logits, padding_mask=padding_mask)
            finally:
                for name in methods:
                    vars(self).pop(name)
                self.router_replay = replay

    return LaterRouter


def test_a_megatron_whose_loss_sees_replayed_routes_keeps_its_own_map():
    LaterRouter = later_router()
    assert aux_loss_maps(LaterRouter) == dict.fromkeys(KINDS, "replayed")
    losses = []
    for router_class in (None, LaterRouter):
        model = build(num_layers=3)
        for router in routers_of(model):
            router.__class__ = router_class or router.__class__
        with LossLog(model) as log:
            run_schedule(make_session(model), model, [make_batch()])
        losses.append(log.losses)
    assert losses[0] == losses[1]


def inline_routing(router, logits, padding_mask=None):
    """A ``routing`` that balances its own top-k by itself."""
    from megatron.core.transformer.moe import moe_utils

    flat = logits.view(-1, EXPERTS)
    probs, routing_map = moe_utils.topk_routing_with_score_function(
        flat, router.topk, score_function=router.score_function, router_replay=router.router_replay
    )
    if router.training and torch.is_grad_enabled():
        own, scores = moe_utils.compute_routing_scores_for_aux_loss(
            flat, router.topk, router.score_function
        )
        coefficient = router.config.moe_aux_loss_coeff
        loss = moe_utils.switch_load_balancing_loss_func(
            scores, own.sum(0), len(flat), router.topk, EXPERTS, coefficient
        )
        probs = router.attach_and_log_load_balancing_loss(
            probs, coefficient, loss, "load_balancing_loss", router.tp_cp_group
        )
    return probs, routing_map


def router_class(case):
    """A router whose loss cannot be shown to see the routes that it is given."""
    from megatron.core.transformer.moe.router import TopKRouter

    class Inline(TopKRouter):
        routing = inline_routing

    class Raises(TopKRouter):
        def routing(self, logits, padding_mask=None):
            assert type(self) is Raises, "only at home"
            return super().routing(logits, padding_mask=padding_mask)

    class Lacks(TopKRouter):
        def __getattribute__(self, name):
            if name == "_apply_aux_loss":
                raise AttributeError(name)
            return super().__getattribute__(name)

    class DropsSome(TopKRouter):
        def _of_this_class(self, routing_map):
            return routing_map * 0

        def routing(self, logits, padding_mask=None):
            under = self._apply_aux_loss
            self._apply_aux_loss = lambda probs, scores, routing_map, *args, **options: under(
                probs, scores, self._of_this_class(routing_map), *args, **options
            )
            try:
                return super().routing(logits, padding_mask=padding_mask)
            finally:
                del self._apply_aux_loss

    return {"inline": Inline, "raises": Raises, "lacks": Lacks, "drops": DropsSome}[case]


@pytest.mark.parametrize("case", ["inline", "raises", "lacks", "drops"])
def test_a_router_whose_loss_cannot_be_given_the_routes_is_refused_by_name(case):
    model = build("aux_loss")
    routers_of(model)[0].__class__ = router_class(case)
    assert not can_replay_aux_loss(routers_of(model)[0])
    with pytest.raises(
        ValueError,
        match=r"aux_loss with coefficient 0\.25 balances the router's own top-k in this",
    ):
        make_session(model, 1)
    make_session(model, 1, allow_live_aux_loss=True)


def test_only_the_losses_that_a_router_computes_must_be_replayable():
    """One kind is computed elsewhere; another kind is replayed."""
    from megatron.core.transformer.moe.router import TopKRouter

    class Elsewhere(TopKRouter):
        def routing(self, logits, padding_mask=None):
            under = self._apply_seq_aux_loss
            self._apply_seq_aux_loss = lambda probs, *args, **options: probs
            try:
                return TopKRouter.routing(self, logits, padding_mask=padding_mask)
            finally:
                self._apply_seq_aux_loss = under

    assert aux_loss_maps(Elsewhere) == {"aux_loss": "own", "global_aux_loss": "own"}
    for kind, allowed in (("aux_loss", True), ("seq_aux_loss", False)):
        model = build(kind)
        routers_of(model)[0].__class__ = Elsewhere
        assert can_replay_aux_loss(routers_of(model)[0]) is allowed


def test_a_subclass_that_calls_megatrons_routing_is_replayed():
    """Also one that reads attributes which its ``__init__`` would have set."""
    from megatron.core.transformer.moe.router import TopKRouter

    class Mine(TopKRouter):
        def routing(self, logits, padding_mask=None):
            if self.scale_logits:
                logits = logits * 1.0
            return super().routing(logits, padding_mask=padding_mask)

    losses = []
    for of_model in (TopKRouter, Mine):
        model = build()
        routers_of(model)[0].__class__ = of_model
        routers_of(model)[0].scale_logits = True
        with LossLog(model) as log:
            run_schedule(make_session(model, 1), model, [make_batch(num_layers=1)])
        losses.append(log.losses)
    assert losses[0] == losses[1]


def test_a_patched_routing_is_asked_anew(monkeypatch):
    """Of the class itself or of one that it inherits from."""
    from megatron.core.transformer.moe.router import TopKRouter

    class Mine(TopKRouter):
        pass

    for router in (TopKRouter, Mine):
        assert aux_loss_maps(router) == dict.fromkeys(KINDS, "own")
    model = build()
    monkeypatch.setattr(TopKRouter, "routing", inline_routing)
    for router in (TopKRouter, Mine):
        assert aux_loss_maps(router) == {}
    with pytest.raises(ValueError, match="aux_loss with coefficient"):
        make_session(model, 1)
    monkeypatch.undo()
    for router in (TopKRouter, Mine):
        assert aux_loss_maps(router) == dict.fromkeys(KINDS, "own")


def test_a_wrapper_of_routing_that_fails_on_an_unknown_router_stands_in_no_ones_way(monkeypatch):
    """A log of one model's routers, say, placed before or after the session is made."""
    from megatron.core.transformer.moe.router import TopKRouter

    original, known = TopKRouter.routing, {}

    def routing(router, *args, **options):
        result = original(router, *args, **options)
        known[id(router)].append(result)
        return result

    losses = []
    for patched in ("never", "before", "after"):
        model = build()
        known.update({id(router): [] for router in routers_of(model)})
        if patched == "before":
            monkeypatch.setattr(TopKRouter, "routing", routing)
        session = make_session(model, 1)
        if patched == "after":
            monkeypatch.setattr(TopKRouter, "routing", routing)
        with LossLog(model) as log:
            run_schedule(session, model, [make_batch(num_layers=1)])
        losses.append(log.losses)
        monkeypatch.undo()
    assert losses[1] == losses[0]
    assert losses[2] == losses[0]


IN_ANOTHER_STATE = """
import torch
from packhorse.replay.cpu_megatron import install_cpu_shims
install_cpu_shims()
with {state}:
    from packhorse.replay.aux_loss import aux_loss_maps
    from megatron.core.transformer.moe.router import TopKRouter
    print(sorted(aux_loss_maps(TopKRouter).items()))
"""


@pytest.mark.parametrize(
    "state", ["torch.device('meta')", "torch.no_grad()", "torch.inference_mode()"]
)
def test_the_answer_does_not_depend_on_the_state_of_torch(state):
    """In a process of its own, so that the module is imported in that state."""
    printed = subprocess.run(
        [sys.executable, "-c", IN_ANOTHER_STATE.format(state=state)],
        cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True, timeout=300,
    ).stdout  # fmt: skip
    assert printed.splitlines()[-1] == str(sorted((kind, "own") for kind in KINDS))


def test_asking_logs_nothing_and_leaves_the_class_as_it_was():
    from megatron.core.transformer.moe.router import TopKRouter

    with RouteLog() as calls:  # a function of its own, so the answer is not a kept one
        before, logged = dict(vars(TopKRouter)), log_of_megatron()
        aux_loss_maps(TopKRouter)
        assert len(calls.calls) == 1
        assert dict(vars(TopKRouter)) == before
        assert log_of_megatron() == logged
