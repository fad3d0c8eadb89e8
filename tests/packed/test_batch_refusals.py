"""Batch and its items: what is refused, in which words, and that nothing has changed by then."""

import copy

import numpy as np
import pytest
import torch

from packhorse.packed.batch import Batch
from packhorse.packed.buffer import join_trajectories, split_trajectories
from packhorse.packed.fields import PACKED_FIELDS, FieldRegistry, PackedField
from packhorse.packed.ragged import PackedRagged
from packhorse.packed.tensor import PackedTensor
from tests.packed.batch_model import ROUTES, SUPPORT, make_batch, model_of
from tests.packed.helpers import make_packed

X = torch.zeros(3, 2)


@pytest.mark.parametrize(
    ("fields", "keywords", "error", "message"),
    [
        ([X], {}, TypeError, "fields must be a mapping, got list"),
        ({"x": X, "y": X[:2]}, {}, ValueError, "y has 2 trajectories, the batch has 3"),
        ({"x": X}, {"batch_size": 4}, ValueError, "x has 3 trajectories, the batch has 4"),
        ({"x": X, "y": make_packed([1, 1])}, {}, ValueError, "y has 2 trajectories"),
        ({"x": X, "y": ["a"]}, {}, ValueError, "y has 1 trajectories"),
        ({"x": X, "y": {"z": {"w": ["a"]}}}, {}, ValueError, "y.z.w has 1 trajectories"),
        ({"x": torch.tensor(1)}, {}, ValueError, r"x must be \[B, \.\.\.\], got a tensor of n"),
        ({"x": X.to_sparse()}, {}, TypeError, "x must be dense, got layout torch.sparse"),
        ({"x": make_packed([1, 2]).to_nested()}, {}, TypeError, "x is nested; wrap it with Packed"),
        ({"x": np.zeros(3)}, {}, TypeError,
         "x must be a tensor, a PackedTensor or PackedRagged, a list .*, got ndarray"),
        ({"x": "abc"}, {}, TypeError, "x must be a tensor, .*, got str"),
        ({"x": None}, {}, TypeError, "x must be a tensor, .*, got NoneType"),
        ({"x": {"y": 3}}, {}, TypeError, r"x\.y must be a tensor, .*, got int"),
        ({3: X}, {}, TypeError, "a field's name must be a string, got 3"),
        ({"x": {3: X}}, {}, TypeError, "a field's name must be a string, got 3"),
        ({"x.y": X, "x": {"y": X}}, {}, ValueError, r"x\.y names two fields"),
        ({}, {}, ValueError, "no field tells the batch size; pass batch_size="),
        ({}, {"batch_size": -1}, ValueError, "batch_size must not be negative"),
        ({}, {"batch_size": 2.0}, TypeError, "batch_size must be an integer"),
        ({}, {"batch_size": 2**31}, ValueError, "2147483648 trajectories do not fit int32"),
        ({"x": X}, {"metadata": [1]}, TypeError, "metadata must be a mapping, got list"),
        ({"x": X}, {"registry": {}}, TypeError, "registry must be a FieldRegistry, got dict"),
        ({ROUTES: torch.zeros(3, 4, 2, 2).byte()}, {}, TypeError,
         f"{ROUTES} must be a PackedTensor, got Tensor"),
        ({ROUTES: make_packed([1], torch.int64, (2, 2))}, {}, TypeError,
         f"{ROUTES} must be torch.uint8 or torch.int16 or torch.int32, got torch.int64"),
        ({ROUTES: make_packed([1], torch.uint8, (2,))}, {}, ValueError, f"{ROUTES} must have rows"),
        ({SUPPORT: X.int()}, {}, TypeError,
         f"{SUPPORT} must be a PackedTensor or a PackedRagged, got Tensor"),
        ({ROUTES: PackedRagged.empty([1])}, {}, TypeError,
         f"{ROUTES} must be a PackedTensor, got PackedRagged"),
        ({"x": X, "y": PackedRagged.empty([1, 0])}, {}, ValueError, "y has 2 trajectories"),
        ({SUPPORT: make_packed([1], torch.uint8, (2,))}, {}, TypeError, f"{SUPPORT} must be torch"),
        ({SUPPORT: make_packed([1], torch.int32, (2, 2))}, {}, ValueError, f"{SUPPORT} must have"),
    ],
)  # fmt: skip
def test_the_constructor_rejects(fields, keywords, error, message):
    with pytest.raises(error, match=f"^Batch: {message}"):
        Batch(fields, **keywords)


