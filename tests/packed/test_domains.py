"""validate_batch: what is legal passes, what is not is refused and named, by plain loops."""

import random

import numpy as np
import pytest
import torch

from packhorse.packed.batch import Batch
from packhorse.packed.domains import validate_batch
from packhorse.packed.fields import PACKED_FIELDS, FieldRegistry, PackedField
from packhorse.packed.inputs import make_inputs, select_for_logprobs
from packhorse.packed.ragged import PackedRagged
from packhorse.packed.tensor import PackedTensor
from tests.packed.inputs_model import PAD, PADDINGS, E, K, L, V, make_output
from tests.packed.trace_helpers import add_turn, make_trace, rows

SIZES = {"vocab_size": V, "num_experts": E, "num_layers": L, "topk": K}
ROUTES, SUPPORT = "rollout_expert_indices", "rollout_sample_support"


def inputs_of(output: dict, padding: str = "left", ragged: bool = False) -> Batch:
    return make_inputs(
        output, padding=padding, pad_token_id=PAD, vocab_size=V, num_experts=E, ragged=ragged
    )


def ragged_of(batch: Batch) -> Batch:
    """The same support, each row as wide as it is."""
    fixed = batch[SUPPORT]
    widths = (fixed.values >= 0).sum(1).tolist()
    ids = fixed.values[fixed.values >= 0]
    return batch.with_fields({SUPPORT: PackedRagged.from_lengths(ids, widths, fixed.lengths)})


# --- legal ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("seed", range(10))
def test_what_an_engine_returned_is_legal_also_padded_sliced_and_in_any_order(padding, seed):
    batch = inputs_of(make_output(seed), padding, ragged=seed % 2 == 1)
    validate_batch(batch, **SIZES)
    validate_batch(batch)
    validate_batch(select_for_logprobs(batch), **SIZES)
    order = list(range(len(batch)))
    random.Random(seed).shuffle(order)
    for other in (
        batch[order], batch[1:], batch[:0], batch.repeat(2), batch.pad_to_multiple(4),
        Batch.cat([batch, batch.synthetic(2)]), batch.synthetic(1),
    ):  # fmt: skip
        validate_batch(other, **SIZES)


def test_traces_with_every_kind_of_token_are_legal():
    traces = [make_trace(3), make_trace(1), make_trace(2)]
    add_turn(traces[0], [5, 6, 7], routes=rows(0, 5))
    tail = traces[0].truncate(2)
    traces[0].add_observation([8, 9])
    traces[0].restore(tail)  # behind the observation: excused
    traces[0].append_tokens([1])
    add_turn(traces[1], [4, 3], routes=rows(0, 2))
    add_turn(traces[2], [4, 3])
    traces[2].mark_missing()
    batch = make_inputs([trace.finalize() for trace in traces], vocab_size=50)
    assert batch["missing"] == (False, False, True)
    validate_batch(batch, vocab_size=50)
    with pytest.raises(ValueError, match="token 7 is a trained target and needs 7 rows, there are"):
        validate_batch(batch.drop(["excused"]), vocab_size=50)


# --- the same verdict as plain loops --------------------------------------------------------------


def is_legal(batch: Batch) -> bool:
    """Routes, support and loss mask of a left-padded batch, from the design's words."""
    width, right = batch["sequences"].shape[1], batch["response_mask"].shape[1]
    for i in range(len(batch)):
        length, response = batch["lengths"][i], batch["response_lengths"][i]
        prompt = length - response
        captured, support = batch[ROUTES][i], batch[SUPPORT][i].tolist()
        if len(captured) > length or len(support) != response:
            return False
        mask = batch["loss_mask"][i].tolist()
        if any(mask[: right - response]):
            return False
        for r in range(response):
            column = right - response + r
            appended = batch["appended"][i, column]
            ids = [token for token in support[r] if token != -1]
            if ids and batch["sequences"][i, width - response + r] not in ids:
                return False
            if mask[column] and not appended and (prompt + r > len(captured) or not ids):
                return False
    return True


