"""A generator's output for tests, and the batch it makes, in plain Python loops.

Token ids, logprobs, routes and supports all tell trajectory and place apart, so that a value of
another place shows.
"""

import random
from typing import Any

import torch

V, L, K, E = 997, 2, 2, 40
PAD = 7
PADDINGS = ("left", "right", "two-sided")


def make_output(seed: int, size: int | None = None, **drop: bool) -> dict[str, Any]:
    """B trajectories with every field but those named ``False``."""
    rng = random.Random(seed)
    size = rng.randrange(1, 7) if size is None else size
    prompts = [[rng.randrange(1, V) for _ in range(rng.randrange(1, 6))] for _ in range(size)]
    responses = [[rng.randrange(1, V) for _ in range(rng.randrange(0, 7))] for _ in range(size)]
    output: dict[str, Any] = {
        "prompt_token_ids": prompts,
        "response_ids": responses,
        "loss_masks": [[rng.randrange(2) for _ in ids] for ids in responses],
        "rewards": [[rng.random() for _ in ids] for ids in responses],
        "rollout_logprobs": [[-rng.random() for _ in ids] for ids in responses],
        "appended": [[r == len(ids) - 1 for r in range(len(ids))] for ids in responses],
        "rollout_expert_indices": [
            routes_of(rng, len(p) + len(r) - rng.randrange(2))
            for p, r in zip(prompts, responses, strict=True)
        ],
        "rollout_sample_support": [support_of(rng, ids) for ids in responses],
        "uids": [f"{seed}-{i}" for i in range(size)],
    }
    return {field: value for field, value in output.items() if drop.get(field, True)}


def routes_of(rng: random.Random, num_rows: int) -> torch.Tensor:
    ids = [[rng.sample(range(E), K) for _ in range(L)] for _ in range(num_rows)]
    return torch.tensor(ids, dtype=torch.int64).view(num_rows, L, K)


def support_of(rng: random.Random, sampled: list[int]) -> list[list[int]]:
    """The last token, which was appended, has an empty row."""
    rows = []
    for r, token in enumerate(sampled):
        others = [(token + 1 + rng.randrange(3)) % V for _ in range(rng.randrange(2))]
        row = [token, *others]
        rng.shuffle(row)
        rows.append([] if r == len(sampled) - 1 else row)
    return rows


def expected(output: dict[str, Any], padding: str, widths: dict[str, int]) -> list[dict[str, Any]]:
    """Each trajectory's row of every dense and listed field."""
    prompts, responses = output["prompt_token_ids"], output["response_ids"]
    longest = max(len(p) + len(r) for p, r in zip(prompts, responses, strict=True))
    right = widths.get("response_width", max(len(r) for r in responses))
    left = widths.get("prompt_width", max(len(p) for p in prompts))
    width = left + right if padding == "two-sided" else widths.get("width", longest)
    rows = []
    for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        tokens = prompt + response
        if padding == "left":
            first, start = width - len(tokens), right - len(response)
        elif padding == "right":
            first, start = 0, 0
        else:
            first, start = left - len(prompt), 0
        row: dict[str, Any] = {
            "sequences": place(tokens, first, width, PAD),
            "attention_mask": place([1] * len(tokens), first, width, 0),
            "response_mask": place([1] * len(response), start, right, 0),
            "loss_mask": place([1.0] * len(response), start, right, 0.0),
            "lengths": len(tokens),
            "response_lengths": len(response),
            "first_columns": first,
        }
        for ours, theirs in (
            ("loss_mask", "loss_masks"), ("rewards", "rewards"),
            ("rollout_logprobs", "rollout_logprobs"), ("appended", "appended"),
            ("excused", "appended"),
        ):  # fmt: skip
            if theirs in output:
                row[ours] = place(output[theirs][i], start, right, 0)
        if "uids" in output:
            row["uids"] = output["uids"][i]
        rows.append(row)
    return rows


def place(values: list[Any], start: int, width: int, fill: Any) -> list[Any]:
    row = [fill] * width
    for k, value in enumerate(values):
        row[start + k] = value
    return row
