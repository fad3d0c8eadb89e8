"""order_cells, score_cells, grad_cells: rows of a ragged support where they are packed.

Oracle: a loop over rows and ids in Python, floats in float64.
"""

import math

import pytest
import torch

from packhorse.kernels import members, ragged_members
from packhorse.kernels.ragged_members import Rows, grad_cells, order_cells, score_cells
from packhorse.kernels.support import (
    SAMPLED_IMPOSSIBLE,
    SAMPLED_OUTSIDE,
    SUPPORT_INVALID,
    SUPPORT_MISSING,
    SUPPORT_OK,
)
from tests.conftest import INTERPRET

VOCAB = 50
#: of a class, its widest first: around what one program places, compares and sorts
CLASSES = {
    4: [4, 1, 2, 3, 0, 4],
    64: [64, 5, 33, 32, 31],
    **({} if INTERPRET else {256: [256, 65, 129], 5000: [5000, 4097]}),
}


def make(widths, device, seed=0):
    """token_ids, rows in another order than packed, one without a token, and T."""
    generator = torch.Generator().manual_seed(seed)
    ends = torch.tensor([0, *widths]).cumsum(0)
    ids = torch.randint(-3, VOCAB + 3, (int(ends[-1]),), generator=generator).int()
    order = torch.randperm(len(widths), generator=generator)
    num_tokens = len(widths) + 2
    tokens = torch.randperm(num_tokens, generator=generator)[: len(widths)]
    tokens[1] = -1
    rows = Rows(tokens, ends[:-1][order], ends.diff()[order])
    return ids.to(device), Rows(*(x.to(device) for x in rows)), num_tokens


def in_python(ids, rows):
    """Of each row: the columns that its cells must hold."""
    for token, begin, count in zip(*(x.tolist() for x in rows), strict=True):
        wanted, seen = [], set()
        for i in sorted(ids[begin : begin + count].tolist()):
            inside = 0 <= i < VOCAB and i not in seen
            seen.add(i)
            wanted.append(-1 if token < 0 or i == -1 else i if inside else -2)
        yield token, slice(begin, begin + count), wanted


@pytest.mark.parametrize("how", ["as its width says", "placed by counting"])
@pytest.mark.parametrize("width", CLASSES)
def test_a_row_holds_its_distinct_ids_ascending(width, how, device, monkeypatch):
    if how == "placed by counting":
        monkeypatch.setattr(ragged_members, "_SORTED", 0)
    ids, rows, _ = make(CLASSES[width], device)
    columns, owners = torch.full_like(ids, 77), torch.full_like(ids, 77)
    order_cells(columns, owners, ids, *rows, width, VOCAB)
    for token, cells, wanted in in_python(ids, rows):
        assert columns[cells].tolist() == wanted
        assert owners[cells].tolist() == [token] * len(wanted)


def test_a_row_of_more_blocks_than_a_grids_second_axis_has(cuda):
    """Unfiltered sampling over a vocabulary of 262,400 is such a row; CUDA's limit is 65,535."""
    count = 65_600 * ragged_members._BLOCK_I
    ids = torch.randint(2**20, (count,), generator=torch.Generator().manual_seed(0)).int().to(cuda)
    rows = Rows(*(torch.tensor([x], device=cuda) for x in (0, 0, count)))
    columns, owners = torch.full_like(ids, -1), torch.full_like(ids, -1)
    order_cells(columns, owners, ids, *rows, count, 2**20)
    ordered = ids.sort().values
    first = torch.cat([ordered[:1] >= 0, ordered[1:] != ordered[:-1]])
    assert torch.equal(columns, torch.where(first, ordered, -2))


