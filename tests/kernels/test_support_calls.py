"""support_logprobs and full_logprobs as calls: shapes, strides, memory, compile, rejections; the
values of full_logprobs. Oracle and tolerance as in test_support.py.
"""

import pytest
import torch
import torch._dynamo.testing
from torch.utils._python_dispatch import TorchDispatchMode

from packhorse.kernels import support, support_full
from packhorse.kernels.support import SupportScores, support_logprobs
from packhorse.kernels.support_full import full_logprobs
from packhorse.testing import assert_within_budget
from tests.conftest import INTERPRET
from tests.kernels.support_oracle import (
    DTYPES,
    INF,
    MISSING,
    NAN,
    OK,
    column,
    dense_scores,
    draw,
    gradients,
    result_dtype,
    score_rows,
)

pytestmark = pytest.mark.skipif(
    INTERPRET, reason="hundreds of rows; test_lm_head runs the same kernels under the interpreter"
)

# --- shapes, strides, memory ----------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(0, 5, 3), (0, 5, 0), (4, 5, 0), (1, 1, 1)], ids=str)
def test_empty_shapes_stay_connected_to_the_logits(shape, device):
    num_tokens, vocab_size, width = shape
    logits = torch.randn(num_tokens, vocab_size, device=device, requires_grad=True)
    ids = torch.zeros(num_tokens, width, dtype=torch.int32, device=device)
    sampled = torch.zeros(num_tokens, dtype=torch.int64, device=device)
    scores = support_logprobs(logits, ids, sampled)
    assert all(x.shape == (num_tokens,) for x in scores)
    assert (scores.status == (OK if width else MISSING)).all()
    for grad in gradients(scores, logits):
        assert torch.equal(grad, torch.zeros_like(logits))
    full = full_logprobs(logits, sampled)
    assert full.shape == (num_tokens,)
    (grad,) = torch.autograd.grad(full.sum(), logits)
    assert grad.shape == logits.shape


@pytest.mark.parametrize("layout", ["transposed", "column-slice", "every-other", "expanded"])
def test_strided_inputs(layout, device):
    base, ids, sampled = draw(24, 60, 6, device=device, seed=9)
    logits = {
        "transposed": base.T.contiguous().T,
        "column-slice": base[:, 7:47],
        "every-other": base[:, ::2],
        "expanded": base[:1].expand(24, 60),
    }[layout].requires_grad_()
    ids = torch.stack([ids, ids], dim=2)[:, :, 0]
    sampled = torch.stack([sampled, sampled], dim=1)[:, 0]
    assert not ids.is_contiguous()
    whole = logits.detach().clone(memory_format=torch.contiguous_format).requires_grad_()
    strided = support_logprobs(logits, ids, sampled)
    plain = support_logprobs(whole, ids.contiguous(), sampled.contiguous())
    assert all(torch.equal(a, b) for a, b in zip(strided, plain, strict=True))
    pairs = zip(gradients(strided, logits), gradients(plain, whole), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    targets = sampled % logits.shape[1]
    # reductions over strided rows may round in another order
    torch.testing.assert_close(full_logprobs(logits, targets), full_logprobs(whole, targets))


class Results(TorchDispatchMode):
    """Keeps what operators return, so that no two of them share memory by reuse."""

    def __init__(self):
        super().__init__()
        self.kept = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        results = out if isinstance(out, tuple | list) else [out]
        self.kept += [x for x in results if isinstance(x, torch.Tensor)]
        return out

    def largest_bytes(self) -> int:
        return max(x.numel() * x.element_size() for x in self.kept)

    def num_buffers(self, num_elements: int) -> int:
        """Distinct allocations of at least ``num_elements``."""
        return len({x.data_ptr() for x in self.kept if x.numel() >= num_elements})


def test_nothing_of_vocabulary_size_is_made_but_the_gradient(device):
    logits, ids, sampled = draw(8, 4096, 5, dtype=torch.bfloat16, device=device)
    logits.requires_grad_()
    with Results() as forward:
        scores = support_logprobs(logits, ids, sampled)
    assert forward.largest_bytes() == 8 * 5 * 4  # the columns, the logprobs of members
    with Results() as backward:
        torch.autograd.grad((scores.logprobs + scores.entropy).sum(), logits)
    assert backward.largest_bytes() == logits.numel() * 2
    assert backward.num_buffers(4096) == 1


@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logits_may_be_overwritten_by_their_gradient(dtype, layout, device):
    base, ids, sampled = draw(24, 60, 6, dtype=dtype, device=device, seed=3)
    if layout == "transposed":
        base = base.T.contiguous().T
    leaf = base.clone().requires_grad_()
    scores = support_logprobs(leaf, ids, sampled, temperature=0.7)
    (expected,) = torch.autograd.grad((scores.logprobs + scores.entropy).sum(), leaf)
    given = base.detach().clone().requires_grad_()
    scores = support_logprobs(given, ids, sampled, temperature=0.7, overwrite_logits=True)
    loss = (scores.logprobs + scores.entropy).sum()
    with Results() as backward:
        (actual,) = torch.autograd.grad(loss, given, retain_graph=True)
    assert torch.equal(actual, expected)
    assert actual.data_ptr() == given.data_ptr()
    assert backward.num_buffers(given.numel()) == 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, given)