@pytest.mark.parametrize(
    ("index", "error", "message"),
    [
        (3, IndexError, "index 3 is out of range for 3 trajectories"),
        (-4, IndexError, "index -4 is out of range"),
        ([0, 3], IndexError, "index 3 is out of range for 3"),
        ([True, False], ValueError, r"a mask of shape \(2,\) for 3"),
        ([True, 0, 1], TypeError, "mixes booleans and integers"),
        (True, TypeError, "the index must be an integer, got True"),
        ((0, 1), TypeError, "got a tuple"),
        (None, TypeError, "cannot index with NoneType"),
        (1.0, TypeError, "cannot index with float"),
        (torch.tensor([[0]]), ValueError, "must be 1-D"),
        (torch.tensor([1, 0, 1], dtype=torch.uint8), TypeError, "uint8 tensor as index"),
        (slice(None, None, 0), ValueError, "step must not be 0"),
        (slice(0.0, 1), TypeError, "slice bound must be an integer"),
        ("y", KeyError, "no field 'y'; there are token_ids, attention_mask"),
    ],
)  # fmt: skip
def test_indexing_rejects(index, error, message):
    with pytest.raises(error, match=rf"^['\"]?Batch: .*{message}"):
        make_batch(3)[index]


def without(batch: Batch, name: str) -> Batch:
    return batch.drop([name])


def entropy_rule(fill: float) -> FieldRegistry:
    return PACKED_FIELDS.with_field(PackedField("e", "any", (torch.float32,), (), fill=fill))


