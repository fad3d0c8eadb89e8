"""Batches of every kind of field for tests, and what they hold as plain Python.

The model of a batch is a list of trajectories, each a dict from a field's path to lists.
"""

import random
from typing import Any

import torch

from packhorse.packed.batch import Batch
from packhorse.packed.fields import PACKED_FIELDS, PackedField
from packhorse.packed.ragged import PackedRagged
from packhorse.packed.tensor import PackedTensor
from tests.packed import ragged_model
from tests.packed.helpers import as_lists, make_rows

ROUTES, SUPPORT, ENTROPY, MARKS = (
    "rollout_expert_indices",
    "rollout_sample_support",
    "rollout_entropy",
    "rollout_marks",
)
WIDTH, CANDIDATES = 3, 4
REGISTRY = PACKED_FIELDS.with_field(
    PackedField(ENTROPY, "token", (torch.float32,), (), fill=0.5)
).with_field(PackedField(MARKS, "token", (torch.int32,), (None,), fill=-1, ragged=True))
PATHS = (
    "token_ids", "attention_mask", "loss_mask", "rewards", ROUTES, SUPPORT, ENTROPY, MARKS,
    "images", "uids", "extra.scores", "extra.parts.format", "extra.rows",
)  # fmt: skip


def make_batch(
    size: int,
    seed: int = 0,
    *,
    routes_dtype=torch.uint8,
    ragged=False,
    device="cpu",
    metadata=None,
) -> Batch:
    """``ragged``: the form of the support."""
    generator = torch.Generator().manual_seed(seed)

    def counts(most: int) -> list[int]:
        return torch.randint(0, most + 1, (size,), generator=generator).tolist()

    def packed(dtype: torch.dtype, row_shape: tuple[int, ...]) -> PackedTensor:
        lengths = counts(3)
        rows = make_rows(sum(lengths), dtype, row_shape)
        return PackedTensor.from_lengths(rows.to(device), lengths)

    def packed_ragged() -> PackedRagged:
        widths = random.Random(seed)
        return ragged_model.build(
            [
                [[widths.randrange(50) for _ in range(widths.choice([0, 1, 1, 2, CANDIDATES]))]
                 for _ in range(length)]
                for length in counts(3)
            ],
            device,
        )  # fmt: skip

    def dense(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.randint(1, 100, (size, *shape), generator=generator).to(device, dtype)

    fields = {
        "token_ids": dense(torch.int64, WIDTH),
        "attention_mask": torch.ones(size, WIDTH, dtype=torch.int64, device=device),
        "loss_mask": torch.ones(size, WIDTH, dtype=torch.bool, device=device),
        "rewards": dense(torch.float32),
        ROUTES: packed(routes_dtype, (2, 2)),
        SUPPORT: packed_ragged() if ragged else packed(torch.int32, (CANDIDATES,)),
        ENTROPY: packed(torch.float32, ()),
        MARKS: packed_ragged(),
        "images": [make_rows(2 * n, torch.bfloat16, ()).view(n, 2).to(device) for n in counts(3)],
        "uids": [f"{seed}-{i}" for i in range(size)],
        "extra": {
            "scores": dense(torch.float32, 2),
            "parts": {"format": [[seed, i] for i in range(size)]},
            "rows": packed(torch.int16, (1,)),
        },
    }
    registry = REGISTRY.with_field(PackedField("extra.rows", "any", (torch.int16,), (1,), fill=0))
    return Batch(fields, batch_size=size, metadata=metadata, registry=registry)


def flat(fields: Any, prefix: str = "") -> dict[str, Any]:
    found = {}
    for key, field in fields.items():
        if isinstance(field, dict):
            found |= flat(field, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = field
    return found


def model_of(batch: Batch) -> list[dict[str, Any]]:
    """Read from values and offsets alone."""
    columns = {}
    for path, field in flat(batch.fields).items():
        if isinstance(field, PackedTensor):
            columns[path] = as_lists(field)
        elif isinstance(field, PackedRagged):
            columns[path] = ragged_model.as_lists(field)
        elif isinstance(field, tuple):
            columns[path] = [x.tolist() if isinstance(x, torch.Tensor) else x for x in field]
        else:
            columns[path] = field.tolist()
    assert all(len(column) == len(batch) for column in columns.values())
    return [{path: column[i] for path, column in columns.items()} for i in range(len(batch))]


def check(batch: Batch, model: list[dict[str, Any]], like: Batch) -> None:
    """``batch`` holds ``model``, in the kinds, dtypes, shapes and on the device of ``like``."""
    assert len(batch) == len(model)
    assert model_of(batch) == model
    assert batch.registry == like.registry
    ours, theirs = flat(batch.fields), flat(like.fields)
    assert list(ours) == list(theirs)
    for path, field in ours.items():
        other = theirs[path]
        assert type(field) is type(other), path
        if isinstance(field, PackedTensor):
            assert field.row_shape == other.row_shape, path
        if isinstance(field, PackedRagged):
            ragged_model.check(field, [trajectory[path] for trajectory in model])
        if isinstance(field, PackedTensor | PackedRagged):
            assert field.offsets == tuple(field.cu_seqlens.tolist()), path
            assert field.cu_seqlens.dtype == torch.int32
            assert field.cu_seqlens.is_contiguous()
            assert field.lengths == tuple(len(trajectory[path]) for trajectory in model), path
        if not isinstance(field, tuple):
            assert (field.dtype, field.device) == (other.dtype, other.device), path
        if isinstance(field, torch.Tensor):
            assert field.shape[1:] == other.shape[1:], path


def padding_of(trajectory: dict[str, Any], ragged: bool = False) -> dict[str, Any]:
    """A copy of it that no loss counts, written from the design's table."""
    no_candidate: list[int] = [] if ragged else [-1] * CANDIDATES
    return {
        **trajectory,
        "loss_mask": [False] * WIDTH,
        ROUTES: [],
        SUPPORT: [no_candidate] * len(trajectory[SUPPORT]),
        ENTROPY: [0.5] * len(trajectory[ENTROPY]),
        MARKS: [[]] * len(trajectory[MARKS]),
        "extra.rows": [],
    }


def synthetic_trajectory() -> dict[str, Any]:
    return {
        "token_ids": [0] * WIDTH,
        "attention_mask": [1] + [0] * (WIDTH - 1),
        "loss_mask": [False] * WIDTH,
        "rewards": 0.0,
        ROUTES: [],
        SUPPORT: [],
        ENTROPY: [0.5],
        MARKS: [[]],
        "images": [],
        "uids": None,
        "extra.scores": [0.0, 0.0],
        "extra.parts.format": None,
        "extra.rows": [],
    }
