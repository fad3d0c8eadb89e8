"""lm_head_ragged_support_logprobs: supports of different widths, in classes of a like width.

Oracle: that of ``test_lm_head.py``, a dense log-softmax over full logits in float64, of the same
rows padded in Python. Ranks: ``tests/replay/test_scoring_ranks.py``.
"""

import pytest
import torch

from packhorse.kernels import lm_head_cells, lm_head_ragged
from packhorse.kernels.lm_head import lm_head_support_logprobs
from packhorse.kernels.lm_head_ragged import lm_head_ragged_support_logprobs
from tests.conftest import INTERPRET
from tests.kernels.test_lm_head import BF16, F32, F64, MISSING, OK, in_float64, leaves

#: ids of each row: none, one, each side of a class's edge, the whole vocabulary
WIDTHS = [1, 5, 20, 4, 0] if INTERPRET else [0, 1, 4, 5, 16, 17, 1, 2, 64, 65, 3, 300, 130, 7]
VOCAB = 24 if INTERPRET else 300
HIDDEN_SIZE = 40
OPTIONS = ("temperature",) if INTERPRET else ("plain", "bias", "temperature", "softcap")


class Ragged:
    """Rows of ``WIDTHS`` ids in their packed order; slots in another, some without a row."""

    def __init__(self, dtype, device, seed=0, whole=True):
        generator = torch.Generator().manual_seed(seed)
        num_rows = len(WIDTHS)
        self.rows = []
        for width in WIDTHS:
            if width == VOCAB and whole:
                ids = torch.randperm(VOCAB, generator=generator)
            else:
                ids = torch.randint(-2, VOCAB + 2, (width,), generator=generator)
                ids[ids == -1] = 3
            self.rows.append(ids.int())
        order = torch.randperm(num_rows + 3, generator=generator)
        self.row_ids = torch.where(order < num_rows - 1, order, -1)  # the last row has no slot
        self.num_tokens = len(order)
        sampled = torch.randint(VOCAB, (self.num_tokens,), generator=generator)
        for t, row in enumerate(self.row_ids.tolist()):
            inside = [i for i in self.rows[row].tolist() if 0 <= i < VOCAB] if row >= 0 else []
            if inside and t % 5:  # some are outside their support
                sampled[t] = inside[t % len(inside)]
        self.sampled = sampled.to(device)
        states = torch.randn(self.num_tokens, HIDDEN_SIZE, generator=generator)
        weight = torch.randn(VOCAB, HIDDEN_SIZE, generator=generator) / HIDDEN_SIZE**0.5
        self.states, self.weight = states.to(device, dtype), weight.to(device, dtype)
        self.bias = torch.randn(VOCAB, generator=generator).to(device, dtype)
        ends = torch.tensor([0, *WIDTHS]).cumsum(0)
        self.support = [x.to(device) for x in (torch.cat(self.rows), ends, self.row_ids)]

    def padded(self) -> torch.Tensor:
        """[T, C] in the order of the slots."""
        out = torch.full((self.num_tokens, max(WIDTHS)), -1)
        for t, row in enumerate(self.row_ids.tolist()):
            if row >= 0:
                out[t, : WIDTHS[row]] = self.rows[row]
        return out.to(self.states.device)


def options_of(name, case):
    generator = torch.Generator().manual_seed(5)
    temperature = 0.5 + torch.rand(case.num_tokens, generator=generator)
    return {
        "plain": {},
        "bias": {"bias": case.bias},
        "temperature": {"temperature": temperature.to(case.states.device)},
        "softcap": {"softcap": 1.5, "temperature": 0.7},
    }[name]


@pytest.fixture(params=["as it is", "small pieces"])
def pieces(request, monkeypatch):
    if request.param == "small pieces":
        monkeypatch.setattr(lm_head_ragged, "_ADDED", 4 if INTERPRET else 16)
        monkeypatch.setattr(lm_head_cells, "_PIECE", 8)
        monkeypatch.setattr(lm_head_cells, "_PARTS", 5)


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", [BF16] if INTERPRET else [F64, F32, BF16], ids=str)
def test_scores_and_gradients_are_those_of_full_logits(dtype, name, device):
    case = Ragged(dtype, device)
    options = options_of(name, case)
    generator = torch.Generator().manual_seed(6)
    grads = [torch.randn(case.num_tokens, generator=generator).to(device) for _ in range(2)]
    wide = dict(options)
    if name == "temperature":
        wide["temperature"] = options["temperature"].double()
        options["temperature"] = wide["temperature"] if dtype == F64 else options["temperature"]
    logprobs, entropy, scored, expected = in_float64(
        case.states, case.weight, case.padded(), case.sampled, grads, **wide
    )
    inputs = leaves(case.states, case.weight, *([case.bias] if name == "bias" else []))
    if name == "bias":
        options["bias"] = inputs[2]
    scores = lm_head_ragged_support_logprobs(
        *inputs[:2], *case.support, case.sampled, widths=WIDTHS, **options
    )
    assert torch.equal(scores.status == OK, scored)
    assert scored.any()
    assert (scores.status[case.row_ids < 0] == MISSING).all()
    torch.testing.assert_close(scores.logprobs.double(), logprobs, rtol=1e-5, atol=3e-5)
    torch.testing.assert_close(scores.entropy.double(), entropy, rtol=1e-5, atol=3e-5)
    (scores.logprobs * grads[0] + scores.entropy * grads[1]).sum().backward()
    unit = torch.finfo(dtype).eps
    for leaf, wanted in zip(inputs, expected, strict=True):
        assert leaf.grad.dtype == dtype
        bound = {"rtol": 2 * unit, "atol": float(wanted.abs().max()) * max(unit / 4, 1e-5)}
        torch.testing.assert_close(leaf.grad.double(), wanted, **bound)