B = make_batch(3)
HALF = PackedTensor.from_lengths(torch.zeros(1).expand(2**30), [2**29] * 2)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: B.select("rewards"), TypeError, "Batch: names must be several, got the string"),
        (lambda: B.select(["y"]), KeyError, r"Batch\.select: no field 'y'; there are token_ids"),
        (lambda: B.drop(["y"]), KeyError, r"Batch\.drop: no field 'y'"),
        (lambda: B.with_fields({"x": X[:2]}), ValueError, r"Batch\.with_fields: x has 2 trajector"),
        (lambda: B.__setitem__("x", X[:2]), ValueError, "Batch: x has 2 trajectories"),
        (lambda: B.__setitem__(0, X), TypeError, "Batch: a field is set by its name, got int"),
        (lambda: B.repeat(-1), ValueError, r"Batch\.repeat: times must not be negative"),
        (lambda: B.repeat(2**31), ValueError, r"Batch\.repeat: 6442450944 trajectories do not fit"),
        (lambda: B.repeat_interleave([1]), ValueError, r"Batch\.repeat_interleave: 1 repeats for"),
        (lambda: B.repeat_interleave([1, 1, -1]), ValueError, "must not be negative, got -1"),
        (lambda: B.repeat_interleave(2**31), ValueError, "repeat_interleave: .* do not fit int32"),
        (lambda: B.split(0), ValueError, r"Batch\.split: split_size must be positive, got 0"),
        (lambda: B.split([1, 1]), ValueError, r"Batch\.split: sizes must be >= 0 and sum to 3 tra"),
        (lambda: B.chunk(0), ValueError, r"Batch\.chunk: chunks must be positive, got 0"),
        (lambda: B[:0].chunk(10**12), ValueError, r"Batch\.chunk: 1000000000000 chunks do not fit"),
        (lambda: Batch.cat([]), ValueError, r"Batch\.cat: no inputs"),
        (lambda: Batch.cat([B, X]), TypeError, r"Batch\.cat: input 1 is a Tensor"),
        (lambda: Batch.cat([B, B, without(B, "rewards")]), ValueError,
         r"Batch\.cat: input 2 has no field rewards"),
        (lambda: Batch.cat([without(B, "rewards"), B]), ValueError,
         r"Batch\.cat: input 0 has no field rewards"),
        (lambda: Batch.cat([B, B.with_fields({"extra": {}})]), ValueError,
         r"Batch\.cat: input 1 has no field extra\.scores"),
        (lambda: Batch.cat([B, B.with_fields({"rewards": [1, 2, 3]})]), TypeError,
         r"Batch\.cat: rewards is listed in input 1, dense in input 0"),
        (lambda: Batch.cat([B, B.with_fields({"token_ids": torch.zeros(3, 4).long()})]),
         ValueError, r"Batch\.cat: token_ids of input 1 has row shape \(4,\), that of input 0"),
        (lambda: Batch.cat([B, B.to("meta")]), ValueError, "token_ids of input 1 is on meta, that"),
        (lambda: Batch.cat([Batch({"e": make_packed([1], torch.float32, ())}, registry=r)
                            for r in (entropy_rule(0.0), entropy_rule(1.0))]), ValueError,
         r"Batch\.cat: the registry of input 1: .*e has two different rules"),
        (lambda: Batch.cat([Batch({"n": make_packed([1], dtype)}) for dtype in
                            (torch.int8, torch.uint8)], widen=True), TypeError,
         r"Batch\.cat: n: .*does not hold all of"),
        (lambda: Batch({"n": HALF}).repeat(2), ValueError, r"Batch\.repeat: n: .* do not fit"),
        (lambda: Batch({"a": {"n": HALF}})[[0, 1, 0, 1]], ValueError, r"Batch: a\.n: .*do not fit"),
        (lambda: Batch.cat([Batch({"n": HALF})] * 2), ValueError, r"Batch\.cat: n: .* do not fit"),
        (lambda: B.pad_to_multiple(0), ValueError, "pad_to_multiple: multiple must be positive"),
        (lambda: B.pad_to_multiple(2.0), TypeError, "multiple must be an integer"),
        (lambda: B.pad_to_multiple(2, zeroed=["y"]), ValueError, "zeroed names y, which is no f"),
        (lambda: B.pad_to_multiple(2, zeroed=[ROUTES]), ValueError,
         f"zeroed names {ROUTES}, which is packed; it must be dense"),
        (lambda: B.pad_to_multiple(2, zeroed=["uids"]), ValueError, "zeroed names uids, which is"),
        (lambda: B.synthetic(-1), ValueError, r"Batch\.synthetic: count must not be negative"),
        (lambda: without(B, "attention_mask").synthetic(1), KeyError, "no dense field 'attention"),
        (lambda: B.synthetic(1, attended="rewards"), ValueError, r"rewards must be \[B, S\] wit"),
        (lambda: B.synthetic(1, values={"uids": 3}), KeyError, "no dense field 'uids'"),
        (lambda: B.synthetic(1, values={"token_ids": [1, 2]}), ValueError,
         r"the value of token_ids must be a number or a row \[3\]"),
        (lambda: B.to(torch.int32), TypeError, r"Batch\.to: torch\.int32 is not floating"),
        (lambda: B.to(torch.float32, torch.float16), TypeError, r"Batch\.to: two dtypes"),
        (lambda: B.to("cpu", device="cpu"), TypeError, r"Batch\.to: two devices"),
        (lambda: B.to("meta").pin_memory(), ValueError, r"Batch\.pin_memory: token_ids is on meta"),
        (lambda: split_trajectories([B]), TypeError, "split_trajectories: batch must be a Batch"),
        (lambda: join_trajectories([]), ValueError, "join_trajectories: no items"),
        (lambda: join_trajectories([B, X]), TypeError, "join_trajectories: item 1 is a Tensor"),
        (lambda: join_trajectories([B], side="top"), ValueError, "side must be 'left' or 'right'"),
        (lambda: join_trajectories([B, without(B, "uids")]), ValueError,
         "join_trajectories: item 1 has no field uids"),
        (lambda: join_trajectories([B, B.with_fields({"token_ids": X.long()})]), ValueError,
         r"join_trajectories: token_ids of item 1 has row shape \(2,\), that of item 0 has \(3,\)"),
        (lambda: join_trajectories([B], fills={"rewards": 0}), KeyError, "no dense field 'rew"),
        (lambda: join_trajectories([B], fills={"token_ids": 0.5}), ValueError,
         r"fills\['token_ids'\]: fill=0.5 does not fit torch.int64"),
    ],
)  # fmt: skip
def test_operations_reject_in_one_line_and_change_nothing(call, error, message):
    before = model_of(B)
    with pytest.raises(error, match=message) as raised:
        call()
    assert "\n" not in str(raised.value)
    assert model_of(B) == before


def test_a_refused_field_leaves_the_batch_as_it_was():
    batch = make_batch(3)
    before, names = copy.deepcopy(model_of(batch)), list(batch.fields)
    for name, value in (("x", X[:2]), ("rewards", 3), (ROUTES, X)):
        with pytest.raises((TypeError, ValueError)):
            batch[name] = value
    assert list(batch.fields) == names
    assert model_of(batch) == before
