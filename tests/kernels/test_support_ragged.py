"""ragged_support_logprobs: supports of different widths, from logits where the model left them.

Oracle: the loops of ``support_oracle.py`` over the same ids, token by token. Tolerance: the error
may not exceed that of a dense log-softmax of plain PyTorch in the same dtype times a factor.
"""

from itertools import pairwise

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from packhorse.kernels import support_ragged
from packhorse.kernels.support import support_logprobs
from packhorse.kernels.support_ragged import ragged_support_logprobs
from packhorse.testing import assert_within_budget
from tests.conftest import INTERPRET
from tests.kernels.support_oracle import (
    DTYPES,
    IMPOSSIBLE,
    INF,
    INVALID,
    MISSING,
    NAN,
    OK,
    OUTSIDE,
    column,
    dense_scores,
    result_dtype,
    score_rows,
)

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
VOCAB = 40 if INTERPRET else 300
#: ids of each row: none, one, each side of a class's edge, the whole vocabulary
WIDTHS = (
    [0, 1, 4, 5, 16, 17, 6, 3, 2, 7]
    if INTERPRET
    else [0, 1, 4, 5, 16, 17, 1, 2, 64, 65, 3, 300, 130, 7, 2, 6, 12, 9, 20, 3]
)


class Ragged:
    """Rows of ``WIDTHS`` ids in their packed order; tokens in another, some without a row."""

    def __init__(self, device, dtype=F32, seed=0):
        generator = torch.Generator().manual_seed(seed)
        num_rows = len(WIDTHS)
        self.rows = []
        for width in WIDTHS:
            if width == VOCAB:
                ids = torch.randperm(VOCAB, generator=generator)
            else:
                ids = torch.randint(-2, VOCAB + 2, (width,), generator=generator)
            self.rows.append(ids.int())
        self.rows[WIDTHS.index(6)].fill_(VOCAB + 3)  # none of them inside the vocabulary
        self.rows[WIDTHS.index(3)].fill_(-1)
        order = torch.randperm(num_rows + 3, generator=generator)
        self.row_ids = torch.where(order < num_rows - 1, order, -1)  # the last row has no token
        self.num_tokens = len(order)
        logits = 4 * torch.randn(self.num_tokens, VOCAB, generator=generator)
        logits[torch.rand(logits.shape, generator=generator) < 0.05] = -INF
        sampled = torch.randint(VOCAB, (self.num_tokens,), generator=generator)
        for t, row in enumerate(self.row_ids.tolist()):
            inside = [i for i in self.rows[row].tolist() if 0 <= i < VOCAB] if row >= 0 else []
            if inside and WIDTHS[row] != 5:  # that of 5 ids is sampled outside its support
                sampled[t] = inside[t % len(inside)]
                logits[t, sampled[t]] = -INF if WIDTHS[row] == 17 else 1.0
            elif inside:
                sampled[t] = next(i for i in range(VOCAB) if i not in inside)
        self.logits, self.sampled = logits.to(device, dtype), sampled.to(device)
        ends = torch.tensor([0, *WIDTHS]).cumsum(0)
        self.support = [x.to(device) for x in (torch.cat(self.rows), ends, self.row_ids)]

    def padded(self) -> torch.Tensor:
        """[T, C] in the order of the tokens."""
        out = torch.full((self.num_tokens, max(WIDTHS)), -1)
        for t, row in enumerate(self.row_ids.tolist()):
            if row >= 0:
                out[t, : WIDTHS[row]] = self.rows[row]
        return out.to(self.logits.device)

    def score(self, logits, **options):
        return ragged_support_logprobs(
            logits, *self.support, self.sampled, widths=WIDTHS, **options
        )


