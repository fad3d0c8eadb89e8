"""Launcher: a kernel runs only on arguments of the kind it was compiled for; and twice is the same.

The compile-only driver stands in for a GPU: what reaches Triton is what a launch would pass.
"""

import numpy as np
import pytest
import torch

from packhorse import (
    align_tokens,
    dummy_routes,
    gather_ragged_support,
    gather_routes,
    gather_rows,
    make_row_ids,
    restore_tokens,
    scatter_rows,
    support_logprobs,
    validate_routes,
    validate_support,
)
from packhorse.kernels import rows
from packhorse.testing import random_row_ids
from tests.tools.aot import compile_only


def meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.compile
@pytest.mark.parametrize("fill", [1, True, np.int64(1)], ids=repr)
def test_a_scalar_is_compiled_as_an_integer_whatever_holds_it(fill):
    with compile_only("sm_90") as compiled:
        rows._gather_rows_cuda(meta(9, 4, dtype=torch.int32), meta(5, dtype=torch.int64), fill)
    assert compiled[0].src.signature["fill"] == "i32"


@pytest.mark.parametrize("temperature", [np.float64(0.7)], ids=repr)
def test_a_temperature_of_numpy_is_a_float(temperature, device):
    """np.float64 is a float, so that no check stops it."""
    logits = torch.arange(12.0, device=device).view(2, 6).requires_grad_()
    ids = torch.tensor([[1, 4, 5], [0, 2, -1]], dtype=torch.int32, device=device)
    sampled = torch.tensor([4, 0], device=device)
    runs = []
    for given in (temperature, float(temperature)):
        scores = support_logprobs(logits, ids, sampled, temperature=given)
        (grad,) = torch.autograd.grad(scores.logprobs.sum(), logits)
        runs.append((scores.logprobs.detach(), grad))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.compile
def test_a_scalar_past_int32_is_compiled_as_64_bits():
    with compile_only("sm_90") as compiled:
        rows._gather_rows_cuda(meta(9, 4, dtype=torch.int64), meta(5, dtype=torch.int64), 2**40)
    assert compiled[0].src.signature["fill"] == "i64"


def test_a_true_fill_does_not_narrow_later_ones(device):
    """bool and uint8 rows share a kernel; a fill of True must not be what it is compiled for."""
    missing = torch.tensor([-1], device=device)
    flags = torch.zeros(2, 4, dtype=torch.bool, device=device)
    assert gather_rows(flags, missing, fill=True).all()
    small = torch.zeros(2, 4, dtype=torch.uint8, device=device)
    for fill in (7, 200):
        assert (gather_rows(small, missing, fill=fill) == fill).all()


def test_alignment_is_part_of_what_is_compiled(device):
    """A view that begins off 16 bytes after one that begins on them, and back."""
    buffer = torch.arange(4 * 65, dtype=torch.uint8, device=device)
    row_ids = torch.tensor([3, -1, 0], device=device)
    for begin in (0, 1, 4, 16, 0, 3):
        x = buffer[begin : begin + 4 * 48].view(4, 48)
        assert torch.equal(gather_rows(x, row_ids)[0], x[3])
        assert torch.equal(gather_rows(x, row_ids)[2], x[0])


def test_fills_past_int32_after_small_ones(device):
    missing = torch.tensor([-1], device=device)
    x = torch.zeros(1, dtype=torch.int64, device=device)
    for fill in (5, 2**40, -(2**50), -3):
        assert gather_rows(x, missing, fill=fill).item() == fill


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_lazy_negation_and_traces_are_seen(device):
    row_ids = torch.tensor([1, -1], device=device)
    x = torch.tensor([1 + 2j, 3 + 4j], device=device).conj().imag
    assert x.is_neg()
    assert gather_rows(x, row_ids).tolist() == [-4, 0]
    plain = torch.tensor([5.0, 6.0], device=device)
    traced = torch.jit.trace(lambda x: gather_rows(x, row_ids), (plain,), check_trace=False)
    assert traced(plain + 1).tolist() == [7, 0]


def calls(device: str) -> dict:
    generator = torch.Generator().manual_seed(0)

    def draw(high: int, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=generator).to(device, dtype)

    ids = random_row_ids(300, 400, missing=0.2, device=device)
    wide, narrow = draw(99, 300, 32), draw(99, 300)
    routes = draw(99, 400, 3, 8, dtype=torch.uint8)
    offsets = torch.tensor([0, 40, 40, 90], dtype=torch.int32, device=device)
    columns = torch.tensor([[3, 0, 0], [37, 0, 50]], dtype=torch.int32, device=device)
    segments = torch.tensor([[0, 30, 30], [30, 0, 50], [0, 0, 0]], dtype=torch.int32, device=device)
    counts = draw(9, 400, dtype=torch.int64)
    row_offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    tokens = draw(1000, int(counts.sum()))
    dense, values = draw(99, 3, 50), draw(99, 90)
    return {
        "gather_rows": lambda: gather_rows(draw(99, 400, 5) * 0 + 3, ids),
        "scatter_rows": lambda: scatter_rows(wide, ids, 400),
        "scatter_rows, narrow": lambda: scatter_rows(narrow, ids, 400),
        "gather_routes": lambda: gather_routes(routes, ids, range(3), num_experts=99),
        "gather_routes, spread": lambda: gather_routes(
            routes[..., :6], ids, range(3), num_experts=99, dummy="spread", ep_size=3
        ),
        "dummy_routes": lambda: dummy_routes(
            301, 6, num_experts=8, dummy="spread", ep_size=4, device=device
        ),
        "make_row_ids": lambda: make_row_ids(offsets, segments, 90),
        "align_tokens": lambda: align_tokens(dense, offsets, columns, 90, fill=0),
        "restore_tokens": lambda: restore_tokens(values, offsets, columns, 49, fill=0),
        "gather_ragged_support": lambda: gather_ragged_support(tokens, row_offsets, ids),
        "validate_routes": lambda: validate_routes(routes, num_experts=50)[:2],
        "validate_support": lambda: validate_support(wide, narrow, vocab_size=50)[:2],
    }


@pytest.mark.parametrize("name", calls("cpu"))
def test_two_runs_are_bitwise_equal(name, device):
    call = calls(device)[name]
    first, second = call(), call()
    if isinstance(first, torch.Tensor):
        first, second = (first,), (second,)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
