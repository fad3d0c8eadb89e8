"""An engine of the tests, whose routes tell place and weights apart, and traces of its turns."""

import itertools

import numpy as np

from packhorse.packed.trace import Trace

L, K, V = 3, 2, 50


def route(position: int, version: int = 0, offset: int = 0) -> list[list[int]]:
    """[L, K] distinct ids that tell position, layer and version apart."""
    first = (position * 7 + version * 3) % 97
    return [[offset + first + layer, offset + first + layer + 101] for layer in range(L)]


def rows(start: int, stop: int, *, version: int = 0, offset: int = 0, dtype=np.uint8) -> np.ndarray:
    """The rows [start, stop) of the engine, [stop - start, L, K]."""
    ids = [route(t, version, offset) for t in range(start, stop)]
    return np.array(ids, dtype=dtype).reshape(-1, L, K)


def make_trace(num_prompt: int = 3, **options) -> Trace:
    options = {"num_layers": L, "topk": K, "vocab_size": V, "trajectory": 3} | options
    return Trace(list(range(num_prompt)), **options)


def add_turn(trace: Trace, output_ids: list[int], **options) -> None:
    """A turn with its own logprobs and support: token t has -t/10 and the ids t, t + 1."""
    options = {
        "logprobs": [-token / 10 for token in output_ids],
        "support": [[token, token + 1] for token in output_ids],
    } | options
    trace.add_turn(output_ids, **options)


def support_of(trajectory) -> list[list[int]]:
    ids, offsets = trajectory.support
    return [ids[a:b].tolist() for a, b in itertools.pairwise(offsets.tolist())]