@pytest.mark.parametrize("dtype", [F32, BF16] if INTERPRET else DTYPES, ids=str)
def test_scores_and_gradients_match_the_loops_within_the_error_of_a_dense_softmax(dtype, device):
    case = Ragged(device, dtype)
    ids = case.padded()
    rows = score_rows(case.logits, ids, case.sampled, 0.7)
    assert {row.status for row in rows} == {OK, MISSING, INVALID, OUTSIDE, IMPOSSIBLE}
    leaf = case.logits.requires_grad_()
    scores = case.score(leaf, temperature=0.7)
    assert scores.status.tolist() == [row.status for row in rows]
    assert scores.num_ignored.tolist() == [row.num_ignored for row in rows]
    assert (scores.status.dtype, scores.num_ignored.dtype) == (torch.uint8, torch.int32)
    dense = dense_scores(leaf, rows, ids, case.sampled, 0.7)
    for actual, baseline, name in zip(scores[:2], dense, ("logprob", "entropy"), strict=True):
        assert actual.dtype == result_dtype(dtype)
        # 3: as of rows of one width, and a row's sum is that of another tile
        assert_within_budget(actual, baseline, column(rows, name, device), factor=3)
        (grad,) = torch.autograd.grad(actual.sum(), leaf, retain_graph=True)
        (grad_baseline,) = torch.autograd.grad(baseline.sum(), leaf, retain_graph=True)
        exact = column(rows, f"grad_{name}", device)
        assert grad.dtype == dtype
        assert_within_budget(grad, grad_baseline, exact, factor=3)
        members = torch.zeros(grad.shape, dtype=torch.bool)
        for t, listed in enumerate(ids.tolist()):
            members[t, [i for i in listed if 0 <= i < VOCAB and rows[t].status == OK]] = True
        assert not grad[~members.to(device)].any()


def test_scores_are_those_of_rows_padded_to_the_widest(device):
    case = Ragged(device, BF16)
    padded = support_logprobs(case.logits, case.padded(), case.sampled)
    ragged = case.score(case.logits)
    assert torch.equal(ragged.status, padded.status)
    assert torch.equal(ragged.num_ignored, padded.num_ignored)
    for a, b in zip(ragged[:2], padded[:2], strict=True):  # wider rows sum in another order
        torch.testing.assert_close(a, b, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", [F64, F32, BF16], ids=str)
def test_backward_twice_is_bitwise_equal(dtype, device):
    case = Ragged(device, dtype)
    leaf = case.logits.requires_grad_()
    upstream = torch.randn(case.num_tokens, generator=torch.Generator().manual_seed(1)).to(device)
    runs = []
    for _ in range(3):
        scores = case.score(leaf)
        loss = (upstream * (scores.logprobs + 0.1 * scores.entropy)).sum()
        runs.append(torch.autograd.grad(loss, leaf)[0])
    assert all(torch.equal(runs[0], run) for run in runs[1:])
    assert runs[0].any()


@pytest.mark.skipif(INTERPRET, reason="float64 runs the references in any case")
def test_gradcheck(device):
    case = Ragged(device, F64)
    finite = case.logits.where(case.logits > -INF, 0.5).requires_grad_()
    scores = case.score(finite)
    assert (scores.status == OK).sum() > 3
    assert torch.autograd.gradcheck(
        lambda x: case.score(x, temperature=0.7)[:2], finite, fast_mode=True
    )


@pytest.mark.parametrize("layout", ["transposed", "column-slice", "every-other"])
def test_strided_logits_and_ids(layout, device):
    case = Ragged(device)
    logits = {
        "transposed": case.logits.T.contiguous().T,
        "column-slice": torch.cat([case.logits] * 2, 1)[:, VOCAB:],
        "every-other": case.logits.repeat_interleave(2, 1)[:, ::2],
    }[layout].requires_grad_()
    assert not logits.is_contiguous()
    whole = case.logits.clone().requires_grad_()
    plain = case.score(whole)
    case.support[2] = torch.stack([case.support[2]] * 2, 1)[:, 0]
    case.sampled = torch.stack([case.sampled] * 2, 1)[:, 0]
    strided = case.score(logits)
    assert all(torch.equal(a, b) for a, b in zip(strided, plain, strict=True))
    found, expected = (
        torch.autograd.grad((s.logprobs + s.entropy).sum(), x)[0]
        for s, x in ((strided, logits), (plain, whole))
    )
    assert torch.equal(found, expected)


@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
@pytest.mark.parametrize("dtype", [F32, BF16] if INTERPRET else DTYPES, ids=str)
def test_logits_may_be_overwritten_by_their_gradient(dtype, layout, device):
    case = Ragged(device, dtype)
    base = case.logits.T.contiguous().T if layout == "transposed" else case.logits
    leaf = base.clone().requires_grad_()
    scores = case.score(leaf, temperature=0.7)
    (expected,) = torch.autograd.grad((scores.logprobs + scores.entropy).sum(), leaf)
    given = base.clone().requires_grad_()
    scores = case.score(given, temperature=0.7, overwrite_logits=True)
    loss = (scores.logprobs + scores.entropy).sum()
    (actual,) = torch.autograd.grad(loss, given, retain_graph=True)
    assert torch.equal(actual, expected)
    assert actual.data_ptr() == given.data_ptr()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, given)