def test_logits_that_share_memory_are_not_overwritten(device):
    base, ids, sampled = draw(4, 20, 3, device=device)
    with pytest.raises(ValueError, match=r"^support_logprobs: overwrite_logits is for logits of"):
        support_logprobs(base[:1].expand(4, 20), ids, sampled, overwrite_logits=True)
    windows = base.flatten().unfold(0, 20, 1)[:4]
    with pytest.raises(ValueError, match=r"of their own memory, got strides \(1, 1\)"):
        support_logprobs(windows, ids, sampled, overwrite_logits=True)
    for own in (
        base,
        base.T.contiguous().T,
        base[:, ::2].repeat(1, 2)[:, ::2],
        base[:1].expand(1, 20),
    ):
        some = slice(own.shape[0])
        support_logprobs(own, ids[some] % 9, sampled[some], overwrite_logits=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": [[1.0]]}, "logits must be a tensor, got list"),
        ({"sampled_ids": [0, 1]}, "sampled_ids must be a tensor, got list"),
        ({"support_ids": [[0], [1]]}, "support_ids must be a tensor, got list"),
        ({"overwrite_logits": "no"}, "overwrite_logits must be a bool, got str"),
    ],
    ids=lambda change: next(iter(change)) if isinstance(change, dict) else "",
)
def test_what_is_no_tensor_is_named(change, message):
    base, ids, sampled = draw(2, 9, 3)
    given = {"logits": base, "support_ids": ids, "sampled_ids": sampled} | change
    with pytest.raises(TypeError, match=f"^support_logprobs: {message}$"):
        support_logprobs(**given)


def test_shapes_do_not_depend_on_the_data():
    logits = torch.empty(6, 9, dtype=torch.bfloat16, device="meta", requires_grad=True)
    ids = torch.empty(6, 4, dtype=torch.int32, device="meta")
    sampled = torch.empty(6, dtype=torch.int64, device="meta")
    scores = support_logprobs(logits, ids, sampled)
    assert [x.dtype for x in scores] == [torch.float32] * 2 + [torch.uint8, torch.int32]
    for output in (*scores[:2], full_logprobs(logits, sampled)):
        assert output.shape == (6,)
        (grad,) = torch.autograd.grad(output.sum(), logits, retain_graph=True)
        assert (grad.shape, grad.dtype) == (logits.shape, torch.bfloat16)


def test_compiles_whole_and_once(device):
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(support_logprobs, fullgraph=True, dynamic=True, backend=counter)
    full_counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    full = torch.compile(full_logprobs, fullgraph=True, dynamic=True, backend=full_counter)
    for shape, temperature in [((9, 20, 5), 0.7), ((16, 33, 7), 0.9), ((12, 21, 4), 1.3)]:
        logits, ids, sampled = draw(*shape, device=device)
        logits.requires_grad_()
        actual = compiled(logits, ids, sampled, temperature=temperature)
        eager = support_logprobs(logits, ids, sampled, temperature=temperature)
        assert isinstance(actual, SupportScores)
        assert all(torch.equal(a, b) for a, b in zip(actual, eager, strict=True))
        losses = [(x.logprobs + 3 * x.entropy).sum() for x in (actual, eager)]
        assert torch.equal(*(torch.autograd.grad(x, logits)[0] for x in losses))
        targets = sampled % shape[1]
        outputs = [f(logits, targets, temperature=temperature) for f in (full, full_logprobs)]
        assert torch.equal(*outputs)
        assert torch.equal(*(torch.autograd.grad(x.sum(), logits)[0] for x in outputs))
    assert (counter.frame_count, full_counter.frame_count) == (1, 1)


