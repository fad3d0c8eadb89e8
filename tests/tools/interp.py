"""Repairs and a memory sanitizer for Triton's interpreter (``TRITON_INTERPRET=1``).

    apply_fixes()        three faults of the interpreter that make a CPU run useless or misleading:
                         runtime ``range`` with NumPy >= 2.4, float32 -> bfloat16 that truncates
                         instead of rounding to nearest even, and ``tl.dot`` on bfloat16, which
                         multiplies the raw bits
    sanitize()           context manager; every launch inside it is checked for
        out of bounds    a lane that is not masked off touches memory outside all tensor arguments,
                         or between the elements of a strided one
        poison           lanes that a load without ``other=`` masks off hold NaN or 0x5A... (the
                         interpreter gives 0, a GPU whatever was there)
        race             two programs store different values to one element, or one program reads
                         what another stores, with no atomics involved
        order            programs run in a shuffled order
        int32            an int32 ``+ - *`` that overflows, and ``tl.device_assert``

Both use private names of ``triton.runtime.interpreter``; they were tried on Triton 3.6.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import triton.language as tl
import triton.runtime.interpreter as ti

_BUILDER = ti.InterpreterBuilder
_fixed = False


class SanitizerError(AssertionError):
    """A launch did what a GPU punishes silently. Reaches the test inside an InterpreterError."""


# --- fixes ----------------------------------------------------------------------------------------


def apply_fixes() -> None:
    """Repair the interpreter in place. Calling it again does nothing."""
    global _fixed
    if _fixed:
        return
    _fixed = True
    patch_lang_tensor, cast, dot = ti._patch_lang_tensor, _BUILDER.cast_impl, _BUILDER.create_dot

    def patch_index_too(tensor: Any, scope: Any) -> None:
        patch_lang_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(np.ravel(self.handle.data)[0]))

    def cast_to_nearest(self: Any, src: Any, dst_type: Any) -> Any:
        if (src.dtype.scalar, dst_type.scalar) != (tl.float32, tl.bfloat16):
            return cast(self, src, dst_type)
        bits = np.ascontiguousarray(src.data).view(np.uint32)
        nearest = (bits + ((bits >> 16) & 1) + np.uint32(0x7FFF)) >> 16
        nearest = np.where(np.isnan(src.data), 0x7FC0, nearest).astype(np.uint16)
        return ti.TensorHandle(nearest.reshape(src.data.shape), tl.bfloat16)

    def dot_in_float32(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        a, b = (cast(self, x, tl.float32) if x.dtype == tl.bfloat16 else x for x in (a, b))
        return dot(self, a, b, *rest)

    ti._patch_lang_tensor = patch_index_too
    _BUILDER.cast_impl = cast_to_nearest
    _BUILDER.create_dot = dot_in_float32


# --- sanitizer ------------------------------------------------------------------------------------


@dataclass
class _Region:
    """Memory of one tensor argument, or of several that overlap."""

    name: str
    start: int  # address
    end: int
    item: int  # bytes of one element
    inside: np.ndarray  # [elements] bool; False between the elements of a strided tensor
    writer: np.ndarray  # [elements] int32, 1 + the program that stored the element; 0: none
    reader: np.ndarray

    @classmethod
    def of(cls, tensors: list[tuple[str, Any]]) -> "_Region":
        start = min(t.data_ptr() for _, t in tensors)
        end = max(_end(t) for _, t in tensors)
        item = min(t.element_size() for _, t in tensors)
        inside = np.zeros((end - start) // item, dtype=bool)
        for _, t in tensors:
            offsets = np.zeros(1, dtype=np.int64)
            for size, stride in zip(t.shape, t.stride(), strict=True):
                offsets = (offsets[:, None] + np.arange(size) * stride).ravel()
            first = (t.data_ptr() - start + offsets * t.element_size()) // item
            for part in range(t.element_size() // item):
                inside[first + part] = True
        owner = np.zeros(inside.shape, dtype=np.int32)
        name = " = ".join(dict.fromkeys(name for name, _ in tensors))
        return cls(name, start, end, item, inside, owner, owner.copy())


def _end(tensor: Any) -> int:
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return tensor.data_ptr() + (last + 1) * tensor.element_size()


class _Memory:
    """What the programs of one launch may touch, and what they have touched."""

    def __init__(self) -> None:
        self.regions: list[_Region] = []
        self.starts = self.ends = np.zeros(0, dtype=np.uint64)
        self.program = 0

    def register(self, arguments: list[tuple[str, Any]]) -> None:
        tensors = [(name, t) for name, t in arguments if hasattr(t, "data_ptr") and t.numel()]
        tensors.sort(key=lambda named: named[1].data_ptr())
        groups: list[list[tuple[str, Any]]] = []
        end = 0
        for name, t in tensors:
            if not groups or t.data_ptr() >= end:
                groups.append([])
            groups[-1].append((name, t))
            end = max(end, _end(t))
        self.regions = [_Region.of(group) for group in groups]
        self.starts = np.array([r.start for r in self.regions], dtype=np.uint64)
        self.ends = np.array([r.end for r in self.regions], dtype=np.uint64)

    def locate(self, pointers: Any, mask: np.ndarray, what: str) -> "_Access":
        """Find the elements that the lanes let through by ``mask`` address, or raise."""
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        shape = np.broadcast_shapes(np.shape(pointers.data), np.shape(mask))
        lanes = np.flatnonzero(np.broadcast_to(mask, shape))
        addresses = np.broadcast_to(pointers.data, shape).astype(np.uint64).ravel()[lanes]
        region = np.searchsorted(self.starts, addresses, side="right") - 1
        good = region >= 0
        good[good] = addresses[good] + np.uint64(size) <= self.ends[region[good]]
        element = np.zeros(len(lanes), dtype=np.int64)
        for k in np.unique(region[good]):
            here = good & (region == k)
            offset = addresses[here] - np.uint64(self.regions[k].start)
            element[here] = offset // np.uint64(self.regions[k].item)
            good[here] = self.regions[k].inside[element[here]]
        if not good.all():
            bad = int(np.flatnonzero(~good)[0])
            raise SanitizerError(
                f"out of bounds {what} by program {ti.interpreter_builder.grid_idx}, "
                f"lane {lanes[bad]}: {self._nearest(region[bad], int(addresses[bad]))}"
            )
        return _Access(lanes, addresses, region, element)

    def _nearest(self, region: int, address: int) -> str:
        if not self.regions:
            return "no tensor argument has elements"
        near = self.regions[max(region, 0)]
        element = (address - near.start) / near.item
        return f"{near.name}[{element:g}] of {len(near.inside)} elements"

    def read(self, at: "_Access") -> None:
        for k in np.unique(at.region):
            region, element = self.regions[k], at.element[at.region == k]
            writer = region.writer[element]
            self._refuse((writer != 0) & (writer != self.program + 1), region, element, "stored")
            region.reader[element] = self.program + 1

    def write(self, at: "_Access", values: np.ndarray) -> None:
        order = np.argsort(at.addresses, kind="stable")
        same = at.addresses[order][1:] == at.addresses[order][:-1]
        if (values[order][1:] != values[order][:-1])[same].any():
            raise SanitizerError(f"race: program {self.program} stores one element from two lanes")
        for k in np.unique(at.region):
            region, here = self.regions[k], at.region == k
            element = at.element[here]
            reader, writer = region.reader[element], region.writer[element]
            self._refuse((reader != 0) & (reader != self.program + 1), region, element, "read")
            again = (writer != 0) & (writer != self.program + 1)
            if again.any():  # equal values are no race: the outcome does not depend on the order
                count = int(again.sum())
                current = ti._interpreter.load(
                    at.addresses[here][again],
                    np.ones(count, dtype=bool),
                    np.zeros(count, dtype=values.dtype),
                    values.dtype,
                )
                again[again] = current != values[here][again]
                self._refuse(again, region, element, "stored")
            region.writer[element] = self.program + 1

    def _refuse(self, bad: np.ndarray, region: _Region, element: np.ndarray, what: str) -> None:
        if bad.any():
            where = f"{region.name}[{int(element[bad][0])}]"
            raise SanitizerError(
                f"race: program {self.program} touches {where}, which another program {what}"
            )


@dataclass
class _Access:
    lanes: np.ndarray  # flat lane numbers that the mask lets through
    addresses: np.ndarray
    region: np.ndarray
    element: np.ndarray


def _poison(dtype: Any) -> Any:
    kind = ti._get_np_dtype(dtype)
    if dtype == tl.bfloat16:
        return 0x7FC0  # NaN; the interpreter keeps bfloat16 as uint16
    if kind.kind in "fb":
        return np.nan if kind.kind == "f" else True
    return int.from_bytes(b"\x5a" * kind.itemsize, "little")


@contextmanager
def sanitize(*, order: int | None = 0, race: bool = True, int32: bool = True) -> Iterator[None]:
    """Check every interpreted launch.

    Args:
        order: seed of the shuffled order of the programs; None keeps 0, 1, 2, ...
        race: False for a kernel whose programs meet on purpose.
        int32: False for a kernel whose int32 arithmetic wraps on purpose.
    """
    memory = _Memory()
    rng = None if order is None else np.random.default_rng(order)
    permutation: np.ndarray | None = None
    hooks = (
        "create_masked_load", "create_masked_store", "create_atomic_rmw", "create_atomic_cas",
        "set_grid_idx", "set_grid_dim",
    )  # fmt: skip
    saved = {name: getattr(_BUILDER, name) for name in hooks}
    init, options = ti.GridExecutor._init_args_hst, ti.interpreter_builder.options

    def load(self: Any, pointers: Any, mask: Any, other: Any, *rest: Any) -> Any:
        at = memory.locate(pointers, mask.data, "load")
        if race:
            memory.read(at)
        if other is None and not np.all(mask.data):
            dtype = pointers.get_element_ty()
            poison = np.full(pointers.data.shape, _poison(dtype), dtype=ti._get_np_dtype(dtype))
            other = ti.TensorHandle(poison, dtype)
        return saved["create_masked_load"](self, pointers, mask, other, *rest)

    def store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        at = memory.locate(pointers, mask.data, "store")
        if race and len(at.lanes):
            shape = np.broadcast_shapes(np.shape(pointers.data), np.shape(mask.data))
            memory.write(at, np.broadcast_to(value.data, shape).ravel()[at.lanes])
        return saved["create_masked_store"](self, pointers, value, mask, *rest)

    def atomic_rmw(self: Any, op: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        memory.locate(pointers, mask.data, "atomic")
        return saved["create_atomic_rmw"](self, op, pointers, value, mask, *rest)

    def atomic_cas(self: Any, pointers: Any, *rest: Any) -> Any:
        memory.locate(pointers, np.ones_like(pointers.data, dtype=bool), "atomic")
        return saved["create_atomic_cas"](self, pointers, *rest)

    def set_grid_dim(self: Any, *dims: int) -> None:
        nonlocal permutation
        permutation = None if rng is None else rng.permutation(int(np.prod(dims)))
        saved["set_grid_dim"](self, *dims)

    def set_grid_idx(self: Any, x: int, y: int, z: int) -> None:
        _, ny, nz = self.grid_dim
        memory.program = (x * ny + y) * nz + z
        if permutation is not None:
            memory.program = int(permutation[memory.program])
            x, rest = divmod(memory.program, ny * nz)
            y, z = divmod(rest, nz)
        saved["set_grid_idx"](self, x, y, z)

    def init_arguments(self: Any, args_dev: Any, kwargs: Any) -> Any:
        args, kwargs = init(self, args_dev, kwargs)
        named: list[tuple[str, Any]] = []
        for name, value in [*zip(self.arg_names, args, strict=False), *kwargs.items()]:
            parts = value if isinstance(value, tuple) else (value,)
            named += [(name, part) for part in parts]
        memory.register(named)
        return args, kwargs

    for name, hook in zip(
        hooks, (load, store, atomic_rmw, atomic_cas, set_grid_idx, set_grid_dim), strict=True
    ):
        setattr(_BUILDER, name, hook)
    ti.GridExecutor._init_args_hst = init_arguments
    ti.interpreter_builder.options = ti.InterpreterOptions(debug=True, sanitize_overflow=int32)
    try:
        yield
    finally:
        for name, hook in saved.items():
            setattr(_BUILDER, name, hook)
        ti.GridExecutor._init_args_hst = init
        ti.interpreter_builder.options = options
