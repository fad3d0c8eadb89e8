"""support_logprobs and lm_head_support_logprobs of packed rows that ``row_ids`` names.

Oracle of the values: the loops of ``support_oracle.py``. Beside it, the same rows copied into the
order of the tokens by NumPy: what is read through row ids is equal to them, bit for bit.
"""

import numpy as np
import pytest
import torch
import torch._dynamo.testing

from packhorse.kernels.lm_head import lm_head_support_logprobs
from packhorse.kernels.support import support_logprobs
from tests.conftest import INTERPRET
from tests.kernels.support_oracle import MISSING, OK, column, score_rows

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
VOCAB, HIDDEN_SIZE = 60, 40
NUM_TOKENS, NUM_ROWS = (9, 7) if INTERPRET else (50, 37)


class Packed:
    """[N, C] rows; tokens in another order, some without a row, one row of two tokens."""

    def __init__(self, device, width, *, dtype=F32, ids_dtype=torch.int32):
        generator = torch.Generator().manual_seed(width)
        ids = torch.randint(-2, VOCAB + 3, (NUM_ROWS, width), generator=generator)
        row_ids = torch.randint(-1, NUM_ROWS, (NUM_TOKENS,), generator=generator)
        row_ids[0], row_ids[1] = -1, row_ids[2]
        sampled = torch.zeros(NUM_TOKENS).long()
        if width:
            sampled = ids[row_ids.clamp(min=0), torch.arange(NUM_TOKENS) % width]
        states = torch.randn(NUM_TOKENS, HIDDEN_SIZE, generator=generator)
        weight = torch.randn(VOCAB, HIDDEN_SIZE, generator=generator) / HIDDEN_SIZE**0.5
        self.copied = np.full((NUM_TOKENS, width), -1)
        for t, row in enumerate(row_ids.tolist()):
            if row >= 0:
                self.copied[t] = ids[row].numpy()
        self.copied = torch.from_numpy(self.copied).to(device, ids_dtype)
        self.ids, self.row_ids = ids.to(device, ids_dtype), row_ids.to(device)
        self.sampled = sampled.to(device)
        logits = 3 * torch.randn(NUM_TOKENS, VOCAB, generator=generator)
        self.inputs = {
            "logits": [logits.to(device, dtype)],
            "LM head": [states.to(device, dtype), weight.to(device, dtype)],
        }


SCORERS = {"logits": support_logprobs, "LM head": lm_head_support_logprobs}


@pytest.fixture(params=SCORERS)
def kind(request) -> str:
    return request.param