@pytest.mark.parametrize("seed", range(60))
def test_a_mutated_batch_is_refused_where_plain_loops_refuse_it(seed):
    rng = random.Random(seed)
    batch = inputs_of(make_output(seed, size=rng.randrange(1, 5)))
    order = list(range(len(batch)))
    rng.shuffle(order)
    shift = rng.choice([-1, 1])
    kind = rng.randrange(5)
    if kind == 0:
        batch[ROUTES] = batch[ROUTES][order]
    elif kind == 1:
        batch[SUPPORT] = batch[SUPPORT][order]
    elif kind == 2:
        batch["loss_mask"] = batch["loss_mask"].roll(shift, rng.randrange(2))
    elif kind == 3:
        rows_of = [ids[: max(len(ids) - rng.randrange(3), 0)] for ids in batch[ROUTES]]
        batch[ROUTES] = PackedTensor.from_segments(rows_of)
    else:
        batch[SUPPORT] = PackedTensor(
            batch[SUPPORT].values.roll(shift, 0), batch[SUPPORT].cu_seqlens
        )
    legal = is_legal(batch)
    if seed % 2:
        batch = ragged_of(batch)
    if legal:
        validate_batch(batch, **SIZES)
    else:
        with pytest.raises(ValueError, match=r"^validate_batch: .* of trajectory \d"):
            validate_batch(batch, **SIZES)


# --- what happened --------------------------------------------------------------------------------


def distinct_batch() -> Batch:
    """Four trajectories of distinct lengths and tokens; sampled tokens but for two observed."""
    prompts = [[10, 11], [20, 21, 22, 23, 24], [30], [40, 41, 42]]
    responses = [[1, 2, 3], [4, 5, 6, 7, 8], [9, 12, 13, 14, 15, 16], [17, 18, 19, 26]]
    support = [[[token, token + 100] for token in ids] for ids in responses]
    loss = [[1] * len(ids) for ids in responses]
    support[2][2] = support[2][3] = []
    loss[2][2] = loss[2][3] = 0
    return make_inputs(
        {
            "prompt_token_ids": prompts,
            "response_ids": responses,
            "loss_masks": loss,
            "rewards": [[-0.5] * len(ids) for ids in responses],
            "rollout_logprobs": [[-0.25] * len(ids) for ids in responses],
            ROUTES: [
                np.arange(2 * (len(p) + len(r) - 1)).reshape(-1, 1, 2) % 8
                for p, r in zip(prompts, responses, strict=True)
            ],
            SUPPORT: support,
        },
        vocab_size=200,
        num_experts=8,
    )


def equal_lengths() -> Batch:
    """Four trajectories of one shape: no length tells them apart."""
    responses = [[1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11, 12]]
    return make_inputs(
        {
            "prompt_token_ids": [[20]] * 4,
            "response_ids": responses,
            SUPPORT: [[[token, token + 50] for token in ids] for ids in responses],
        },
        vocab_size=200,
    )


def segments(packed: PackedTensor, change) -> PackedTensor:
    return PackedTensor.from_segments([change(rows) for rows in packed])


def rolled(values, shift: int):
    values = list(values)
    return values[-shift:] + values[:-shift]


@pytest.mark.parametrize(("field", "subject"), [
    (ROUTES, "rows fit the {} one: one trajectory off"),
    (SUPPORT, "has as many as the {} one needs: one trajectory off"),
    ("attention_mask", "has that of the {} one: one trajectory off"),
    ("response_mask", "has as many as the {} one needs: one trajectory off"),
    ("loss_mask", "'s fit the {} one: one trajectory off"),
    ("rollout_logprobs", "'s fit the {} one: one trajectory off"),
])  # fmt: skip
@pytest.mark.parametrize("shift", [1, -1])
def test_a_field_that_is_one_trajectory_off_is_named(field, subject, shift):
    batch = distinct_batch()
    order = rolled(range(4), shift)
    value = batch[field]
    batch[field] = value[order]
    which = "previous" if shift > 0 else "next"
    with pytest.raises(ValueError, match=rf"^validate_batch: {field} of trajectory \d") as caught:
        validate_batch(batch)
    assert str(caught.value).endswith(subject.format(which))


