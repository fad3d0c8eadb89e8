"""Batch.

Oracle: worked cases, and the batch as a Python list of trajectories, each a dict of lists. Rows are
moved, not computed, so nothing here has a tolerance.
"""

import numpy as np
import pytest
import torch

from packhorse.packed.batch import Batch
from packhorse.packed.buffer import join_trajectories
from packhorse.packed.fields import (
    PACKED_FIELDS,
    FieldRegistry,
    PackedField,
    materialize,
    router_padding_mask,
)
from packhorse.packed.ragged import PackedRagged
from packhorse.packed.tensor import PackedTensor
from tests.packed import ragged_model
from tests.packed.batch_model import (
    CANDIDATES,
    ENTROPY,
    MARKS,
    ROUTES,
    SUPPORT,
    check,
    make_batch,
    model_of,
)
from tests.packed.helpers import as_lists, make_packed
from tests.packed.test_fields import make_routes

FORMS = [pytest.param(False, id="one-width"), pytest.param(True, id="ragged")]  # of the support

# --- trap 33: every field follows -----------------------------------------------------------------


@pytest.mark.parametrize("ragged", FORMS)
def test_trap_33_filtering_and_replacing_take_every_field_along(ragged, device):
    batch = make_batch(4, ragged=ragged, device=device)
    model = model_of(batch)
    check(batch[[0, 2, 3]], [model[0], model[2], model[3]], batch)
    check(batch[[True, False, True, True]], [model[0], model[2], model[3]], batch)
    check(batch[[0, 3, 2, 3]], [model[0], model[3], model[2], model[3]], batch)
    check(batch[[]], [], batch)
    check(batch[torch.zeros(4, dtype=torch.bool)], [], batch)


# --- trap 41: none, empty, one; for every kind of field -------------------------------------------


@pytest.mark.parametrize("ragged", FORMS)
@pytest.mark.parametrize("size", [0, 1, 3])
def test_trap_41_no_trajectory_empty_ones_and_one_are_legal(size, ragged, device):
    batch = make_batch(size, ragged=ragged, device=device)
    model = model_of(batch)
    for same in (batch[:], batch[::1], Batch.cat([batch[:0], batch]), batch.repeat(1)):
        check(same, model, batch)
    for none in (batch[:0], batch[[]], batch[5:], batch[2:1], batch.repeat(0),
                 batch.repeat_interleave(0), Batch.cat([batch[:0], batch[:0]]),
                 batch.synthetic(0)):  # fmt: skip
        check(none, [], batch)
    assert batch[:0].pad_to_multiple(4) == batch[:0]
    assert [len(part) for part in batch[:0].chunk(3)] == [0, 0, 0]
    assert list(map(model_of, batch)) == [[trajectory] for trajectory in model]
    if size:
        check(batch[-1], model[-1:], batch)
        check(batch[0], model[:1], batch)
        empty = make_packed([0] * size, torch.uint8, (2, 2), device)
        check(batch.with_fields({ROUTES: empty})[-1:],
              [{**model[-1], ROUTES: []}], batch)  # fmt: skip
        for rows in ([], [[]] * 2):  # no response token, and rows without a candidate
            marks = PackedRagged.empty([len(rows)] * size, device=device)
            check(batch.with_fields({MARKS: marks})[::-1],
                  [{**trajectory, MARKS: rows} for trajectory in model[::-1]], batch)  # fmt: skip


def test_a_batch_without_fields_has_a_size():
    batch = Batch({}, batch_size=3)
    assert (len(batch), len(batch[1:]), len(batch.repeat(2)), len(batch[[0]])) == (3, 2, 6, 1)
    assert len(Batch.cat([batch, batch])) == 6
    assert repr(batch) == "Batch(3 trajectories; no fields)"


# --- trap 42: dtypes ------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [1, -1])
def test_trap_42_cat_of_two_dtypes_is_an_error_and_widening_is_asked_for(order):
    batches = [make_batch(2), make_batch(3, 1, routes_dtype=torch.int16)][::order]
    batches.append(make_batch(1, 2))
    with pytest.raises(TypeError, match=rf"^Batch\.cat: {ROUTES} of input 1 is torch\.\w+, that"):
        Batch.cat(batches)
    joined = Batch.cat(batches, widen=True)
    assert joined[ROUTES].dtype == torch.int16
    assert model_of(joined) == [trajectory for batch in batches for trajectory in model_of(batch)]
    assert [batch[ROUTES].dtype for batch in batches].count(torch.int16) == 1
    dense = [Batch({"x": torch.zeros(1)}), Batch({"x": torch.zeros(1).double()})]
    with pytest.raises(TypeError, match=r"^Batch\.cat: x of input 1 is torch\.float64"):
        Batch.cat(dense, widen=True)


