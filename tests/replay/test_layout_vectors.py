"""The 240 worked layout cases: the oracle agrees with them, and so does TokenLayout.

CPU tensors run the references, under ``TRITON_INTERPRET=1`` the Triton kernels; with a GPU the
kernels run on it too. A failure lists the indices of the cases that differ.
"""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from packhorse.replay.layout import TokenLayout
from tests.oracle import OracleLayout

CASES = json.loads((Path(__file__).parents[1] / "data" / "layout_cases.json").read_text())["cases"]
LAYOUT_FIELDS = (
    "lengths",
    "format",
    "tp_size",
    "tp_rank",
    "cp_size",
    "cp_rank",
    "cp_order",
    "fp8",
    "padded_lengths",
    "batch_width",
    "first_columns",
)


def layout_arguments(case: dict) -> dict:
    return {name: case[name] for name in LAYOUT_FIELDS}


def oracle_results(case: dict) -> dict:
    plain = OracleLayout(**layout_arguments(case))
    parallel = OracleLayout(**layout_arguments(case), sequence_parallel=True)
    values = [np.array(values) for values in case["model_values_by_cp_rank"]]
    return {
        "align": plain.alignment(),
        "support_row_ids": plain.support_row_ids(case["response_lengths"]),
        "token_row_ids": plain.token_row_ids(),
        "next_token_row_ids": plain.token_row_ids(next_token=True),
        "route_row_ids_sequence_parallel": parallel.route_row_ids(case["captured_lengths"]),
        "restored": plain.restore(values).tolist(),
    }


def test_the_oracle_agrees_with_the_worked_cases():
    assert len(CASES) == 240
    wrong = []
    for index, case in enumerate(CASES):
        expected = {"align": case["align"], **case["expect"]}
        actual = oracle_results(case)
        assert actual.keys() == expected.keys()
        wrong += [(index, claim) for claim in expected if actual[claim] != expected[claim]]
    assert not wrong, f"(case, claim) that differ: {wrong}"


# --- TokenLayout ---------------------------------------------------------------------------------


def build(case: dict, device: str, **changes) -> TokenLayout:
    return TokenLayout.build(**{**layout_arguments(case), "device": device, **changes})


def assert_every_case(compare: Callable[[dict], bool]) -> None:
    """``compare`` holds for every case, and raises for none; a failure names the cases."""
    wrong = []
    for index, case in enumerate(CASES):
        try:
            if not compare(case):
                wrong.append(f"case {index}")
        except Exception as error:
            wrong.append(f"case {index} raised {error!r}")
    assert not wrong, f"{len(wrong)} of {len(CASES)} cases differ: " + ", ".join(wrong)


def ids_equal(actual: torch.Tensor, expected: list[int], device: str) -> bool:
    return torch.equal(actual, torch.tensor(expected, dtype=torch.int64, device=device))


def test_padded_lengths_and_token_counts_are_those_of_the_worked_cases():
    def compare(case):
        layout = build(case, "cpu")
        num_tokens = len(case["expect"]["token_row_ids"])
        if case["padded_lengths"] is not None:
            padded = case["padded_lengths"]
        else:
            padded = [-(-length // case["align"]) * case["align"] for length in case["lengths"]]
            if case["format"] == "bshd":
                padded = [max(padded)] * len(padded)
        return (layout.padded_lengths, layout.num_tokens) == (tuple(padded), num_tokens)

    assert_every_case(compare)


def test_sequence_parallel_token_counts_are_those_of_the_worked_cases():
    def compare(case):
        layout = build(case, "cpu", sequence_parallel=True)
        return layout.num_rank_tokens == len(case["expect"]["route_row_ids_sequence_parallel"])

    assert_every_case(compare)


def test_token_row_ids_are_those_of_the_worked_cases(device):
    def compare(case):
        actual = build(case, device).token_row_ids()
        return ids_equal(actual, case["expect"]["token_row_ids"], device)

    assert_every_case(compare)


def test_next_token_row_ids_are_those_of_the_worked_cases(device):
    def compare(case):
        actual = build(case, device).token_row_ids(next_token=True)
        return ids_equal(actual, case["expect"]["next_token_row_ids"], device)

    assert_every_case(compare)


def test_support_row_ids_are_those_of_the_worked_cases(device):
    def compare(case):
        actual = build(case, device).support_row_ids(case["response_lengths"])
        return ids_equal(actual, case["expect"]["support_row_ids"], device)

    assert_every_case(compare)


def test_route_row_ids_are_those_of_the_worked_cases(device):
    def compare(case):
        layout = build(case, device, sequence_parallel=True)
        actual = layout.route_row_ids(case["captured_lengths"])
        return ids_equal(actual, case["expect"]["route_row_ids_sequence_parallel"], device)

    assert_every_case(compare)


def test_restored_values_are_those_of_the_worked_cases(device):
    def compare(case):
        by_rank = [torch.tensor(v, device=device) for v in case["model_values_by_cp_rank"]]
        actual = build(case, device).restore_gathered(by_rank)
        return torch.equal(actual, torch.tensor(case["expect"]["restored"], device=device))

    assert_every_case(compare)


def test_aligned_values_are_those_of_the_worked_cases(device):
    """``model_values_by_cp_rank`` holds 1000 (trajectory + 1) + position, in pads too."""

    def compare(case):
        lengths, first_columns = case["lengths"], case["first_columns"]
        dense = torch.full((len(lengths), case["batch_width"]), -5)
        for trajectory, (length, first) in enumerate(zip(lengths, first_columns, strict=True)):
            dense[trajectory, first : first + length] = torch.arange(length)
            dense[trajectory, first : first + length] += 1000 * (trajectory + 1)
        expected = [
            value if value % 1000 < lengths[value // 1000 - 1] else -1
            for value in case["model_values_by_cp_rank"][case["cp_rank"]]
        ]
        return ids_equal(build(case, device).align(dense.to(device), -1), expected, device)

    assert_every_case(compare)