@pytest.mark.parametrize("shift", [1, -1])
def test_a_support_one_trajectory_off_is_named_by_its_ids_where_lengths_are_equal(shift):
    batch = equal_lengths()
    batch[SUPPORT] = batch[SUPPORT][rolled(range(4), shift)]
    which = "previous" if shift > 0 else "next"
    with pytest.raises(
        ValueError, match=r"^validate_batch: rollout_sample_support of trajectory 0"
    ):
        validate_batch(batch)
    for form in (batch, ragged_of(batch)):
        with pytest.raises(ValueError, match=f"the rows of the {which} one: one trajectory off$"):
            validate_batch(form)


def test_a_field_of_another_order_is_named():
    batch = distinct_batch()
    order = [0, 2, 1, 3]
    with pytest.raises(ValueError, match=r"trajectory 1 has 6 .* trajectory 2 needs as many: of a"):
        validate_batch(batch.with_fields({SUPPORT: batch[SUPPORT][order]}))
    with pytest.raises(ValueError, match=r"trajectory 2.* they fit trajectory 1: of a batch in an"):
        validate_batch(batch.with_fields({ROUTES: batch[ROUTES][order]}))
    with pytest.raises(
        ValueError, match=r"attention_mask of trajectory 1 .*; it is that of traj.* 2"
    ):
        validate_batch(batch.with_fields({"attention_mask": batch["attention_mask"][order]}))
    batch = equal_lengths()
    with pytest.raises(
        ValueError,
        match=r"trajectory 1, row 0: the sampled id 4 is not among its 2"
        r" ids; its rows hold the tokens of trajectory 2: of a batch in another",
    ):
        validate_batch(batch.with_fields({SUPPORT: batch[SUPPORT][order]}))
    with pytest.raises(
        ValueError, match=r"its rows hold the tokens of trajectory 2: of a batch in"
    ):
        validate_batch(batch.with_fields({"sequences": batch["sequences"][order]}))


@pytest.mark.parametrize(("shift", "how", "what"), [(1, "late", "before"), (-1, "early", "after")])
def test_a_support_one_token_off_is_named(shift, how, what):
    batch = distinct_batch()
    ends = slice(None, 1) if shift > 0 else slice(-1, None)

    def moved(ids):  # every row a place on; the end of it is repeated
        return torch.cat([ids[ends], ids[:-1]] if shift > 0 else [ids[1:], ids[ends]])

    batch[SUPPORT] = segments(batch[SUPPORT], moved)
    with pytest.raises(
        ValueError,
        match=rf"in every trajectory each row holds the token {what} its"
        rf" own: one token {how}$",
    ):
        validate_batch(batch.drop(["loss_mask"]))
    with pytest.raises(ValueError, match=rf": one token {how}$"):
        validate_batch(ragged_of(batch.drop(["loss_mask"])))
    one = distinct_batch()
    one[SUPPORT] = PackedTensor.cat([one[SUPPORT][:3], batch[SUPPORT][3:]])
    with pytest.raises(ValueError, match=r"trajectory 3, row \d.* in trajectory 3 each row holds"):
        validate_batch(one)


def test_a_loss_mask_one_token_off_is_named():
    batch = distinct_batch()
    early = batch.with_fields({"loss_mask": batch["loss_mask"].roll(-1, 1)})
    message = r"loss_mask of trajectory 0 is not 0 in column 2, .*: one token early$"
    with pytest.raises(ValueError, match=message):
        validate_batch(early)
    one = batch[2:3]  # its observed tokens show it inside the response
    for shift, how in ((1, "late"), (-1, "early")):
        mask = one["loss_mask"].roll(shift, 1)
        mask[0, 0 if shift > 0 else -1] = 0
        message = (
            r"row \d is empty, but its token is trained and not marked appended; the loss mask fits"
            rf" if it is moved by one: it is one token {how}$"
        )
        with pytest.raises(ValueError, match=message):
            validate_batch(one.with_fields({"loss_mask": mask}))


