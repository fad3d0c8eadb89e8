"""The expert-bias shim by itself: what Megatron's method counts with it, and how it comes off."""

from types import SimpleNamespace

import pytest
import torch

from packhorse.replay.expert_bias import expert_bias_needs_shim, install_expert_bias_shim
from tests.megatron.helpers import (
    DEVICE,
    build_model,
    make_batch,
    make_session,
    megatron_version,
    routers_of,
    run_schedule,
)


@pytest.fixture
def method():
    """Megatron's own, checked to be back in place afterwards."""
    from megatron.core.transformer.moe.router import TopKRouter

    before = TopKRouter._apply_expert_bias
    with torch.compiler.set_stance("force_eager"):  # on a GPU it is compiled, for modules only
        yield before
    assert TopKRouter._apply_expert_bias is before


def count(routing_map, mask):
    """What ``_apply_expert_bias`` adds to the counters of a router with as many experts."""
    from megatron.core.transformer.moe.router import TopKRouter

    counts = torch.zeros(routing_map.shape[1], device=DEVICE)
    router = SimpleNamespace(
        enable_expert_bias=True, local_tokens_per_expert=counts, router_replay=None
    )
    TopKRouter._apply_expert_bias(
        router,
        routing_map.to(DEVICE),
        padding_mask=None if mask is None else torch.tensor(mask, device=DEVICE),
    )
    return router.local_tokens_per_expert.tolist()


CASES = {
    "as many tokens as experts": (torch.ones(2, 2, dtype=torch.bool), [False, True], [1, 1]),
    "more experts than tokens": (
        torch.ones(3, 4, dtype=torch.bool),
        [True, False, False],
        [2, 2, 2, 2],
    ),
    "more tokens than experts": (
        torch.tensor([[1, 0], [0, 1], [1, 0], [1, 0]]).bool(),
        [False, False, False, True],
        [2, 1],
    ),
    "one token": (torch.ones(1, 3, dtype=torch.bool), [True], [0, 0, 0]),
    "no mask": (torch.ones(2, 3, dtype=torch.bool), None, [2, 2, 2]),
    "a mask of sequence and batch": (
        torch.ones(4, 2, dtype=torch.bool),
        [[False, True], [True, True]],
        [1, 1],
    ),
}


@pytest.mark.parametrize("installs", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_tokens_marked_as_padding_are_not_counted(method, case, installs):
    routing_map, mask, expected = CASES[case]
    undo = [install_expert_bias_shim() for _ in range(installs)]
    try:
        assert count(routing_map, mask) == expected
    finally:
        for step in undo:
            step()


@pytest.mark.parametrize("case", CASES)
def test_a_megatron_whose_method_is_right_stays_right(method, monkeypatch, case):
    """As on main after 0.19: the mask is unsqueezed there, and must be [T] or None."""
    from megatron.core.transformer.moe.router import TopKRouter

    def fixed(self, routing_map, padding_mask=None):
        if padding_mask is not None:
            assert padding_mask.dim() == 1
            routing_map = routing_map & ~padding_mask.unsqueeze(-1)
        self.local_tokens_per_expert += routing_map.sum(dim=0)

    with monkeypatch.context() as patch:
        patch.setattr(TopKRouter, "_apply_expert_bias", fixed)
        assert not expert_bias_needs_shim()
        routing_map, mask, expected = CASES[case]
        undo = install_expert_bias_shim()
        assert count(routing_map, mask) == expected
        assert not expert_bias_needs_shim()
        undo()
        assert TopKRouter._apply_expert_bias is fixed


def test_the_probe_sees_the_fault_of_these_releases(method):
    assert expert_bias_needs_shim() == (megatron_version() <= (0, 19))
    undo = install_expert_bias_shim()
    assert expert_bias_needs_shim() == (megatron_version() <= (0, 19))  # asks the one below
    undo()


def test_without_the_shim_these_releases_are_wrong(method):
    """So the tests above can fail."""
    if not expert_bias_needs_shim():
        pytest.skip("this Megatron-core is right by itself")
    routing_map, mask, expected = CASES["as many tokens as experts"]
    assert count(routing_map, mask) != expected
    with pytest.raises(Exception, match=r"size of tensor|fake tensor"):
        count(*CASES["more experts than tokens"][:2])


def test_a_mask_of_another_length_is_an_error(method):
    undo = install_expert_bias_shim()
    try:
        with pytest.raises(ValueError, match="mask of 4 tokens for a routing map of 2"):
            count(torch.ones(2, 4, dtype=torch.bool), [False] * 4)
    finally:
        undo()


def test_the_shim_stays_until_each_install_was_undone(method):
    from megatron.core.transformer.moe.router import TopKRouter

    first, second = install_expert_bias_shim(), install_expert_bias_shim()
    shim = TopKRouter._apply_expert_bias
    assert shim is not method
    first()
    first()  # undoing twice does nothing
    assert TopKRouter._apply_expert_bias is shim
    second()
    assert TopKRouter._apply_expert_bias is method


def test_somebody_elses_method_over_the_shim_is_left_alone(method):
    from megatron.core.transformer.moe.router import TopKRouter

    undo = install_expert_bias_shim()
    shim = TopKRouter._apply_expert_bias
    calls = []

    def theirs(self, routing_map, padding_mask=None):
        calls.append(padding_mask)
        return shim(self, routing_map, padding_mask=padding_mask)

    TopKRouter._apply_expert_bias = theirs
    undo()
    assert TopKRouter._apply_expert_bias is theirs
    routing_map, mask, expected = CASES["as many tokens as experts"]
    again = install_expert_bias_shim()  # over theirs, which still ends in the first one
    assert count(routing_map, mask) == expected
    assert calls == [None]
    again()
    assert TopKRouter._apply_expert_bias is theirs
    TopKRouter._apply_expert_bias = method


def test_a_permanent_shim_survives_a_schedule_and_serves_models_beside_it(method):
    from megatron.core.transformer.moe.router import TopKRouter

    undo = install_expert_bias_shim()
    try:
        shim = TopKRouter._apply_expert_bias
        model = build_model()
        run_schedule(make_session(model), model, [make_batch()])
        assert TopKRouter._apply_expert_bias is shim
        # without a schedule the mask is the model's own
        other = build_model(num_layers=1)
        batch = make_batch((8,))
        mask = torch.zeros(1, 8, dtype=torch.bool, device=DEVICE)
        mask[0, 5:] = True
        other(**batch.inputs, padding_mask=mask)
        assert routers_of(other)[0].local_tokens_per_expert.sum() == 2 * 5
    finally:
        undo()


def test_a_megatron_without_the_method_is_refused(method, monkeypatch):
    from megatron.core.transformer.moe.router import TopKRouter

    with monkeypatch.context() as patch:
        patch.delattr(TopKRouter, "_apply_expert_bias")
        with pytest.raises(ValueError, match=r"has no _apply_expert_bias; 0\.16\.1 is the first"):
            install_expert_bias_shim()
