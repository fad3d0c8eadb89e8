"""sum_vocabulary_tile, grad_vocabulary_tile: against a dense log-softmax in float64.

The oracle takes all products at once and lets autograd differentiate them; it shares no code with
the package. What is computed may be off by a bound counted from the roundings (``Dense.bound``):
few rows are off by less than any bound from another run of theirs. What is selected is exact.
"""

import math
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch

from packhorse.kernels import lm_head_full, vocabulary_tiles
from packhorse.kernels.lm_head_full import full_vocabulary_logprobs
from packhorse.kernels.vocabulary_tiles import grad_vocabulary_tile, sum_vocabulary_tile
from tests.conftest import INTERPRET

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
NAN, INF = float("nan"), float("inf")
#: tokens, ids, first ids of the tiles after the first; a wide row is read in parts
SHAPES = {
    "tiles of all widths": (4, 301, (1, 132)),
    "one row": (1, 37, (4,)),
    "a wide row": (1, 9001, (8200,)),
    "wide rows": (3, 4100, ()),
}
if not INTERPRET:
    SHAPES |= {"many rows": (2500, 133, (100,)), "rows of two parts": (900, 5000, ())}
NUM_CAPPED = 8 if INTERPRET else 64
OPTIONS = {
    "plain": {},
    "bias": {"bias": F32},
    "temperature": {"temperature": 0.7},
    "temperature a token": {"temperature": "rows"},
    "soft cap": {"softcap": 3.0},
    "all": {"bias": BF16, "softcap": 3.0, "temperature": "rows"},
}


class Problem:
    """Products [T, V], sampled ids [T] of which some are negative, and options."""

    def __init__(self, num_tokens, num_ids, *, device, options=None, dtype=F32, seed=0):
        generator = torch.Generator().manual_seed(seed)
        options = options or {}

        def normal(*shape):
            return torch.randn(*shape, generator=generator)

        self.products = (2 * normal(num_tokens, num_ids)).to(device, dtype)
        self.sampled = torch.randint(num_ids, (num_tokens,), generator=generator)
        self.sampled[2::5] = -1
        self.sampled = self.sampled.to(device)
        self.weights = [normal(num_tokens).to(device, dtype) for _ in range(2)]
        self.bias = None
        if "bias" in options:
            self.bias = normal(num_ids).to(device, options["bias"])
        self.softcap = options.get("softcap")
        self.temperature = options.get("temperature", 1.0)
        self.temperatures = None
        if self.temperature == "rows":
            rows = 0.5 + torch.rand(num_tokens, generator=generator)
            self.temperature, self.temperatures = 1.0, rows.to(device, dtype)

    def given(self, ids=slice(None)):
        """The options of a tile."""
        bias = None if self.bias is None else self.bias[ids]
        return bias, self.softcap, self.temperature, self.temperatures

    def tiles(self, cuts):
        edges = [0, *cuts, self.products.shape[1]]
        return [slice(a, b) for a, b in pairwise(edges)]

    def sums(self, cuts=(), first_id=0):
        """``sums`` after all tiles; ids of the vocabulary begin at ``first_id``."""
        sums = no_sums(self.products.shape[0], self.products)
        sampled = torch.where(self.sampled < 0, self.sampled, self.sampled + first_id)
        for ids in self.tiles(cuts):
            products = self.products[:, ids].contiguous()
            start = first_id + ids.start
            sum_vocabulary_tile(products, sums, sampled, start, *self.given(ids))
        return sums

    def grads(self, sums, cuts=(), dtype=None):
        _, entropy, log_sum = scores(sums)
        tiles = [
            grad_vocabulary_tile(
                self.products[:, ids].contiguous(), self.sampled, *self.weights, entropy, log_sum,
                ids.start, dtype or self.products.dtype, *self.given(ids),
            )
            for ids in self.tiles(cuts)
        ]  # fmt: skip
        return torch.cat(tiles, 1)

    def dense(self):
        products = self.products.double().requires_grad_()
        z = products if self.bias is None else products + self.bias.double()
        if self.softcap is not None:
            z = self.softcap * torch.tanh(z / self.softcap)
        rows = self.temperatures
        z = z / (self.temperature if rows is None else rows.double()[:, None])
        log_p = z.log_softmax(1)
        logprobs = log_p.gather(1, self.sampled.clamp(min=0)[:, None]).squeeze(1)
        entropy = -(log_p.exp() * log_p).sum(1)
        loss = self.weights[0].double() * logprobs + self.weights[1].double() * entropy
        loss[self.sampled >= 0].sum().backward()
        largest = max(float(x.detach().abs().max()) for x in (z, log_p))
        return Dense(logprobs.detach(), entropy.detach(), products.grad, largest)