# --- full vocabulary ------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_elements", [1, 200, 1 << 24])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_full_matches_the_loops_in_any_chunking(dtype, chunk_elements, device, monkeypatch):
    monkeypatch.setattr(support_full, "_CHUNK_ELEMENTS", chunk_elements)
    logits, _, sampled = draw(33, 70, 8, dtype=dtype, device=device, seed=10)
    sampled = sampled.where(sampled < 70, -100)
    finite = logits.gather(1, sampled.clamp(min=0)[:, None]).squeeze(1) > -INF
    sampled = sampled.where(finite, -1)
    everything = torch.arange(70, device=device).expand(33, 70)
    ids = torch.where(sampled[:, None] >= 0, everything, -1)
    rows = score_rows(logits, ids, sampled, 0.7)
    assert {row.status for row in rows} == {OK, MISSING}
    logits.requires_grad_()
    actual = full_logprobs(logits, sampled, temperature=0.7)
    baseline, _ = dense_scores(logits, rows, ids, sampled, 0.7)
    assert actual.dtype == result_dtype(dtype)
    assert_within_budget(actual, baseline, column(rows, "logprob", device), factor=2)
    (grad,) = torch.autograd.grad(actual.sum(), logits)
    (baseline_grad,) = torch.autograd.grad(baseline.sum(), logits)
    assert grad.dtype == dtype
    assert_within_budget(grad, baseline_grad, column(rows, "grad_logprob", device), factor=2)


def test_full_holds_few_widened_logits_at_once(device, monkeypatch):
    monkeypatch.setattr(support_full, "_CHUNK_ELEMENTS", 2 * 1024)
    logits, _, sampled = draw(32, 1024, 4, dtype=torch.bfloat16, device=device)
    logits, sampled = logits.requires_grad_(), sampled % 1024
    with Results() as forward:
        logprobs = full_logprobs(logits, sampled)
    assert forward.largest_bytes() == 2 * 1024 * 4
    with Results() as backward:
        torch.autograd.grad(logprobs.sum(), logits)
    assert backward.largest_bytes() == logits.numel() * 2
    assert backward.num_buffers(logits.numel()) == 1


def test_full_selects_rows_without_a_target_and_shows_what_is_wrong(device):
    logits = torch.tensor(
        [[NAN, INF], [1.0, 2.0], [1.0, 2.0], [NAN, 0.0], [INF, 0.0], [-INF, -INF], [-INF, 5.0]],
        device=device,
        requires_grad=True,
    )
    sampled = torch.tensor([-1, -100, 2, 1, 0, 0, 0], device=device)
    logprobs = full_logprobs(logits, sampled)
    assert logprobs[:2].tolist() == [0.0, 0.0]
    assert logprobs[2:6].isnan().all()
    assert logprobs[6] == -INF
    (grad,) = torch.autograd.grad(logprobs, logits, torch.tensor([NAN] + [1.0] * 6, device=device))
    assert (grad[:2] == 0).all()
    assert grad[2:6].isnan().all()
    assert grad[6].tolist() == [1.0, -1.0]


# --- a padded vocabulary --------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_elements", [100, 1 << 24])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pad", [0, 1, 26])
def test_pad_columns_never_enter_and_get_no_gradient(
    pad, dtype, chunk_elements, device, monkeypatch
):
    """Against the same logits without them. What the pad columns hold is mostly no number."""
    monkeypatch.setattr(support_full, "_CHUNK_ELEMENTS", chunk_elements)
    true, ids, sampled = draw(33, 70, 8, dtype=dtype, device=device, seed=12)
    filler = torch.tensor([NAN, INF, 1e4], device=device).repeat(33, 9)[:, :pad].to(dtype)
    padded = torch.cat([true, filler], 1).requires_grad_()
    true = true.clone().requires_grad_()
    ids[4, :3] = torch.tensor([70, 71, 95], dtype=ids.dtype)  # pad columns' ids are no members
    sampled[4] = 71
    targets = torch.where(sampled < 70, sampled, -1)
    expected = support_logprobs(true, ids, sampled, temperature=0.7)
    actual = support_logprobs(padded, ids, sampled, temperature=0.7, vocab_size=70)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    pairs = list(zip(gradients(actual, padded), gradients(expected, true), strict=True))
    full = full_logprobs(padded, targets, temperature=0.7, vocab_size=70)
    expected_full = full_logprobs(true, targets, temperature=0.7)
    # a reduction over strided rows may round in another order
    torch.testing.assert_close(full, expected_full)
    weights = torch.linspace(0.5, 2, 33, device=device).to(full.dtype)
    pairs.append(
        (
            torch.autograd.grad((full * weights).nan_to_num(0, 0, 0).sum(), padded)[0],
            torch.autograd.grad((expected_full * weights).nan_to_num(0, 0, 0).sum(), true)[0],
        )
    )
    for grad, expected_grad in pairs:
        assert grad.dtype == dtype
        torch.testing.assert_close(grad[:, :70], expected_grad)
        assert torch.equal(grad[:, 70:], torch.zeros_like(grad[:, 70:]))