def test_pad_columns_never_enter_and_get_no_gradient(device):
    case = Ragged(device)
    leaf = case.logits.clone().requires_grad_()
    expected = case.score(leaf)
    filler = torch.full((case.num_tokens, 9), NAN, device=device)
    padded = torch.cat([case.logits, filler], 1).requires_grad_()
    actual = case.score(padded, vocab_size=VOCAB)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    grads = [
        torch.autograd.grad((s.logprobs + s.entropy).sum(), x)[0]
        for s, x in ((actual, padded), (expected, leaf))
    ]
    assert torch.equal(grads[0][:, :VOCAB], grads[1])
    assert not grads[0][:, VOCAB:].any()


def test_what_is_no_member_may_hold_anything_and_what_is_one_shows(device):
    case = Ragged(device)
    members = torch.zeros(case.logits.shape, dtype=torch.bool)
    for t, listed in enumerate(case.padded().tolist()):
        members[t, [i for i in listed if 0 <= i < VOCAB]] = True
    plain = case.score(case.logits)
    case.logits[~members.to(device)] = NAN
    leaf = case.logits.requires_grad_()
    scores = case.score(leaf)
    assert all(torch.equal(a, b) for a, b in zip(scores, plain, strict=True))
    (grad,) = torch.autograd.grad((scores.logprobs + scores.entropy).sum(), leaf)
    assert grad.isfinite().all()
    token = int((scores.status == OK).nonzero()[0])
    with torch.no_grad():
        leaf[token, case.sampled[token]] = NAN
    assert case.score(leaf).logprobs.isnan().nonzero().flatten().tolist() == [token]


