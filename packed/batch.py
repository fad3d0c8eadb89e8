"""Everything a trainer knows of B trajectories, under one batch size.

    kind     value                              trajectory i
    dense    tensor [B, ...]                    row i
    packed   ``PackedTensor`` or                segment i
             ``PackedRagged`` of B segments
    listed   list or tuple of B things          thing i; tensors of any shapes, or what is none
    nested   mapping of fields                  trajectory i of each

Every operation does the same to all kinds and costs as much as its result: a slice is a view, a
selection of consecutive trajectories too. Nothing is written in place and nothing waits for a
device; indices, counts and lengths are host integers. ``metadata`` belongs to the batch as a whole
and goes with every result.

Padding and synthetic trajectories hold what the field registry says of each packed field; one
without a rule is refused there.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, SupportsIndex, TypeAlias, overload

import numpy as np
import torch
from torch import Tensor

from packhorse._nvtx import ranged_methods
from packhorse.packed.batch_padding import check_zeroed, padding_fields, synthetic_fields
from packhorse.packed.batch_parts import (
    Shipped,
    apply,
    check_fields,
    check_joinable,
    check_kinds,
    cut_fields,
    equal_fields,
    join_fields,
    kind_of,
    leaves,
    received,
    shown,
)
from packhorse.packed.batch_tensordict import parts_of, tensordict_of
from packhorse.packed.copies import clone_rows, index_rows, repeat_rows, take_rows
from packhorse.packed.fields import PACKED_FIELDS, FieldRegistry, Packed
from packhorse.packed.host import (
    Selector,
    check_total,
    chunk_sizes,
    device_and_dtype,
    from_host,
    host_count,
    host_int,
    is_scalar,
    repeat_counts,
    segment_ids,
    slice_bounds,
    split_stops,
)
from packhorse.packed.segments import PackedSegments

Field: TypeAlias = "Tensor | Packed | tuple[Any, ...] | dict[str, Any]"

#: Zero in padding, so that no loss counts it.
LOSS_MASK_FIELD: Final = "loss_mask"
#: One at column 0 of a synthetic trajectory.
ATTENTION_MASK_FIELD: Final = "attention_mask"


@ranged_methods()
class Batch:
    """B trajectories: dense tensors, packed fields, lists and nested mappings of these.

    Args:
        fields: by name. Tensors are taken as they are, not copied; any device.
        batch_size: B; needed only where no field tells it.
        metadata: of the batch as a whole, by name; any values.
        registry: the rules of its packed fields. One that has a rule is held to it; one that has
            none may be anything until padding is needed.

    Raises:
        TypeError: a field is of no kind, a registered one is not packed or has another dtype.
        ValueError: a field has another batch size, or a registered one another row shape.

    Example:
        >>> batch = Batch({"token_ids": torch.zeros(4, 7).long(), "rollout_expert_indices": routes})
        >>> for microbatch in batch.split(2): ...
    """

    __slots__ = ("__weakref__", "_fields", "_metadata", "_registry", "_size")

    _fields: dict[str, Field]
    _size: int
    _metadata: dict[str, Any]
    _registry: FieldRegistry

    def __init__(
        self,
        fields: Mapping[str, Any],
        *,
        batch_size: int | None = None,
        metadata: Mapping[str, Any] | None = None,
        registry: FieldRegistry = PACKED_FIELDS,
    ) -> None:
        if not isinstance(registry, FieldRegistry):
            raise TypeError(
                f"Batch: registry must be a FieldRegistry, got {type(registry).__name__}"
            )
        if metadata is not None and not isinstance(metadata, Mapping):
            raise TypeError(f"Batch: metadata must be a mapping, got {type(metadata).__name__}")
        size = None if batch_size is None else host_count(batch_size, "Batch: batch_size")
        taken, size = check_fields("Batch", fields, size, registry)
        self._set(taken, size, dict(metadata or {}), registry)

    def _set(
        self, fields: dict[str, Field], size: int, metadata: dict[str, Any], registry: FieldRegistry
    ) -> None:
        self._fields, self._size = fields, size
        self._metadata, self._registry = metadata, registry

    def _with(self, fields: dict[str, Field], size: int | None = None) -> "Batch":
        """From fields already checked."""
        batch = object.__new__(Batch)
        size = self._size if size is None else size
        batch._set(fields, size, self._metadata.copy(), self._registry)
        return batch

    # --- what it is -------------------------------------------------------------------------------

    @property
    def fields(self) -> Mapping[str, Field]:
        """Its fields by name, read-only."""
        return MappingProxyType(self._fields)

    @property
    def metadata(self) -> dict[str, Any]:
        """Of the batch as a whole; yours to change. Results start from a copy of it."""
        return self._metadata

    @property
    def registry(self) -> FieldRegistry:
        """The rules of its packed fields."""
        return self._registry

    def __len__(self) -> int:
        """B."""
        return self._size

    def __contains__(self, name: object) -> bool:
        return name in self._fields

    def __iter__(self) -> Iterator["Batch"]:
        """Its trajectories, each a batch of one; ``fields`` iterates over names."""
        return (self._slice(i, i + 1) for i in range(self._size))

    def __repr__(self) -> str:
        inside = ", ".join(f"{path}: {shown(leaf)}" for path, leaf in leaves(self._fields))
        return f"Batch({self._size} trajectories; {inside or 'no fields'})"

    # --- fields -----------------------------------------------------------------------------------

    def select(self, names: Iterable[str]) -> "Batch":
        """Those fields alone, in that order, same trajectories. A missing one is a ``KeyError``."""
        return self._with({name: self._field("Batch.select", name) for name in _names(names)})

    def drop(self, names: Iterable[str]) -> "Batch":
        """All fields but those. A missing one is a ``KeyError``."""
        fields = self._fields.copy()
        for name in dict.fromkeys(_names(names)):
            self._field("Batch.drop", name)
            del fields[name]
        return self._with(fields)

    def with_fields(self, fields: Mapping[str, Any]) -> "Batch":
        """With those fields added or in place of the old, checked as the constructor checks."""
        added, _ = check_fields("Batch.with_fields", fields, self._size, self._registry)
        return self._with({**self._fields, **added})

    def __setitem__(self, name: str, value: Any) -> None:
        """Add or replace a field of this batch; views made of it before keep what they had."""
        if not isinstance(name, str):
            raise TypeError(f"Batch: a field is set by its name, got {type(name).__name__}")
        added, _ = check_fields("Batch", {name: value}, self._size, self._registry)
        self._fields = {**self._fields, **added}

    def _field(self, function: str, name: str) -> Field:
        if name not in self._fields:
            known = ", ".join(self._fields) or "none"
            raise KeyError(f"{function}: no field {name!r}; there are {known}")
        return self._fields[name]

    # --- trajectories -----------------------------------------------------------------------------

    @overload
    def __getitem__(self, selector: str) -> Any: ...

    @overload
    def __getitem__(self, selector: "SupportsIndex | Selector") -> "Batch": ...

    def __getitem__(self, selector: Any) -> Any:
        """A field by its name; else a batch of the trajectories that the selector names.

        An integer gives a batch of one (-1 the last), a slice of step 1 a view, and a list, tensor
        or array of integers or booleans, or a range, those trajectories in its order, repeats
        allowed. Where they stand one after another that is a view too.

        Raises:
            KeyError: no such field.
            TypeError, ValueError, IndexError: the selector is on a device, of another type, or
                names what is not there.
        """
        if isinstance(selector, str):
            field = self._field("Batch", selector)
            return dict(field) if isinstance(field, dict) else field
        if isinstance(selector, slice):
            start, stop, step = slice_bounds(selector, self._size, "Batch")
            if step == 1:
                return self._slice(start, max(start, stop))
        elif is_scalar(selector):
            i = host_int(selector, "Batch: the index")
            if not -self._size <= i < self._size:
                raise IndexError(f"Batch: index {i} is out of range for {self._size} trajectories")
            i %= self._size
            return self._slice(i, i + 1)
        return self._gather("Batch", segment_ids(selector, self._size, "Batch"))

    def _slice(self, start: int, stop: int) -> "Batch":
        return self._with(cut_fields(self._fields, start, stop), stop - start)

    def _gather(self, function: str, ids: np.ndarray) -> "Batch":
        check_total(function, ids.size, "trajectories")
        if ids.size == 0:
            return self._slice(0, 0)
        first = int(ids[0])
        if (ids == np.arange(first, first + ids.size)).all():
            return self._slice(first, first + ids.size)
        rows: dict[torch.device, Tensor] = {}

        def gather_dense(_: str, dense: Tensor) -> Tensor:
            if dense.is_cpu:
                return take_rows(dense, ids)
            if dense.device not in rows:
                rows[dense.device] = from_host(ids.copy(), dense.device)
            return index_rows(dense, rows[dense.device])

        listed_ids = ids.tolist()
        fields = apply(
            function,
            self._fields,
            gather_dense,
            lambda _, packed: packed[ids],
            lambda _, listed: tuple(listed[i] for i in listed_ids),
        )
        return self._with(fields, ids.size)

    def repeat(self, times: int) -> "Batch":
        """The whole batch ``times`` times over: 0 1 become 0 1 0 1. 1 returns it as it is."""
        name = "Batch.repeat"
        times = host_count(times, f"{name}: times")
        if times == 1 or self._size == 0:
            return self
        check_total(name, self._size * times, "trajectories")
        fields = apply(
            name,
            self._fields,
            lambda _, dense: repeat_rows(dense, times),
            lambda _, packed: packed.repeat(times),
            lambda _, listed: listed * times,
        )
        return self._with(fields, self._size * times)

    def repeat_interleave(self, repeats: int | Sequence[int] | Tensor) -> "Batch":
        """Each trajectory ``repeats`` times in place: 0 1 become 0 0 1 1.

        Args:
            repeats: one count, or B of them on the host; 0 leaves the trajectory out.
        """
        name = "Batch.repeat_interleave"
        counts = repeat_counts(name, repeats, np.zeros(self._size, dtype=np.int64))
        return self._gather(name, np.repeat(np.arange(self._size, dtype=np.int64), counts))

    def split(self, split_size: int | Sequence[int]) -> tuple["Batch", ...]:
        """Views of consecutive trajectories, as ``torch.split`` cuts dimension 0.

        Args:
            split_size: trajectories a part, fewer in the last; or one size a part, B in sum.
        """
        stops = split_stops("Batch.split", split_size, self._size, "trajectories")
        return tuple(self._slice(a, b) for a, b in zip([0, *stops], stops, strict=False))

    def chunk(self, chunks: int) -> tuple["Batch", ...]:
        """``split`` into parts of ceil(B / chunks), as ``torch.chunk``: at most ``chunks`` parts,
        fewer where B is small, and that many empty ones of an empty batch."""
        return self.split(chunk_sizes("Batch.chunk", chunks, self._size))

    @staticmethod
    def cat(batches: Iterable["Batch"], *, widen: bool = False) -> "Batch":
        """Join batches, in order. One input is returned as it is.

        Args:
            batches: of the same fields, kinds, dtypes, row shapes and devices.
            widen: cast packed integer fields of several dtypes to the widest among them (routes of
                a batch whose ids fit uint8 beside one whose ids do not); no value changes.

        Returns:
            The metadata is that of input 0, the registry has the rules of all.

        Raises:
            TypeError: an input is no ``Batch``; kinds, forms of a packed field or dtypes differ,
                and are not to be widened, or to none that is legal by a rule of another input.
            ValueError: no inputs; fields, row shapes, devices or rules differ, or the rows of a
                field are past int32. Each names field and input.
        """
        name = "Batch.cat"
        batches = list(batches)
        if not batches:
            raise ValueError(f"{name}: no inputs")
        for i, batch in enumerate(batches):
            if not isinstance(batch, Batch):
                raise TypeError(f"{name}: input {i} is a {type(batch).__name__}")
        if len(batches) == 1:
            return batches[0]
        first = batches[0]
        registry = first._registry
        for i, batch in enumerate(batches[1:], 1):
            try:
                registry = registry.merge(batch._registry)
            except ValueError as error:
                raise ValueError(f"{name}: the registry of input {i}: {error}") from None
        parts = [batch._fields for batch in batches]
        check_joinable(name, "", parts, widen)
        size = sum(batch._size for batch in batches)
        check_total(name, size, "trajectories")
        joined = first._with(join_fields(name, parts), size)
        joined._registry = registry
        if registry is not first._registry:  # a field may have met none of these rules yet
            check_kinds(name, joined._fields, registry)
        return joined

    # --- padding ----------------------------------------------------------------------------------

    def pad_to_multiple(self, multiple: int, *, zeroed: Sequence[str] | None = None) -> "Batch":
        """Append copies of trajectory 0 that no loss counts until ``multiple`` divides B.

        Dense, listed and nested fields repeat trajectory 0, packed fields hold what their rule says
        (routes: no rows; support: as many rows as trajectory 0, all -1 or empty),
        ``router_padding_mask`` is True. ``[:len(batch)]`` of the result takes them off. A batch
        that needs none, an empty one too, is returned as it is.

        Args:
            zeroed: dense or listed fields that padding holds zeros in, so that no loss counts it;
                nested ones as "outer.inner". By default ``loss_mask``, which must then be there;
                pass () for a batch that is not trained on.

        Raises:
            ValueError: a packed field has no rule, a field of ``zeroed`` is not there or packed, or
                is not named although the batch has no ``loss_mask``.
        """
        name = "Batch.pad_to_multiple"
        multiple = host_int(multiple, f"{name}: multiple")
        if multiple < 1:
            raise ValueError(f"{name}: multiple must be positive, got {multiple}")
        if zeroed is None:
            if LOSS_MASK_FIELD not in self._fields:
                raise ValueError(
                    f"{name}: no field {LOSS_MASK_FIELD}; name in zeroed= the fields that keep"
                    " padding out of the loss, () if there are none"
                )
            zeroed = (LOSS_MASK_FIELD,)
        zeros = frozenset(_names(zeroed))
        check_zeroed(name, self._fields, zeros)
        count = -self._size % multiple
        if count == 0:
            return self
        check_total(name, self._size + count, "trajectories")
        padding = padding_fields(name, self._fields, count, zeros, self._rules(name))
        return self._with(join_fields(name, [self._fields, padding]), self._size + count)

    def synthetic(
        self,
        count: int,
        *,
        attended: str | None = ATTENTION_MASK_FIELD,
        values: Mapping[str, Any] | None = None,
    ) -> "Batch":
        """``count`` trajectories like these that stand for nothing, for ranks that have too few.

        Each has one attended token, at column 0 (``TokenLayout.build([1], first_columns=[0])``), no
        captured route and no response. Dense fields are zero, ``router_padding_mask`` is True,
        listed tensors are [0, ...], other listed things None, packed fields what their rule says.

        Args:
            count: trajectories.
            attended: the dense [B, S] field that is 1 at column 0; None where there is none.
            values: by field, what else a dense one holds: a number, or a row of it.

        Raises:
            KeyError: ``attended`` or a field of ``values`` is not there.
            ValueError: a packed field has no rule; ``attended`` has no column, a row does not fit.
        """
        name = "Batch.synthetic"
        count = host_count(count, f"{name}: count")
        check_total(name, count, "trajectories")
        rules = self._rules(name)
        return self._with(
            synthetic_fields(name, self._fields, count, attended, dict(values or {}), rules), count
        )

    def _rules(self, function: str) -> dict[str, Any]:
        """The rule of each packed field; all must have one."""
        packed = [path for path, leaf in leaves(self._fields) if kind_of(leaf) == "packed"]
        return {path: self._registry.rule(function, path) for path in packed}

    # --- placement and dtype ----------------------------------------------------------------------

    def to(
        self,
        target: torch.device | str | int | torch.dtype | None = None,
        dtype: torch.dtype | None = None,
        *,
        device: torch.device | str | int | None = None,
        non_blocking: bool = False,
        copy: bool = False,
    ) -> "Batch":
        """Move all tensors, and cast the floating ones: ``to(device)``, ``to(dtype)``, or both.

        A ``dtype`` casts floating fields only, as ``torch.nn.Module.to`` does: ids, masks, routes
        and support pass unchanged. Listed things that are no tensors stay as they are.

        Raises:
            TypeError: ``dtype`` is not floating; a target given twice.
        """
        name = "Batch.to"
        place, dtype = device_and_dtype(name, target, dtype, device)
        if dtype is not None and not dtype.is_floating_point:
            raise TypeError(f"{name}: {dtype} is not floating; only floating fields are cast")

        def move(_: str, x: Tensor) -> Tensor:
            wanted = dtype if dtype is not None and x.is_floating_point() else x.dtype
            return x.to(x.device if place is None else place, wanted, non_blocking, copy)

        return self._each(
            name,
            move,
            lambda _, packed: packed.to(place, dtype, non_blocking=non_blocking, copy=copy),
        )

    def pin_memory(self) -> "Batch":
        """Copy all tensors to page-locked memory; ``self`` where there is no accelerator.

        Raises:
            ValueError: a field is on a device; names it.
        """
        name = "Batch.pin_memory"
        for path, leaf in leaves(self._fields):
            for x in leaf if isinstance(leaf, tuple) else (leaf,):
                if isinstance(x, Tensor | PackedSegments) and x.device.type != "cpu":
                    raise ValueError(f"{name}: {path} is on {x.device}")
        if not torch.accelerator.is_available():
            return self
        return self._each(name, lambda _, x: x.pin_memory(), lambda _, p: p.pin_memory())

    def contiguous(self) -> "Batch":
        """Tensors and rows one after another in memory; what stands so already is not copied."""
        return self._each(
            "Batch.contiguous", lambda _, x: x.contiguous(), lambda _, packed: packed.contiguous()
        )

    def clone(self) -> "Batch":
        """A private, writable, contiguous copy of all tensors."""
        return self._each("Batch.clone", lambda _, x: clone_rows(x), lambda _, p: p.clone())

    def detach(self) -> "Batch":
        """The same tensors outside the autograd graph."""
        return self._each("Batch.detach", lambda _, x: x.detach(), lambda _, p: p.detach())

    def _each(
        self,
        function: str,
        of_tensor: Callable[[str, Tensor], Any],
        of_packed: Callable[[str, Packed], Packed],
    ) -> "Batch":
        """Change tensors in place of themselves; listed ones too."""

        def of_listed(path: str, listed: tuple[Any, ...]) -> tuple[Any, ...]:
            return tuple(of_tensor(path, x) if isinstance(x, Tensor) else x for x in listed)

        return self._with(apply(function, self._fields, of_tensor, of_packed, of_listed))

    # --- other forms ------------------------------------------------------------------------------

    def to_tensordict(self) -> Any:
        """A ``tensordict.TensorDict`` of batch size [B].

        Packed fields become jagged nested tensors over the same rows, a ``PackedRagged`` a
        ``TensorDict`` of two (``ragged_ids`` over the same ids, ``ragged_widths``), listed ones
        ``NonTensorStack``, nested ones a ``TensorDict``, metadata ``NonTensorData``.

        Raises:
            ImportError: the package ``tensordict`` is not installed.
            ValueError: metadata has the name of a field.
        """
        return tensordict_of("Batch.to_tensordict", self._fields, self._size, self._metadata)

    @classmethod
    def from_tensordict(
        cls,
        source: Any,
        *,
        lengths: Mapping[str, Sequence[int]] | None = None,
        widths: Mapping[str, Sequence[int]] | None = None,
        registry: FieldRegistry = PACKED_FIELDS,
    ) -> "Batch":
        """The other way round; tensors are not copied.

        Args:
            source: a ``tensordict.TensorDict`` of batch size [B].
            lengths: by name, B host integers: the lengths of nested tensors on a device, which
                would have to be read back otherwise; nested ones as "outer.inner".
            widths: by name, host integers: the ids of each row of a ``PackedRagged`` on a device.
            registry: as in the constructor.

        Raises:
            ImportError: the package ``tensordict`` is not installed.
            TypeError: ``source`` is another thing, or holds something else than tensors, jagged
                nested tensors, non-tensor data and dictionaries of them; lengths are missing.
            ValueError: its batch size is not [B].
        """
        fields, size, metadata = parts_of("Batch.from_tensordict", source, lengths, widths)
        return cls(fields, batch_size=size, metadata=metadata, registry=registry)

    # --- equality, pickling -----------------------------------------------------------------------

    def equal(self, other: "Batch") -> bool:
        """Same names, kinds, dtypes, devices and values (a NaN equals nothing); not the metadata.

        On a device this reads the answer back. ``==`` is the same.
        """
        if not isinstance(other, Batch):
            raise TypeError(f"Batch.equal: other is a {type(other).__name__}")
        if self._size != other._size or self._fields.keys() != other._fields.keys():
            return False
        return equal_fields(self._fields, other._fields)

    def __eq__(self, other: object) -> bool:
        return self.equal(other) if isinstance(other, Batch) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __copy__(self) -> "Batch":
        return self._with(self._fields.copy())

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        """Only its own rows travel; by protocol 5 each CPU tensor, dense or packed, is one buffer
        (a ``PackedRagged`` two, ids and row offsets), out of band if asked. What arrives in
        read-only memory stays there where it is packed, and is copied where it is dense or listed.
        """
        state = self._each("Batch", lambda _, x: Shipped(x), lambda _, packed: packed)
        registry = None if self._registry == PACKED_FIELDS else self._registry
        return _received_batch, (state._fields, self._size, self._metadata, registry)


def _received_batch(
    fields: dict[str, Any], size: int, metadata: dict[str, Any], registry: FieldRegistry | None
) -> Batch:
    batch = object.__new__(Batch)
    batch._set(received(fields), size, metadata, PACKED_FIELDS if registry is None else registry)
    return batch


def _names(names: Iterable[str]) -> list[str]:
    if isinstance(names, str):
        raise TypeError(f"Batch: names must be several, got the string {names!r}")
    return list(names)