def test_the_id_of_a_pad_column_is_outside_the_vocabulary(device):
    logits = torch.zeros(2, 8, device=device)
    ids = torch.tensor([[5, 1], [5, 6]], dtype=torch.int32, device=device)
    scores = support_logprobs(logits, ids, torch.tensor([5, 5], device=device), vocab_size=5)
    assert scores.status.tolist() == [support.SAMPLED_OUTSIDE, support.SUPPORT_INVALID]
    assert scores.num_ignored.tolist() == [1, 2]
    full = full_logprobs(logits, torch.tensor([4, 5], device=device), vocab_size=5)
    assert full[0].exp().item() == pytest.approx(1 / 5)
    assert full[1].isnan()


@pytest.mark.parametrize("vocab_size", [None, 17])
def test_a_padded_vocabulary_compiles_whole(vocab_size, device):
    logits, ids, sampled = draw(9, 20, 5, device=device)
    logits.requires_grad_()
    for function, inputs in ((support_logprobs, (ids, sampled)), (full_logprobs, (sampled % 17,))):
        compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
        losses = []
        for call in (compiled, function):
            out = call(logits, *inputs, vocab_size=vocab_size)
            losses.append((out if isinstance(out, torch.Tensor) else out.logprobs).sum())
        assert torch.equal(*losses)
        assert torch.equal(*(torch.autograd.grad(loss, logits)[0] for loss in losses))


def test_a_padded_vocabulary_makes_nothing_of_its_size_but_the_gradient(device, monkeypatch):
    monkeypatch.setattr(support_full, "_CHUNK_ELEMENTS", 2 * 1024)
    logits, ids, sampled = draw(32, 1024, 4, dtype=torch.bfloat16, device=device)
    logits.requires_grad_()
    with Results() as forward:
        full = full_logprobs(logits, sampled % 1000, vocab_size=1000)
        scores = support_logprobs(logits, ids, sampled, vocab_size=1000)
    assert forward.largest_bytes() <= 2 * 1024 * 4
    for output in (full, scores.logprobs):
        with Results() as backward:
            torch.autograd.grad(output.sum(), logits)
        assert backward.largest_bytes() == logits.numel() * 2
        assert backward.num_buffers(logits.numel()) == 1


# --- on a GPU -------------------------------------------------------------------------------------


def test_no_host_sync(cuda):
    logits, ids, sampled = draw(64, 500, 20, dtype=torch.bfloat16, device=cuda)
    logits.requires_grad_()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        scores = support_logprobs(logits, ids, sampled, temperature=0.7)
        full = full_logprobs(logits, sampled % 500, temperature=0.7)
        loss = scores.logprobs.sum() + scores.entropy.sum() + full.sum()
        torch.autograd.grad(loss, logits)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_replays_in_a_cuda_graph(cuda):
    logits, ids, sampled = draw(64, 500, 20, device=cuda)
    logits.requires_grad_()

    def step():
        scores = support_logprobs(logits, ids, sampled, temperature=0.7)
        (grad,) = torch.autograd.grad((scores.logprobs + scores.entropy).sum(), logits)
        return *(x.detach() for x in scores), grad

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    others = draw(64, 500, 20, device=cuda, seed=1)
    with torch.no_grad():
        for buffer, other in zip((logits, ids, sampled), others, strict=True):
            buffer.copy_(other)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, step(), strict=True))


# --- rejections -----------------------------------------------------------------------------------

