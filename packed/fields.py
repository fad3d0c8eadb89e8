"""The packed fields a batch may hold, and what each has where no row was captured.

    rollout_expert_indices   captured prefix, 0 <= rows <= length   uint8, int16, int32 [L, K]
    rollout_sample_support   exactly one row a response token       int32 [C], or ragged

    field    position without a row   batch padding                 synthetic trajectory
    routes   K distinct experts       no rows                       no rows
    support  -1                       trajectory 0's rows, all -1   no rows

The support may also be stored ragged, as a ``PackedRagged``: what is a row of -1 here is an empty
row there.

Batch padding is a copy of trajectory 0's tokens that no loss counts; a synthetic trajectory is one
attended token without a response. Rows are stored only where something was captured: the dummy
routes of all other tokens are written on the device, when they are gathered. ``materialize`` stores
them for code that wants full-length rows.

Sizes: B trajectories, S padded length, L captured layers, K experts a token, E experts, C width of
the support.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from packhorse._nvtx import ranged, ranged_methods
from packhorse.kernels.dummies import dummy_routes
from packhorse.kernels.routes import Dummy, check_dummy
from packhorse.packed.checks import check_fill
from packhorse.packed.collate import ROUTES_FIELD, SUPPORT_FIELD, routes_dtype
from packhorse.packed.copies import join_rows
from packhorse.packed.host import from_host, host_count, host_ints
from packhorse.packed.ragged import PackedRagged
from packhorse.packed.sentinels import NO_CANDIDATE
from packhorse.packed.tensor import PackedTensor

#: The two forms of a packed field.
Packed: TypeAlias = PackedTensor | PackedRagged

ROUTE_DTYPES: Final = (torch.uint8, torch.int16, torch.int32)

#: ``PackedField.fill`` of routes: K distinct experts, which no single number is.
DUMMY_ROUTE: Final = "dummy_route"

#: A dense [B, S] bool field of this name is True for all of a padding or synthetic trajectory.
ROUTER_PADDING_MASK_FIELD: Final = "router_padding_mask"

#: Which tokens have a row: the evaluated ones from the first on; each of the response; each of the
#: trajectory; or any number of rows.
Domain = Literal["captured", "response", "token", "any"]
_DOMAINS: Final = ("captured", "response", "token", "any")


@ranged_methods()
@dataclass(frozen=True, eq=False)
class PackedField:
    """The rule of one packed field.

    Args:
        name: of the field.
        domain: which tokens have a row. "captured": the first ``rows`` <= length tokens;
            "response": each response token; "token": each token, prompt and response; "any": as
            many rows as there are, unrelated to tokens.
        dtypes: those that are legal, narrowest first.
        row_shape: of one row; None where any size is legal.
        fill: what a model position without a row receives, and what a row of padding holds; every
            dtype must hold it. ``DUMMY_ROUTE`` for rows [L, K] of routes.
        ragged: whether it may be a ``PackedRagged`` too, whose empty row stands for one of ``fill``
            alone: rows [C] of any width, of int32, filled by -1 (``NO_CANDIDATE``).

    Raises:
        TypeError, ValueError: an argument is wrong; names it.

    Example:
        >>> entropy = PackedField("rollout_entropy", "response", (torch.float32,), (), fill=0.0)
        >>> fields = PACKED_FIELDS.with_field(entropy)
    """

    name: str
    domain: Domain
    dtypes: tuple[torch.dtype, ...]
    row_shape: tuple[int | None, ...]
    fill: float | str
    ragged: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise TypeError(f"PackedField: name must be a non-empty string, got {self.name!r}")
        where = f"PackedField: {self.name}"
        if self.domain not in _DOMAINS:
            raise ValueError(f"{where}: domain must be one of {_DOMAINS}, got {self.domain!r}")
        for what, given in (("dtypes", self.dtypes), ("row_shape", self.row_shape)):
            if not isinstance(given, tuple):
                raise TypeError(f"{where}: {what} must be a tuple, got {type(given).__name__}")
        if not self.dtypes or not all(isinstance(dtype, torch.dtype) for dtype in self.dtypes):
            raise TypeError(f"{where}: dtypes must hold one torch dtype or more")
        for size in self.row_shape:
            if size is not None:
                host_count(size, f"{where}: a size of row_shape")
        if self.fill == DUMMY_ROUTE:
            if self.domain != "captured" or len(self.row_shape) != 2:
                raise ValueError(f"{where}: dummy routes need domain 'captured' and rows [L, K]")
            if any(d.is_floating_point or d == torch.bool for d in self.dtypes):
                raise TypeError(f"{where}: dummy routes need integer dtypes, got {self.dtypes}")
        else:
            for dtype in self.dtypes:
                check_fill(where, self.fill, dtype)
        if not isinstance(self.ragged, bool):
            raise TypeError(f"{where}: ragged must be a bool, got {type(self.ragged).__name__}")
        legal = self.row_shape == (None,) and torch.int32 in self.dtypes
        if self.ragged and not (legal and self.fill == NO_CANDIDATE):
            raise ValueError(f"{where}: ragged needs rows [C] of any width, int32 and fill -1")

    def _key(self) -> tuple[Any, ...]:
        fill = "nan" if self.fill != self.fill else self.fill  # a NaN is not equal to itself
        return self.name, self.domain, self.dtypes, self.row_shape, fill, self.ragged

    def __eq__(self, other: object) -> bool:
        return self._key() == other._key() if isinstance(other, PackedField) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key())

    @property
    def forms(self) -> str:
        """The classes that may hold it, in words."""
        return "a PackedTensor or a PackedRagged" if self.ragged else "a PackedTensor"

    def check(self, function: str, packed: Packed) -> None:
        """Refuse a wrong form or dtype (``TypeError``) or row shape (``ValueError``), under the
        name ``function``."""
        if isinstance(packed, PackedRagged) and self.ragged:
            return
        if not isinstance(packed, PackedTensor):
            given = type(packed).__name__
            raise TypeError(f"{function}: {self.name} must be {self.forms}, got {given}")
        if packed.dtype not in self.dtypes:
            legal = " or ".join(str(dtype) for dtype in self.dtypes)
            raise TypeError(f"{function}: {self.name} must be {legal}, got {packed.dtype}")
        shape = tuple(packed.row_shape)
        if len(shape) != len(self.row_shape) or any(
            expected not in (None, size)
            for size, expected in zip(shape, self.row_shape, strict=True)
        ):
            sizes = ", ".join("*" if size is None else str(size) for size in self.row_shape)
            raise ValueError(f"{function}: {self.name} must have rows [{sizes}], got {list(shape)}")

    def check_lengths(
        self,
        function: str,
        packed: Packed,
        lengths: Sequence[int],
        response_lengths: Sequence[int] | None = None,
    ) -> None:
        """Refuse (``ValueError``) a trajectory whose number of rows its domain does not allow.

        Args:
            function: whose name the error begins with.
            lengths: B numbers of tokens, prompt and response, on the host.
            response_lengths: B numbers of response tokens; needed by the domain "response".
        """
        rows = np.diff(packed.bounds)
        what, given = "lengths", lengths
        if self.domain == "response":
            if response_lengths is None:
                raise TypeError(f"{function}: {self.name} needs response_lengths")
            what, given = "response_lengths", response_lengths
        tokens = host_ints(given, f"{function}: {what}")
        if tokens.size != rows.size:
            raise ValueError(
                f"{function}: {self.name} has {rows.size} trajectories, {what} has {tokens.size}"
            )
        if self.domain == "any":
            return
        wrong = rows > tokens if self.domain == "captured" else rows != tokens
        if wrong.any():
            i = int(np.argmax(wrong))
            kind = "response tokens" if self.domain == "response" else "tokens"
            most = " at most" if self.domain == "captured" else ""
            raise ValueError(
                f"{function}: {self.name} of trajectory {i} has {rows[i]} rows for {tokens[i]}"
                f" {kind}; a token has one{most}"
            )

    def padding(self, packed: Packed, count: int) -> Packed:
        """Rows of ``count`` padding trajectories: copies of trajectory 0's tokens, no loss.

        As many rows as trajectory 0 has, all ``fill`` (empty in a ``PackedRagged``), where the
        domain fixes their number; none in the domains "captured" and "any". In the form of
        ``packed``, on its device.
        """
        fixed = self.domain in ("response", "token") and len(packed) > 0
        return self._filled(packed, int(packed.bounds[1]) if fixed else 0, count)

    def synthetic(self, packed: Packed, count: int) -> Packed:
        """Rows of ``count`` synthetic trajectories, one attended token each and no response."""
        return self._filled(packed, 1 if self.domain == "token" else 0, count)

    def _filled(self, like: Packed, num_rows: int, count: int) -> Packed:
        if isinstance(like, PackedRagged):
            return PackedRagged.empty([num_rows] * count, device=like.device)
        shape = (num_rows * count, *like.row_shape)
        if num_rows == 0:
            values = like.values.new_empty(shape)
        else:
            assert not isinstance(self.fill, str)  # dummy routes have no row of their own
            values = like.values.new_full(shape, self.fill)
        return PackedTensor.from_lengths(values, [num_rows] * count)


@ranged_methods()
class FieldRegistry(Mapping[str, PackedField]):
    """Rules by field name. Immutable: ``with_field`` gives another registry.

    Args:
        fields: rules; ``PACKED_FIELDS`` holds those of routes and support.

    Raises:
        TypeError: an entry is no ``PackedField``.
        ValueError: a name stands twice.
    """

    __slots__ = ("_fields",)

    def __init__(self, fields: Iterable[PackedField] = ()) -> None:
        self._fields: dict[str, PackedField] = {}
        for field in fields:
            if not isinstance(field, PackedField):
                raise TypeError(
                    f"FieldRegistry: a rule must be a PackedField, got {type(field).__name__}"
                )
            if field.name in self._fields:
                raise ValueError(f"FieldRegistry: {field.name} is registered already")
            self._fields[field.name] = field

    def with_field(self, field: PackedField) -> "FieldRegistry":
        """These rules and one more. A name that is registered already is a ``ValueError``."""
        return FieldRegistry([*self._fields.values(), field])

    def merge(self, other: "FieldRegistry") -> "FieldRegistry":
        """The rules of both; two different rules of one name are a ``ValueError``."""
        if other is self or other._fields == self._fields:
            return self
        for name, field in other._fields.items():
            if self._fields.get(name, field) != field:
                raise ValueError(f"FieldRegistry.merge: {name} has two different rules")
        return FieldRegistry({**self._fields, **other._fields}.values())

    def rule(self, function: str, name: str) -> PackedField:
        """The rule of ``name``; without one, a ``ValueError`` that begins with ``function``."""
        field = self._fields.get(name)
        if field is None:
            raise ValueError(
                f"{function}: {name} is packed and has no registered rule that says what padding"
                " holds; add one with FieldRegistry.with_field"
            )
        return field

    def __getitem__(self, name: str) -> PackedField:
        return self._fields[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def __reduce__(self) -> tuple[Any, ...]:
        return FieldRegistry, (tuple(self._fields.values()),)

    def __repr__(self) -> str:
        return f"FieldRegistry({', '.join(self._fields)})"


#: The rules of routes and support.
PACKED_FIELDS: Final = FieldRegistry(
    [
        PackedField(ROUTES_FIELD, "captured", ROUTE_DTYPES, (None, None), fill=DUMMY_ROUTE),
        PackedField(
            SUPPORT_FIELD, "response", (torch.int32,), (None,), fill=NO_CANDIDATE, ragged=True
        ),
    ]
)


# --- the router's padding mask, and rows for every token ------------------------------------------


@ranged
def router_padding_mask(
    captured: PackedTensor | Sequence[int],
    lengths: Sequence[int],
    *,
    width: int | None = None,
    first_columns: Sequence[int] | None = None,
    explicit: Tensor | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Which columns of a padded batch the router does not count: padding, or no captured route.

        mask[i, s] = not first_columns[i] <= s < first_columns[i] + captured[i], or explicit[i, s]

    Args:
        captured: the packed routes, or B numbers of their rows, on the host.
        lengths: B numbers of tokens, each at least the trajectory's rows.
        width: S, at least the longest trajectory, which is the default.
        first_columns: B columns of the first real token; by default S - length (left padding).
        explicit: [B, S] bool, or-ed in: tokens that are masked though they have a row, as those of
            ``materialize``.
        device: of the result; by default that of ``explicit``, of the packed routes, or the CPU.

    Returns:
        [B, S] bool, True = padding or not captured (the polarity of Megatron's ``padding_mask``).
        Nothing is read from a device.

    Raises:
        TypeError: an argument has a wrong type, or is on a device where it must be on the host.
        ValueError: counts differ, a trajectory has more rows than tokens or does not fit its
            columns, ``explicit`` has another shape or device.
    """
    name = "router_padding_mask"
    place = torch.device("cpu")
    if isinstance(captured, PackedTensor):
        rows, place = np.diff(captured.bounds), captured.device
    else:
        rows = host_ints(captured, f"{name}: captured")
    tokens = host_ints(lengths, f"{name}: lengths")
    if (tokens < 0).any():
        i = int(np.argmax(tokens < 0))
        raise ValueError(f"{name}: length of trajectory {i} is negative: {tokens[i]}")
    if rows.size != tokens.size:
        raise ValueError(f"{name}: captured has {rows.size} trajectories, lengths {tokens.size}")
    wrong = (rows < 0) | (rows > tokens)
    if wrong.any():
        i = int(np.argmax(wrong))
        raise ValueError(
            f"{name}: {ROUTES_FIELD} of trajectory {i} has {rows[i]} rows for {tokens[i]} tokens"
        )
    longest = int(tokens.max(initial=0))
    width = longest if width is None else host_count(width, f"{name}: width")
    if first_columns is None:
        first = width - tokens
    else:
        first = host_ints(first_columns, f"{name}: first_columns")
        if first.size != tokens.size:
            raise ValueError(
                f"{name}: first_columns has {first.size} trajectories, lengths {tokens.size}"
            )
    outside = (first < 0) | (first > width - tokens)
    if outside.any():
        i = int(np.argmax(outside))
        raise ValueError(
            f"{name}: trajectory {i} of {tokens[i]} tokens from column {first[i]} does not fit"
            f" width={width}"
        )
    if explicit is not None:
        if not isinstance(explicit, Tensor) or explicit.dtype != torch.bool:
            raise TypeError(f"{name}: explicit must be a bool tensor, True where masked")
        if tuple(explicit.shape) != (tokens.size, width):
            raise ValueError(
                f"{name}: explicit must be {[tokens.size, width]}, got {list(explicit.shape)}"
            )
        place = explicit.device
    if device is not None:
        place = torch.device(device)
        if explicit is not None and place.type != explicit.device.type:
            raise ValueError(f"{name}: explicit is on {explicit.device}, device={device}")
        place = place if explicit is None else explicit.device
    begins, ends = from_host(np.stack([first, first + rows])[:, :, None], place)
    columns = torch.arange(width, device=place)
    mask = (columns < begins) | (columns >= ends)
    return mask if explicit is None else mask | explicit


