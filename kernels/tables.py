"""Bring a small table of host integers to the device: a kernel reads it out of pinned memory.

    table[i] = host[i]

A copy engine moves such a table as fast, but handing it over to the kernel that waits for it takes
the device another 7 us (H200: 14.0 us for a copy and ``make_row_ids`` after it, 6.5 us with this
kernel). Under CUDA's unified addressing pinned memory has one address for host and device.

No operator: the caller keeps ``host`` as it is until the stream has passed this launch.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from packhorse.kernels.launch import Launcher, is_hooked, kernel_name

# --- Triton ---------------------------------------------------------------------------------------


@triton.jit(
    repr=kernel_name("pull_table"),
    do_not_specialize=["num_ints"],
    do_not_specialize_on_alignment=["table_ptr", "host_ptr"],
)
def _pull_table_kernel(
    table_ptr,  # [num_ints] int32
    host_ptr,  # [num_ints] int32, pinned
    num_ints,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    # .cv: the host wrote to the same addresses for an earlier launch
    ints = tl.load(host_ptr + place, mask=place < num_ints, other=0, cache_modifier=".cv")
    tl.store(table_ptr + place, ints, mask=place < num_ints)


_launch_pull_table = Launcher(_pull_table_kernel)

_BLOCK = 512


def pull_table(table: Tensor, host: Tensor) -> None:
    """Overwrite ``table`` [n] int32 on a GPU by the first n of ``host``, int32 and pinned, in
    stream order; n > 0."""
    num_ints = table.shape[0]
    _launch_pull_table(((num_ints + _BLOCK - 1) // _BLOCK,), (table, host, num_ints), (_BLOCK,))


class PinnedTable:
    """A pinned ``host`` [n] int32 and a ``table`` [n] int32 on a GPU, for many pulls on one stream:
    the kernel is looked up once.

    Attributes:
        table: what ``pull`` overwrites.
    """

    def __init__(self, table: Tensor, host: Tensor, stream: int) -> None:
        self.table = table
        self._host = host
        self._device = table.get_device()
        self._stream = stream
        self._addresses = table.data_ptr(), host.data_ptr()
        self._launch: Callable[..., Any] | None = None

    def pull(self, num_ints: int) -> None:
        """The first ``num_ints`` > 0 of the host's integers into ``table``, in stream order."""
        launch = self._launch
        if launch is None or is_hooked() or self._device != torch._C._cuda_getDevice():
            table = self.table[:num_ints]
            pull_table(table, self._host)
            self._launch = _launch_pull_table.compiled_for((table, self._host, num_ints), (_BLOCK,))
            return
        grid = (num_ints + _BLOCK - 1) // _BLOCK, 1, 1
        launch(grid, self._stream, (*self._addresses, num_ints, _BLOCK))
