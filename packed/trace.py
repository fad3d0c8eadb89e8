"""One trajectory as it grows turn by turn: tokens, and what an engine decided at each of them.

    trace = Trace(prompt_ids, num_layers=48, topk=8, vocab_size=151936)
    trace.add_turn(output_ids, logprobs=..., support=..., routes=..., routes_start=trace.num_rows)
    trace.add_observation(tool_ids)
    trace.append_tokens([eos_id])
    trajectory = trace.finalize()

    token          prompt           sampled       observation   appended
    route row      where captured   the same      the same      the same
    loss           no               yes           no            as said
    logprob        none             its own       0             as given, or 0
    support row    none             its own       empty         empty

Route row t is the route of token t. The captured prefix grows at its end only: a reply gives the
rows after it, those that overlap it are cut off, and none is written twice. The boundary token of a
turn, which its own reply never has a row for, so gets it from the next one.

Sizes: B trajectories, P prompt and R response tokens, L captured layers, K experts a token, E
experts, V vocabulary.
"""

from collections.abc import Hashable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from packhorse._nvtx import ranged_methods
from packhorse.packed.collate import (
    LOGPROBS_FIELD,
    ROUTES_FIELD,
    SUPPORT_FIELD,
    SupportRows,
)
from packhorse.packed.host import INT32_MAX, check_total, host_count
from packhorse.packed.host_arrays import positive
from packhorse.packed.replies import (
    LOGPROB_FLOOR,
    SupportReply,
    narrow_routes,
    numpy_dtype,
    read_logprobs,
    read_loss_mask,
    read_routes,
    read_support,
    read_token_ids,
)
from packhorse.packed.route_checks import check_routes, expert_layers
from packhorse.packed.trajectory import RowSpan, TokenKind, Trajectory

#: one row a response token
_COLUMNS: Final = ("token_ids", "kinds", "loss", "logprobs", "counts", "added")


class TraceTail(NamedTuple):
    """What ``Trace.truncate`` cut off, for ``Trace.restore``."""

    start: int  # response tokens before it
    columns: dict[str, np.ndarray]
    spans: tuple[RowSpan, ...]

    @property
    def token_ids(self) -> np.ndarray:
        """[n] int64."""
        return self.columns["token_ids"]


class _Rows:
    """Rows that grow at their end, in parts that are never written."""

    def __init__(self, empty: np.ndarray):
        self._parts = [empty]
        self.length = 0

    def add(self, rows: np.ndarray) -> None:
        if len(rows):
            self._parts.append(rows)
            self.length += len(rows)

    def cut(self, length: int) -> np.ndarray:
        """Keep the first ``length`` rows; returns the others."""
        removed = []
        while self.length > length:
            part = self._parts.pop()
            kept = max(length - (self.length - len(part)), 0)
            removed.append(part[kept:])
            self.length -= len(part)
            self.add(part[:kept])
        rows = np.concatenate([self._parts[0], *reversed(removed)])
        rows.flags.writeable = False
        return rows

    def join(self, dtype: np.dtype | None = None) -> np.ndarray:
        """A new array, by default of the widest part's dtype."""
        return np.concatenate(self._parts, dtype=dtype, casting="unsafe")