def passes(kind, inputs, *given, **options):
    """Scores, and the gradients of what they are made of."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    scores = SCORERS[kind](*leaves, *given, temperature=0.7, **options)
    grads = torch.autograd.grad((scores.logprobs + 0.3 * scores.entropy).sum(), leaves)
    return [*scores, *grads]


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("dtype", [F64, F32, BF16], ids=str)
@pytest.mark.parametrize("width", [0, 1, 5, 20] if INTERPRET else [0, 1, 5, 20, 300, 5000])
def test_rows_that_are_named_score_as_their_copies_bit_for_bit(
    width, dtype, ids_dtype, kind, device
):
    case = Packed(device, width, dtype=dtype, ids_dtype=ids_dtype)
    inputs = case.inputs[kind]
    named = passes(kind, inputs, case.ids, case.sampled, row_ids=case.row_ids)
    copied = passes(kind, inputs, case.copied, case.sampled)
    for a, b in zip(named, copied, strict=True):
        assert torch.equal(a, b)
        assert a.dtype == b.dtype
    if width:
        assert (named[2] == OK).any()
        assert (named[2][case.row_ids < 0] == MISSING).all()


def test_scores_are_those_of_the_loops(device):
    case = Packed(device, 20)
    (logits,) = case.inputs["logits"]
    scores = support_logprobs(logits, case.ids, case.sampled, row_ids=case.row_ids, temperature=0.7)
    rows = score_rows(logits, case.copied, case.sampled, 0.7)
    assert scores.status.tolist() == [row.status for row in rows]
    assert scores.num_ignored.tolist() == [row.num_ignored for row in rows]
    for actual, name in zip(scores[:2], ("logprob", "entropy"), strict=True):
        torch.testing.assert_close(
            actual.double(), column(rows, name, device), rtol=1e-5, atol=1e-5
        )


def test_ids_of_any_strides(kind, device):
    case = Packed(device, 5)
    inputs = case.inputs[kind]
    plain = passes(kind, inputs, case.ids, case.sampled, row_ids=case.row_ids)
    between = torch.stack([case.row_ids, case.row_ids - 5], 1)[:, 0]
    wider = torch.cat([case.ids, case.ids + 1], 1)[:, :5]
    for ids, row_ids in ((case.ids.T.contiguous().T, case.row_ids), (wider, between)):
        strided = passes(kind, inputs, ids, case.sampled, row_ids=row_ids)
        assert all(torch.equal(a, b) for a, b in zip(strided, plain, strict=True))


def test_tokens_without_any_row(kind, device):
    case = Packed(device, 5)
    none = torch.full_like(case.row_ids, -1)
    for ids in (case.ids, case.ids[:0]):
        status, _, *grads = passes(kind, case.inputs[kind], ids, case.sampled, row_ids=none)[2:]
        assert (status == MISSING).all()
        assert not any(grad.any() for grad in grads)
    # and rows without any token
    first, *rest = case.inputs[kind]
    scores = SCORERS[kind](first[:0], *rest, case.ids, case.sampled[:0], row_ids=none[:0])
    assert all(x.shape == (0,) for x in scores)


def test_operators_pass_opcheck(device):
    case = Packed(device, 5)
    ops = torch.ops.packhorse
    (logits,) = case.inputs["logits"]
    torch.library.opcheck(ops.order_support.default, (case.ids, VOCAB, case.row_ids))
    given = logits, case.ids, case.sampled, VOCAB, 0.7, None, case.row_ids
    torch.library.opcheck(ops.score_logits.default, given)


@pytest.mark.skipif(INTERPRET, reason="the interpreter runs no compiled graph")
def test_compiles_whole_and_once(kind, device):
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(SCORERS[kind], fullgraph=True, dynamic=True, backend=counter)
    for width in (5, 7, 9):
        case = Packed(device, width)
        leaves = [x.requires_grad_() for x in case.inputs[kind]]
        some = slice(NUM_TOKENS - width)
        leaves[0] = leaves[0].detach()[some].requires_grad_()
        given = case.ids, case.sampled[some]
        results = []
        for score in (compiled, SCORERS[kind]):
            scores = score(*leaves, *given, row_ids=case.row_ids[some])
            results.append((*scores, *torch.autograd.grad(scores.logprobs.sum(), leaves)))
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b)
    assert counter.frame_count == 1


# --- on a GPU -------------------------------------------------------------------------------------


def test_nothing_waits_for_the_device_and_a_graph_replays_it(kind, cuda, no_host_sync):
    case = Packed(cuda, 20, dtype=BF16)
    static = [case.ids, case.sampled, case.row_ids]
    leaves = [x.requires_grad_() for x in case.inputs[kind]]

    def step():
        ids, sampled, row_ids = static
        scores = SCORERS[kind](*leaves, ids, sampled, row_ids=row_ids)
        return [*scores, *torch.autograd.grad(scores.logprobs.sum(), leaves)]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    with no_host_sync():
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    static[2].copy_(case.row_ids.roll(3))
    static[1].copy_(case.sampled.roll(5))
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, step(), strict=True))


def test_no_copy_of_the_ids_is_made(cuda):
    num_tokens, width = 100_000, 20
    ids = torch.arange(width, device=cuda).repeat(num_tokens, 1)  # int64
    row_ids = torch.arange(num_tokens, device=cuda).flip(0)
    logits = torch.randn(num_tokens, 64, device=cuda)
    sampled = torch.zeros(num_tokens, dtype=torch.int64, device=cuda)
    support_logprobs(logits, ids, sampled, row_ids=row_ids)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    support_logprobs(logits, ids, sampled, row_ids=row_ids)
    # columns and logprobs of members are 8 bytes a candidate; a copy of the ids would be 8 more
    assert torch.cuda.max_memory_allocated() - before < 12 * num_tokens * width


# --- rejections -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row_ids", "error", "said"),
    [
        ([0, 1], TypeError, "row_ids must be a tensor, got list"),
        (torch.zeros(2).int(), TypeError, "row_ids must be int64, got torch.int32"),
        (torch.zeros(3).long(), ValueError, r"row_ids must be \[T\] = \[2\], got \[3\]"),
        (torch.zeros(2, 1).long(), ValueError, r"row_ids must be \[T\] = \[2\], got \[2, 1\]"),
        (torch.zeros(2, device="meta").long(), ValueError, "row_ids on meta, .* on cpu"),
        (torch.tensor([0, 3]), ValueError, r"a row id is outside \[-1, 3\)"),
        (torch.tensor([-2, 0]), ValueError, r"a row id is outside \[-1, 3\)"),
    ],
    ids=str,
)
def test_row_ids_that_do_not_fit_are_refused_by_name(row_ids, error, said, kind):
    inputs = {
        "logits": [torch.zeros(2, 9)],
        "LM head": [torch.zeros(2, 8), torch.zeros(9, 8)],
    }[kind]
    ids, sampled = torch.zeros(3, 4).int(), torch.zeros(2).long()
    name = SCORERS[kind].__name__
    with pytest.raises(error, match=f"^{name}: {said}"):
        SCORERS[kind](*inputs, ids, sampled, row_ids=row_ids)
    with pytest.raises(ValueError, match=rf"^{name}: support_ids must be \[N, C\], got \(3,\)"):
        SCORERS[kind](*inputs, ids[:, 0], sampled, row_ids=torch.zeros(2).long())
    with pytest.raises(ValueError, match=rf"^{name}: support_ids must be \[T, C\] with T = 2"):
        SCORERS[kind](*inputs, ids, sampled)