def test_rows_of_other_classes_are_left(device):
    """Those not given, and among the given ones those of more ids than the class has."""
    ids, rows, num_tokens = make([3, 2, 4, 1, 0, 5, 30], device)
    some = rows.part(slice(0, 5))
    columns, owners = torch.full_like(ids, 77), torch.full_like(ids, 77)
    order_cells(columns, owners, ids, *some, 4, VOCAB)
    given = outputs(num_tokens, ids.shape[0], device)
    sampled = torch.zeros(num_tokens, dtype=torch.int64, device=device)
    score_cells(*given, torch.zeros(1, len(ids), device=device), columns, sampled, *some, 4, 1.0)
    written, named = torch.zeros_like(ids, dtype=torch.bool), []
    for token, cells, wanted in in_python(ids, some):
        if 0 < len(wanted) <= 4:
            written[cells] = True
            named += [token] * (token >= 0)
    assert 0 < written.sum() < len(ids)
    assert (columns[~written] == 77).all()
    assert (owners[~written] == 77).all()
    assert (columns[written] != 77).all()
    assert (given[4][~written] == 9).all()
    assert (given[4][written] != 9).all()
    assert sorted((given[2] != 9).nonzero().flatten().tolist()) == sorted(named)


def outputs(num_tokens, num_cells, device):
    dtypes = (torch.float32, torch.float32, torch.uint8, torch.int32)
    return [
        *(torch.full((num_tokens,), 9, dtype=dtype, device=device) for dtype in dtypes),
        torch.full((num_cells,), 9.0, device=device),
    ]


@pytest.mark.parametrize("temperatures", [False, True])
@pytest.mark.parametrize("width", CLASSES)
def test_scores_and_gradients_of_rows(width, temperatures, device):
    ids, rows, num_tokens = make(CLASSES[width], device, seed=1)
    num_cells = ids.shape[0]
    generator = torch.Generator().manual_seed(2)
    parts = torch.randn(3, num_cells, generator=generator).to(device)
    parts[0, ::7] = -math.inf
    columns, owners = torch.full_like(ids, -1), torch.full_like(ids, -1)
    order_cells(columns, owners, ids, *rows, width, VOCAB)
    sampled = torch.randint(VOCAB, (num_tokens,), generator=generator)
    for t, (token, _, wanted) in enumerate(in_python(ids, rows)):
        inside = [v for v in wanted if v >= 0]
        if token >= 0 and inside and t % 4 != 3:
            sampled[token] = inside[t % len(inside)]
    scales = 0.5 + torch.rand(num_tokens, generator=generator)
    operand = (1.0, scales.to(device)) if temperatures else (0.7,)
    given = outputs(num_tokens, num_cells, device)
    sampled = sampled.to(device)
    score_cells(*given, parts, columns, sampled, *rows, width, *operand)
    logprobs, entropy, status, ignored, member_logprobs = given
    g, e = (torch.randn(num_tokens, generator=generator).to(device) for _ in range(2))
    grads = grad_cells(g, e, columns, owners, member_logprobs, entropy, sampled, *operand)

    seen, named = set(), set()
    for token, cells, wanted in in_python(ids, rows):
        if token < 0:
            assert (member_logprobs[cells] == -math.inf).all()
            assert not grads[cells].any()
            continue
        if not wanted:  # no cell: whoever made the outputs says that it has no support
            continue
        named.add(token)
        places = [k for k, v in enumerate(wanted) if v >= 0]
        scale = float(scales[token]) if temperatures else 0.7
        z = {wanted[k]: float(parts[:, cells][:, k].double().sum()) / scale for k in places}
        s = int(sampled[token])
        if all(v == -1 for v in wanted):
            expected = SUPPORT_MISSING
        elif not places:
            expected = SUPPORT_INVALID
        elif s not in z:
            expected = SAMPLED_OUTSIDE
        else:
            expected = SAMPLED_IMPOSSIBLE if z[s] == -math.inf else SUPPORT_OK
        seen.add(expected)
        assert int(status[token]) == expected
        assert int(ignored[token]) == wanted.count(-2)
        if expected != SUPPORT_OK:
            assert float(logprobs[token]) == float(entropy[token]) == 0
            assert (member_logprobs[cells] == -math.inf).all()
            assert not grads[cells].any()
            continue
        top = max(z.values())
        total = sum(math.exp(x - top) for x in z.values())
        log_p = {v: x - top - math.log(total) for v, x in z.items()}
        p = {v: math.exp(x) for v, x in log_p.items()}
        h = -sum(p[v] * x for v, x in log_p.items() if p[v] > 0)
        assert float(logprobs[token]) == pytest.approx(log_p[s], rel=1e-5, abs=1e-5)
        assert float(entropy[token]) == pytest.approx(h, rel=1e-5, abs=1e-5)
        for k, v in enumerate(wanted):
            cell = cells.start + k
            if v < 0 or p[v] == 0:
                assert float(grads[cell]) == 0
                continue
            assert float(member_logprobs[cell]) == pytest.approx(log_p[v], rel=1e-5, abs=2e-5)
            wanted_grad = float(g[token]) * ((v == s) - p[v])
            wanted_grad -= float(e[token]) * p[v] * (log_p[v] + h)
            assert float(grads[cell]) == pytest.approx(wanted_grad / scale, rel=1e-4, abs=1e-5)
    assert SUPPORT_OK in seen
    others = [t for t in range(num_tokens) if t not in named]
    assert others
    assert all((x[others] == 9).all() for x in given[:4])