def test_logprobs_one_token_off_show_at_observed_tokens():
    batch = distinct_batch()[2:3]
    batch["loss_mask"] = torch.zeros(1, 6)
    batch["rollout_logprobs"] = torch.tensor([[-0.1, -0.2, 0.0, 0.0, -0.3, -0.4]])
    validate_batch(batch)
    for late, how in (
        ([-0.9, -0.1, -0.2, 0, 0, -0.3], "late"),
        ([-0.2, 0, 0, -0.3, -0.4, -0.5], "early"),
    ):
        message = (
            r"^validate_batch: rollout_logprobs of trajectory 0, response token \d: -0.\d+, but its"
            rf" support row is empty; the field fits if it is moved by one: it is one token {how}$"
        )
        with pytest.raises(ValueError, match=message):
            validate_batch(batch.with_fields({"rollout_logprobs": torch.tensor([late])}))
    # a sampled token whose support was not kept is no shift
    kept = torch.tensor([[-0.1, -0.2, -0.3, -0.4, -0.5, -0.6]])
    validate_batch(batch.with_fields({"rollout_logprobs": kept}))


def test_a_forced_first_token_with_a_logprob_and_no_support_is_legal():
    """As of a template's "<think>": the engine evaluated it, nothing was sampled, it is not
    trained. That the logprobs would fit one place later says nothing."""
    output = {
        "prompt_token_ids": [[1], [1, 2]],
        "response_ids": [[7, 4, 5], [7, 6]],
        "loss_masks": [[0, 1, 1], [0, 1]],
        "rollout_logprobs": [[-0.5, -1.0, -1.0], [-0.5, -2.0]],
        SUPPORT: [[[], [4], [5]], [[], [6]]],
    }
    for padding in PADDINGS:
        validate_batch(inputs_of(output, padding), **SIZES)
    early = output | {"rollout_logprobs": [[-1.0, -1.0, 0.0], [-2.0, 0.0]]}
    with pytest.raises(ValueError, match="it is one token early"):
        validate_batch(inputs_of(early), **SIZES)


def test_values_on_the_other_side_or_one_column_off_are_named():
    batch = distinct_batch()
    with pytest.raises(
        ValueError, match=r"loss_mask of trajectory 0 .* aligned on the other side$"
    ):
        validate_batch(batch.with_fields({"loss_mask": batch["loss_mask"].flip(1)}))
    for shift, how in ((1, "late"), (-1, "early")):
        mask = batch["attention_mask"].roll(shift, 1)
        with pytest.raises(ValueError, match=f"; one column {how} in every trajectory$"):
            validate_batch(batch.with_fields({"attention_mask": mask}))


def test_routes_that_end_one_row_early_everywhere_are_named():
    batch = distinct_batch()
    routes = segments(batch[ROUTES], lambda ids: ids[:-1])
    with pytest.raises(
        ValueError,
        match=r"trajectory 0: token 4 is a trained target and needs 4 ro"
        r"ws, there are 3 .*; one row too few in every trajectory$",
    ):
        validate_batch(batch.with_fields({ROUTES: routes}))
    support = segments(batch[SUPPORT], lambda ids: ids[:-1])
    with pytest.raises(ValueError, match=r"2 rows for 3 response tokens; one row too few in every"):
        validate_batch(batch.with_fields({SUPPORT: support}))
    whole = PackedTensor.from_lengths(
        batch[SUPPORT].values[:1].repeat(sum(batch["lengths"]), 1), batch["lengths"]
    )
    with pytest.raises(ValueError, match="every trajectory has a row a token, prompt and response"):
        validate_batch(batch.with_fields({SUPPORT: whole}))


def test_swapped_fields_are_named():
    batch = distinct_batch()
    free = Batch(dict(batch.fields), registry=FieldRegistry())
    swapped = free.with_fields({ROUTES: batch[SUPPORT], SUPPORT: batch[ROUTES]})
    with pytest.raises(
        ValueError, match=r"rollout_expert_indices and rollout_sample_support are s"
    ):
        validate_batch(swapped)
    for one, other, message in (
        ("lengths", "response_lengths", "lengths and response_lengths are swapped: no trajectory"),
        ("loss_mask", "response_mask", "loss_mask does: the two are swapped"),
        ("rewards", "rollout_logprobs", "rewards holds no positive one: the two are swapped"),
    ):
        given = batch
        if one == "rewards":
            given = batch.with_fields({"rewards": -batch["rewards"]})
        with pytest.raises(ValueError, match=message):
            validate_batch(given.with_fields({one: given[other], other: given[one]}))