class Dense(NamedTuple):
    """Scores [T] of all rows and gradients [T, V] in float64."""

    logprobs: torch.Tensor
    entropy: torch.Tensor
    grads: torch.Tensor
    largest: float  # logit or logarithm

    def assert_close(self, actual, name, rows=slice(None)):
        """Twice half an ulp of the largest: a logit is rounded, and its difference to the logarithm
        of the sum; what exp makes of that is off by as large a share."""
        exact = getattr(self, name)[rows]
        bound = torch.finfo(actual.dtype).eps * self.largest * max(1, float(exact.abs().max()))
        torch.testing.assert_close(actual[rows].double(), exact, rtol=0, atol=bound)


def no_sums(num_tokens, like):
    sums = like.new_zeros((4, num_tokens))
    sums[0] = -INF
    return sums


def scores(sums):
    """Logprobs, entropy, log sum exp z of what ``sums`` holds."""
    top, total, spread, chosen = sums
    log_sum = top + total.log()
    return chosen - log_sum, total.log() - spread / total, log_sum


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_sums_and_gradients_are_those_of_a_dense_softmax(shape, options, device):
    num_tokens, num_ids, cuts = SHAPES[shape]
    problem = Problem(num_tokens, num_ids, device=device, options=OPTIONS[options])
    sums = problem.sums(cuts)
    grads = problem.grads(sums, cuts)
    exact, has_target = problem.dense(), problem.sampled >= 0
    assert not sums[3][~has_target].any()
    assert not grads[~has_target].any()
    logprobs, entropy, _ = scores(sums)
    exact.assert_close(logprobs, "logprobs", has_target)
    exact.assert_close(entropy, "entropy")
    exact.assert_close(grads, "grads")


@pytest.mark.parametrize("options", ["plain", "all"])
def test_gradients_are_rounded_to_bfloat16_once(options, device):
    problem = Problem(5, 2100, device=device, options=OPTIONS[options], seed=1)
    sums = problem.sums()
    narrow, wide = problem.grads(sums, dtype=BF16), problem.grads(sums)
    assert (narrow.dtype, wide.dtype) == (BF16, F32)
    assert torch.equal(narrow, wide.to(BF16))


@pytest.mark.parametrize("options", ["plain", "all"])
def test_float64_products_are_summed_in_float64(options, device):
    problem = Problem(6, 50, device=device, options=OPTIONS[options], dtype=F64)
    sums = problem.sums((20,))
    grads = problem.grads(sums, (20,))
    exact, has_target = problem.dense(), problem.sampled >= 0
    assert (sums.dtype, grads.dtype) == (F64, F64)
    logprobs, entropy, _ = scores(sums)
    exact.assert_close(logprobs, "logprobs", has_target)
    exact.assert_close(entropy, "entropy")
    exact.assert_close(grads, "grads")


