"""A JSON tree with arrays in it as the fields of a frame, and back.

    fields = split_tree(tree)             {"json": the tree's text, "/choices/0/routed_experts": …}
    frame = encode_frame(fields)
    tree = join_tree(decode_frame(frame).fields)

An array's field is named by its place, a JSON pointer (RFC 6901); in the text it is null.
"""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from packhorse._nvtx import ranged
from packhorse.packed.wire_format import WireArray, WireLimits, malformed
from packhorse.packed.wire_json import dump_json, escaped, load_json

#: the field of the text; no place has this name
TEXT_FIELD: Final = "json"
_DEFAULT: Final = WireLimits()


@ranged
def split_tree(tree: Any) -> dict[str, np.ndarray | WireArray]:
    """The fields for ``encode_frame`` of a tree of dicts, lists, JSON's scalars and, anywhere in
    it, arrays or ``WireArray``. It is not changed.

    Raises:
        ValueError: it is nested too deeply, or holds what is not JSON.
    """
    name = "split_tree"
    fields: dict[str, np.ndarray | WireArray] = {}

    try:
        text = dump_json(name, _without_arrays(name, tree, "", fields))
    except RecursionError:
        raise ValueError(f"{name}: the tree is nested too deeply") from None
    return {TEXT_FIELD: np.frombuffer(text, dtype=np.uint8), **fields}


# a function of the module: a closure that calls itself would keep the arrays alive
def _without_arrays(
    name: str, value: Any, place: str, fields: dict[str, np.ndarray | WireArray]
) -> Any:
    if isinstance(value, np.ndarray | WireArray):
        fields[place] = value
        return None
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise ValueError(f"{name}: a key at {place or '/'} must be a string: {key!r}")
        return {
            key: _without_arrays(name, item, f"{place}/{escaped(key)}", fields)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_without_arrays(name, item, f"{place}/{i}", fields) for i, item in enumerate(value)]
    return value


@ranged
def join_tree(fields: Mapping[str, WireArray], *, limits: WireLimits = _DEFAULT) -> Any:
    """The tree of ``split_tree``, with a ``WireArray`` in the place of each array.

    Raises:
        WireFormatError: there is no text, it is not JSON or above ``max_json_bytes``, or a field is
            not named by a null of it.
    """
    name = "join_tree"
    given = fields.get(TEXT_FIELD)
    if given is None or given.values.dtype != np.uint8 or given.values.ndim != 1:
        malformed(name, "there is no text of bytes", TEXT_FIELD)
    if given.values.size > limits.max_json_bytes:
        malformed(
            name,
            f"{given.values.size} bytes are above max_json_bytes={limits.max_json_bytes}",
            TEXT_FIELD,
        )
    try:
        tree = load_json(given.values.tobytes())
    except (ValueError, RecursionError) as error:
        malformed(name, f"it is not JSON: {str(error)[:80]}", TEXT_FIELD)
    for place, array in fields.items():
        if place == TEXT_FIELD:
            continue
        if place == "" and tree is None:
            return array
        holder, key = _find(tree, place)
        if holder is None or holder[key] is not None:
            malformed(name, "the text has no null at this place", place)
        holder[key] = array
    return tree


def _find(tree: Any, place: str) -> tuple[Any, Any]:
    """(dict or list, key or index) of an existing place; (None, None) where there is none."""
    tokens = place.split("/")
    if len(tokens) < 2 or tokens[0]:
        return None, None
    for depth, token in enumerate(tokens[1:], 1):
        key: str | int = token.replace("~1", "/").replace("~0", "~")
        if isinstance(tree, list):
            index = int(token) if token.isascii() and token.isdigit() and len(token) < 10 else -1
            if not 0 <= index < len(tree) or str(index) != token:
                return None, None
            key = index
        elif not isinstance(tree, dict) or escaped(str(key)) != token or key not in tree:
            return None, None
        if depth == len(tokens) - 1:
            return tree, key
        tree = tree[key]
    return None, None