def test_what_is_joined_is_held_to_the_rules_of_all():
    wide = make_packed([1, 2], torch.int64, (2, 2))
    free = Batch({ROUTES: wide}, registry=FieldRegistry())
    ruled = Batch({ROUTES: make_packed([1, 2], torch.uint8, (2, 2))})
    for parts in ([free, ruled], [ruled, free]):
        with pytest.raises(TypeError, match=f"Batch.cat: {ROUTES} must be .*, got torch.int64"):
            Batch.cat(parts, widen=True)
    assert Batch.cat([free, free], widen=True)[ROUTES].dtype == torch.int64


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("widen", [False, True])
def test_a_support_of_one_width_joins_a_ragged_one_only_after_a_change_of_form(order, widen):
    batches = [make_batch(2), make_batch(3, 1, ragged=True)][::order]
    forms = ["a PackedTensor of one width", "a PackedRagged"][::order]
    message = rf"^Batch\.cat: {SUPPORT} is {forms[1]} in input 1, {forms[0]} in input 0; Packed"
    with pytest.raises(TypeError, match=message):
        Batch.cat(batches, widen=widen)
    with pytest.raises(TypeError, match=f"^join_trajectories: {SUPPORT} is {forms[1]} in item 1"):
        join_trajectories(batches, widen=widen)
    assert batches[0] != batches[1]
    ragged = [batch if isinstance(batch[SUPPORT], PackedRagged) else
              batch.with_fields({SUPPORT: PackedRagged.from_padded(batch[SUPPORT])})
              for batch in batches]  # fmt: skip
    assert model_of(Batch.cat(ragged)) == [t for batch in ragged for t in model_of(batch)]
    wide = [batch.with_fields({SUPPORT: batch[SUPPORT].to_padded(CANDIDATES)}) for batch in ragged]
    assert wide[::order][0] == batches[::order][0]
    assert model_of(Batch.cat(wide)) == [t for batch in wide for t in model_of(batch)]


# --- trap 44: slicing rebases ---------------------------------------------------------------------


def test_trap_44_row_ids_of_a_slice_start_at_its_first_row(device):
    from packhorse.replay.layout import TokenLayout

    prompts, responses = [3, 2], [2, 4]
    support = make_packed(responses, torch.int32, (5,), device)
    batch = Batch({SUPPORT: support, "lengths": [5, 6]})
    batch["marks"] = PackedRagged.from_padded(support, widths=[5] * 6)
    for second in (batch[1:2], batch[-1], batch[[1]], batch[[1, 0]][:1]):
        rows, ragged = second[SUPPORT], second["marks"]
        assert rows.cu_seqlens.tolist() == ragged.cu_seqlens.tolist() == [0, 4]
        row_ids = TokenLayout.build(second["lengths"]).support_row_ids(rows.lengths).tolist()
        assert row_ids == [-1, 0, 1, 2, 3, -1]
        assert [rows.values[r].tolist() for r in row_ids if r >= 0] == support[1].tolist()
        assert ragged.row_offsets.tolist() == [0, 5, 10, 15, 20]
        assert ragged.values.tolist() == support[1].flatten().tolist()
    assert prompts[1] + responses[1] == 6


# --- trap 45: a field without a rule --------------------------------------------------------------


@pytest.mark.parametrize("path", ["notes", "extra.notes"])
def test_trap_45_a_packed_field_without_a_rule_is_refused_where_padding_is_needed(path):
    notes = make_packed([1, 2, 0], torch.float32, (2,))
    batch = make_batch(3)
    if path == "notes":
        batch["notes"] = notes
    else:
        batch["extra"] = {**batch["extra"], "notes": notes}
    model = model_of(batch)
    check(batch[[2, 0]], [model[2], model[0]], batch)
    assert batch.pad_to_multiple(3) is batch
    for call in (lambda: batch.pad_to_multiple(2), lambda: batch.synthetic(1)):
        with pytest.raises(ValueError, match=rf"^Batch\.\w+: {path} is packed and has no regist"):
            call()
    check(batch, model, batch)
    rule = PackedField(path, "any", (torch.float32,), (2,), fill=0.0)
    known = Batch(batch.fields, registry=batch.registry.with_field(rule))
    assert model_of(known.pad_to_multiple(2))[3][path] == []
    assert model_of(known.synthetic(1))[0][path] == []