class MaterializedRoutes(NamedTuple):
    """Routes of every token, captured or not."""

    routes: PackedTensor  # [sum(lengths), L, K]: a row a token
    padding_mask: PackedTensor  # [sum(lengths)] bool, True where the row is a dummy


@ranged
def materialize(
    routes: PackedTensor,
    lengths: Sequence[int],
    *,
    num_experts: int,
    dummy: Dummy = "constant",
    ep_size: int = 1,
    spread_offset: int = 0,
) -> MaterializedRoutes:
    """Store a route row for every token: the captured ones, then dummies up to the length.

    A batch that carries such rows must carry the mask too (``router_padding_mask(...,
    explicit=mask.to_padded(True, width, side="left"))``): their number no longer says what was
    captured.

    Args:
        routes: [N, L, K] uint8, int16 or int32, captured prefixes of B trajectories.
        lengths: B numbers of tokens on the host, each at least the trajectory's rows.
        num_experts: E >= K; the result's dtype holds E - 1, and is wider than that of ``routes``
            where that does not.
        dummy, ep_size, spread_offset: as in ``dummy_routes``; "spread" walks over the missing rows
            in order.

    Returns:
        ``MaterializedRoutes`` on the device of ``routes``, nothing read back from there.

    Raises:
        TypeError: ``routes`` is no ``PackedTensor`` of a dtype of routes; ``lengths`` is not on the
            host.
        ValueError: a shape or count is wrong, or a trajectory has more rows than tokens; names the
            trajectory. An id on the CPU is not below E; names trajectory and row.
    """
    name = "materialize"
    if not isinstance(routes, PackedTensor):
        raise TypeError(f"{name}: routes must be a PackedTensor, got {type(routes).__name__}")
    rule = PACKED_FIELDS[ROUTES_FIELD]
    rule.check(name, routes)
    rule.check_lengths(name, routes, lengths)
    num_layers, topk = routes.row_shape
    check_dummy(name, dummy, topk, num_experts, ep_size, spread_offset)
    _check_experts(name, routes, num_experts)

    dtype = routes.dtype
    if num_experts - 1 > torch.iinfo(dtype).max:
        dtype = routes_dtype(num_experts)
    tokens = host_ints(lengths, f"{name}: lengths")
    captured = np.diff(routes.bounds)
    missing = tokens - captured
    segments = routes.widen(dtype) if dtype != routes.dtype else routes
    dummies = dummy_routes(
        int(missing.sum()), topk, num_experts=num_experts, dtype=dtype, dummy=dummy,
        ep_size=ep_size, spread_offset=spread_offset, device=routes.device,
    )[0][:, None].expand(-1, num_layers, -1)  # fmt: skip
    parts = zip(segments, dummies.split(missing.tolist()), strict=True)
    values = join_rows([segments.values[:0], *chain.from_iterable(parts)])
    bounds = np.cumsum(tokens) - tokens
    positions = np.arange(values.shape[0], dtype=np.int64) - np.repeat(bounds, tokens)
    mask = from_host(positions >= np.repeat(captured, tokens), routes.device)
    row_counts = tokens.tolist()
    return MaterializedRoutes(
        PackedTensor.from_lengths(values, row_counts), PackedTensor.from_lengths(mask, row_counts)
    )


def _check_experts(name: str, routes: PackedTensor, num_experts: int) -> None:
    values: Any = routes.values
    if values.device.type != "cpu" or values.numel() == 0:
        return
    array = values.numpy()
    if array.min() < 0 or array.max() >= num_experts:
        rows = ((array < 0) | (array >= num_experts)).any(axis=(1, 2))
        row = int(np.argmax(rows))
        i = int(np.searchsorted(routes.bounds, row, side="right")) - 1
        raise ValueError(
            f"{name}: {ROUTES_FIELD} of trajectory {i}, row {row - routes.bounds[i]}: an expert is"
            f" outside [0, {num_experts})"
        )
