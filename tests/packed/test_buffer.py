"""Items of a replay buffer: split, joined again, bit for bit.

Oracle: the batch's own selection by ids, and the bytes of each field.
"""

import pickle
import random

import pytest
import torch

from packhorse.packed.batch import Batch
from packhorse.packed.buffer import join_trajectories, split_trajectories
from packhorse.packed.ragged import PackedRagged
from packhorse.packed.tensor import PackedTensor
from tests.packed.batch_model import ROUTES, SUPPORT, check, flat, make_batch, model_of
from tests.packed.helpers import make_packed


def bits(batch: Batch) -> dict[str, object]:
    """The bytes, lengths, shapes and dtypes of each field."""
    found: dict[str, object] = {}
    for path, field in flat(batch.fields).items():
        parts = field if isinstance(field, tuple) else (field,)
        found[path] = []
        for part in parts:
            offsets, rows = [], part
            if isinstance(part, PackedTensor | PackedRagged):
                offsets, rows = part.cu_seqlens.tolist(), part.values
            if isinstance(part, PackedRagged):
                offsets += part.row_offsets.tolist()
            if isinstance(rows, torch.Tensor):
                data = rows.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
                found[path].append((data, rows.shape, rows.dtype, offsets))
            else:
                found[path].append(rows)
    return found


@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize("seed", range(20))
def test_any_subset_joins_bit_for_bit(seed, copy, device):
    rng = random.Random(seed)
    batch = make_batch(6, seed, ragged=seed % 2 == 1, device=device)
    batch["odd"] = torch.tensor([float("nan"), -0.0, 0.0, float("inf"), 1e-45, -1.0], device=device)
    items = split_trajectories(batch, copy=copy)
    assert [len(item) for item in items] == [1] * 6
    ids = [rng.randrange(6) for _ in range(rng.randrange(1, 9))]
    joined = join_trajectories([items[i] for i in ids])
    assert bits(joined) == bits(batch[ids])
    assert bits(join_trajectories(items)) == bits(batch)
    assert bits(join_trajectories(joined)) == bits(joined)


def test_items_are_private_and_travel_alone():
    batch = Batch({
        "token_ids": torch.arange(400).view(4, 100),
        ROUTES: make_packed([5, 0, 7, 3], torch.uint8, (6, 2)),
        SUPPORT: PackedRagged.from_lengths(torch.arange(22).int(), [7, *[1] * 15], [5, 0, 8, 3]),
    }, metadata={"version": 2})  # fmt: skip
    before = bits(batch)
    items = split_trajectories(batch)
    assert [item[ROUTES].values.untyped_storage().nbytes() for item in items] == [60, 0, 84, 36]
    assert [item[SUPPORT].values.untyped_storage().nbytes() for item in items] == [44, 0, 32, 12]
    assert [item["token_ids"].untyped_storage().nbytes() for item in items] == [800] * 4
    assert len(pickle.dumps(items[0], protocol=5)) < 800 + 60 + 44 + 48 + 1500
    received = [pickle.loads(pickle.dumps(item, protocol=5)) for item in items]
    for item in items:
        item["token_ids"].zero_()
        item[ROUTES].values.zero_()
        item[SUPPORT].values.zero_()
        item[SUPPORT].row_offsets.zero_()
    assert bits(batch) == before == bits(join_trajectories(received))
    assert received[3].metadata == {"version": 2}


def test_items_of_several_batches_join():
    first, second = make_batch(3, 1), make_batch(2, 2)
    items = split_trajectories(first) + split_trajectories(second)
    model = model_of(first) + model_of(second)
    joined = join_trajectories([items[i] for i in (4, 0, 3)])
    check(joined, [model[4], model[0], model[3]], first)


def test_items_of_two_route_dtypes_join_widened_when_asked():
    narrow, wide = make_batch(1), make_batch(1, 1, routes_dtype=torch.int16)
    items = split_trajectories(narrow) + split_trajectories(wide)
    with pytest.raises(TypeError, match=rf"^join_trajectories: {ROUTES} of item 1 is torch\.int16"):
        join_trajectories(items)
    joined = join_trajectories(items, widen=True)
    assert joined[ROUTES].dtype == torch.int16
    assert model_of(joined) == model_of(narrow) + model_of(wide)


@pytest.mark.parametrize("side", ["left", "right"])
def test_items_of_different_widths_are_filled_up(side):
    def batch(width: int, start: int) -> Batch:
        ids = torch.arange(start, start + width)[None]
        support = make_packed([1], torch.int32, (2,))
        return Batch({"ids": ids, "more": {"mask": ids > 0}, "reward": ids[:, 0], SUPPORT: support})

    items = [batch(2, 1), batch(4, 5), batch(3, 9)]
    joined = join_trajectories(items, fills={"ids": -7, "more.mask": False}, side=side)
    rows = [[1, 2], [5, 6, 7, 8], [9, 10, 11]]
    for i, row in enumerate(rows):
        pads = 4 - len(row)
        left, right = (pads, 0) if side == "left" else (0, pads)
        assert joined["ids"][i].tolist() == [-7] * left + row + [-7] * right
        mask = [False] * left + [True] * len(row) + [False] * right
        assert joined["more"]["mask"][i].tolist() == mask
    assert joined["reward"].tolist() == [1, 5, 9]
    assert [item["ids"].shape[1] for item in items] == [2, 4, 3]