def test_trap_45_a_ragged_field_without_a_rule_is_refused_where_padding_is_needed():
    batch = Batch({"notes": PackedRagged.empty([1, 2, 0]), "loss_mask": torch.ones(3)})
    assert batch[[2, 0]]["notes"].lengths == (0, 1)
    for call in (lambda: batch.pad_to_multiple(2), lambda: batch.synthetic(1, attended=None)):
        with pytest.raises(ValueError, match=r"^Batch\.\w+: notes is packed and has no regist"):
            call()
    rule = PackedField("notes", "response", (torch.int32,), (None,), fill=-1)
    with pytest.raises(TypeError, match=r"^Batch: notes must be a PackedTensor, got PackedRagged"):
        Batch(batch.fields, registry=PACKED_FIELDS.with_field(rule))
    rule = PackedField("notes", "response", (torch.int32,), (None,), fill=-1, ragged=True)
    known = Batch(batch.fields, registry=PACKED_FIELDS.with_field(rule))
    assert ragged_model.as_lists(known.pad_to_multiple(2)["notes"]) == [[[]], [[], []], [], [[]]]
    assert ragged_model.as_lists(known.synthetic(1, attended=None)["notes"]) == [[]]


# --- trap 46: batch padding -----------------------------------------------------------------------


@pytest.mark.parametrize("format", ["thd", "bshd"])
@pytest.mark.parametrize(("dummy", "ragged"), [("constant", False), ("spread", True)])
def test_trap_46_padding_stores_no_route_and_the_model_sees_dummies(format, dummy, ragged, device):
    from packhorse.replay.layout import TokenLayout

    lengths, captured, responses = [4, 2, 3], [3, 2, 3], [2, 1, 2]
    routes = make_routes(captured, num_layers=2, topk=2, device=device)
    token_ids = torch.arange(12, device=device).view(3, 4)
    support = make_packed(responses, torch.int32, (3,), device)
    if ragged:
        support = PackedRagged.from_padded(support, widths=[3] * 5)
    batch = Batch({
        "token_ids": token_ids,
        "loss_mask": torch.ones(3, 4, device=device),
        "lengths": lengths,
        ROUTES: routes,
        SUPPORT: support,
    })  # fmt: skip
    padded = batch.pad_to_multiple(5)
    assert len(padded) == 5
    assert padded["token_ids"].tolist() == token_ids.tolist() + 2 * [token_ids[0].tolist()]
    assert padded["loss_mask"].tolist() == [[1.0] * 4] * 3 + [[0.0] * 4] * 2
    assert padded["lengths"] == (4, 2, 3, 4, 4)
    assert padded[ROUTES].lengths == (3, 2, 3, 0, 0)
    assert padded[SUPPORT].lengths == (2, 1, 2, 2, 2)
    if ragged:
        assert ragged_model.as_lists(padded[SUPPORT])[3:] == [[[]] * 2] * 2
        padded_support = padded[SUPPORT].to_padded()
    else:
        padded_support = padded[SUPPORT]
    assert as_lists(padded_support)[3:] == [[[-1] * 3] * 2] * 2
    assert padded[:3] == batch

    # in the model: each of the 8 padded tokens has K distinct experts and is masked
    layout = TokenLayout.build(padded["lengths"], format=format, device=device)
    topk_ids, mask, _ = layout.gather_routes(
        padded[ROUTES], range(2), num_experts=6, dummy=dummy, ep_size=2
    )
    owners = layout.align(
        torch.arange(5, device=device)[:, None].expand(5, layout.batch_width).contiguous(), fill=-1
    ).tolist()
    of_padding = [slot for slot, owner in enumerate(owners) if owner >= 3]
    assert len(of_padding) == 8
    assert all(mask[slot] for slot in of_padding)
    assert int((~mask).sum()) == sum(captured)
    assert all(len(set(row)) == 2 for row in topk_ids.view(-1, 2).tolist())

    # materialised
    full, dummies = materialize(
        padded[ROUTES], padded["lengths"], num_experts=6, dummy=dummy, ep_size=2
    )
    assert full.lengths == (4, 2, 3, 4, 4)
    assert as_lists(dummies) == [
        [False] * 3 + [True], [False] * 2, [False] * 3, [True] * 4, [True] * 4,
    ]  # fmt: skip
    assert [full[i][: captured[i]].tolist() for i in range(3)] == as_lists(routes)
    assert all(len(set(row)) == 2 for row in full.values.view(-1, 2).tolist())
    derived = router_padding_mask(padded[ROUTES], padded["lengths"])
    assert torch.equal(derived, dummies.to_padded(True, side="left"))


