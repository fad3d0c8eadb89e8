"""Batch: any sequence of its operations, on every kind of field.

Oracle: a batch is a Python list of trajectories, a trajectory a dict of lists; every operation is
done once more on those. Rows are moved, not computed, so nothing here has a tolerance.
"""

import copy
import importlib.util
import pickle
import random
from typing import Any

import numpy as np
import pytest
import torch

from packhorse.packed.batch import Batch
from packhorse.packed.buffer import join_trajectories, split_trajectories
from packhorse.packed.ragged import PackedRagged
from packhorse.packed.tensor import PackedTensor
from tests.packed.batch_model import (
    CANDIDATES,
    PATHS,
    ROUTES,
    SUPPORT,
    check,
    flat,
    make_batch,
    model_of,
    padding_of,
    synthetic_trajectory,
)

# --- every operation against lists ----------------------------------------------------------------

HAS_TENSORDICT = importlib.util.find_spec("tensordict") is not None
SEQUENCES, BLOCKS = 1020, 12
MOST = 24  # trajectories


class Walk:
    """A batch and its model, through random operations on both."""

    def __init__(self, seed: int, device: str) -> None:
        self.random = random.Random(seed)
        self.device = device
        self.ragged = self.random.random() < 0.5  # the form of the support
        self.batch = self.like = self._make(self.random.randrange(6), seed, self._any_dtype())
        self.model = model_of(self.batch)
        self.done: list[str] = []

    def _make(self, size: int, seed: int, dtype: torch.dtype) -> Batch:
        return make_batch(size, seed, routes_dtype=dtype, ragged=self.ragged, device=self.device)

    def _any_dtype(self) -> torch.dtype:
        return self.random.choice([torch.uint8, torch.int16])

    def step(self) -> None:
        operation = self.random.choice(OPERATIONS)
        self.done.append(operation.__name__)
        before, batch = copy.deepcopy(self.model), self.batch
        operation(self)
        check(self.batch, self.model, self.like)
        assert model_of(batch) == before, "an operation changed its input"

    def take_slice(self) -> None:
        start, stop = (self.random.choice([None, *range(-7, 8)]) for _ in range(2))
        step = self.random.choice([None, 1, 1, 2, -1, -2])
        self.batch, self.model = self.batch[start:stop:step], self.model[start:stop:step]

    def take_ids(self) -> None:
        size = len(self.model)
        count = self.random.randrange(8) if size else 0
        ids = [self.random.randrange(-size, size) for _ in range(count)]
        given: Any = ids
        match self.random.randrange(4):
            case 0:
                given = torch.tensor(ids, dtype=torch.int64)
            case 1:
                given = np.array(ids, dtype=np.int32)
            case 2 if size:
                ids = given = range(self.random.randrange(size), size, self.random.randrange(1, 3))
        self.batch, self.model = self.batch[given], [self.model[i] for i in ids]

    def take_mask(self) -> None:
        mask = [self.random.random() < 0.7 for _ in self.model]
        self.batch = self.batch[torch.tensor(mask, dtype=torch.bool)]
        self.model = [trajectory for trajectory, keep in zip(self.model, mask, strict=True) if keep]

    def take_one(self) -> None:
        if self.model:
            i = self.random.randrange(-len(self.model), len(self.model))
            self.batch, self.model = self.batch[i], [self.model[i]]

    def repeat(self) -> None:
        times = self.random.randrange(3)
        self.batch, self.model = self.batch.repeat(times), self.model * times

    def repeat_each(self) -> None:
        times = self.random.randrange(3)
        self.batch = self.batch.repeat_interleave(times)
        self.model = [trajectory for trajectory in self.model for _ in range(times)]

    def repeat_by_counts(self) -> None:
        counts = [self.random.randrange(3) for _ in self.model]
        given = torch.tensor(counts, dtype=torch.int64) if self.random.random() < 0.5 else counts
        self.batch = self.batch.repeat_interleave(given)
        self.model = [t for t, n in zip(self.model, counts, strict=True) for _ in range(n)]

    def split_and_cat(self) -> None:
        size = self.random.randrange(1, 5)
        parts = self.batch.split(size)
        expected = [self.model[i : i + size] for i in range(0, len(self.model), size)] or [[]]
        assert list(map(model_of, parts)) == expected
        self.batch = Batch.cat(parts[::-1])
        self.model = [trajectory for part in expected[::-1] for trajectory in part]

    def split_by_sizes(self) -> None:
        first = self.random.randrange(len(self.model) + 1)
        left, none, right = self.batch.split([first, 0, len(self.model) - first])
        check(none, [], self.like)
        self.batch = Batch.cat([right, none, left])
        self.model = self.model[first:] + self.model[:first]

    def chunk(self) -> None:
        chunks = self.random.randrange(1, 5)
        parts = self.batch.chunk(chunks)
        dense = torch.arange(len(self.model)).chunk(chunks)
        assert [len(part) for part in parts] == [len(part) for part in dense] or not self.model
        which = self.random.randrange(len(parts))
        self.batch = parts[which]
        self.model = [self.model[i] for i in dense[which].tolist()] if self.model else []

    def cat_another(self) -> None:
        dtype = self._any_dtype()
        other = self._make(self.random.randrange(4), self.random.randrange(100), dtype)
        widen = dtype != self.like[ROUTES].dtype
        self.model = self.model + model_of(other)
        self.batch = Batch.cat([self.batch, other], widen=widen)
        if widen:
            self.like = self._make(1, 0, torch.int16)

    def pad(self) -> None:
        multiple = self.random.randrange(1, 6)
        self.batch = self.batch.pad_to_multiple(multiple)
        missing = -len(self.model) % multiple
        self.model = self.model + [padding_of(self.model[0], self.ragged) for _ in range(missing)]

    def cat_synthetic(self) -> None:
        count = self.random.randrange(3)
        # an empty batch has no image to tell its shape, so that a None would stand for it
        if self.model:
            self.batch = Batch.cat([self.batch, self.batch.synthetic(count)])
            kinds = {"images": None if self.model[0]["images"] is None else []}
            made = {**synthetic_trajectory(), **kinds}
            self.model = self.model + [made] * count

    def through_pickle(self) -> None:
        buffers: list[Any] = []
        protocol = self.random.randrange(2, 6)
        out_of_band = protocol == 5 and self.random.random() < 0.5
        call = buffers.append if out_of_band else None
        data = pickle.dumps(self.batch, protocol=protocol, buffer_callback=call)
        received = [bytes(buffer.raw()) for buffer in buffers] if out_of_band else None
        self.batch = pickle.loads(data, buffers=received)

    def through_tensordict(self) -> None:
        if not HAS_TENSORDICT:
            return
        known = {}
        if self.device != "cpu" or self.random.random() < 0.5:
            fields = flat(self.batch.fields)
            packed = {p: f for p, f in fields.items() if isinstance(f, PackedTensor | PackedRagged)}
            known = {
                "lengths": {path: field.lengths for path, field in packed.items()},
                "widths": {p: f.widths for p, f in packed.items() if isinstance(f, PackedRagged)},
            }
        made = self.batch.to_tensordict()
        self.batch = Batch.from_tensordict(made, registry=self.batch.registry, **known)

    def change_form_of_support(self) -> None:
        support = self.batch[SUPPORT]
        rows = [[[i for i in row if i >= 0] for row in t[SUPPORT]] for t in self.model]
        if self.ragged:
            support = support.to_padded(CANDIDATES)
            rows = [[row + [-1] * (CANDIDATES - len(row)) for row in segment] for segment in rows]
        else:
            widths = [len(row) for segment in rows for row in segment]
            support = PackedRagged.from_padded(support, widths=widths)
        self.ragged = not self.ragged
        self.batch = self.batch.with_fields({SUPPORT: support})
        self.model = [{**t, SUPPORT: new} for t, new in zip(self.model, rows, strict=True)]
        self.like = self._make(1, 0, self.like[ROUTES].dtype)

    def through_items(self) -> None:
        if self.model:
            items = split_trajectories(self.batch)
            self.random.shuffle(order := list(range(len(items))))
            self.batch = join_trajectories([items[i] for i in order])
            self.model = [self.model[i] for i in order]

    def keep(self) -> None:
        copies = [self.batch.clone(), self.batch.contiguous(), self.batch.detach()]
        copies += [copy.copy(self.batch), copy.deepcopy(self.batch), self.batch.to(self.device)]
        for same in copies:
            check(same, self.model, self.like)
        self.batch = self.random.choice(copies)

    def reorder_fields(self) -> None:
        names = list(self.batch.fields)
        some = self.random.sample(names, self.random.randrange(len(names) + 1))
        rest = self.batch.drop(some)
        assert [*rest.fields] == [name for name in names if name not in some]
        self.batch = rest.with_fields(self.batch.select(some).fields).select(names)


OPERATIONS = [value for name, value in vars(Walk).items() if name[0] != "_" and name != "step"]


@pytest.mark.parametrize("block", range(BLOCKS))
def test_any_sequence_of_operations_matches_a_list_of_trajectories(block, device):
    for seed in range(block, SEQUENCES, BLOCKS):
        walk = Walk(seed, device)
        try:
            for _ in range(walk.random.randrange(1, 7)):
                if len(walk.model) <= MOST:
                    walk.step()
        except Exception as error:
            raise AssertionError(f"seed {seed}: {' -> '.join(walk.done)}") from error


def test_the_walks_use_every_operation():
    used: set[str] = set()
    for seed in range(80):
        walk = Walk(seed, "cpu")
        for _ in range(4):
            if len(walk.model) <= MOST:
                walk.step()
        used |= set(walk.done)
    assert used == {operation.__name__ for operation in OPERATIONS}
    assert tuple(flat(make_batch(1).fields)) == PATHS