@ranged_methods()
class Trace:
    """A trajectory that grows. Every method changes all of it or, with an error, nothing.

    Args:
        prompt_ids: [P] integers, at least one: a list, host array or CPU tensor.
        num_layers, topk: L, K of the engine's routes. Without them no routes are kept.
        num_experts: E, where known: ids are checked against it and it chooses the dtype.
        moe_layers: captured layers, from 0, that have experts; the others hold zeros. By default
            all.
        vocab_size: V. With it each sampled token has a support row, without it none has.
        has_logprobs: each sampled token has a logprob.
        trajectory: how errors name this trajectory.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: the prompt is empty; an id or size is out of range; only one of ``num_layers``
            and ``topk`` is given, or what needs both.
    """

    def __init__(
        self,
        prompt_ids: Sequence[int] | np.ndarray,
        *,
        num_layers: int | None = None,
        topk: int | None = None,
        num_experts: int | None = None,
        moe_layers: Sequence[int] | None = None,
        vocab_size: int | None = None,
        has_logprobs: bool = True,
        trajectory: int | str | None = None,
    ) -> None:
        name = "Trace"
        self._label = "" if trajectory is None else f"trajectory {trajectory}"
        self._turn = 0
        if vocab_size is not None:
            vocab_size = positive(vocab_size, f"{name}: vocab_size")
            check_total(name, vocab_size, "token ids")
        ids = read_token_ids(self._where(name, "prompt_ids", turn=False), prompt_ids, vocab_size)
        if ids.size == 0:
            raise ValueError(
                f"{self._where(name, 'prompt_ids', turn=False)} is empty: nothing predicts the"
                " first token"
            )
        self._row_shape, self._experts_at = _route_sizes(name, num_layers, topk, moe_layers)
        if num_experts is not None:
            num_experts = positive(num_experts, f"{name}: num_experts")
            if self._row_shape is None or self._row_shape[1] > num_experts:
                raise ValueError(f"{name}: num_experts={num_experts} with topk={topk}")
        self._num_experts = num_experts
        self._vocab_size = vocab_size
        self._has_logprobs = bool(has_logprobs)
        self._prompt_ids = ids
        self._columns = {
            "token_ids": _Rows(np.empty(0, dtype=np.int64)),
            "kinds": _Rows(np.empty(0, dtype=np.uint8)),
            "loss": _Rows(np.empty(0, dtype=np.bool_)),
            "logprobs": _Rows(np.empty(0, dtype=np.float32)),
            "counts": _Rows(np.empty(0, dtype=np.int64)),  # ids of the support row
            "added": _Rows(np.empty(0, dtype=np.bool_)),  # the engine left the sampled id out
            "support_ids": _Rows(np.empty(0, dtype=np.int64)),
            "routes": _Rows(np.empty((0, *(self._row_shape or (0, 0))), dtype=np.uint8)),
        }
        self._spans: list[RowSpan] = []
        self._missing = False
        self._last_tail: TraceTail | None = None  # while nothing was added since the cut

    # --- what is there ----------------------------------------------------------------------------

    @property
    def num_prompt_tokens(self) -> int:
        return self._prompt_ids.size

    @property
    def num_response_tokens(self) -> int:
        return self._columns["token_ids"].length

    @property
    def length(self) -> int:
        """P + R so far."""
        return self.num_prompt_tokens + self.num_response_tokens

    @property
    def num_rows(self) -> int:
        """Rows of the captured prefix: the row that the next request asks from (vLLM
        ``routed_experts_prompt_start``)."""
        return self._columns["routes"].length

    @property
    def token_ids(self) -> np.ndarray:
        """[P + R] int64, a copy: the prompt of the next turn."""
        return np.concatenate([self._prompt_ids, self._columns["token_ids"].join()])

    # --- growing ----------------------------------------------------------------------------------

    def add_turn(
        self,
        output_ids: Sequence[int] | np.ndarray,
        *,
        logprobs: Any = None,
        support: Any = None,
        routes: Any = None,
        routes_start: int = 0,
        evaluated: int | None = None,
        prompt_ids: Any = None,
        loss_mask: Any = None,
        weight_version: Hashable = None,
    ) -> None:
        """Add the tokens that an engine sampled after all tokens so far.

        Args:
            output_ids: [n] sampled ids; none for a turn that was aborted before its first token.
            logprobs: [n] natural-log probabilities (a list may hold None). Missing and non-finite
                ones become -9999.0 and are counted.
            support: n rows, in any form of ``pack_support``. A sampled id that is not in its row is
                added at the row's end and counted.
            routes: [rows, L, K]: the rows [routes_start, evaluated), or all rows before
                ``evaluated`` from a server that ignored the start (vLLM ``routed_experts``). Rows
                that are known already are cut off. None: the reply had none, and a later one brings
                them.
            routes_start: the row that the request asked from, at most ``num_rows``.
            evaluated: tokens that have a row, from the first. By default all but the last.
            prompt_ids: what the engine was given; must be the tokens so far.
            loss_mask: [n] 0 or 1: the token is trained. By default each is.
            weight_version: of the new route rows.

        Raises:
            TypeError: an argument has a wrong type, or is on a device.
            ValueError: a declared field is missing, an undeclared one given; a shape or a number of
                rows is not the expected one; an id is out of range, repeated in its row, or stands
                in a dense layer; a layer of experts is all zeros; a logprob is positive; the
                prompt is another. One line that names the field, the trajectory and the turn.
        """
        name = "Trace.add_turn"
        ids = read_token_ids(self._where(name, "output_ids"), output_ids, self._vocab_size)
        count = ids.size
        self._check_declared(name, count, logprobs, support)
        self._check_prompt(name, prompt_ids)
        loss = np.ones(count, dtype=np.bool_)
        if loss_mask is not None:
            loss = read_loss_mask(self._where(name, "loss_mask"), loss_mask, count)
        values = None
        if logprobs is not None:
            values = read_logprobs(self._where(name, LOGPROBS_FIELD), logprobs, count)
        rows_of_support = None
        if support is not None and self._vocab_size is not None:
            where = self._where(name, SUPPORT_FIELD)
            rows_of_support = read_support(where, support, ids, self._vocab_size)
        rows = self._new_rows(name, routes, routes_start, evaluated, self.length + count)

        self._add(ids, TokenKind.SAMPLED, loss, values, rows_of_support)
        self._add_rows(rows, weight_version)
        self._turn += 1

    def add_routes(
        self,
        routes: Any,
        *,
        routes_start: int = 0,
        evaluated: int | None = None,
        weight_version: Hashable = None,
    ) -> None:
        """Add route rows without tokens: of a reply that came late, or of a pass over all tokens.

        Arguments and errors are those of ``add_turn``.
        """
        name = "Trace.add_routes"
        if routes is None:
            raise TypeError(f"{self._where(name, ROUTES_FIELD)} is None")
        rows = self._new_rows(name, routes, routes_start, evaluated, self.length)
        self._add_rows(rows, weight_version)

    def add_observation(self, token_ids: Sequence[int] | np.ndarray) -> None:
        """Add tokens that no model sampled: no loss, logprob 0, an empty support row. Their route
        rows come with the next turn.

        Raises:
            TypeError, ValueError: ``token_ids`` [n] are no host integers, or out of range.
        """
        where = self._where("Trace.add_observation", "token_ids")
        ids = read_token_ids(where, token_ids, self._vocab_size)
        self._add(ids, TokenKind.OBSERVATION, np.zeros(ids.size, dtype=np.bool_))

    def append_tokens(
        self, token_ids: Sequence[int] | np.ndarray, *, loss: bool = True, logprobs: Any = None
    ) -> None:
        """Add tokens that the generator puts there itself: a synthetic EOS.

        Their support rows are empty, and as targets they may lie past the captured prefix: the
        position before them runs live.

        Args:
            token_ids: [n] integers.
            loss: they are trained. ``score_microbatch`` takes one such token a trajectory.
            logprobs: [n], by default 0.

        Raises:
            TypeError, ValueError: an argument is of a wrong type, length or range.
        """
        name = "Trace.append_tokens"
        ids = read_token_ids(self._where(name, "token_ids"), token_ids, self._vocab_size)
        values = None
        if logprobs is not None:
            values = read_logprobs(self._where(name, LOGPROBS_FIELD), logprobs, ids.size)
        self._add(ids, TokenKind.APPENDED, np.full(ids.size, bool(loss)), values)

    # --- cutting ----------------------------------------------------------------------------------

    def truncate(self, num_response_tokens: int) -> TraceTail:
        """Keep the first ``num_response_tokens`` response tokens: one cut for all fields.

        Route rows of the kept tokens stay: a token that was not the last has its row.

        Returns:
            What was cut off, for ``restore``.

        Raises:
            TypeError, ValueError: the count is no integer, negative, or above what is there.
        """
        where = self._where("Trace.truncate", "num_response_tokens")
        kept = host_count(num_response_tokens, where)
        if kept > self.num_response_tokens:
            raise ValueError(f"{where} is {kept}, there are {self.num_response_tokens}")
        columns = {name: self._columns[name].cut(kept) for name in _COLUMNS}
        num_ids = int(self._columns["counts"].join().sum())
        columns["support_ids"] = self._columns["support_ids"].cut(num_ids)
        columns["routes"] = self._columns["routes"].cut(min(self.num_rows, self.length))
        spans = self._cut_spans()
        self._last_tail = TraceTail(kept, columns, spans)
        return self._last_tail

    def restore(self, tail: TraceTail) -> None:
        """Put back what ``truncate`` cut off, each token with its own logprob, loss and support.

        Right after the cut everything is as before. Behind other tokens (the sampled EOS of a turn,
        after its observation) the sampled ones are marked ``RESTORED`` and have no route rows: the
        positions before them run live.

        Raises:
            TypeError: ``tail`` is no ``TraceTail``.
        """
        if not isinstance(tail, TraceTail):
            raise TypeError(
                f"{self._where('Trace.restore', 'tail')} must be a TraceTail, got"
                f" {type(tail).__name__}"
            )
        in_place = tail is self._last_tail
        kinds = tail.columns["kinds"]
        if not in_place:
            kinds = np.where(kinds == TokenKind.SAMPLED, TokenKind.RESTORED, kinds)
        for name in (*_COLUMNS, "support_ids"):
            self._columns[name].add(tail.columns[name] if name != "kinds" else kinds)
        if in_place:
            self._columns["routes"].add(tail.columns["routes"])
            for span in tail.spans:
                self._add_span(span)
        self._last_tail = None

    def mark_missing(self) -> None:
        """The routes of this trajectory are lost: ``finalize`` gives none, and all its tokens run
        live."""
        self._missing = True

    # --- the end ----------------------------------------------------------------------------------

    def finalize(self, *, loss_mask: Any = None) -> Trajectory:
        """Check that the routes cover what is trained, and join everything. The trace stays as it
        is and may grow on.

        Args:
            loss_mask: [R] 0 or 1, in place of the trace's own.

        Raises:
            TypeError: ``loss_mask`` has a wrong type.
            ValueError: it has a wrong length; a trained target lies past the captured prefix (at
                position j it needs j route rows), is neither appended nor restored, and the
                trajectory is not marked missing.
        """
        name = "Trace.finalize"
        columns = {key: self._columns[key].join() for key in (*_COLUMNS, "support_ids")}
        loss = columns["loss"]
        if loss_mask is not None:
            where = self._where(name, "loss_mask", turn=False)
            loss = read_loss_mask(where, loss_mask, self.num_response_tokens)
        offsets = np.zeros(columns["counts"].size + 1, dtype=np.int64)
        np.cumsum(columns["counts"], out=offsets[1:])
        trajectory = Trajectory(
            prompt_ids=self._prompt_ids.copy(),
            response_ids=columns["token_ids"],
            kinds=columns["kinds"],
            loss_mask=loss,
            logprobs=columns["logprobs"] if self._has_logprobs else None,
            support=(
                SupportRows(columns["support_ids"], offsets)
                if self._vocab_size is not None
                else None
            ),
            routes=self._joined_routes(),
            weight_versions=() if self._missing else tuple(self._spans),
            missing=self._missing,
            num_floored=int((columns["logprobs"] == LOGPROB_FLOOR).sum()),
            num_added=int(columns["added"].sum()),
        )
        if self._row_shape is not None and not self._missing:
            self._check_coverage(name, trajectory)
        return trajectory

    def _check_coverage(self, name: str, trajectory: Trajectory) -> None:
        targets = np.flatnonzero(trajectory.loss_mask & ~trajectory.excused)
        beyond = targets[targets + self.num_prompt_tokens > self.num_rows]
        if beyond.size:
            token = int(beyond[0]) + self.num_prompt_tokens
            raise ValueError(
                f"{self._where(name, ROUTES_FIELD, turn=False)}: token {token} is a trained target"
                f" and needs {token} rows, there are {self.num_rows} (append_tokens and"
                " mark_missing make the exceptions)"
            )

    def _joined_routes(self) -> np.ndarray | None:
        if self._row_shape is None:
            return None
        dtype = None if self._num_experts is None else numpy_dtype(self._num_experts)
        routes = self._columns["routes"].join(dtype)
        return routes[:0].copy() if self._missing else routes

    # --- parts ------------------------------------------------------------------------------------

    def _where(self, name: str, field: str, *, turn: bool = True) -> str:
        places = [self._label] if self._label else []
        if turn:
            places.append(f"turn {self._turn}")
        return f"{name}: {field}" + (f" of {', '.join(places)}" if places else "")

    def _check_declared(self, name: str, count: int, logprobs: Any, support: Any) -> None:
        for field, given, declared, how in (
            (LOGPROBS_FIELD, logprobs, self._has_logprobs, "has_logprobs=False"),
            (SUPPORT_FIELD, support, self._vocab_size is not None, "no vocab_size"),
        ):
            if declared and given is None and count:
                raise ValueError(
                    f"{self._where(name, field)} is missing for {count} sampled tokens (Trace with"
                    f" {how} has none)"
                )
            if not declared and given is not None:
                raise ValueError(f"{self._where(name, field)} is given, but Trace has {how}")

    def _check_prompt(self, name: str, prompt_ids: Any) -> None:
        if prompt_ids is None:
            return
        where = self._where(name, "prompt_ids")
        given, known = read_token_ids(where, prompt_ids, self._vocab_size), self.token_ids
        shared = min(given.size, known.size)
        differ = given[:shared] != known[:shared]
        if differ.any():
            token = int(np.argmax(differ))
            raise ValueError(
                f"{where}, token {token}: id {given[token]}, the trace has {known[token]}"
            )
        if given.size != known.size:
            raise ValueError(f"{where} has {given.size} tokens, the trace has {known.size}")

    def _new_rows(
        self, name: str, routes: Any, start: Any, evaluated: Any, length: int
    ) -> np.ndarray | None:
        """The checked rows of a reply after the captured prefix, copied; None where it has none."""
        if routes is None:
            return None
        where = self._where(name, ROUTES_FIELD)
        if self._row_shape is None:
            raise ValueError(f"{where} is given, but Trace has no num_layers and topk")
        ids = read_routes(
            where,
            routes,
            start=start,
            evaluated=evaluated,
            captured=self.num_rows,
            length=length,
            row_shape=self._row_shape,
        )
        experts = INT32_MAX + 1 if self._num_experts is None else self._num_experts
        if self.num_rows:
            where += f", counted from row {self.num_rows}"
        check_routes(where, ids, experts, self._experts_at)
        return narrow_routes(where, ids, self._num_experts)

    def _add(
        self,
        ids: np.ndarray,
        kind: TokenKind,
        loss: np.ndarray,
        logprobs: np.ndarray | None = None,
        support: SupportReply | None = None,
    ) -> None:
        zeros = np.zeros(ids.size, dtype=np.int64)
        if support is None:
            support = SupportReply(zeros[:0], zeros, zeros > 0)
        if logprobs is None:
            logprobs = zeros.astype(np.float32)
        kinds = np.full(ids.size, kind, dtype=np.uint8)
        columns = (ids, kinds, loss, logprobs, support.counts, support.added)
        for name, rows in zip(_COLUMNS, columns, strict=True):
            self._columns[name].add(rows)
        self._columns["support_ids"].add(support.token_ids)
        if ids.size:
            self._last_tail = None

    def _add_rows(self, rows: np.ndarray | None, version: Hashable) -> None:
        if rows is not None and len(rows):
            self._last_tail = None
            self._add_span(RowSpan(self.num_rows, self.num_rows + len(rows), version))
            self._columns["routes"].add(rows)

    def _add_span(self, span: RowSpan) -> None:
        if self._spans and self._spans[-1].version == span.version:
            span = span._replace(start=self._spans.pop().start)
        self._spans.append(span)

    def _cut_spans(self) -> tuple[RowSpan, ...]:
        """Keep the spans of the rows that are there; returns the others."""
        rows, spans = self.num_rows, self._spans
        removed = [span._replace(start=max(span.start, rows)) for span in spans if span.stop > rows]
        self._spans = [
            span._replace(stop=min(span.stop, rows)) for span in spans if span.start < rows
        ]
        return tuple(removed)


def _route_sizes(
    name: str, num_layers: Any, topk: Any, moe_layers: Any
) -> tuple[tuple[int, int] | None, np.ndarray]:
    """((L, K) or None, [L] bool whether a captured layer has experts)."""
    if num_layers is None and topk is None:
        if moe_layers is not None:
            raise ValueError(f"{name}: moe_layers without num_layers and topk")
        return None, np.empty(0, dtype=np.bool_)
    if num_layers is None or topk is None:
        raise ValueError(f"{name}: num_layers={num_layers} and topk={topk}; give both or none")
    layers, experts = positive(num_layers, f"{name}: num_layers"), positive(topk, f"{name}: topk")
    check_total(name, layers, "layers")
    check_total(name, experts, "experts a token")
    return (layers, experts), expert_layers(name, moe_layers, layers)