LOGITS = torch.zeros(2, 4)
IDS = torch.zeros(2, 3, dtype=torch.int32)
SAMPLED = torch.zeros(2, dtype=torch.int64)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"logits": LOGITS.int()}, TypeError, "logits has unsupported dtype torch.int32"),
        ({"logits": LOGITS.cfloat()}, TypeError, "logits has unsupported dtype torch.complex64"),
        ({"logits": LOGITS[0]}, ValueError, r"logits must be \[T, V\] with V > 0, got \(4,\)"),
        ({"logits": LOGITS[:, :0]}, ValueError, r"with V > 0, got \(2, 0\)"),
        ({"sampled_ids": SAMPLED.int()}, TypeError, "sampled_ids must be int64, got torch.int32"),
        ({"sampled_ids": SAMPLED[:1]}, ValueError, r"\[T\] with T = 2, got \(1,\)"),
        ({"sampled_ids": SAMPLED[:, None]}, ValueError, r"\[T\] with T = 2, got \(2, 1\)"),
        ({"sampled_ids": SAMPLED.to("meta")}, ValueError, "sampled_ids on meta, logits on cpu"),
        ({"temperature": 0.0}, ValueError, "temperature must be finite and > 0, got 0.0"),
        ({"temperature": -0.7}, ValueError, "temperature must be finite and > 0, got -0.7"),
        ({"temperature": NAN}, ValueError, "temperature must be finite and > 0, got nan"),
        ({"temperature": INF}, ValueError, "temperature must be finite and > 0, got inf"),
        ({"temperature": torch.ones(2)}, TypeError, "temperature must be a number, got Tensor"),
        ({"temperature": None}, TypeError, "temperature must be a number, got NoneType"),
        ({"temperature": True}, TypeError, "temperature must be a number, got bool"),
        ({"vocab_size": 0}, ValueError, "vocab_size must be from 1 to the 4 columns .*, got 0"),
        ({"vocab_size": 5}, ValueError, "vocab_size must be from 1 to the 4 columns .*, got 5"),
        ({"vocab_size": 4.0}, TypeError, "vocab_size must be an int, got float"),
        ({"vocab_size": True}, TypeError, "vocab_size must be an int, got bool"),
    ],
)
def test_rejects(changed, error, message):
    arguments = {"logits": LOGITS, "sampled_ids": SAMPLED, "temperature": 1.0, **changed}
    with pytest.raises(error, match=f"^full_logprobs: .*{message}"):
        full_logprobs(**arguments)
    with pytest.raises(error, match=f"^support_logprobs: .*{message}"):
        support_logprobs(support_ids=IDS, **arguments)


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        (IDS.short(), TypeError, "support_ids must be int32 or int64, got torch.int16"),
        (IDS.float(), TypeError, "support_ids must be int32 or int64, got torch.float32"),
        (IDS[0], ValueError, r"support_ids must be \[T, C\] with T = 2, got \(3,\)"),
        (IDS[:1], ValueError, r"support_ids must be \[T, C\] with T = 2, got \(1, 3\)"),
        (IDS.to("meta"), ValueError, "support_ids on meta, logits on cpu"),
    ],
)
def test_rejects_support(ids, error, message):
    with pytest.raises(error, match=f"^support_logprobs: {message}"):
        support_logprobs(LOGITS, ids, SAMPLED)


def test_strides_of_the_ids_do_not_change_a_bit(device):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(50, 64, generator=generator).to(device)
    ids = torch.rand(50, 64, generator=generator).argsort(1)[:, :20].contiguous().to(device)
    row_major = support_logprobs(logits, ids, ids[:, 0].contiguous())
    column_major = support_logprobs(logits, ids.T.contiguous().T, ids[:, 0].contiguous())
    for one, other in zip(row_major, column_major, strict=True):
        assert torch.equal(one, other)


def test_a_spread_past_float32_stays_finite(device):
    logits = torch.tensor([[3e38, -3e38]] * 2, device=device, requires_grad=True)
    ids = torch.tensor([[0, 1]] * 2, device=device)
    scores = support_logprobs(logits, ids, torch.tensor([0, 1], device=device))
    assert scores.logprobs[0] == 0
    assert scores.logprobs.isfinite().all()
    assert scores.entropy.tolist() == [0, 0]
    scores.logprobs.sum().backward()
    assert logits.grad.isfinite().all()


def test_a_whole_number_temperature_past_int64_is_a_number(device):
    logits = torch.randn(2, 5, device=device)
    scores = support_logprobs(
        logits, torch.tensor([[0, 1]] * 2, device=device), torch.tensor([0, 1], device=device),
        temperature=10**30,
    )  # fmt: skip
    torch.testing.assert_close(scores.logprobs, torch.full((2,), 0.5, device=device).log())
