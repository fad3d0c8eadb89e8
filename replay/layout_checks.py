"""What a ``TokenLayout`` checks and derives on the host before it lays anything out."""

from typing import Literal, TypeAlias

import numpy as np

from packhorse.replay.host import HostInts, host_array

Fp8: TypeAlias = bool | Literal["delayed", "tensorwise", "mxfp8", "blockwise"]

_FP8_RECIPES = ("delayed", "tensorwise", "mxfp8", "blockwise")


def check_fp8(name: str, fp8: object) -> None:
    if not isinstance(fp8, bool) and fp8 not in _FP8_RECIPES:
        raise ValueError(f"{name}: fp8 must be True, False or one of {_FP8_RECIPES}, got {fp8!r}")


def check_padded(
    name: str,
    format: str,
    lengths: np.ndarray,
    padded: np.ndarray,
    cp_size: int,
    cp_order: str,
) -> None:
    num_sequences = lengths.size
    allowed = (num_sequences,) if format == "bshd" else (num_sequences, num_sequences + 1)
    if padded.size not in allowed:
        raise ValueError(
            f"{name}: padded_lengths has {padded.size} entries for {num_sequences} trajectories"
        )
    shorter = padded[:num_sequences] < lengths
    if shorter.any():
        i = int(shorter.argmax())
        raise ValueError(
            f"{name}: padded_lengths of trajectory {i} is {padded[i]}, shorter than its"
            f" {lengths[i]} tokens"
        )
    if format == "bshd":
        unlike = padded != padded[:1]
        if unlike.any():
            i = int(unlike.argmax())
            raise ValueError(
                f"{name}: padded_lengths of trajectory {i} is {padded[i]}, but 'bshd' has one"
                f" common length, {padded[0]}"
            )
    chunks = 1 if cp_size == 1 else 2 * cp_size if cp_order == "zigzag" else cp_size
    uneven = padded % chunks != 0
    if uneven.any():
        i = int(uneven.argmax())
        who = f"trajectory {i}" if i < num_sequences else "the tail pad"
        raise ValueError(
            f"{name}: padded_lengths of {who} is {padded[i]}, not a multiple of the {chunks}"
            f" chunks of cp_size={cp_size} ({cp_order})"
        )


def support_starts(name: str, lengths: np.ndarray, responses: np.ndarray) -> np.ndarray:
    """[B] position of each response's first row: that of the token before the response."""
    whole = (responses > 0) & (responses >= lengths)
    if whole.any():
        i = int(whole.argmax())
        raise ValueError(
            f"{name}: response_lengths of trajectory {i} is {responses[i]} of {lengths[i]} tokens:"
            " a response needs a prompt token before it"
        )
    return np.maximum(lengths - responses - 1, 0)


def check_slice(name: str, format: str, num_tokens: int, batch: int, tp_size: int) -> None:
    """A sequence-parallel slice is equal along the sequence dimension."""
    tokens = num_tokens if format == "thd" else num_tokens // max(batch, 1)
    if tokens % tp_size:
        raise ValueError(
            f"{name}: padded_lengths leave this rank {tokens} tokens, which do not divide into"
            f" tp_size={tp_size} sequence-parallel slices"
        )


def place_columns(
    name: str,
    lengths: np.ndarray,
    first_columns: HostInts | None,
    batch_width: int | None,
) -> tuple[np.ndarray, int]:
    """First columns [B] and S."""
    if first_columns is None:
        width = int(lengths.max(initial=0)) if batch_width is None else batch_width
        wider = lengths > width
        if wider.any():
            i = int(wider.argmax())
            raise ValueError(
                f"{name}: batch_width={width} is less than the {lengths[i]} tokens of"
                f" trajectory {i}"
            )
        return width - lengths, width
    columns = host_array(name, "first_columns", first_columns)
    if columns.size != lengths.size:
        raise ValueError(
            f"{name}: first_columns has {columns.size} entries for {lengths.size} trajectories"
        )
    ends = columns + lengths
    width = int(ends.max(initial=0)) if batch_width is None else batch_width
    beyond = ends > width
    if beyond.any():
        i = int(beyond.argmax())
        raise ValueError(
            f"{name}: first_columns of trajectory {i} is {columns[i]}, but its"
            f" {lengths[i]} tokens then pass batch_width={width}"
        )
    return columns, width
