"""What a replay microbatch accepts, and which positions it lets run live. No Megatron, no GPU."""

import numpy as np
import pytest
import torch

from packhorse.packed.tensor import PackedTensor
from packhorse.replay.layout import TokenLayout
from packhorse.replay.microbatch import ReplayMicrobatch


def layout_of(*lengths, **options):
    return TokenLayout.build(list(lengths), **options)


def routes_of(*captured, dtype=torch.uint8):
    rows = sum(captured)
    values = torch.arange(2).repeat(rows, 3, 1).to(dtype)
    return PackedTensor.from_lengths(values, list(captured))


def mask(*values):
    return np.array(values, dtype=bool)


# --- which positions run live ---------------------------------------------------------------------


def test_a_captured_prefix_shorter_than_a_trained_target_is_an_error_that_names_the_token():
    """5 tokens, 3 rows, tokens 3 and 4 trained: the logit of token 4 stands at position 3."""
    with pytest.raises(
        ValueError,
        match="ReplayMicrobatch: token 4 of trajectory 1 is a trained target and needs 4 route"
        " rows, there are 3",
    ):
        ReplayMicrobatch(
            layout_of(4, 5),
            routes_of(3, 3),
            loss_masks=[mask(0, 1, 1, 1), mask(0, 0, 0, 1, 1)],
        )


def test_the_same_target_marked_as_appended_runs_its_position_live():
    microbatch = ReplayMicrobatch(
        layout_of(5),
        routes_of(3),
        loss_masks=[mask(0, 0, 0, 1, 1)],
        appended=[mask(0, 0, 0, 0, 1)],
    )
    assert microbatch.live_counts == (1,)
    assert (microbatch.num_replayed, microbatch.num_live, microbatch.num_dummy) == (3, 1, 1)


def test_an_appended_target_needs_every_uncaptured_position_before_it():
    """Rows of 8 tokens end at 3; tokens 3 to 6 are observations, token 7 the appended end."""
    trained = mask(0, 0, 1, 1, 0, 0, 0, 1)
    microbatch = ReplayMicrobatch(
        layout_of(8), routes_of(3), loss_masks=[trained], appended=[mask(*[0] * 7, 1)]
    )
    assert microbatch.live_counts == (4,)  # positions 3 4 5 6


def test_an_appended_token_that_is_not_trained_needs_nothing():
    microbatch = ReplayMicrobatch(
        layout_of(5),
        routes_of(3),
        loss_masks=[mask(0, 1, 1, 1, 0)],
        appended=[mask(0, 0, 0, 0, 1)],
    )
    assert microbatch.live_counts == (0,)


def test_an_appended_target_does_not_excuse_another_one():
    with pytest.raises(ValueError, match="token 4 of trajectory 0 is a trained target"):
        ReplayMicrobatch(
            layout_of(6),
            routes_of(3),
            loss_masks=[mask(0, 0, 0, 1, 1, 1)],
            appended=[mask(0, 0, 0, 0, 0, 1)],
        )


def test_the_last_token_and_trailing_observations_need_no_rows():
    microbatch = ReplayMicrobatch(
        layout_of(4, 7), routes_of(3, 4), loss_masks=[mask(0, 1, 1, 1), mask(0, 0, 1, 1, 1, 0, 0)]
    )
    assert microbatch.live_counts == (0, 0)


def test_live_all_adds_every_uncaptured_position():
    microbatch = ReplayMicrobatch(
        layout_of(4, 7),
        routes_of(3, 4),
        loss_masks=[mask(0, 1, 1, 1), mask(0, 0, 1, 1, 1, 0, 0)],
        live="all",
    )
    assert microbatch.live_counts == (1, 3)


def test_live_all_excuses_no_trained_target():
    with pytest.raises(ValueError, match="token 5 of trajectory 0 is a trained target"):
        ReplayMicrobatch(layout_of(6), routes_of(4), live="all")


def test_without_loss_masks_every_token_but_the_first_is_a_target():
    ReplayMicrobatch(layout_of(4, 1, 0), routes_of(3, 0, 0))
    with pytest.raises(ValueError, match=r"token 3 of trajectory 0 .* loss_masks says which"):
        ReplayMicrobatch(layout_of(4), routes_of(2))
    with pytest.raises(ValueError, match="token 1 of trajectory 1 is a trained target"):
        ReplayMicrobatch(layout_of(4, 3), routes_of(3, 0), loss_masks=[mask(0, 0, 0, 1), None])


def test_a_missing_trajectory_runs_live_whole():
    microbatch = ReplayMicrobatch(layout_of(4, 6), routes_of(3, 0), missing=[False, True])
    assert microbatch.live_counts == (0, 6)
    with pytest.raises(ValueError, match="trajectory 0 is marked missing, but has 3 route rows"):
        ReplayMicrobatch(layout_of(4), routes_of(3), missing=[True])


def test_a_trajectory_without_rows_needs_the_missing_marker():
    with pytest.raises(ValueError, match=r"needs 1 route rows, there are 0 .*missing="):
        ReplayMicrobatch(layout_of(4, 6), routes_of(3, 0), loss_masks=[None, mask(*[0] + [1] * 5)])