# --- refusals -------------------------------------------------------------------------------------


def changed(field: str, place: tuple, value) -> dict:
    values = distinct_batch()[field].clone()
    values[place] = value
    return {field: values}


def changed_rows(field: str, place: tuple, value) -> dict:
    packed = distinct_batch()[field].clone()
    packed.values[place] = value
    return {field: packed}


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({"lengths": [5, 10, 7, 0]}, {}, "lengths of trajectory 3: 0 tokens, 4 of them of the"),
        ({"response_lengths": [3, 5, 8, 4]}, {}, "response_lengths of trajectory 2: 7 tokens, 8"),
        ({"response_lengths": [3, 5, 7, 4]}, {},
         "response_lengths of trajectory 2: all its 7 tokens are of the response, so that nothing"),
        ({"first_columns": [5, 0, 3, 4]}, {}, "first_columns of trajectory 3: 7 tokens, 4 of them"
         " of the response, from column 4 of 10"),
        ({"lengths": torch.tensor([5, 10, 7, 7])}, {}, "lengths must be host integers in a list"),
        ({"lengths": [5, 10, 7, "7"]}, {}, "lengths of trajectory 3 must be an integer, got '7'"),
        ({"lengths": [5, True, 7, 7]}, {}, "lengths of trajectory 1 must be an integer, got True"),
        ({"sequences": torch.zeros(4, 10)}, {}, "sequences must be int64, got float32"),
        ({"sequences": ["a"] * 4}, {}, "sequences must be a dense tensor, got tuple"),
        ({"attention_mask": torch.ones(4, 9)}, {}, "attention_mask must be [4, 10], got [4, 9]"),
        ({"attention_mask": torch.ones(4)}, {}, "attention_mask must be of 2 dimensions, got [4]"),
        (changed("attention_mask", (2, 5), 0), {},
         "attention_mask of trajectory 2 is not 1 at the columns [3, 10) and 0 elsewhere"),
        (changed("sequences", (3, 4), -2), {}, "sequences of trajectory 3, token 1: id -2 is neg"),
        ({}, {"vocab_size": 40}, "sequences of trajectory 3, token 0: id 40 is not below vocab_s"),
        (changed("response_mask", (0, 2), 1), {},
         "response_mask of trajectory 0 has 4 tokens, not the 3 of response_lengths"),
        (changed("response_mask", (0, slice(None)), torch.tensor([0, 1, 1, 1, 0, 0])), {},
         "response_mask of trajectory 0 is no run of 1 that begins at column 0 or ends at the"),
        (changed("response_mask", (0, 5), 2), {},
         "response_mask of trajectory 0, column 5: 2 is neither 0 nor 1"),
        (changed("loss_mask", (3, 4), 0.5), {},
         "loss_mask of trajectory 3, column 4: 0.5 is neither 0 nor 1"),
        (changed("loss_mask", (3, 1), 1), {},
         "loss_mask of trajectory 3 is not 0 in column 1, where it has no response token"),
        ({"loss_mask": torch.ones(4, 5)}, {}, "loss_mask must be [4, 6], got [4, 5]"),
        (changed("rollout_logprobs", (1, 3), float("-inf")), {},
         "rollout_logprobs of trajectory 1, column 3: -inf is not finite"),
        (changed("rollout_logprobs", (1, 3), 0.5), {},
         "rollout_logprobs of trajectory 1, column 3: 0.5 is positive"),
        (changed("rewards", (0, 0), 1.0), {}, "rewards of trajectory 0 is not 0 in column 0, w"),
        ({"appended": torch.tensor([[0] * 6, [0] * 6, [0] * 6, [0, 0, 1, 1, 0, 0]])}, {},
         "appended of trajectory 3: 2 tokens with loss; at most one a trajectory is scored over"),
        (changed_rows(ROUTES, (5, 0, 1), 9), {"num_experts": 9},
         "rollout_expert_indices of trajectory 1, row 1, layer 0: expert 9 is not below num_expe"),
        ({}, {"num_layers": 2}, "rollout_expert_indices has 1 layers, expected 2"),
        ({}, {"topk": 8}, "rollout_expert_indices has 2 experts a token, expected 8"),
        ({}, {"topk": -8}, "topk must not be negative, got -8"),
        ({"missing": [False, True, False, False]}, {},
         "rollout_expert_indices of trajectory 1 has 9 rows, but missing says that its routes are"),
        ({"missing": [0, 0, 0, 0]}, {}, "missing of trajectory 0 must be a bool, got 0"),
        ({"missing": torch.zeros(4)}, {}, "missing must be booleans in a list, got Tensor"),
        (changed_rows(SUPPORT, (1, 0), -1), {},
         "rollout_sample_support of trajectory 0, row 1: an id after a -1"),
        (changed_rows(SUPPORT, (4, 1), 300), {"vocab_size": 200},
         "rollout_sample_support of trajectory 1, row 1: id 300 is not below vocab_size=200"),
        (changed_rows(SUPPORT, (4, 1), -5), {},
         "rollout_sample_support of trajectory 1, row 1: id -5 is negative"),
        (changed_rows(SUPPORT, (4, 0), 77), {},
         "rollout_sample_support of trajectory 1, row 1: the sampled id 5 is not among its 2 ids"),
        (changed_rows(SUPPORT, (4, slice(None)), -1), {},
         "rollout_sample_support of trajectory 1, row 1 is empty, but its token is trained and"),
    ],
)  # fmt: skip
def test_a_wrong_field_is_refused_in_one_line(change, options, message):
    with pytest.raises((TypeError, ValueError)) as caught:
        validate_batch(distinct_batch().with_fields(change), **options)
    text = str(caught.value)
    assert text.startswith(f"validate_batch: {message}")
    assert "\n" not in text