def test_what_padding_zeroes_is_named_or_the_loss_mask():
    batch = make_batch(3).drop(["loss_mask"])
    with pytest.raises(ValueError, match=r"^Batch\.pad_to_multiple: no field loss_mask; name in"):
        batch.pad_to_multiple(2)
    assert model_of(batch.pad_to_multiple(2, zeroed=()))[3]["rewards"] == batch["rewards"][0]
    padded = batch.pad_to_multiple(2, zeroed=["rewards", "extra.scores", "images"])
    last = model_of(padded)[3]
    assert (last["rewards"], last["extra.scores"]) == (0.0, [0.0, 0.0])
    assert last["images"] == [[0.0, 0.0]] * len(batch["images"][0])
    assert last["uids"] == "0-0"


def test_a_stored_router_mask_masks_all_of_padding_and_of_synthetic_trajectories():
    routes, lengths = make_routes([3, 2]), [4, 3]
    full, dummies = materialize(routes, lengths, num_experts=6)
    batch = Batch({
        ROUTES: full,
        "router_padding_mask": dummies.to_padded(True, 5, side="left"),
        "loss_mask": torch.ones(2, 5),
    })  # fmt: skip
    mask = router_padding_mask(routes, lengths, width=5)
    assert torch.equal(batch["router_padding_mask"], mask)
    for more in (batch.pad_to_multiple(3), Batch.cat([batch, batch.synthetic(1, attended=None)])):
        assert more["router_padding_mask"].tolist() == [*mask.tolist(), [True] * 5]
        assert more[ROUTES].lengths == (4, 3, 0)


# --- trap 47: synthetic trajectories --------------------------------------------------------------


@pytest.mark.parametrize("real", [0, 2])
@pytest.mark.parametrize(("format", "ragged"), [("thd", False), ("bshd", True)])
def test_trap_47_a_synthetic_trajectory_is_one_masked_token_without_a_response(
    real, format, ragged, device
):
    from packhorse.replay.layout import TokenLayout
    from packhorse.replay.scoring import score_microbatch

    width = 5
    mask = torch.tensor([[0, 1, 1, 1, 1], [0, 0, 1, 1, 1]], device=device)
    support = PackedTensor.from_lengths(
        torch.tensor([[7, 1], [7, 2], [7, 3]], dtype=torch.int32, device=device), [2, 1]
    )
    if ragged:
        support = PackedRagged.from_padded(support, widths=[2] * 3)
    batch = Batch({
        "token_ids": torch.full((2, width), 7, device=device),
        "attention_mask": mask,
        "lengths": torch.tensor([4, 3]),
        "first_columns": torch.tensor([1, 2]),
        ROUTES: make_routes([3, 2], num_layers=2, topk=2, device=device),
        SUPPORT: support,
    })  # fmt: skip
    made = batch.synthetic(2, values={"lengths": 1})
    microbatch = Batch.cat([batch[:real], made])
    assert made["attention_mask"].tolist() == [[1, 0, 0, 0, 0]] * 2
    assert made["token_ids"].tolist() == [[0] * width] * 2
    assert (made["lengths"].tolist(), made["first_columns"].tolist()) == ([1, 1], [0, 0])
    assert (made[ROUTES].lengths, made[SUPPORT].lengths) == ((0, 0), (0, 0))

    layout = TokenLayout.build(
        microbatch["lengths"].tolist(), format=format, batch_width=width,
        first_columns=microbatch["first_columns"].tolist(), device=device,
    )  # fmt: skip
    topk_ids, padding_mask, _ = layout.gather_routes(microbatch[ROUTES], range(2), num_experts=6)
    assert all(len(set(row)) == 2 for row in topk_ids.view(-1, 2).tolist())
    assert int((~padding_mask).sum()) == sum(microbatch[ROUTES].lengths)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(layout.num_tokens, 9, generator=generator).to(device).requires_grad_()
    support = microbatch[SUPPORT].to_padded(2) if ragged else microbatch[SUPPORT]
    scores = score_microbatch(logits, layout, microbatch["token_ids"], support)
    assert scores.logprobs.lengths == support.lengths
    total = scores.logprobs.values.sum()
    (gradient,) = torch.autograd.grad(total, logits)
    assert torch.isfinite(gradient).all()
    assert torch.isfinite(total)
    if real == 0:
        assert total.item() == 0.0
        assert not gradient.any()