@pytest.mark.parametrize("size", [1e-4, 0.1, 0.54, 0.56, 2.0, 40.0])
def test_a_soft_cap_keeps_the_digits_of_small_logits(size, device):
    """Of one id that every row samples: ``chosen`` is its logit."""
    x = size * torch.linspace(0.9, 1.0, NUM_CAPPED // 2, device=device)
    products = torch.stack([x, -x], 1).flatten()[:, None].contiguous()
    sums = no_sums(NUM_CAPPED, products)
    sampled = torch.zeros(NUM_CAPPED, dtype=torch.int64, device=device)
    sum_vocabulary_tile(products, sums, sampled, 0, None, 1.0, 1.0)
    exact = torch.tanh(products.double()).squeeze(1)
    torch.testing.assert_close(sums[3].double(), exact, rtol=8 * 2**-24, atol=0)
    assert torch.equal(sums[0], sums[3])
    # the slope too: with a second id that is as likely, half of it
    pair = products.expand(-1, 2).contiguous()
    ones = torch.ones(NUM_CAPPED, device=device)
    log_sum = sums[3] + math.log(2)
    given = (pair, sampled, ones, 0 * ones, ones, log_sum, 0, F32, None, 1.0, 1.0)
    grads = grad_vocabulary_tile(*given).double()
    slope = 1 - exact.square()
    wanted = torch.stack([slope, -slope], 1) / 2
    torch.testing.assert_close(grads, wanted, rtol=1e-6, atol=5e-7)


def test_a_sampled_id_is_chosen_by_the_tile_that_holds_it(device):
    products = torch.arange(12, dtype=F32, device=device).view(3, 4)
    sums = no_sums(3, products)
    sampled = torch.tensor([101, 99, 104], device=device)
    sum_vocabulary_tile(products, sums, sampled, 100, None, None, 1.0)
    assert sums[3].tolist() == [1.0, 0.0, 0.0]
    sum_vocabulary_tile(products, sums, sampled, 104, None, None, 0.5)
    assert sums[3].tolist() == [1.0, 0.0, 16.0]
    sums[3] = 0
    sum_vocabulary_tile(products, sums, sampled - 200, 0, None, None, 1.0)
    assert not sums[3].any()


def test_ids_of_a_shard_begin_anywhere(device):
    problem = Problem(7, 90, device=device, seed=2)
    assert torch.equal(problem.sums((40,)), problem.sums((40,), first_id=2**31 - 200))


WIDTHS = {"one part": (3, 5), "parts": (6000, 2100)}


@pytest.mark.parametrize("widths", WIDTHS)
def test_impossible_ids_have_no_part_in_the_sums(widths, device):
    first, second = WIDTHS[widths]
    impossible = torch.full((2, first), -INF, device=device)
    possible = torch.full((2, second), -INF, device=device)
    possible[0, 1], possible[0, -1] = 3.0, 3.0
    sampled = torch.tensor([first + 1, 0], device=device)
    for order in ((impossible, possible), (possible, impossible)):
        sums, start = no_sums(2, possible), 0
        for tile in order:
            sum_vocabulary_tile(tile, sums, sampled, start, None, None, 1.0)
            start += tile.shape[1]
        # no logit of the second row is possible: its total is 0
        assert sums[0].tolist() == [3.0, -INF]
        assert sums[1].tolist() == [2.0, 0.0]
        assert sums[2].tolist() == [0.0, 0.0]
    sums = no_sums(2, possible)
    sum_vocabulary_tile(impossible, sums, sampled, 0, None, None, 1.0)
    sum_vocabulary_tile(possible, sums, sampled, first, None, None, 1.0)
    assert sums[3].tolist() == [3.0, -INF]
    _, entropy, log_sum = scores(sums)
    ones = torch.ones(2, device=device)
    given = (sampled, ones, ones, entropy, log_sum, first, F32, None, None, 1.0)
    grads = grad_vocabulary_tile(possible, *given)[0]
    wanted = torch.zeros_like(grads)
    wanted[1], wanted[-1] = 0.5, -0.5
    torch.testing.assert_close(grads, wanted)


@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("fault", [INF, NAN])
def test_a_fault_of_the_model_stays_one(fault, widths, device):
    first, second = WIDTHS[widths]
    for faulty in (0, 1):
        tiles = [torch.zeros(3, width, device=device) for width in (first, second)]
        tiles[faulty][1, -1] = fault
        sampled = torch.tensor([0, 1, -1], device=device)
        sums, start = no_sums(3, tiles[0]), 0
        for tile in tiles:
            sum_vocabulary_tile(tile, sums, sampled, start, None, None, 1.0)
            start += tile.shape[1]
        logprobs, entropy, log_sum = scores(sums)
        assert logprobs.isnan().tolist() == [False, True, False]
        assert entropy.isnan().tolist() == [False, True, False]
        ones = torch.ones(3, device=device)
        given = (sampled, ones, ones, entropy, log_sum, 0, F32, None, None, 1.0)
        grads = grad_vocabulary_tile(tiles[0], *given)
        assert grads.isfinite().all(1).tolist() == [True, False, True]


@pytest.mark.parametrize("fault", [INF, NAN])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_a_row_without_a_target_has_no_gradient_whatever_it_holds(softcap, fault, device):
    products = torch.full((2, 9), fault, device=device)
    products[1] = 0
    sampled = torch.tensor([-100, 3], device=device)
    row = torch.full((2,), fault, device=device)
    row[1] = 1.0
    given = (sampled, row, row, row, row, 0, BF16, None, softcap, 1.0)
    grads = grad_vocabulary_tile(products, *given)
    assert not grads[0].any()
    assert grads[1].all()


@pytest.mark.parametrize("widths", WIDTHS)
def test_a_spread_past_float32_stays_finite(widths, device):
    first, second = WIDTHS[widths]
    low = torch.full((2, first), -3e38, device=device)
    high = torch.full((2, second), -3e38, device=device)
    high[:, :2] = 3e38
    sampled = torch.tensor([0, first], device=device)
    for order in ((low, high), (high, low)):
        sums, start = no_sums(2, low), 0
        for tile in order:
            sum_vocabulary_tile(tile, sums, sampled, start, None, None, 1.0)
            start += tile.shape[1]
        assert sums[1].tolist() == [2.0, 2.0]
        assert sums[2].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("shape", ["tiles of all widths", "a wide row", "wide rows"])
def test_two_runs_agree_bit_for_bit(shape, device):
    num_tokens, num_ids, cuts = SHAPES[shape]
    problem = Problem(num_tokens, num_ids, device=device, options=OPTIONS["all"], seed=3)
    runs = []
    for _ in range(2):
        sums = problem.sums(cuts)
        runs.append((sums, problem.grads(sums, cuts)))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_a_row_read_in_parts_has_the_sums_of_one_part(device, monkeypatch):
    problem = Problem(2, 6500, device=device, options=OPTIONS["all"], seed=4)
    in_parts = problem.sums()
    monkeypatch.setattr(vocabulary_tiles, "_PROGRAMS", 1)
    torch.testing.assert_close(in_parts, problem.sums(), rtol=3e-6, atol=0)
    # as few parts as are joined at once, of several blocks
    monkeypatch.setattr(vocabulary_tiles, "_PROGRAMS", 1 << 20)
    monkeypatch.setattr(vocabulary_tiles, "_MAX_PARTS", 2)
    torch.testing.assert_close(in_parts, problem.sums(), rtol=3e-6, atol=0)


def test_strides_and_tokens_of_a_longer_batch(device):
    problem = Problem(9, 40, device=device, options=OPTIONS["all"])
    expected = problem.sums()
    tokens = slice(2, 6)
    sums = no_sums(9, problem.products)
    between = problem.products.repeat_interleave(2, 1)[tokens, ::2]
    bias = problem.bias.repeat_interleave(3)[::3]
    sampled = problem.sampled.repeat_interleave(2)[::2][tokens]
    options = (bias, problem.softcap, 1.0, problem.temperatures[tokens])
    sum_vocabulary_tile(between, sums[:, tokens], sampled, 0, *options)
    assert torch.equal(sums[:, tokens], expected[:, tokens])
    rest = [0, 1, 6, 7, 8]
    assert torch.equal(sums[:, rest], no_sums(9, sums)[:, rest])
    rows = [x.repeat_interleave(2)[::2][tokens] for x in (*problem.weights, *scores(expected)[1:])]
    grads = grad_vocabulary_tile(between, sampled, *rows, 0, F32, *options)
    assert torch.equal(grads, problem.grads(expected)[tokens])


def test_no_tokens(device):
    products, row = torch.empty(0, 5, device=device), torch.empty(0, device=device)
    sampled = torch.empty(0, dtype=torch.int64, device=device)
    sum_vocabulary_tile(products, no_sums(0, products), sampled, 0, None, None, 1.0)
    given = (sampled, row, row, row, row, 0, BF16, None, None, 1.0)
    assert grad_vocabulary_tile(products, *given).shape == (0, 5)


def test_operators_pass_opcheck(device):
    ops = torch.ops.packhorse
    for options in ("plain", "all"):
        problem = Problem(4, 12, device=device, options=OPTIONS[options])
        sums = no_sums(4, problem.products)
        given = (problem.products, sums, problem.sampled, 0, *problem.given())
        torch.library.opcheck(ops.sum_vocabulary_tile.default, given)
        _, entropy, log_sum = scores(problem.sums())
        rows = (problem.sampled, *problem.weights, entropy, log_sum)
        given = (problem.products, *rows, 0, BF16, *problem.given())
        torch.library.opcheck(ops.grad_vocabulary_tile.default, given)


@pytest.mark.skipif(INTERPRET, reason="what is traced does not depend on who computes")
def test_compiles_whole_for_any_number_of_tokens(device):
    problem = Problem(6, 30, device=device, options=OPTIONS["all"])

    def both(products, sampled, rows, temperatures):
        sums = products.new_zeros((4, products.shape[0]))
        sums[0].fill_(-INF)
        options = (problem.bias, problem.softcap, 1.0, temperatures)
        sum_vocabulary_tile(products, sums, sampled, 0, *options)
        grads = grad_vocabulary_tile(products, sampled, *rows, 0, BF16, *options)
        return sums, grads

    compiled = torch.compile(both, fullgraph=True, dynamic=True, backend="aot_eager")
    rows = (*problem.weights, *scores(problem.sums())[1:])
    for num_tokens in (6, 3):
        given = [x[:num_tokens] for x in (problem.products, problem.sampled)]
        given += [[row[:num_tokens] for row in rows], problem.temperatures[:num_tokens]]
        for actual, expected in zip(compiled(*given), both(*given), strict=True):
            assert torch.equal(actual, expected)


# --- through full_vocabulary_logprobs -------------------------------------------------------------


def test_scores_from_hidden_states_are_those_of_all_logits(device, monkeypatch):
    """Pads of the vocabulary, tiles of tokens and of ids; the interpreter runs the kernels here."""
    monkeypatch.setattr(lm_head_full, "_TOKENS_AT_ONCE", 5)
    monkeypatch.setattr(lm_head_full, "_LOGITS_AT_ONCE", 110)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(9, 8, generator=generator).to(device).requires_grad_()
    weight = torch.randn(55, 8, generator=generator).to(device).requires_grad_()
    bias = torch.randn(55, generator=generator).to(device).requires_grad_()
    sampled = torch.randint(-5, 50, (9,), generator=generator).to(device)
    sampled[0] = -1
    temperature = (0.5 + torch.rand(9, generator=generator)).to(device)
    actual = full_vocabulary_logprobs(
        hidden, weight, sampled, bias=bias, softcap=4.0, temperature=temperature, vocab_size=50
    )
    inputs = [x.detach().double().requires_grad_() for x in (hidden, weight, bias)]
    z = 4 * torch.tanh((inputs[0] @ inputs[1].T + inputs[2]) / 4) / temperature.double()[:, None]
    log_p = z[:, :50].log_softmax(1)
    has_target = sampled >= 0
    logprobs = log_p.gather(1, sampled.clamp(min=0)[:, None]).squeeze(1)
    expected = [torch.where(has_target, x, 0.0) for x in (logprobs, -(log_p.exp() * log_p).sum(1))]
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=2e-6, atol=2e-6)
    (actual.logprobs - 2 * actual.entropy).sum().backward()
    (expected[0] - 2 * expected[1]).sum().backward()
    for a, b in zip((hidden, weight, bias), inputs, strict=True):
        torch.testing.assert_close(a.grad.double(), b.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_tokens", [8, 3000])
@pytest.mark.parametrize("with_main_grad", [True, False])
def test_memory_is_that_of_a_few_tiles(with_main_grad, num_tokens, cuda):
    """Few tokens too, whose gradient of the weight would be a buffer as large as the weight."""
    hidden = torch.randn(num_tokens, 2048, device=cuda, dtype=BF16, requires_grad=True)
    weight = torch.randn(100_000, 2048, device=cuda, dtype=BF16, requires_grad=True)
    main_grad = torch.zeros(weight.shape, device=cuda) if with_main_grad else None
    sampled = torch.arange(num_tokens, device=cuda)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    scores = full_vocabulary_logprobs(hidden, weight, sampled, main_grad=main_grad)
    torch.autograd.grad(scores.logprobs.sum(), (hidden, weight), allow_unused=True)
    torch.cuda.synchronize()
    taken = torch.cuda.max_memory_allocated() - before
    dense = 0 if with_main_grad else 2 * weight.numel()
    assert taken <= dense + 4 * 4 * lm_head_full._LOGITS_AT_ONCE + 12 * hidden.numel()


def test_bfloat16_products_are_added_to_float32_gradients(cuda):
    """Over several tiles of ids and of tokens."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(700, 64, generator=generator).to(cuda, BF16).requires_grad_()
    weight = torch.randn(3000, 64, generator=generator).to(cuda, BF16).requires_grad_()
    sampled = torch.randint(3000, (700,), generator=generator).to(cuda)
    main_grad = torch.randn(3000, 64, generator=generator).to(cuda)
    inputs = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    exact = (inputs[0] @ inputs[1].T).log_softmax(1).gather(1, sampled[:, None])
    exact.sum().backward()
    wanted = main_grad.double() + inputs[1].grad
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lm_head_full, "_TOKENS_AT_ONCE", 300)
        patch.setattr(lm_head_full, "_LOGITS_AT_ONCE", 300 * 512)
        scores = full_vocabulary_logprobs(hidden, weight, sampled, main_grad=main_grad)
        scores.logprobs.sum().backward()
    # gradients of logits, up to 1, are rounded to 8 bits, and stand before numbers of up to 4
    torch.testing.assert_close(main_grad.double(), wanted, rtol=0, atol=6e-2)
    torch.testing.assert_close(hidden.grad.double(), inputs[0].grad, rtol=1e-2, atol=6e-2)


# --- sizes of a model -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape", [(8192, 2048), (8192, 1024), (700, 23_808), (1, 151_936)], ids=str
)
@pytest.mark.parametrize("options", ["plain", "all"])
def test_tiles_of_a_model_have_the_sums_and_gradients_of_float64(options, shape, cuda):
    problem = Problem(*shape, device=cuda, options=OPTIONS[options], seed=5)
    sums = problem.sums((shape[1] // 2,))
    exact, has_target = problem.dense(), problem.sampled >= 0
    logprobs, entropy, _ = scores(sums)
    exact.assert_close(logprobs, "logprobs", has_target)
    exact.assert_close(entropy, "entropy")
    exact.assert_close(problem.grads(sums), "grads")


@pytest.mark.parametrize("shape", [(300, 4096), (2, 151_936)], ids=str)
def test_a_cuda_graph_replays_both_without_a_wait(shape, cuda, no_host_sync):
    problem = Problem(*shape, device=cuda, options=OPTIONS["all"], seed=6)

    def step():
        sums = problem.sums((1024,))
        return sums, problem.grads(sums, (1024,), BF16)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    with no_host_sync():
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    problem.products.copy_(problem.products.flip(0) + 1)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, step(), strict=True))


@pytest.mark.gpu_memory(gib=24)
def test_offsets_past_int32(cuda):
    num_tokens, num_ids = (1 << 20) + 3, 2052
    products = torch.randn(num_tokens, num_ids, device=cuda)
    sampled = torch.arange(num_tokens, device=cuda) % num_ids
    sums, last = no_sums(num_tokens, products), slice(num_tokens - 2, num_tokens)
    sum_vocabulary_tile(products, sums, sampled, 0, None, None, 1.0)
    _, entropy, log_sum = scores(sums)
    ones = torch.ones(num_tokens, device=cuda)
    rows = (sampled, ones, ones, entropy, log_sum)
    grads = grad_vocabulary_tile(products, *rows, 0, BF16, None, None, 1.0)
    few = grad_vocabulary_tile(
        products[last].clone(), *(row[last] for row in rows), 0, BF16, None, None, 1.0
    )
    assert torch.equal(grads[last], few)
    exact = products[last].double().log_softmax(1).gather(1, sampled[last, None]).squeeze(1)
    torch.testing.assert_close(scores(sums)[0][last].double(), exact, rtol=1e-6, atol=1e-6)
