"""2,000 layouts drawn at random, each against the loops of ``tests/oracle.py``.

``test_layout.py`` has the claims one by one and draws what is near their edges; this draws evenly
over format, ranks, order, padding and lengths. Under the interpreter the Triton kernels run, on a
quarter of them: a launch takes milliseconds there.
"""

import os

import numpy as np
import pytest
import torch

from packhorse import PackedTensor, TokenLayout
from tests.oracle import OracleLayout

SEEDS, LAYOUTS = 20, 25 if os.environ.get("TRITON_INTERPRET") == "1" else 100


def draw(generator: np.random.Generator) -> dict:
    cp_size, tp_size = int(generator.choice([1, 1, 2, 3, 4])), int(generator.choice([1, 1, 2, 4]))
    batch = int(generator.choice([1, 2, 3, 7]))
    lengths = generator.integers(0, int(generator.choice([1, 3, 18])), batch)
    arguments = {
        "lengths": lengths.tolist(),
        "format": str(generator.choice(["thd", "bshd"])),
        "cp_size": cp_size,
        "cp_rank": int(generator.integers(cp_size)),
        "cp_order": str(generator.choice(["zigzag", "contiguous"])),
        "tp_size": tp_size,
        "tp_rank": int(generator.integers(tp_size)),
        "sequence_parallel": bool(generator.integers(2)),
        "fp8": [False, False, False, True, "mxfp8"][generator.integers(5)],
    }
    width = int(lengths.max()) + int(generator.integers(3))
    columns = [int(generator.integers(width - n + 1)) for n in lengths]
    arguments |= generator.choice([{}, {"batch_width": width}, {"first_columns": columns}])
    if generator.integers(3) == 0:
        padded = OracleLayout(**arguments).padded()
        if arguments["format"] == "thd":  # a packer that pads more, and pads the slab
            unit = OracleLayout(**arguments).alignment()
            padded = [n + unit * int(generator.integers(2)) for n in padded]
            padded += [unit * int(generator.integers(3))] * int(generator.integers(2))
        arguments["padded_lengths"] = padded
    return arguments


def check(arguments: dict, generator: np.random.Generator, device: str) -> None:
    oracle = OracleLayout(**arguments)
    layout = TokenLayout.build(**arguments, device=device)
    lengths = arguments["lengths"]
    captured = [int(generator.integers(n + 1)) for n in lengths]
    responses = [int(generator.integers(n)) if n else 0 for n in lengths]
    assert layout.route_row_ids(captured).tolist() == oracle.route_row_ids(captured)
    assert layout.support_row_ids(responses).tolist() == oracle.support_row_ids(responses)

    routes = torch.from_numpy(generator.integers(0, 9, (sum(captured), 2, 2), dtype=np.uint8))
    packed = PackedTensor.from_lengths(routes, captured).to(device)
    ranked = layout.gather_routes(packed, range(2), num_experts=9)
    for i, row in enumerate(oracle.route_row_ids(captured)):
        expected = routes[row].tolist() if row >= 0 else [[0, 1]] * 2
        assert ranked.topk_ids[:, i].tolist() == expected
        assert bool(ranked.padding_mask[i]) == (row < 0)

    next_token = bool(generator.integers(2))
    shape = (len(lengths), oracle.width())
    dense = generator.integers(0, 1000, (*shape, 2), dtype=np.int64)
    aligned = layout.align(torch.from_numpy(dense).to(device), -1, next_token=next_token)
    assert np.array_equal(aligned.cpu().numpy(), oracle.align(dense, -1, next_token=next_token))

    values = [
        generator.standard_normal(layout.num_tokens).astype(np.float32)
        for _ in range(layout.cp_size)
    ]
    restored = layout.restore_gathered([torch.from_numpy(v).to(device) for v in values], -3)
    assert np.array_equal(restored.cpu().numpy(), oracle.restore(values, -3))


@pytest.mark.parametrize("seed", range(SEEDS))
def test_matches_the_loops(seed, device):
    generator = np.random.default_rng(seed)
    for number in range(LAYOUTS):
        arguments = draw(generator)
        try:
            check(arguments, generator, device)
        except Exception as error:
            raise AssertionError(f"layout {number} of seed {seed}: {arguments}") from error