def test_a_batch_without_any_routes_is_refused():
    batch = distinct_batch()
    none = PackedTensor.from_lengths(batch[ROUTES].values[:0], [0] * 4)
    lost = batch.with_fields({ROUTES: none, "missing": [True] * 4})
    with pytest.raises(
        ValueError,
        match=r"^validate_batch: rollout_expert_indices is missing in al"
        r"l 4 trajectories, so there is nothing to replay$",
    ):
        validate_batch(lost)
    validate_batch(
        lost.with_fields({"missing": [True] * 3 + [False], "loss_mask": torch.zeros(4, 6)})
    )


def test_a_batch_elsewhere_or_of_another_kind_is_refused():
    with pytest.raises(TypeError, match=r"^validate_batch: batch must be a Batch, got dict$"):
        validate_batch({})
    batch = distinct_batch()
    with pytest.raises(KeyError, match="validate_batch: no field 'first_columns'"):
        validate_batch(batch.drop(["first_columns"]))
    with pytest.raises(
        TypeError, match=r"^validate_batch: sequences is on meta; it must be on the"
    ):
        validate_batch(batch.with_fields({"sequences": batch["sequences"].to("meta")}))
    with pytest.raises(
        TypeError, match=r"^validate_batch: rollout_expert_indices is on meta; it mu"
    ):
        validate_batch(batch.with_fields({ROUTES: batch[ROUTES].to("meta")}))
    free = Batch(dict(batch.fields), registry=FieldRegistry())
    for field in (ROUTES, SUPPORT):
        with pytest.raises(TypeError, match=rf"^validate_batch: {field} must be (a P|p)acked"):
            validate_batch(free.with_fields({field: [1, 2, 3, 4]}))


def test_a_users_own_field_is_held_to_its_domain():
    registry = PACKED_FIELDS.with_field(
        PackedField("rollout_entropy", "response", (torch.float32,), (), fill=0.0)
    )
    batch = distinct_batch()
    fields = dict(batch.fields)
    responses = list(batch["response_lengths"])
    for given in (responses, responses[::-1]):
        entropy = PackedTensor.from_lengths(torch.ones(sum(responses)), given)
        own = Batch(fields | {"rollout_entropy": entropy}, registry=registry)
        if given == responses:
            validate_batch(own)
        else:
            with pytest.raises(
                ValueError, match=r"^validate_batch: rollout_entropy of trajectory 0"
            ):
                validate_batch(own)