# --- trap 48: equal numbers everywhere ------------------------------------------------------------


@pytest.mark.parametrize("ragged", FORMS)
def test_trap_48_ranks_filled_up_with_synthetic_ones_hold_each_real_row_once(ragged):
    batch = make_batch(11, ragged=ragged)
    batch["origin"] = torch.arange(1, 12)
    groups = [[3, 0], [1], [10, 2, 4, 5], [], [9, 8, 7, 6]]  # of each rank
    most = max(map(len, groups))
    ranks = [Batch.cat([batch[ids], batch.synthetic(most - len(ids))]) for ids in groups]
    assert [len(rank) for rank in ranks] == [most] * len(groups)
    everything = Batch.cat(ranks)
    origin = everything["origin"]
    real = everything[origin > 0]
    assert real[torch.argsort(real["origin"])] == batch
    assert int((origin == 0).sum()) == most * len(groups) - 11
    assert not everything[origin == 0]["loss_mask"].any()


# --- what it is -----------------------------------------------------------------------------------


def test_fields_are_read_set_and_listed_by_name():
    batch = make_batch(3, metadata={"step": 4})
    assert batch["uids"] == ("0-0", "0-1", "0-2")
    assert "uids" in batch
    assert "step" not in batch
    part = batch[1:]
    part["advantages"] = torch.zeros(2)
    part["uids"] = ["a", "b"]
    part.metadata["step"] = 5
    assert "advantages" not in batch
    assert batch["uids"][1:] == ("0-1", "0-2")
    assert batch.metadata == {"step": 4}
    assert part.repeat(2).metadata == Batch.cat([part, batch[:0].with_fields(
        {"advantages": torch.zeros(0)})]).metadata == {"step": 5}  # fmt: skip
    batch["extra"]["mine"] = 1
    assert "mine" not in batch["extra"]
    with pytest.raises(TypeError):
        batch.fields["x"] = 1


def test_equality_means_fields_and_not_metadata():
    batch = make_batch(3)
    assert batch == make_batch(3, metadata={"step": 1})
    assert batch != make_batch(3, 1)
    assert batch != batch[:2]
    assert batch != batch.drop(["uids"])
    assert batch != batch.with_fields({"rewards": batch["rewards"].double()})
    assert batch != batch.with_fields({"rewards": batch["rewards"].tolist()})
    assert batch != batch.with_fields({"extra": {}})
    assert batch != batch.with_fields({"images": batch["images"][::-1]})
    assert (batch == 3) is False
    with pytest.raises(TypeError, match=r"^Batch\.equal: other is a int"):
        batch.equal(3)
    with pytest.raises(TypeError, match="unhashable"):
        hash(batch)


def test_listed_arrays_are_compared_by_value_and_dtype():
    def made(last, dtype=np.int64):
        return Batch({"x": [np.arange(3), [np.array([1, last], dtype=dtype)], {"y": np.array(2)}]})

    assert made(5) == made(5)
    assert made(5) != made(6)
    assert made(5) != made(5, np.int32)
    assert made(5) != Batch({"x": [np.arange(3), [np.array([1, 5])], None]})
    assert Batch({"x": [np.arange(3)]}) != Batch({"x": [3]})


def test_the_representation_reads_no_value():
    batch = make_batch(2).to("meta")
    assert repr(batch).startswith("Batch(2 trajectories; token_ids: [2, 3] torch.int64, attention")
    assert f"{ROUTES}: " in repr(batch)
    assert f"{ENTROPY}: " in repr(batch)
    assert f"{MARKS}: {batch[MARKS].num_rows} ragged rows of {batch[MARKS].num_ids}" in repr(batch)


def test_the_default_registry_is_that_of_routes_and_support():
    assert Batch({}, batch_size=0).registry is PACKED_FIELDS