def test_scores_are_those_of_rows_padded_to_the_widest(device):
    case = Ragged(BF16, device)
    padded = lm_head_support_logprobs(case.states, case.weight, case.padded(), case.sampled)
    ragged = lm_head_ragged_support_logprobs(
        case.states, case.weight, *case.support, case.sampled, widths=WIDTHS
    )
    assert torch.equal(ragged.status, padded.status)
    assert torch.equal(ragged.num_ignored, padded.num_ignored)
    for a, b in zip(ragged[:2], padded[:2], strict=True):  # wider rows sum in another order
        torch.testing.assert_close(a, b, rtol=1e-6, atol=2e-6)


def test_two_backwards_into_main_grad_are_equal_bit_for_bit(device):
    case = Ragged(BF16, device)
    runs = []
    for _ in range(2):
        inputs = leaves(case.states, case.weight)
        main_grad = torch.ones(case.weight.shape, device=device)
        scores = lm_head_ragged_support_logprobs(
            *inputs, *case.support, case.sampled, widths=WIDTHS, main_grad=main_grad
        )
        (scores.logprobs + scores.entropy).sum().backward()
        assert inputs[1].grad is None
        runs.append((scores.logprobs.detach(), inputs[0].grad, main_grad))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    assert (runs[0][2] != 1).any()


@pytest.mark.skipif(INTERPRET, reason="float64 runs the references in any case")
@pytest.mark.parametrize("name", ["bias", "softcap"])
def test_gradcheck(name, device):
    case = Ragged(F64, device)
    options = options_of(name, case)
    inputs = [x.requires_grad_() for x in (case.states, case.weight, case.bias)]

    def scores(states, weight, bias):
        given = {**options, "bias": bias} if name == "bias" else options
        return lm_head_ragged_support_logprobs(
            states, weight, *case.support, case.sampled, widths=WIDTHS, **given
        )

    assert (scores(*inputs).status == OK).any()
    inputs = inputs if name == "bias" else inputs[:2]
    assert torch.autograd.gradcheck(
        lambda *x: scores(*x, *([] if len(x) == 3 else [None]))[:2], inputs, fast_mode=True
    )


def test_rows_without_a_slot_and_slots_without_a_row_may_hold_anything(device):
    case = Ragged(F32, device)
    case.states[case.row_ids.to(device) < 0] = float("nan")
    inputs = leaves(case.states, case.weight)
    scores = lm_head_ragged_support_logprobs(*inputs, *case.support, case.sampled, widths=WIDTHS)
    (scores.logprobs + scores.entropy).sum().backward()
    for x in (*scores[:2], *(leaf.grad for leaf in inputs)):
        assert x.isfinite().all()
    assert not inputs[0].grad[case.row_ids.to(device) < 0].any()


def test_no_rows_no_ids_no_tokens(device):
    case = Ragged(F32, device)
    ids = torch.empty(0, dtype=torch.int32, device=device)
    for num_rows, num_tokens in ((0, case.num_tokens), (2, case.num_tokens), (0, 0)):
        inputs = leaves(case.states[:num_tokens], case.weight)
        row_ids = torch.full((num_tokens,), -1, device=device)
        row_ids[:num_rows] = torch.arange(num_rows, device=device)
        scores = lm_head_ragged_support_logprobs(
            *inputs,
            ids,
            torch.zeros(num_rows + 1, dtype=torch.int64, device=device),
            row_ids,
            case.sampled[:num_tokens],
            widths=[0] * num_rows,
        )
        assert (scores.status == MISSING).all()
        scores.logprobs.sum().backward()
        assert not any(leaf.grad.any() for leaf in inputs)


def test_rows_and_no_tokens(device):
    case = Ragged(F32, device)
    inputs = leaves(case.states[:0], case.weight)
    none = case.support[2][:0]
    scores = lm_head_ragged_support_logprobs(
        *inputs, *case.support[:2], none, case.sampled[:0], widths=WIDTHS
    )
    assert all(x.shape == (0,) for x in scores)
    scores.logprobs.sum().backward()
    assert not inputs[1].grad.any()