def test_no_rows_no_ids_no_tokens(device):
    case = Ragged(device)
    ids = torch.empty(0, dtype=torch.int32, device=device)
    for num_rows, num_tokens in ((0, case.num_tokens), (2, case.num_tokens), (0, 0)):
        leaf = case.logits[:num_tokens].clone().requires_grad_()
        row_ids = torch.full((num_tokens,), -1, device=device)
        row_ids[:num_rows] = torch.arange(num_rows, device=device)
        offsets = torch.zeros(num_rows + 1, dtype=torch.int64, device=device)
        scores = ragged_support_logprobs(
            leaf, ids, offsets, row_ids, case.sampled[:num_tokens], widths=[0] * num_rows
        )
        assert (scores.status == MISSING).all()
        (grad,) = torch.autograd.grad((scores.logprobs + scores.entropy).sum(), leaf)
        assert torch.equal(grad, torch.zeros_like(leaf))
    # rows, and no token that names them
    scores = ragged_support_logprobs(
        case.logits[:0], *case.support[:2], row_ids[:0], case.sampled[:0], widths=WIDTHS
    )
    assert all(x.shape == (0,) for x in scores)


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that an operator returned."""

    num_elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else [out]:
            if isinstance(x, torch.Tensor):
                self.num_elements = max(self.num_elements, x.numel())
        return out


@pytest.mark.skipif(INTERPRET, reason="thousands of ids; shapes are the same")
def test_a_wide_row_among_narrow_ones_makes_nothing_of_all_rows_by_the_widest(device):
    widths = [2] * 999 + [3700]
    ends = torch.tensor([0, *widths]).cumsum(0).to(device)
    ids = (torch.arange(int(ends[-1]), dtype=torch.int32) % 4000).to(device)
    logits = torch.randn(1000, 4000, generator=torch.Generator().manual_seed(0)).to(device)
    row_ids, sampled = torch.arange(1000, device=device), ids[ends[:-1]].long()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    with Largest() as made:
        scores = ragged_support_logprobs(logits, ids, ends, row_ids, sampled, widths=widths)
    assert (scores.status == OK).all()
    assert made.num_elements == len(ids)
    if device == "cuda":
        assert torch.cuda.max_memory_allocated() - before < 1000 * 3700  # a quarter of float32


def test_a_second_derivative_is_refused_and_no_grad_records_nothing(device):
    case = Ragged(device)
    leaf = case.logits.requires_grad_()
    scores = case.score(leaf)
    assert [x.requires_grad for x in scores] == [True, True, False, False]
    weight = torch.ones(case.num_tokens, device=device, requires_grad=True)
    (grad,) = torch.autograd.grad((weight * scores.logprobs).sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
    with torch.no_grad():
        assert not any(x.requires_grad for x in case.score(leaf))


def test_logits_of_shards_add_up_to_the_whole_bit_for_bit(device):
    """What ranks do, one after another: each shard's logits, their sum, each shard's gradients."""
    case = Ragged(device)
    columns = torch.tensor([0, 9, 17, 18, -1, -2, 30, 39], dtype=torch.int32, device=device)
    owners = torch.tensor([0, 0, 1, 1, 1, 2, 2, -1], dtype=torch.int32, device=device)
    columns[7] = -1
    whole = support_ragged.read_cell_logits(case.logits, columns, owners, 0)
    expected = [
        float(case.logits[t, c]) if c >= 0 and t >= 0 else 0.0
        for c, t in zip(columns.tolist(), owners.tolist(), strict=True)
    ]
    assert whole[0].tolist() == expected
    cuts = [0, 10, 18, VOCAB]
    shards = [slice(a, b) for a, b in pairwise(cuts)]
    parts = [
        support_ragged.read_cell_logits(case.logits[:, shard], columns, owners, shard.start)
        for shard in shards
    ]
    assert torch.equal(sum(parts), whole)
    generator = torch.Generator().manual_seed(2)
    g, e, h = (torch.randn(3, generator=generator).to(device) for _ in range(3))
    members = -torch.rand(8, generator=generator).to(device)
    sampled = torch.tensor([9, 17, 3], device=device)
    given = g, e, columns, owners, members, h, sampled
    out = torch.zeros(3, VOCAB, device=device)
    support_ragged.put_cell_grads(out, *given, 0, 0.7)
    assert (out != 0).sum() == 5
    for shard in shards:
        part = torch.zeros(3, shard.stop - shard.start, device=device)
        support_ragged.put_cell_grads(part, *given, shard.start, 0.7)
        assert torch.equal(part, out[:, shard])


def test_operators_pass_opcheck(device):
    case = Ragged(device, BF16)
    ops = torch.ops.packhorse
    columns = torch.tensor([0, 9, -1, 17, -2], dtype=torch.int32, device=device)
    owners = torch.tensor([0, 0, 1, 1, 1], dtype=torch.int32, device=device)
    given = case.logits[:2], columns, owners, 0
    torch.library.opcheck(ops.read_cell_logits.default, given)
    members = ops.read_cell_logits(*given)[0].clamp(max=0)
    row = torch.rand(2, generator=torch.Generator().manual_seed(0)).to(device)
    sampled = torch.tensor([9, 17], device=device)
    out = torch.zeros(2, VOCAB, dtype=BF16, device=device)
    torch.library.opcheck(
        ops.put_cell_grads.default, (out, row, row, columns, owners, members, row, sampled, 0, 0.7)
    )
    by_token = (out, row, row, columns, owners, members, row, sampled, 0, 1.0, row + 0.5)
    torch.library.opcheck(ops.put_cell_grads.default, by_token)


def test_shapes_do_not_depend_on_the_data():
    logits = torch.empty(6, 9, dtype=BF16, device="meta", requires_grad=True)
    ids = torch.empty(7, dtype=torch.int32, device="meta")
    row_ids, sampled = (torch.empty(6, dtype=torch.int64, device="meta") for _ in range(2))
    offsets = torch.empty(4, dtype=torch.int64, device="meta")
    scores = ragged_support_logprobs(logits, ids, offsets, row_ids, sampled, widths=[1, 0, 6])
    assert [x.dtype for x in scores] == [F32, F32, torch.uint8, torch.int32]
    (grad,) = torch.autograd.grad(scores.logprobs.sum(), logits)
    assert (grad.shape, grad.dtype) == (logits.shape, BF16)


# --- on a GPU -------------------------------------------------------------------------------------


def test_nothing_waits_for_the_device(cuda, no_host_sync):
    for dtype in (BF16, F64):
        case = Ragged(cuda, dtype)
        leaf = case.logits.requires_grad_()

        def step(case=case, leaf=leaf):
            scores = case.score(leaf * 1, temperature=0.7, overwrite_logits=True)
            torch.autograd.grad((scores.logprobs + scores.entropy).sum(), leaf)

        step()
        with no_host_sync():
            step()


@pytest.mark.gpu_memory(gib=20)
def test_offsets_past_2_to_the_31(cuda):
    num_tokens, vocab = 17_000, 151_936  # 2.6e9 logits
    logits = torch.zeros(num_tokens, vocab, dtype=BF16, device=cuda).requires_grad_()
    last = torch.tensor([0, vocab - 1], dtype=torch.int32, device=cuda)
    with torch.no_grad():
        logits[-1, -1] = 2.0
    row_ids = torch.full((num_tokens,), -1, device=cuda)
    row_ids[-1] = 0
    sampled = torch.full((num_tokens,), vocab - 1, device=cuda)
    scores = ragged_support_logprobs(
        logits, last, torch.tensor([0, 2], device=cuda), row_ids, sampled, widths=[2],
        overwrite_logits=True,
    )  # fmt: skip
    p = 1 / (1 + torch.tensor(-2.0).exp())
    torch.testing.assert_close(scores.logprobs[-1].cpu(), p.log())
    (grad,) = torch.autograd.grad(scores.logprobs.sum(), logits)
    row = grad[-1].float().cpu()
    torch.testing.assert_close(row[[0, -1]], torch.stack([p - 1, 1 - p]), rtol=1e-2, atol=1e-3)
    assert row.count_nonzero() == 2
    assert not grad[: num_tokens - 1].any()


# --- rejections -----------------------------------------------------------------------------------


def good():
    return {
        "logits": torch.zeros(3, 8),
        "token_ids": torch.zeros(3, dtype=torch.int32),
        "row_offsets": torch.tensor([0, 1, 3]),
        "row_ids": torch.tensor([0, 1, -1]),
        "sampled_ids": torch.zeros(3, dtype=torch.int64),
        "widths": [1, 2],
    }


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"logits": [[1.0]]}, TypeError, "logits must be a tensor, got list"),
        ({"logits": torch.zeros(3, 8).int()}, TypeError, "logits has unsupported dtype"),
        ({"logits": torch.zeros(3, 0)}, ValueError, r"logits must be \[T, V\] with V > 0"),
        ({"sampled_ids": torch.zeros(3).int()}, TypeError, "sampled_ids must be int64"),
        ({"sampled_ids": torch.zeros(2).long()}, ValueError, r"sampled_ids must be \[T\] with T"),
        ({"temperature": 0}, ValueError, "temperature must be finite and > 0, got 0"),
        ({"vocab_size": 9}, ValueError, "vocab_size must be from 1 to the 8 columns of logits"),
        ({"vocab_start": 5}, ValueError, "vocab_start=5, but no group holds other columns"),
        ({"overwrite_logits": 1}, TypeError, "overwrite_logits must be a bool, got int"),
        (
            {"logits": torch.zeros(1, 8).expand(3, 8), "overwrite_logits": True},
            ValueError,
            "overwrite_logits is for logits of their own memory, got strides",
        ),
        ({"token_ids": torch.zeros(3).long()}, TypeError, "token_ids must be int32"),
        ({"token_ids": [0, 1, 2]}, TypeError, "token_ids must be a tensor, got list"),
        ({"row_offsets": torch.tensor([0, 1, 2])}, ValueError, "row_offsets must rise from 0 to"),
        ({"row_ids": [0, 1, -1]}, TypeError, "row_ids must be a tensor, got list"),
        ({"row_ids": torch.zeros(3).int()}, TypeError, "row_ids must be int64"),
        ({"row_ids": torch.zeros(2).long()}, ValueError, r"row_ids must be \[T\] = \[3\], got"),
        ({"row_ids": torch.tensor([1, 1, 0])}, ValueError, "row_ids must name a row once at most"),
        ({"row_ids": torch.tensor([0, 2, 1])}, ValueError, r"row_ids must be in \[-1, 2\)"),
        ({"row_ids": torch.zeros(3, device="meta").long()}, ValueError, "row_ids on meta, logits"),
        ({"widths": torch.tensor([1, 2])}, TypeError, "widths must be host integers, got a tensor"),
        ({"widths": [1]}, ValueError, "1 widths for 2 rows"),
        ({"widths": [2, 1]}, ValueError, "widths must be those of row_offsets"),
        ({"widths": [2, 2]}, ValueError, "widths are negative, or more than the 3 ids"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_by_name(change, error, said):
    with pytest.raises(error, match=f"^ragged_support_logprobs: .*{said}"):
        ragged_support_logprobs(**{**good(), **change})
    ragged_support_logprobs(**good())


def test_supports_elsewhere_than_the_logits_are_refused():
    given = good()
    given |= {x: given[x].to("meta") for x in ("token_ids", "row_offsets")}
    with pytest.raises(ValueError, match=r"^ragged_support_logprobs: token_ids on meta, logits on"):
        ragged_support_logprobs(**given)
