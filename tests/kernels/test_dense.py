"""align_tokens and restore_tokens: dense batches to the order of a rank's tokens, and back.

Oracle: ``tests/oracle.py``, plain loops that share no code with the package. It moves the numbers
of cells or of tokens; each test then moves rows by these numbers, one by one. Tolerance: none.
"""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from packhorse.kernels import dense as module
from packhorse.kernels.dense import align_tokens, restore_tokens
from packhorse.kernels.rows import SUPPORTED_DTYPES
from packhorse.testing import poisoned_empty
from tests.oracle import OracleLayout

DTYPES = sorted(SUPPORTED_DTYPES, key=str)


class Layout(OracleLayout):
    """The oracle with the tables and keywords of the functions under test."""

    def tables(self, device: str) -> tuple[Tensor, Tensor]:
        local = [length // self.cp_size for length in self.padded()]
        offsets = [0, local[0]] if self.format == "bshd" else np.cumsum([0, *local]).tolist()
        first_columns = [self.first_column(b) for b in range(len(self.lengths))]
        return table(offsets, device), table([first_columns, list(self.lengths)], device)

    @property
    def num_tokens(self) -> int:
        return sum(self.padded()) // self.cp_size

    @property
    def keywords(self) -> dict:
        zigzag, position_major = self.cp_order == "zigzag", self.format == "bshd"
        return {"cp_size": self.cp_size, "zigzag": zigzag, "position_major": position_major}

    def ranks(self) -> list["Layout"]:
        return [Layout(**{**vars(self), "cp_rank": rank}) for rank in range(self.cp_size)]

    def align(self, dense: Tensor, fill=0, *, next_token=False) -> Tensor:
        offsets, columns = self.tables(dense.device.type)
        with poisoned_empty():
            return align_tokens(
                dense, offsets, columns, self.num_tokens, fill=fill, shift=int(next_token),
                cp_rank=self.cp_rank, **self.keywords,
            )  # fmt: skip

    def restore(self, values: Tensor, fill=0) -> Tensor:
        offsets, columns = self.tables(values.device.type)
        width = max(self.width() - 1, 0)
        with poisoned_empty():
            return restore_tokens(values, offsets, columns, width, fill=fill, **self.keywords)

    # --- the oracle's numbers ---------------------------------------------------------------------

    def cells(self, next_token: bool) -> list[int]:
        """[T] 1 + cell of each slot, 0 where it has none."""
        shape = (len(self.lengths), self.width())
        numbers = np.arange(1, 1 + shape[0] * shape[1]).reshape(shape)
        return OracleLayout.align(self, numbers, 0, next_token=next_token).tolist()

    def tokens(self) -> list[int]:
        """[B * (S - 1)] 1 + token of each cell, the ranks' one after another; 0: none."""
        numbers = np.arange(1, 1 + self.cp_size * self.num_tokens)
        parts = np.split(numbers, self.cp_size)
        return OracleLayout.restore(self, parts).flatten().tolist()


def table(values, device: str) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def moved(numbers: list[int], rows: Tensor, fill) -> Tensor:
    """Row ``number - 1`` of ``rows`` for each number, fill for 0."""
    out = torch.full((len(numbers), *rows.shape[1:]), fill, dtype=rows.dtype)
    for i, number in enumerate(numbers):
        if number:
            out[i] = rows[number - 1]
    return out


def moved_back(numbers: list[int], rows: Tensor, num_rows: int) -> Tensor:
    """The adjoint: row i lands in row ``number - 1``, the others are 0."""
    out = torch.zeros((num_rows, *rows.shape[1:]), dtype=rows.dtype)
    for number, row in zip(numbers, rows, strict=True):
        if number:
            out[number - 1] += row
    return out


def make(shape: tuple[int, ...], dtype: torch.dtype, device: str, seed: int = 0) -> Tensor:
    """Never 0, but where bool; so that a fill is told from a value."""
    generator = torch.Generator().manual_seed(seed)
    low, high = (0, 2) if dtype == torch.bool else (1, 128)
    return torch.randint(low, high, shape, generator=generator).to(device, dtype)


def layout(format: str, cp_size: int = 1, cp_order: str = "zigzag", pads: str = "left") -> Layout:
    lengths, width = [5, 1, 0, 11, 8, 2, 0], 13
    first_columns = {
        "left": None,
        "right": [0] * len(lengths),
        "two-sided": [3, 12, 13, 1, 0, 7, 4],
    }[pads]
    padded = None
    if format == "thd" and pads != "left":  # a packer's own, and a pad of the whole slab
        unit = 2 * cp_size
        padded = [-(-length // unit) * unit for length in lengths]
        padded = [*padded[:4], padded[4] + unit, *padded[5:], 3 * unit]
    return Layout(
        lengths, format, cp_size=cp_size, cp_order=cp_order, padded_lengths=padded,
        batch_width=width, first_columns=first_columns,
    )  # fmt: skip


LAYOUTS = {
    f"{format} CP{cp_size} {cp_order} {pads}": layout(format, cp_size, cp_order, pads)
    for format in ("thd", "bshd")
    for cp_size, cp_order, pads in (
        (1, "zigzag", "left"),
        (1, "zigzag", "two-sided"),
        (2, "zigzag", "right"),
        (2, "contiguous", "two-sided"),
        (4, "zigzag", "two-sided"),
        (4, "contiguous", "left"),
    )
}


def check(layout: Layout, dense: Tensor, values: Tensor, fill=0, *, next_token=False) -> None:
    """Both ways, of this rank and of all."""
    expected = moved(layout.cells(next_token), dense.cpu().flatten(0, 1), fill)
    assert torch.equal(layout.align(dense, fill, next_token=next_token).cpu(), expected)
    expected = moved(layout.tokens(), values.cpu(), fill)
    assert torch.equal(layout.restore(values, fill).cpu().flatten(0, 1), expected)


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("next_token", [False, True], ids=["this", "next"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_align_matches_the_loops(name, next_token, device):
    dense = make((7, 13), torch.int64, device)
    for rank in LAYOUTS[name].ranks():
        expected = moved(rank.cells(next_token), dense.cpu().flatten(), -7)
        assert torch.equal(rank.align(dense, -7, next_token=next_token).cpu(), expected)


@pytest.mark.parametrize("name", LAYOUTS)
def test_restore_matches_the_loops(name, device):
    layout = LAYOUTS[name]
    values = make((layout.cp_size * layout.num_tokens,), torch.int64, device)
    expected = moved(layout.tokens(), values.cpu(), -7).view(7, 12)
    assert torch.equal(layout.restore(values, -7).cpu(), expected)


@pytest.mark.parametrize("name", ["thd CP2 zigzag right", "bshd CP2 contiguous two-sided"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(name, dtype, device):
    layout = LAYOUTS[name]
    fill = 1 if dtype == torch.bool else 7
    dense = make((7, 13, 3), dtype, device)
    check(layout, dense, make((2 * layout.num_tokens, 2), dtype, device), fill)


TRAILING = [
    pytest.param((), torch.bool, id="scalars-1-byte"),
    pytest.param((), torch.float64, id="scalars-8-bytes"),
    pytest.param((1,), torch.float32, id="width-1"),
    pytest.param((3,), torch.float32, id="odd-width"),
    pytest.param((6,), torch.int16, id="4-byte-units"),
    pytest.param((2, 8), torch.float32, id="whole-16-bytes"),
    pytest.param((20,), torch.int32, id="width-no-power-of-two"),
    pytest.param((0,), torch.float32, id="no-elements"),
]


@pytest.mark.parametrize("name", ["thd CP2 zigzag right", "bshd CP1 zigzag left"])
@pytest.mark.parametrize(("trailing", "dtype"), TRAILING)
def test_any_trailing_shape(name, trailing, dtype, device):
    layout = LAYOUTS[name]
    dense = make((7, 13, *trailing), dtype, device)
    values = make((layout.cp_size * layout.num_tokens, *trailing), dtype, device)
    check(layout, dense, values, 1, next_token=True)


@pytest.mark.parametrize("format", ["thd", "bshd"])
@pytest.mark.parametrize(("width", "dtype"), [(1300, torch.float64), (1301, torch.int8)])
def test_rows_of_several_blocks(width, dtype, format, device):
    layout = Layout([2, 0, 1], format, cp_size=2)
    dense = make((3, 2, width), dtype, device)
    check(layout, dense, make((2 * layout.num_tokens, width), dtype, device), 1)


@st.composite
def layouts(draw) -> Layout:
    format = draw(st.sampled_from(["thd", "bshd"]))
    cp_size, cp_order = draw(st.integers(1, 4)), draw(st.sampled_from(["zigzag", "contiguous"]))
    lengths = draw(st.lists(st.integers(0, 30), min_size=1, max_size=6))
    unit, spare = 2 * cp_size, draw(st.integers(0, 3))
    if format == "bshd":
        padded = [(-(-max(lengths) // unit) + spare) * unit] * len(lengths)
    else:
        padded = [(-(-length // unit) + draw(st.integers(0, 1))) * unit for length in lengths]
        padded += [spare * unit] if draw(st.booleans()) else []
    width = max(lengths) + draw(st.integers(0, 3))
    first_columns = [draw(st.integers(0, width - length)) for length in lengths]
    return Layout(
        lengths, format, cp_size=cp_size, cp_rank=draw(st.integers(0, cp_size - 1)),
        cp_order=cp_order, padded_lengths=padded, batch_width=width, first_columns=first_columns,
    )  # fmt: skip


@given(layout=layouts(), next_token=st.booleans(), trailing=st.sampled_from([(), (2,), (3,)]))
def test_random_layouts_with_their_gradients(layout, next_token, trailing):
    batch, width = len(layout.lengths), layout.width()
    dense = make((batch, width, *trailing), torch.float32, "cpu").requires_grad_()
    cells = layout.cells(next_token)
    aligned = layout.align(dense, -7, next_token=next_token)
    assert torch.equal(aligned, moved(cells, dense.detach().flatten(0, 1), -7))
    grad = make(tuple(aligned.shape), torch.float32, "cpu", seed=1)
    (actual,) = torch.autograd.grad(aligned, dense, grad)
    assert torch.equal(actual.flatten(0, 1), moved_back(cells, grad, batch * width))

    num_values = layout.cp_size * layout.num_tokens
    values = make((num_values, *trailing), torch.float32, "cpu").requires_grad_()
    tokens = layout.tokens()
    restored = layout.restore(values, -7)
    assert torch.equal(restored.flatten(0, 1), moved(tokens, values.detach(), -7))
    grad = make(tuple(restored.shape), torch.float32, "cpu", seed=1)
    (actual,) = torch.autograd.grad(restored, values, grad)
    assert torch.equal(actual, moved_back(tokens, grad.flatten(0, 1), num_values))


# --- many blocks ----------------------------------------------------------------------------------


def test_the_last_slot_of_a_block_begins_a_sequence(device):
    layout = Layout([255, 256, 512, 1024, 2048, 3])  # one slot short of 256, 512, 1024, ...
    dense, values = (make(shape, torch.int32, device) for shape in ((6, 2048), (4098,)))
    check(layout, dense, values)


@pytest.mark.parametrize("num_sequences", [1, 2, 31, 32, 33, 64, 1023, 1025])
def test_search_finds_every_sequence(num_sequences, device):
    lengths = [(7 * b) % 5 for b in range(num_sequences)]
    layout = Layout(lengths, first_columns=[0] * num_sequences, batch_width=5)
    dense = make((num_sequences, 5), torch.int32, device)
    expected = moved(layout.cells(False), dense.cpu().flatten(), 0)
    assert torch.equal(layout.align(dense).cpu(), expected)


@pytest.mark.parametrize("order", ["zigzag", "contiguous"])
@pytest.mark.parametrize("format", ["thd", "bshd"])
def test_sequences_of_several_blocks(format, order, device):
    """Blocks that end where a sequence does, hold several, or are not full."""
    lengths = [4096, 0, 2048, 3, 5, 3001]
    layout = Layout(lengths, format, cp_size=2, cp_order=order)
    dense = make((6, 4096), torch.int32, device)
    values = make((2 * layout.num_tokens,), torch.int32, device)
    for rank in layout.ranks():
        check(rank, dense, values, next_token=True)


@pytest.mark.parametrize("format", ["thd", "bshd"])
def test_more_sequences_than_a_tile_holds(format, device, monkeypatch):
    """bshd transposes tiles of up to 32 sequences; a program takes more where a grid is full."""
    layout = Layout([b % 3 for b in range(33)], format)
    dense = make((33, 2), torch.int16, device)
    values = make((layout.num_tokens,), torch.int16, device)
    for max_programs in (65535, 8, 1):
        monkeypatch.setattr(module, "_MAX_GRID_Y", max_programs)
        check(layout, dense, values)


def test_more_sequences_than_a_grid_holds(cuda):
    offsets = 2 * torch.arange(70_001, dtype=torch.int32, device=cuda)
    columns = torch.tensor([[0], [2]], dtype=torch.int32, device=cuda).repeat(1, 70_000)
    values = make((140_000,), torch.int16, cuda)
    assert torch.equal(restore_tokens(values, offsets, columns, 1), values.view(-1, 2)[:, :1])
    assert torch.equal(align_tokens(values.view(-1, 2), offsets, columns, 140_000), values)
    aligned = align_tokens(
        values.view(-1, 2), offsets[:2].contiguous(), columns, 140_000, position_major=True
    )
    assert torch.equal(aligned.view(2, -1), values.view(-1, 2).T)


# --- strides and sizes ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["thd CP2 zigzag right", "bshd CP1 zigzag left"])
def test_strided_inputs(name, device):
    layout = LAYOUTS[name]
    flat = make((1 + 7 * 26 * 4,), torch.float32, device)
    batch = flat[:-1].view(7, 26, 4)
    for dense in (
        batch[:, 3:16],
        batch[:, ::2],
        batch[:, 3:16, 1],
        batch[:, ::2, ::2],
        batch[:, :13].transpose(0, 1).contiguous().transpose(0, 1),
        batch[:, :13].transpose(1, 2).contiguous().transpose(1, 2),
        flat[1:].view(7, 26, 4)[:, :13],  # not 16-byte aligned
        batch[:1, :13].expand(7, 13, 4),
        batch[:, :1].expand(7, 13, 4),
        make((7, 16, 7), torch.float32, device)[:, :13, :4],
    ):
        assert torch.equal(layout.align(dense, -7), layout.align(dense.contiguous(), -7))
    num_values = layout.cp_size * layout.num_tokens
    flat = make((1 + num_values * 8,), torch.float32, device)
    rows = flat[:-1].view(num_values, 8)
    for values in (
        rows[:, :4],
        rows[:, 1:5],
        rows[:, ::2],
        rows[:, 5],
        rows.T.contiguous().T,
        flat[1:].view(num_values, 8),
        rows[:1].expand(num_values, 8),
        rows[:1, 0].expand(num_values),
        flat[: num_values * 7].view(num_values, 7)[:, :4],
    ):
        assert torch.equal(layout.restore(values, -7), layout.restore(values.contiguous(), -7))


def test_strided_rows_are_not_copied():
    batch = torch.zeros(7, 26, 4)
    for dense in (batch[:, 3:16], batch[:, ::2], batch[..., 1], batch[..., :2]):
        assert module._as_rows(dense, 2).data_ptr() == dense.data_ptr()


def test_empty_batches(device):
    nothing = table([0], device), torch.zeros(2, 0, dtype=torch.int32, device=device)
    assert align_tokens(torch.zeros(0, 3, device=device), *nothing, 0).shape == (0,)
    assert align_tokens(torch.zeros(0, 3, 2, device=device), *nothing, 2, fill=5).eq(5).all()
    assert restore_tokens(torch.zeros(0, 2, device=device), *nothing, 3).shape == (0, 3, 2)
    bshd = table([0, 0], device), nothing[1]
    aligned = align_tokens(torch.zeros(0, 3, device=device), *bshd, 0, position_major=True)
    assert aligned.shape == (0,)

    tables = table([0, 0, 0], device), table([[0, 0], [0, 0]], device)
    for position_major in (False, True):
        empty = torch.zeros(2, 0, device=device)
        filled = align_tokens(empty, *tables, 4, fill=5, position_major=position_major)
        assert filled.tolist() == [5] * 4
        values = torch.zeros(0, device=device)
        out = restore_tokens(values, *tables, 0, position_major=position_major)
        assert out.shape == (2, 0)
        out = restore_tokens(values, *tables, 2, fill=5, position_major=position_major)
        assert out.tolist() == [[5, 5], [5, 5]]


def test_one_token(device):
    tables = table([0, 1], device), table([[0], [1]], device)
    dense = torch.tensor([[4]], device=device)
    for position_major in (False, True):
        keywords = {"fill": -1, "position_major": position_major}
        assert align_tokens(dense, *tables, 1, **keywords).tolist() == [4]
        assert align_tokens(dense, *tables, 1, shift=1, **keywords).tolist() == [-1]
        assert restore_tokens(dense[0], *tables, 0, **keywords).shape == (1, 0)
        assert restore_tokens(dense[0], *tables, 1, **keywords).tolist() == [[-1]]


@pytest.mark.parametrize("position_major", [False, True])
def test_slots_past_the_sequences_are_fill(position_major, device):
    """Static buffers: room for 40 tokens, used by 24 a rank; thd tables end in empty sequences."""
    lengths = [20, 7, 15, 0, 0] if not position_major else [20, 7]
    offsets = [0, 10, 14, 24, 24, 24] if not position_major else [0, 12]
    columns = table([[0] * len(lengths), lengths], device)
    offsets, batch = table(offsets, device), len(lengths)
    dense = make((batch, 24), torch.int64, device)
    keywords = {"cp_size": 2, "zigzag": True, "position_major": position_major}
    for rank in range(2):
        exact = align_tokens(dense, offsets, columns, 24, fill=-7, cp_rank=rank, **keywords)
        roomy = align_tokens(dense, offsets, columns, 40, fill=-7, cp_rank=rank, **keywords)
        assert torch.equal(roomy[:24], exact)
        assert roomy[24:].eq(-7).all()
    values = make((80,), torch.int64, device)
    used = values.view(2, 40)[:, :24].flatten()
    assert torch.equal(
        restore_tokens(values, offsets, columns, 23, **keywords),
        restore_tokens(used, offsets, columns, 23, **keywords),
    )


@pytest.mark.parametrize("position_major", [False, True])
@pytest.mark.parametrize("cp_rank", [0, 1, None])
def test_no_table_makes_it_leave_the_tensors(cp_rank, position_major, device):
    """Tables on a GPU are not checked; what they name outside is fill. The sanitizer watches."""
    generator = torch.Generator().manual_seed(0)
    dense, values = make((4, 6), torch.int32, device), make((20,), torch.int32, device)
    ops, layout = torch.ops.packhorse, (1, 1, 2, cp_rank, True, position_major)
    for low, high, rises in [(-9, 30, False), *[(0, 9, True), (0, 60, True), (-9, 30, True)] * 3]:
        offsets = torch.randint(low, high, (6,), generator=generator, dtype=torch.int32)
        columns = torch.randint(low, high, (2, 4), generator=generator, dtype=torch.int32)
        if rises:
            offsets, columns[0] = (offsets.sort().values - offsets.min()) // 2 * 2, columns[0] // 4
        tables = offsets.to(device), columns.to(device)
        aligned = ops.align_tokens(dense, *tables, 10, -7, *layout).cpu()
        restored = ops.restore_tokens(values, *tables, 60, -7, *layout).cpu()
        if rises:
            tables = offsets, columns
            expected = module.align_tokens_reference(dense.cpu(), *tables, 10, -7, *layout)
            assert torch.equal(aligned, expected)
            expected = module.restore_tokens_reference(values.cpu(), *tables, 60, -7, *layout)
            assert torch.equal(restored, expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_large_fill_is_as_exact_as_the_dtype(dtype, device):
    tables = table([0, 1], device), table([[0], [0]], device)
    for fill in (16_777_217, -(2**31) - 1):
        expected = torch.tensor(fill, dtype=dtype).item()
        out = align_tokens(torch.zeros(1, 1, dtype=dtype, device=device), *tables, 1, fill=fill)
        assert out.item() == expected
        out = restore_tokens(torch.zeros(1, dtype=dtype, device=device), *tables, 1, fill=fill)
        assert out.item() == expected


# --- gradients ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LAYOUTS)
def test_gradients_are_the_adjoint(name, device):
    layout = LAYOUTS[name]
    for rank in layout.ranks():
        dense = make((7, 13), torch.float32, device).requires_grad_()
        grad = make((layout.num_tokens,), torch.float32, device, seed=1)
        with poisoned_empty():
            (actual,) = torch.autograd.grad(rank.align(dense, next_token=True), dense, grad)
        expected = moved_back(rank.cells(True), grad.cpu(), 7 * 13).view(7, 13)
        assert torch.equal(actual.cpu(), expected)
    num_values = layout.cp_size * layout.num_tokens
    values = make((num_values,), torch.float32, device).requires_grad_()
    grad = make((7, 12), torch.float32, device, seed=1)
    with poisoned_empty():
        (actual,) = torch.autograd.grad(layout.restore(values), values, grad)
    assert torch.equal(actual.cpu(), moved_back(layout.tokens(), grad.cpu().flatten(), num_values))


@pytest.mark.parametrize(("format", "order"), [("thd", "zigzag"), ("bshd", "contiguous")])
def test_gradients_of_gradients(format, order, device):
    layout = Layout([2, 3], format, cp_size=2, cp_order=order, batch_width=4)
    generator = torch.Generator().manual_seed(0)
    dense = torch.randn(2, 4, dtype=torch.float64, generator=generator)
    values = torch.randn(2 * layout.num_tokens, 2, dtype=torch.float64, generator=generator)
    dense, values = dense.to(device).requires_grad_(), values.to(device).requires_grad_()
    for holds in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        assert holds(lambda x: layout.align(x, -7, next_token=True), dense, fast_mode=True)
        assert holds(lambda x: layout.restore(x, -7), values, fast_mode=True)


def test_a_sum_hands_back_an_expanded_gradient(device):
    layout, ones = LAYOUTS["thd CP2 zigzag right"], torch.ones(200)
    dense = make((7, 13), torch.float32, device).requires_grad_()
    (actual,) = torch.autograd.grad(layout.align(dense).sum(), dense)
    cells = layout.cells(False)
    assert torch.equal(actual.cpu(), moved_back(cells, ones[: len(cells)], 91).view(7, 13))
    assert not layout.align(dense.detach()).requires_grad
    with torch.no_grad():
        assert not layout.align(dense).requires_grad


# --- torch ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("cp_rank", [1, None])
def test_operator_contract(cp_rank, device):
    layout = LAYOUTS["thd CP2 zigzag right"]
    offsets, columns = layout.tables(device)
    num_tokens, num_ranks = layout.num_tokens, 2 if cp_rank is None else 1
    arguments = (1, 1, 2, cp_rank, True, False)
    torch.library.opcheck(
        torch.ops.packhorse.align_tokens.default,
        (make((7, 13, 2), torch.float32, device), offsets, columns, num_tokens, -7, *arguments),
    )
    values = make((num_ranks * num_tokens, 2), torch.float32, device)
    torch.library.opcheck(
        torch.ops.packhorse.restore_tokens.default,
        (values, offsets, columns, 13, -7, *arguments),
    )


def test_compiles_whole_and_once(device):
    options = {"fullgraph": True, "dynamic": True, "backend": "aot_eager"}
    align, restore = (
        torch.compile(align_tokens, **options),
        torch.compile(restore_tokens, **options),
    )
    for length in (8, 12):
        tables = table([0, length, 2 * length], device), table([[1, 0], [5, length]], device)
        dense = torch.randn(2, length + 1, 3, device=device, requires_grad=True)
        keywords = {"cp_size": 2, "zigzag": True}
        out = align(dense, *tables, 2 * length, fill=-1, shift=1, cp_rank=1, **keywords)
        expected = align_tokens(
            dense, *tables, 2 * length, fill=-1, shift=1, cp_rank=1, **keywords
        )  # fmt: skip
        assert torch.equal(out, expected)
        grads = [torch.autograd.grad(x.square().sum(), dense)[0] for x in (out, expected)]
        assert torch.equal(*grads)
        values = torch.randn(4 * length, 3, device=device, requires_grad=True)
        out = restore(values, *tables, length, fill=-1, **keywords)
        expected = restore_tokens(values, *tables, length, fill=-1, **keywords)
        assert torch.equal(out, expected)
        grads = [torch.autograd.grad(x.square().sum(), values)[0] for x in (out, expected)]
        assert torch.equal(*grads)


def test_traces_without_values():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        tables = torch.zeros(3, dtype=torch.int32), torch.zeros(2, 2, dtype=torch.int32)
        assert align_tokens(torch.randn(2, 5, 3), *tables, 7).shape == (7, 3)
        assert restore_tokens(torch.randn(8, 3), *tables, 4, cp_size=2).shape == (2, 4, 3)


def test_nothing_waits_for_the_device(device, no_host_sync):
    layout = LAYOUTS["thd CP2 zigzag right"]
    dense = make((7, 13), torch.float32, device).requires_grad_()
    values = make((2 * layout.num_tokens,), torch.float32, device).requires_grad_()
    offsets, columns = layout.tables(device)
    with no_host_sync():
        aligned = align_tokens(dense, offsets, columns, layout.num_tokens, **layout.keywords)
        restored = restore_tokens(values, offsets, columns, 12, **layout.keywords)
        torch.autograd.grad((aligned.sum(), restored.sum()), (dense, values))


def test_replays_in_a_cuda_graph_with_new_lengths(cuda):
    """Room for 4 sequences of up to 16 columns, and 32 tokens of each of 2 ranks."""

    def tables(lengths: list[int], first_columns: list[int]) -> tuple[Tensor, Tensor, Layout]:
        rest = [0] * (4 - len(lengths))
        layout = Layout(
            [*lengths, *rest], cp_size=2, batch_width=16, first_columns=[*first_columns, *rest]
        )
        return *layout.tables(cuda), layout

    offsets, columns, _ = tables([16, 16, 16, 12], [0, 0, 0, 4])
    dense = make((4, 16), torch.float32, cuda).requires_grad_()
    values = make((64,), torch.float32, cuda).requires_grad_()
    grad, back = make((32,), torch.float32, cuda, 1), make((4, 15), torch.float32, cuda, 2)

    def step() -> tuple[Tensor, ...]:
        aligned = align_tokens(
            dense, offsets, columns, 32, fill=-7, shift=1, cp_size=2, cp_rank=1, zigzag=True
        )
        restored = restore_tokens(values, offsets, columns, 15, fill=-7, cp_size=2, zigzag=True)
        grads = torch.autograd.grad((aligned, restored), (dense, values), (grad, back))
        return aligned, restored, *grads

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = step()
    for lengths, first_columns in (([5, 11], [11, 2]), ([16, 1, 0, 9], [0, 3, 0, 7]), ([], [])):
        new_offsets, new_columns, layout = tables(lengths, first_columns)
        with torch.no_grad():
            offsets.copy_(new_offsets)
            columns.copy_(new_columns)
        graph.replay()
        aligned, restored, dense_grad, values_grad = (out.detach().cpu() for out in outputs)
        used, cells = layout.num_tokens, layout.ranks()[1].cells(True)
        assert torch.equal(aligned[:used], moved(cells, dense.detach().cpu().flatten(), -7))
        assert aligned[used:].eq(-7).all()
        expected = moved_back(cells, grad.cpu()[:used], 64).view(4, 16)
        assert torch.equal(dense_grad, expected)
        tokens = [n and n + (32 - used) * (n > used) for n in layout.tokens()]  # ranks stand apart
        expected = moved(tokens, values.detach().cpu(), -7).view(4, 15)
        assert torch.equal(restored, expected)
        assert torch.equal(values_grad, moved_back(tokens, back.cpu().flatten(), 64))


@pytest.mark.gpu_memory(gib=6)
def test_offsets_past_int32(cuda):
    """The last cells of a batch of more than 2**31 elements, read and written."""
    width, num_columns = 1024, 2**20 + 8
    dense = torch.zeros(2, num_columns, width, dtype=torch.uint8, device=cuda)
    dense[1, -2:] = torch.tensor([[3], [4]], dtype=torch.uint8, device=cuda)
    tables = table([0, 0, 2], cuda), table([[0, num_columns - 2], [0, 2]], cuda)
    assert align_tokens(dense, *tables, 2)[:, ::1023].tolist() == [[3, 3], [4, 4]]
    scalars = dense.view(2, -1)[:, : num_columns * width]
    tables = tables[0], table([[0, scalars.shape[1] - 2], [0, 2]], cuda)
    assert align_tokens(scalars, *tables, 2).tolist() == [4, 4]
    del dense, scalars

    tables = tables[0], table([[0, num_columns - 2], [0, 2]], cuda)
    values = torch.full((2, width), 5, dtype=torch.uint8, device=cuda)
    out = restore_tokens(values, *tables, num_columns, fill=1)
    assert out[1, -2].eq(5).all()
    assert out[1, -1].eq(1).all()
    assert out[1, -3].eq(1).all()
