"""What the tests of ``kernels/validate.py`` share: oracles of loops over Python lists, and inputs.

They share no code with the package. Every count is exact.
"""

import numpy as np
import torch

from packhorse.kernels import faults
from packhorse.kernels.faults import NO_FAULT
from packhorse.kernels.validate import validate_ragged_support, validate_routes, validate_support

# --- oracles --------------------------------------------------------------------------------------


def fault_of_route(ids: list[int], num_experts: int, unsigned: bool) -> str | None:
    missing = 0 if unsigned else ids.count(-1)
    if missing == len(ids):
        return "missing"
    if missing:
        return "partly_missing"
    if any(not 0 <= expert < num_experts for expert in ids):
        return "out_of_range"
    if len(ids) > 1 and not any(ids):
        return "all_zero"
    if len(set(ids)) < len(ids):
        return "repeated"
    return None


def faults_of_routes(routes: torch.Tensor, layers, num_experts: int) -> dict[str, tuple]:
    """name -> (cells, row, layer) as ``RouteCheck.read`` gives them."""
    found: dict[str, list[tuple[int, int]]] = {}
    if routes.shape[2]:
        for row, of_row in enumerate(routes.tolist()):
            for layer in layers:
                name = fault_of_route(of_row[layer], num_experts, routes.dtype == torch.uint8)
                if name:
                    found.setdefault(name, []).append((row, layer))
    return {name: (len(cells), *min(cells)) for name, cells in found.items()}


def fault_of_row(ids: list[int], sampled: int, vocab_size: int) -> str | None:
    named = [token for token in ids if token != -1]
    if any(not 0 <= token < vocab_size for token in named):
        return "out_of_range"
    if ids[: len(named)] != named:
        return "not_compacted"
    if len(set(named)) < len(named):
        return "repeated"
    if named and sampled not in named:
        return "sampled_missing"
    return None


def faults_of_rows(rows: list[list[int]], sampled: torch.Tensor, vocab_size: int) -> dict:
    found: dict[str, list[int]] = {}
    for row, (ids, one) in enumerate(zip(rows, sampled.tolist(), strict=True)):
        name = fault_of_row(ids, one, vocab_size)
        if name:
            found.setdefault(name, []).append(row)
    return {name: (len(rows), min(rows)) for name, rows in found.items()}


# --- inputs ---------------------------------------------------------------------------------------


def make_routes(num_rows, num_layers, topk, num_experts, dtype, device, seed=0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(num_rows, num_layers, num_experts, generator=generator)
    return scores.topk(topk, -1).indices.to(dtype).to(device)


def spoil(routes: torch.Tensor, num_experts: int, share: float, seed: int) -> None:
    """Faults of all kinds that the dtype can hold, in ``share`` of the cells."""
    rng = np.random.default_rng(seed)
    topk = routes.shape[2]
    top = torch.iinfo(routes.dtype).max
    for row, layer in np.argwhere(rng.random(routes.shape[:2]) < share):
        cell = routes[row, layer]
        kind, k = rng.integers(7), rng.integers(topk)
        if kind == 0:
            cell[:] = 0
        elif kind == 1:
            cell[k] = cell[0]
        elif kind == 2 and num_experts <= top:
            cell[k] = rng.integers(num_experts, min(top, num_experts + 3) + 1)
        elif kind == 3 and num_experts <= top:
            cell[k] = top
        elif routes.dtype != torch.uint8:
            if kind == 4:
                cell[:] = -1
            elif kind == 5:
                cell[k] = -1
            elif kind == 6:
                cell[k] = rng.choice([-2, -3, torch.iinfo(routes.dtype).min])


def make_support(num_rows, width, vocab_size, device, *, ascending, seed=0):
    """Rows of 0 to ``width`` ids and sampled members of them."""
    rng = np.random.default_rng(seed)
    rows = np.full((num_rows, width), -1, dtype=np.int32)
    sampled = rng.integers(0, vocab_size, num_rows)
    for row in rows:
        ids = rng.choice(vocab_size, rng.integers(0, width + 1), replace=False)
        row[: len(ids)] = np.sort(ids) if ascending else ids
    for i in np.flatnonzero(rows[:, 0] >= 0) if width else ():
        sampled[i] = rng.choice(rows[i][rows[i] >= 0])
    return torch.from_numpy(rows).to(device), torch.from_numpy(sampled).to(device)


def spoil_support(support: torch.Tensor, sampled: torch.Tensor, vocab_size: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    width = support.shape[1]
    for row in np.flatnonzero(rng.random(support.shape[0]) < 0.3):
        kind, c = rng.integers(6), rng.integers(width)
        if kind == 0:
            support[row, c] = vocab_size + rng.integers(3)
        elif kind == 1:
            support[row, c] = rng.choice([-2, -(2**31), 2**31 - 1])
        elif kind == 2:
            support[row, c] = -1
        elif kind == 3:
            support[row, c] = support[row, 0]
        elif kind == 4:
            sampled[row] = rng.integers(vocab_size)
        else:
            sampled[row] = rng.choice([-1, vocab_size, torch.iinfo(sampled.dtype).max])


def check_routes(routes, num_experts, layers=None) -> None:
    listed = range(routes.shape[1]) if layers is None else layers
    listed = listed.tolist() if isinstance(listed, torch.Tensor) else listed
    found = validate_routes(routes, num_experts=num_experts, layers=layers)
    expected = faults_of_routes(routes, listed, num_experts)
    assert found.read() == expected
    assert found.counts.dtype == found.first.dtype == torch.int64
    for k, name in enumerate(faults.ROUTE_FAULTS):
        count, row, layer = expected.get(name, (0, None, None))
        assert found.counts[k].item() == count
        flat = NO_FAULT if row is None else row * routes.shape[1] + layer
        assert found.first[k].item() == flat


def check_support(support, sampled, vocab_size) -> None:
    found = validate_support(support, sampled, vocab_size=vocab_size)
    assert found.read() == faults_of_rows(support.tolist(), sampled, vocab_size)


def make_ragged(rows: list[list[int]], device: str) -> tuple[torch.Tensor, torch.Tensor]:
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows], dtype=np.int64)])
    ids = torch.tensor([token for row in rows for token in row], dtype=torch.int32)
    return ids.to(device), torch.from_numpy(offsets.astype(np.int64)).to(device)


def check_ragged(rows: list[list[int]], sampled: torch.Tensor, vocab_size: int) -> None:
    ids, offsets = make_ragged(rows, str(sampled.device))
    found = validate_ragged_support(ids, offsets, sampled, vocab_size=vocab_size)
    # there is no padding: -1 is an id out of range
    expected = [[vocab_size if token == -1 else token for token in row] for row in rows]
    assert found.read() == faults_of_rows(expected, sampled, vocab_size)