def test_a_row_scores_as_one_of_a_single_width_does(device):
    """The same ids padded, by the functions for one width."""
    ids, rows, num_tokens = make([16, 9, 12], device, seed=3)
    columns, owners = torch.full_like(ids, -1), torch.full_like(ids, -1)
    order_cells(columns, owners, ids, *rows, 16, VOCAB)
    logits = torch.randn(1, ids.shape[0], generator=torch.Generator().manual_seed(4)).to(device)
    sampled = torch.zeros(num_tokens, dtype=torch.int64, device=device)
    given = outputs(num_tokens, ids.shape[0], device)
    for token, _, wanted in in_python(ids, rows):
        if token >= 0:
            sampled[token] = max(wanted)
    score_cells(*given, logits, columns, sampled, *rows, 16, 1.0)
    for token, cells, wanted in in_python(ids, rows):
        if token < 0:
            continue
        row = torch.tensor([wanted], device=device).int().clamp(min=-1)
        known = torch.zeros(1, dtype=torch.uint8, device=device)
        plain = members.score_members(
            logits[:, None, cells].contiguous(), row, known, sampled[token][None], 1.0
        )
        for x, y in zip(plain[:2], given[:2], strict=True):
            torch.testing.assert_close(x[0], y[token], rtol=1e-6, atol=1e-6)


def test_no_rows_no_cells(device):
    empty = torch.empty(0, dtype=torch.int64, device=device)
    ids = torch.empty(0, dtype=torch.int32, device=device)
    rows = Rows(empty, empty, empty)
    order_cells(ids, ids.clone(), ids.clone(), *rows, 4, VOCAB)
    given = outputs(2, 0, device)
    sampled = torch.zeros(2, dtype=torch.int64, device=device)
    none = torch.empty(1, 0, device=device)
    score_cells(*given, none, ids, sampled, *rows, 4, 1.0)
    assert (given[0] == 9).all()
    g = torch.zeros(2, device=device)
    assert grad_cells(g, g, ids, ids, none[0], g, sampled, 1.0).shape == (0,)


def test_operators_pass_opcheck(device):
    ids, rows, num_tokens = make([4, 1, 3], device)
    columns, owners = torch.full_like(ids, -1), torch.full_like(ids, -1)
    ops = torch.ops.packhorse
    torch.library.opcheck(ops.order_cells.default, (columns, owners, ids, *rows, 4, VOCAB))
    order_cells(columns, owners, ids, *rows, 4, VOCAB)
    given = outputs(num_tokens, ids.shape[0], device)
    logits = torch.randn(2, ids.shape[0], generator=torch.Generator().manual_seed(4)).to(device)
    sampled = torch.zeros(num_tokens, dtype=torch.int64, device=device)
    scored = (*given, logits, columns, sampled, *rows, 4, 1.0)
    torch.library.opcheck(ops.score_cells.default, scored)
    score_cells(*scored)
    g = torch.randn(num_tokens, generator=torch.Generator().manual_seed(5)).to(device)
    torch.library.opcheck(
        ops.grad_cells.default, (g, g, columns, owners, given[4], given[1], sampled, 1.0)
    )