def test_nothing_waits_for_the_device(cuda, no_host_sync):
    case = Ragged(BF16, cuda)
    inputs = leaves(case.states, case.weight)
    main_grad = torch.zeros(case.weight.shape, device=cuda)

    def step():
        scores = lm_head_ragged_support_logprobs(
            *inputs, *case.support, case.sampled, widths=WIDTHS, main_grad=main_grad
        )
        scores.logprobs.sum().backward()

    step()
    with no_host_sync():
        step()


def test_operators_of_cells_pass_opcheck_and_leave_the_rows_of_others(device):
    case = Ragged(BF16, device)
    ops = torch.ops.packhorse
    ids = torch.tensor([5, 1, 11, 0, 9], device=device, dtype=torch.int32)
    of_slots = [torch.tensor(x, device=device) for x in ([2, 0, 0], [3, 0, 2])]
    tokens, begins, counts = (
        torch.tensor(x, device=device) for x in ([2, -1, 0], [0, 2, 2], [2, 0, 3])
    )
    columns, owners = (torch.full_like(ids, -1) for _ in range(2))
    ordered = (columns, owners, ids, tokens, begins, counts, 4, VOCAB)
    torch.library.opcheck(ops.order_cells.default, ordered)
    ops.order_cells(*ordered)
    assert columns.tolist() == [1, 5, 0, 9, 11]
    assert owners.tolist() == [2, 2, 0, 0, 0]
    given = (case.states[:3], case.weight, None, columns, owners, 0)
    torch.library.opcheck(ops.project_cells.default, given)
    expected = [float(case.states[t].float() @ case.weight[v].float())
                for t, v in zip(owners.tolist(), columns.tolist(), strict=True)]  # fmt: skip
    logits = ops.project_cells(*given).sum(0).tolist()
    assert logits == pytest.approx(expected, rel=1e-4, abs=1e-4)
    grads = torch.randn(5, device=device)
    rows = grads[:, None] * case.weight[columns.long()].float()
    narrow = (grads, case.weight, columns, owners, *of_slots, 0, 2)
    torch.library.opcheck(ops.grad_hidden_of_cells.default, narrow)
    out = ops.grad_hidden_of_cells(*narrow)
    assert not out[:2].any()  # a row of more than 2 ids, and none
    torch.testing.assert_close(out[2].float(), rows[:2].sum(0), rtol=1e-2, atol=1e-2)
    wide = (out, grads, case.weight, columns, tokens[2:], begins[2:], counts[2:], 4, 0)
    torch.library.opcheck(ops.put_wide_hidden.default, wide)
    before = out.clone()
    ops.put_wide_hidden(*wide)
    torch.testing.assert_close(out[0].float(), rows[2:].sum(0), rtol=1e-2, atol=1e-2)
    assert torch.equal(out[1:], before[1:])
    sums = torch.zeros(case.weight.shape, device=device)
    pairs = columns.sort(stable=True)
    torch.library.opcheck(
        ops.add_weight_gradient.default, (sums, grads, case.states[:3], *pairs, 1, owners)
    )


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"widths": torch.tensor([1, 2])}, TypeError, "widths must be host integers, got a tensor"),
        ({"widths": [1.5, 2]}, TypeError, r"widths must be host integers \[N\], got float64"),
        ({"widths": [1]}, ValueError, "1 widths for 2 rows"),
        ({"widths": [-1, 2]}, ValueError, "widths are negative, or more than the 3 ids"),
        ({"widths": [2, 2]}, ValueError, "widths are negative, or more than the 3 ids"),
        ({"widths": [2, 1]}, ValueError, "widths must be those of row_offsets"),
        ({"row_ids": torch.tensor([1, 1, 0])}, ValueError, "row_ids must name a row once at most"),
        ({"row_ids": torch.tensor([0, 2, 1])}, ValueError, r"row_ids must be in \[-1, 2\)"),
        ({"row_ids": torch.zeros(3).int()}, TypeError, "row_ids must be int64"),
        ({"row_ids": torch.zeros(2).long()}, ValueError, r"row_ids must be \[T\] = \[3\], got"),
        ({"row_ids": [0, 1, -1]}, TypeError, "row_ids must be a tensor, got list"),
        ({"token_ids": torch.zeros(3).long()}, TypeError, "token_ids must be int32"),
        ({"hidden": torch.zeros(3, 9)}, ValueError, "weight must be"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_by_name(change, error, said):
    given = {
        "hidden": torch.zeros(3, 8),
        "weight": torch.zeros(10, 8),
        "token_ids": torch.zeros(3, dtype=torch.int32),
        "row_offsets": torch.tensor([0, 1, 3]),
        "row_ids": torch.tensor([0, 1, -1]),
        "sampled_ids": torch.zeros(3, dtype=torch.int64),
        "widths": [1, 2],
    }
    with pytest.raises(error, match=f"^lm_head_ragged_support_logprobs: .*{said}"):
        lm_head_ragged_support_logprobs(**{**given, **change})
