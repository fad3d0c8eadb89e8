"""Which host memory goes where in one allocation: every field of a batch, or some trajectories'.

    layout = LayOut(direct=False, max_bytes=2**20)
    make = layout.add_value(batch, ids)   # a function of the allocation, giving the batch in it
    for chunk in layout.chunks(): chunk.write(buffer)
    staged = make(memory)

``memory`` is uint8 [``layout.num_bytes``] on any device. A chunk is a range of it that is filled at
once: ``write`` copies the host's rows into a buffer that stands for the range. Rows are copied from
where they are, whatever their strides, and only those of the trajectories asked for.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from packhorse.packed.batch import Batch
from packhorse.packed.copies import run_rows
from packhorse.packed.host import check_total
from packhorse.packed.ragged import PackedRagged
from packhorse.packed.ragged_rows import sums
from packhorse.packed.tensor import PackedTensor

#: Where a field begins, in bytes: as the allocators of torch align what they give.
ALIGNMENT: Final = 256
#: From which a run of pinned rows is worth a copy of its own, in bytes.
DIRECT_BYTES: Final = 256 * 1024

#: integers that hold the bits of an element, by its bytes
_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

#: From an allocation on a device to what lies in it.
Made = Callable[[Tensor], Any]


@dataclass(frozen=True)
class Piece:
    """Rows that lie side by side in the source, and where they go."""

    place: int  # bytes from the start of the allocation
    num_bytes: int
    rows: np.ndarray  # their elements, as integers; any strides
    source: Tensor | None  # the same, contiguous and pinned: it needs no buffer

    def write(self, buffer: np.ndarray, first: int) -> None:
        """``buffer``: uint8, which stands for the allocation from byte ``first`` on."""
        begin = self.place - first
        into = buffer[begin : begin + self.num_bytes]
        np.copyto(into.view(self.rows.dtype).reshape(self.rows.shape), self.rows)


@dataclass
class Chunk:
    """A range of the allocation, filled by one copy to the device."""

    place: int
    num_bytes: int = 0
    pieces: list[Piece] = field(default_factory=list)

    @property
    def direct(self) -> Tensor | None:
        """[num_bytes] uint8, pinned: what is copied from where it is."""
        return self.pieces[0].source

    def write(self, buffer: np.ndarray) -> None:
        """Fill ``buffer`` [>= num_bytes] uint8."""
        for piece in self.pieces:
            piece.write(buffer, self.place)


class LayOut:
    """Places in one allocation, and the rows that go there.

    Args:
        direct: whether pinned rows are copied from where they are; asks the driver of each field.
        max_bytes: the most that one chunk holds.
    """

    def __init__(self, *, direct: bool, max_bytes: int) -> None:
        self.num_bytes = 0
        self._direct, self._max_bytes = direct, max_bytes
        self._pieces: list[Piece] = []

    def chunks(self) -> list[Chunk]:
        """The ranges that are filled at once, in order."""
        made: list[Chunk] = []
        for piece in self._pieces:
            end = piece.place + piece.num_bytes
            fits = made and end - made[-1].place <= self._max_bytes
            if not fits or piece.source is not None or made[-1].direct is not None:
                made.append(Chunk(piece.place))
            made[-1].pieces.append(piece)
            made[-1].num_bytes = end - made[-1].place
        return made

    # --- what goes there --------------------------------------------------------------------------

    def add_value(self, value: Any, ids: np.ndarray | None) -> Made:
        """Trajectories ``ids`` of a batch or packed field, all where that is None."""
        if isinstance(value, Batch):
            size = len(value) if ids is None else ids.size
            check_total("DeviceStager.stage", size, "trajectories")
            made = self._add_fields(dict(value.fields), ids)
            return lambda memory: value._with(made(memory), size)
        return self._add_field(value, ids)

    def _add_fields(self, fields: dict[str, Any], ids: np.ndarray | None, above: str = "") -> Made:
        made: dict[str, Made] = {}
        for name, held in fields.items():
            if isinstance(held, dict):
                made[name] = self._add_fields(held, ids, f"{above}{name}.")
                continue
            try:
                made[name] = self._add_field(held, ids)
            except ValueError as error:  # past int32
                raise ValueError(f"{above}{name}: {error}") from None
        return lambda memory: {name: make(memory) for name, make in made.items()}

    def _add_field(self, held: Any, ids: np.ndarray | None) -> Made:
        if isinstance(held, PackedTensor):
            return self._add_packed(held, ids)
        if isinstance(held, PackedRagged):
            return self._add_ragged(held, ids)
        if isinstance(held, Tensor):
            return self._add_dense(held, ids)
        things = held if ids is None else tuple(held[i] for i in ids.tolist())
        made = [self.add_rows(x) if isinstance(x, Tensor) else _same(x) for x in things]
        return lambda memory: tuple(make(memory) for make in made)

    def _add_dense(self, dense: Tensor, ids: np.ndarray | None) -> Made:
        if ids is None:
            return self.add_rows(dense)
        first_of_run = np.append(0, 1 + np.flatnonzero(np.diff(ids) != 1))[: ids.size]
        lengths = np.diff(np.append(first_of_run, ids.size))
        return self.add_rows(dense, ids[first_of_run], lengths)

    def _add_packed(self, packed: PackedTensor, ids: np.ndarray | None) -> Made:
        if ids is None:
            bounds, rows = packed.bounds, self.add_rows(packed.values)
        else:
            bounds, starts, lengths = packed._runs(ids)
            rows = self.add_rows(packed.values, starts, lengths)
        offsets = self.add_rows(torch.from_numpy(bounds.astype(np.int32)))
        return lambda memory: PackedTensor._make(rows(memory), bounds, offsets(memory))

    def _add_ragged(self, packed: PackedRagged, ids: np.ndarray | None) -> Made:
        if ids is None:
            bounds, starts = packed.bounds, np.zeros(1, dtype=np.int64)
            lengths = np.array([packed.num_rows])
        else:
            bounds, starts, lengths = packed._runs(ids)
        all_bounds = packed._row_bounds
        first_ids = all_bounds[starts]
        num_ids = all_bounds[starts + lengths] - first_ids
        rows = run_rows(starts, lengths)
        row_bounds = sums(all_bounds[rows + 1] - all_bounds[rows])
        filled = num_ids > 0
        values = self.add_rows(packed.values, (first_ids - all_bounds[0])[filled], num_ids[filled])
        row_offsets = self.add_rows(torch.from_numpy(row_bounds))
        offsets = self.add_rows(torch.from_numpy(bounds.astype(np.int32)))

        def make(memory: Tensor) -> PackedRagged:
            return PackedRagged._make(
                values(memory), bounds, row_bounds, row_offsets(memory), offsets(memory)
            )

        return make

    # --- rows -------------------------------------------------------------------------------------

    def add_rows(
        self, tensor: Tensor, starts: np.ndarray | None = None, lengths: np.ndarray | None = None
    ) -> Made:
        """Rows [start, start + length) of each pair, one after another; all by default."""
        tensor = tensor.detach().resolve_conj().resolve_neg()
        if tensor.dim() == 0:
            made = self.add_rows(tensor.reshape(1))
            return lambda memory: made(memory)[0]
        num_rows = tensor.shape[0]
        if starts is None or lengths is None:
            starts, lengths = np.zeros(1, dtype=np.int64), np.array([num_rows])
        shape = (int(lengths.sum()), *tensor.shape[1:])
        dtype: torch.dtype = tensor.dtype
        row_bytes = tensor.shape[1:].numel() * tensor.itemsize
        num_bytes = shape[0] * row_bytes
        if num_bytes == 0:
            return lambda memory: torch.empty(shape, dtype=dtype, device=memory.device)
        place = self.num_bytes
        self.num_bytes += -(-num_bytes // ALIGNMENT) * ALIGNMENT
        self._pieces += self._cut(tensor, row_bytes, place, starts, lengths)

        def view(memory: Tensor) -> Tensor:
            return memory[place : place + num_bytes].view(dtype).view(shape)

        return view

    def _cut(
        self, tensor: Tensor, row_bytes: int, place: int, starts: np.ndarray, lengths: np.ndarray
    ) -> Iterator[Piece]:
        bits = _BITS.get(tensor.itemsize)
        if bits is None or row_bytes > self._max_bytes:
            tensor = tensor.contiguous()
        pinned = None
        unit = row_bytes
        if tensor.is_contiguous():  # then a row may be cut
            flat = tensor.view(-1).view(torch.uint8)
            pinned = flat if self._direct and flat.is_pinned() else None
            array, unit = flat.numpy(), 1
            starts, lengths = starts * row_bytes, lengths * row_bytes
        else:
            assert bits is not None
            array = tensor.view(bits).numpy()
        most = max(self._max_bytes // unit, 1)
        for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
            if pinned is not None and length >= DIRECT_BYTES:
                end = start + length
                yield Piece(place, length, array[start:end], pinned[start:end])
            else:
                for first in range(start, start + length, most):
                    end = min(first + most, start + length)
                    offset = (first - start) * unit
                    yield Piece(place + offset, (end - first) * unit, array[first:end], None)
            place += length * unit


def _same(thing: Any) -> Made:
    return lambda memory: thing