def test_counts_cover_all_ranks_and_pads():
    layout = layout_of(5, 3, tp_size=2, tp_rank=1, cp_size=2, cp_rank=0, sequence_parallel=True)
    microbatch = ReplayMicrobatch(layout, routes_of(4, 2))
    assert microbatch.num_replayed == 6
    assert microbatch.num_dummy == 16 - 6  # padded to 8 each


def test_without_routes_every_real_token_runs_live():
    microbatch = ReplayMicrobatch(layout_of(4, 6), None)
    assert (microbatch.num_replayed, microbatch.num_live, microbatch.num_dummy) == (0, 10, 0)


@pytest.mark.parametrize(
    ("lengths", "masks", "expected"),
    [
        ((1, 1), None, False),
        ((2, 1), None, True),
        ((3, 2), [mask(0, 0, 0), mask(0, 0)], False),
        ((3, 2), [mask(0, 0, 0), mask(0, 1)], True),
    ],
)
def test_has_targets_says_whether_anything_is_trained(lengths, masks, expected):
    captured = [length - 1 for length in lengths]
    microbatch = ReplayMicrobatch(layout_of(*lengths), routes_of(*captured), loss_masks=masks)
    assert microbatch.has_targets is expected


@pytest.mark.parametrize(
    "masks",
    [
        [[False, False, True]],
        [torch.tensor([False, False, True])],
        [np.array([0, 0, 1])],
        torch.tensor([[0, 0, 1]]),
    ],
    ids=["list", "tensor", "integers", "one tensor"],
)
def test_masks_may_be_lists_arrays_or_host_tensors(masks):
    assert ReplayMicrobatch(layout_of(3), routes_of(2), loss_masks=masks).has_targets


# --- refusals -------------------------------------------------------------------------------------

REFUSALS = {
    "layout": (
        TypeError,
        "layout must be a TokenLayout, got list",
        lambda: ReplayMicrobatch([4], routes_of(3)),
    ),
    "routes": (
        TypeError,
        "routes must be a PackedTensor or None, got Tensor",
        lambda: ReplayMicrobatch(layout_of(4), torch.zeros(3, 3, 2)),
    ),
    "routes dtype": (
        TypeError,
        "routes must be uint8, int16 or int32, got torch.int64",
        lambda: ReplayMicrobatch(layout_of(4), routes_of(3, dtype=torch.int64)),
    ),
    "route rows": (
        ValueError,
        r"routes must have \[L, K\] rows, got \[2\]",
        lambda: ReplayMicrobatch(
            layout_of(4), PackedTensor.from_lengths(torch.zeros(3, 2, dtype=torch.uint8), [3])
        ),
    ),
    "number of trajectories": (
        ValueError,
        "routes of 2 trajectories for a layout of 1",
        lambda: ReplayMicrobatch(layout_of(4), routes_of(3, 3)),
    ),
    "more rows than tokens": (
        ValueError,
        "trajectory 1 has 6 route rows for 5 tokens",
        lambda: ReplayMicrobatch(layout_of(4, 5), routes_of(3, 6)),
    ),
    "devices": (
        ValueError,
        "routes on meta, layout on cpu",
        lambda: ReplayMicrobatch(
            layout_of(4),
            PackedTensor.from_lengths(torch.zeros(3, 3, 2, dtype=torch.uint8, device="meta"), [3]),
        ),
    ),
    "dummy": (
        ValueError,
        "dummy must be 'constant' or 'spread', got 'zero'",
        lambda: ReplayMicrobatch(layout_of(4), routes_of(3), dummy="zero"),
    ),
    "live": (
        ValueError,
        "live must be 'required' or 'all', got True",
        lambda: ReplayMicrobatch(layout_of(4), routes_of(3), live=True),
    ),
    "number of masks": (
        ValueError,
        "loss_masks has 1 entries for 2 trajectories",
        lambda: ReplayMicrobatch(layout_of(4, 4), routes_of(3, 3), loss_masks=[mask(0, 0, 0, 1)]),
    ),
    "length of a mask": (
        ValueError,
        r"appended of trajectory 1 must be \[5\], one a token, got \[4\]",
        lambda: ReplayMicrobatch(
            layout_of(4, 5), routes_of(3, 4), appended=[mask(0, 0, 0, 0), mask(0, 0, 0, 1)]
        ),
    ),
    "kind of a mask": (
        TypeError,
        "loss_masks of trajectory 0 must be bool",
        lambda: ReplayMicrobatch(
            layout_of(4), routes_of(3), loss_masks=[np.array([0.0, 0.5, 1.0, 1.0])]
        ),
    ),
    "a mask on a device": (
        TypeError,
        "loss_masks of trajectory 0 must be on the host, not on meta",
        lambda: ReplayMicrobatch(
            layout_of(4),
            routes_of(3),
            loss_masks=[torch.zeros(4, dtype=torch.bool, device="meta")],
        ),
    ),
    "a mask of logit positions": (
        ValueError,
        "loss_masks of trajectory 0 trains token 0, which nothing predicts",
        lambda: ReplayMicrobatch(layout_of(4), routes_of(3), loss_masks=[mask(1, 1, 1, 0)]),
    ),
    "missing": (
        TypeError,
        "missing of trajectory 0 must be a bool, got 1",
        lambda: ReplayMicrobatch(layout_of(4), routes_of(3), missing=[1]),
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_is_no_microbatch_is_refused_by_name(name):
    error, message, make = REFUSALS[name]
    with pytest.raises(error, match="ReplayMicrobatch: " + message):
        make()
