"""align_tokens and restore_tokens: dense [B, S] batches to the order of a rank's tokens, and back.

    python benchmarks/bench_dense.py [--json out.jsonl] [--rounds 3] [--only REGEX] [--dry]

32 left-padded trajectories of 2k to 8k tokens, 8,192 columns. Tables are on the device already, so
that a graph can hold the call; a backward is one ``autograd.grad`` of a forward made before. The
floor is the values of real tokens read once, every value of the output written once.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from baselines import align_loop, offsets_of, restore_loop
from harness import Case, Cases, Setting, run
from torch import Tensor

from packhorse.kernels.dense import align_tokens, restore_tokens

BATCH, WIDTH = 32, 8192

Operation = Callable[[Tensor], Tensor]


def gradients(
    operation: Operation, inputs: list[Tensor], grads: list[Tensor]
) -> Sequence[Callable[[], Tensor]]:
    """For each input the backward of ``operation`` on it; its forward runs once, here."""

    def backward(leaf: Tensor, out: Tensor, grad: Tensor) -> Tensor:
        return torch.autograd.grad(out, leaf, grad, retain_graph=True)[0]

    backwards = []
    for values, grad in zip(inputs, grads, strict=True):
        leaf = values.clone().requires_grad_()
        backwards.append(partial(backward, leaf, operation(leaf), grad))
    return backwards


def shape(
    setting: Setting, restore: bool, dtype: torch.dtype, backward: bool, job: str
) -> Callable[[], Case]:
    def build() -> Case:
        device, width = setting.device, setting.size(WIDTH)
        lengths = setting.lengths(2048, 8192, BATCH)
        first_columns = [width - length for length in lengths]
        tokens, batch = sum(lengths), len(lengths)
        offsets = torch.tensor(offsets_of(lengths), dtype=torch.int32, device=device)
        columns = torch.tensor([first_columns, lengths], dtype=torch.int32, device=device)
        packed, dense = (tokens,), (batch, width - 1 if restore else width)
        read = tokens - batch if restore else tokens  # the last position predicts no token
        wide_written = restore is not backward
        written = dense[0] * dense[1] if wide_written else tokens
        bytes_moved = (read + written) * dtype.itemsize
        num_sets = setting.num_sets(bytes_moved)

        def draw(size: tuple[int, ...]) -> list[Tensor]:
            return [
                torch.randint(-(2**20), 2**20, size, device=device).to(dtype)
                for _ in range(num_sets)
            ]

        def ours(values: Tensor) -> Tensor:
            if restore:
                return restore_tokens(values, offsets, columns, width - 1)
            return align_tokens(values, offsets, columns, tokens)

        def loop(values: Tensor) -> Tensor:
            if restore:
                return restore_loop(values, first_columns, lengths, width - 1, 0)
            return align_loop(values, first_columns, lengths, 0)

        inputs = draw(packed if restore else dense)
        if backward:
            grads = draw(dense if restore else packed)
            ours_back = gradients(ours, inputs, grads)
            checked = sorted({0, num_sets - 1})  # a check takes these sets, a clock the first
            loop_back = gradients(loop, [inputs[i] for i in checked], [grads[i] for i in checked])
            loop_of = dict(zip(checked, loop_back, strict=True))
            providers = {
                "packhorse": lambda i: ours_back[i](),
                "torch loop": lambda i: loop_of[i](),
            }
        else:
            providers = {
                "packhorse": lambda i: ours(inputs[i]),
                "torch loop": lambda i: loop(inputs[i]),
            }
        return Case(
            tokens=tokens,
            bytes_moved=bytes_moved,
            providers=providers,
            expected=providers["torch loop"],
            num_sets=num_sets,
            capturable=frozenset({"packhorse"}),
            no_sync=frozenset({"packhorse"}),
            jobs={job: "packhorse"},
        )

    return build


def cases(setting: Setting) -> Cases:
    built: Cases = {}
    for verb, restore in (("align", False), ("restore", True)):
        for kind, dtype in (("fp32", torch.float32), ("int64", torch.int64)):
            directions = ("forward", "backward") if dtype.is_floating_point else ("forward",)
            for direction in directions:
                built[f"{verb} 32 x 8k {kind}, {direction}"] = shape(
                    setting, restore, dtype, direction == "backward", f"{verb}_{kind}"
                )
    return built


if __name__ == "__main__":
    run(cases)
