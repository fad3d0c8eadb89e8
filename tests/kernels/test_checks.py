"""PACKHORSE_CHECK=1: index values on the device are checked. Read at import, so in a process."""

import os
import subprocess
import sys

import pytest

SETUP = """
import sys, torch
from packhorse import PackedTensor, gather_routes, gather_rows, scatter_rows
device = sys.argv[1]
rows = torch.arange(6., device=device).view(3, 2)
routes = torch.tensor([[[0, 1]], [[2, 3]]], dtype=torch.uint8, device=device)
def ids(*values):
    return torch.tensor(values, dtype=torch.int64, device=device)
"""

FAULTS = {
    "gather_rows: a row id is outside [-1, 3)": "gather_rows(rows, ids(0, 3))",
    "scatter_rows: a row id is outside [-1, 2)": "scatter_rows(rows, ids(0, 2, -1), 2)",
    "gather_rows: a row id is outside [-1, 3": "gather_rows(rows, ids(-2))",
    "gather_routes: a row id is outside [-1, 2)": (
        "gather_routes(routes, ids(2), range(1), num_experts=8)"
    ),
    "gather_routes: an expert is outside [0, 3)": (
        "gather_routes(routes, ids(0), range(1), num_experts=3)"
    ),
    "gather_routes: a layer is outside [0, 1)": (
        "gather_routes(routes, ids(0), torch.tensor([1], dtype=torch.int32, device=device),"
        " num_experts=8)"
    ),
}


def run(statement: str, device: str) -> subprocess.CompletedProcess[str]:
    code = f"{SETUP}\n{statement}\nif device == 'cuda': torch.cuda.synchronize()"
    return subprocess.run(
        [sys.executable, "-c", code, device],
        env={**os.environ, "PACKHORSE_CHECK": "1", "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("message", FAULTS)
def test_a_wrong_index_is_reported(message, device):
    result = run(FAULTS[message], device)
    assert result.returncode != 0
    # a device-side assert names no message in Python; the kernel prints it
    assert message in result.stderr + result.stdout or device == "cuda", result.stderr


def test_right_indices_pass(device):
    right = (
        "gather_rows(rows, ids(0, -1, 2)); scatter_rows(rows, ids(1, 0, -1), 2);"
        " gather_routes(routes, ids(1, -1), range(1), num_experts=4);"
        # a layer that is not delivered may hold another model's experts
        " two = torch.cat([routes, routes + 100], 1);"
        " gather_routes(two, ids(1, -1), range(1), num_experts=4)"
    )
    result = run(right, device)
    assert result.returncode == 0, result.stderr


def test_checked_calls_still_compile_once_for_all_lengths(device):
    code = """
from torch._dynamo.testing import CompileCounterWithBackend
counter = CompileCounterWithBackend("aot_eager")
def both(x, ids, n):
    return gather_rows(x, ids), scatter_rows(x, ids, n)
compiled = torch.compile(both, fullgraph=True, dynamic=True, backend=counter)
for n in range(4, 16):
    x = torch.randn(n, 3, device=device)
    got = compiled(x, torch.arange(n, device=device), n + 2)
    assert torch.equal(got[0], x)
assert counter.frame_count == 1, counter.frame_count
"""
    result = run(code, device)
    assert result.returncode == 0, result.stderr
