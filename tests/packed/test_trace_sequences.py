"""Traces against lists of rows, for any sequence of turns and cuts; a real conversation."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from packhorse.packed.trace import Trace
from packhorse.packed.trajectory import RowSpan, TokenKind, pack_trajectories
from packhorse.replay.capture import Capture
from packhorse.replay.layout import TokenLayout
from packhorse.replay.microbatch import ReplayMicrobatch
from tests.packed.trace_helpers import add_turn, make_trace, route, rows, support_of

CAPTURE = Path(__file__).parents[2] / "replay" / "data" / "vllm_tiny_moe.npz"


# --- against lists --------------------------------------------------------------------------------


class Model:
    """What a trace must hold, as lists: tokens (id, kind, loss, logprob, support) and rows."""

    def __init__(self, num_prompt):
        self.num_prompt, self.tokens, self.rows, self.versions = num_prompt, [], [], []

    @property
    def length(self):
        return self.num_prompt + len(self.tokens)

    def see(self, evaluated, version):
        for t in range(len(self.rows), evaluated):
            self.rows.append(route(t, version))
            self.versions.append(version)

    def cut(self, kept):
        tail = self.tokens[kept:], self.rows, self.versions
        self.tokens = self.tokens[:kept]
        self.rows, self.versions = self.rows[: self.length], self.versions[: self.length]
        return tail

    def restore(self, tail, grown):
        tokens, rows, versions = tail
        if not grown:
            self.rows, self.versions = rows, versions
        self.tokens += [
            (t, TokenKind.RESTORED if grown and kind == TokenKind.SAMPLED else kind, *rest)
            for t, kind, *rest in tokens
        ]

    def first_uncovered(self):
        for t, (_, kind, loss, _, _) in enumerate(self.tokens, start=self.num_prompt):
            if loss and kind not in (TokenKind.APPENDED, TokenKind.RESTORED) and t > len(self.rows):
                return t
        return None


def check_trace(trace, model):
    assert (trace.length, trace.num_rows) == (model.length, len(model.rows))
    uncovered = model.first_uncovered()
    if uncovered is not None:
        with pytest.raises(ValueError, match=f"token {uncovered} is a trained target"):
            trace.finalize()
        return
    trajectory = trace.finalize()
    assert trajectory.routes.tolist() == model.rows
    versions = [v for a, b, v in trajectory.weight_versions for _ in range(a, b)]
    assert versions == model.versions
    assert all(a < b for a, b, _ in trajectory.weight_versions)
    assert [a for a, _, _ in trajectory.weight_versions[1:]] == [
        b for _, b, _ in trajectory.weight_versions[:-1]
    ]
    columns = (
        trajectory.response_ids.tolist(),
        trajectory.kinds.tolist(),
        trajectory.loss_mask.tolist(),
        trajectory.logprobs.tolist(),
        support_of(trajectory),
    )
    expected = [(*token[:3], float(np.float32(token[3])), token[4]) for token in model.tokens]
    assert list(zip(*columns, strict=True)) == expected


@given(data=st.data(), num_prompt=st.integers(1, 4), num_steps=st.integers(1, 12))
@settings(max_examples=400, deadline=None)
def test_any_sequence_of_turns_and_cuts_agrees_with_lists(data, num_prompt, num_steps):
    trace, model, tail, grown = make_trace(num_prompt), Model(num_prompt), None, False
    kinds = ["turn", "turn", "cut", "observation", "append", "cut and restore", "routes"]
    for step in range(num_steps):
        what = data.draw(st.sampled_from(kinds + ["restore"] * (4 if tail else 0)))
        before = (model.length, len(model.rows))
        output = data.draw(st.lists(st.integers(0, 40), max_size=4))
        reply = {}
        if what in ("turn", "routes") and (what == "routes" or data.draw(st.integers(0, 3))):
            length = model.length + (len(output) if what == "turn" else 0)
            evaluated = length - data.draw(st.integers(0, 1))
            start = data.draw(st.integers(0, len(model.rows)))
            first = start if data.draw(st.booleans()) else 0
            reply = {
                "routes": rows(first, max(evaluated, first), version=step, dtype=np.int32),
                "routes_start": start,
                "evaluated": evaluated,
                "weight_version": step,
            }
        if what == "turn":
            add_turn(trace, output, **reply)
            model.tokens += [(t, TokenKind.SAMPLED, True, -t / 10, [t, t + 1]) for t in output]
        elif what == "routes":
            trace.add_routes(**reply)
        elif what == "observation":
            trace.add_observation(output)
            model.tokens += [(t, TokenKind.OBSERVATION, False, 0.0, []) for t in output]
        elif what == "append":
            trace.append_tokens(output, loss=bool(step % 2))
            model.tokens += [(t, TokenKind.APPENDED, bool(step % 2), 0.0, []) for t in output]
        elif what == "cut":
            kept = data.draw(st.integers(0, len(model.tokens)))
            tail, grown = (trace.truncate(kept), model.cut(kept)), False
            before = (model.length, len(model.rows))
        elif what == "cut and restore":
            kept = data.draw(st.integers(0, len(model.tokens)))
            trace.restore(trace.truncate(kept))
            grown = True
        else:
            trace.restore(tail[0])
            model.restore(tail[1], grown)
            tail = None
        if reply:
            model.see(reply["evaluated"], step)
        grown |= (model.length, len(model.rows)) > before
        check_trace(trace, model)


# --- a real engine --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def conversation():
    """(capture, ids of the requests of its conversation of several turns, in order)."""
    capture = Capture.load(CAPTURE)
    conv, turn = capture.optional["conv"], capture.optional["turn"]
    return capture, sorted(np.flatnonzero(conv == 0).tolist(), key=lambda i: turn[i])


def grow(capture, requests, *, partial, version=None) -> Trace:
    """The trace of a conversation, asked for new rows only or answered with all rows."""
    trace = Trace(
        capture.prompt_ids[requests[0]],
        num_layers=capture.num_layers,
        topk=capture.topk,
        num_experts=capture.num_experts,
        vocab_size=capture.vocab_size,
    )
    for i in requests:
        known = trace.length
        trace.add_observation(capture.prompt_ids[i][known:])
        start = trace.num_rows
        reply = capture.routes[i].numpy()
        trace.add_turn(
            capture.response_ids[i],
            prompt_ids=capture.prompt_ids[i],
            logprobs=capture.sampled_logprobs[i],
            support=capture.support[i],
            routes=reply[start:] if partial else reply,
            routes_start=start,
            weight_version=i,
        )
    return trace


@pytest.mark.parametrize("partial", [True, False])
def test_the_turns_of_a_real_conversation_become_one_trajectory(conversation, partial):
    capture, (first, second) = conversation
    assert capture.lengths[first] < len(capture.prompt_ids[second])
    trajectory = grow(capture, [first, second], partial=partial).finalize()
    # the engine's own second reply repeats the first turn's rows, and both must say the same
    assert np.array_equal(trajectory.routes, capture.routes[second].numpy())
    tokens = np.concatenate([trajectory.prompt_ids, trajectory.response_ids])
    expected = [capture.prompt_ids[second], capture.response_ids[second]]
    assert np.array_equal(tokens, np.concatenate(expected))
    boundary = capture.routes[first].shape[0]
    assert trajectory.weight_versions[0] == RowSpan(0, boundary, first)
    sampled = trajectory.kinds == TokenKind.SAMPLED
    both = [capture.sampled_logprobs[i] for i in (first, second)]
    assert np.array_equal(trajectory.logprobs[sampled], np.concatenate(both))
    assert (trajectory.num_added, trajectory.num_floored) == (0, 0)

    packed = pack_trajectories(
        [trajectory], num_experts=capture.num_experts, vocab_size=capture.vocab_size
    )
    support = packed.support.values[torch.from_numpy(sampled)]
    width = support.shape[1]
    both = torch.cat([capture.support[i] for i in (first, second)])
    assert torch.equal(support, both[:, :width])
    assert (packed.support.values[torch.from_numpy(~sampled)] == -1).all()
    ReplayMicrobatch(
        TokenLayout.build(packed.lengths),
        packed.routes,
        loss_masks=packed.loss_masks,
        appended=packed.excused,
        missing=packed.missing,
    )


def test_single_turns_of_a_real_engine_pack_to_what_the_capture_holds(conversation):
    capture, _ = conversation
    traces = [grow(capture, [i], partial=True) for i in range(capture.num_trajectories)]
    packed = pack_trajectories(
        [trace.finalize() for trace in traces],
        num_experts=capture.num_experts,
        vocab_size=capture.vocab_size,
    )
    assert packed.routes.equal(capture.routes)
    assert packed.support.equal(capture.support)
    assert packed.lengths == capture.lengths
