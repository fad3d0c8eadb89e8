"""Capture.load.

Oracle: the fields of the file itself, cut by plain slices. Each bad file is the packaged capture of
a real vLLM with one thing changed.
"""

import io
import json
import re
import struct
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest

import packhorse.replay
from packhorse.replay.capture import OPTIONAL, REQUIRED, Capture

PATH = Path(next(iter(packhorse.replay.__path__))) / "data" / "vllm_tiny_moe.npz"
TEST_DATA = Path(__file__).parent.parent / "data"


@pytest.fixture(scope="module")
def fields() -> dict[str, np.ndarray]:
    with np.load(PATH, allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}


@pytest.fixture
def load(tmp_path, fields):
    """Load the capture with some fields changed; None leaves one out."""

    def load(given: dict | None = None, **changes):
        changed = {name: value.copy() for name, value in fields.items()} | changes
        path = tmp_path / "capture.npz"
        np.savez(path, **{name: value for name, value in changed.items() if value is not None})
        return Capture.load(path, **(given or {}))

    return load


def cut(fields, values, offsets, i):
    return fields[values][fields[offsets][i] : fields[offsets][i + 1]]


def test_trajectories_are_the_files_slices(fields):
    capture = Capture.load(PATH)
    assert capture.num_trajectories == len(fields["prompt_offsets"]) - 1 == 9
    assert (capture.num_experts, capture.topk) == (8, 2)
    assert (capture.num_layers, capture.vocab_size) == (4, 512)
    start = 0
    for i in range(9):
        prompt = cut(fields, "prompt_ids", "prompt_offsets", i)
        response = cut(fields, "response_ids", "response_offsets", i)
        assert np.array_equal(capture.prompt_ids[i], prompt)
        assert np.array_equal(capture.response_ids[i], response)
        assert capture.lengths[i] == len(prompt) + len(response)
        assert capture.response_lengths[i] == len(response)
        logprobs = fields["sampled_logprobs"][start : start + len(response)]
        assert np.array_equal(capture.sampled_logprobs[i], logprobs)
        routes = cut(fields, "routed_experts", "route_offsets", i)
        assert np.array_equal(capture.routes.segment(i).numpy(), routes)
        for r, row in enumerate(capture.support.segment(i).numpy()):
            kept = cut(fields, "support_ids", "support_offsets", start + r)
            assert row[: len(kept)].tolist() == kept.tolist()
            assert (row[len(kept) :] == -1).all()
        start += len(response)
    assert capture.meta["vllm"] == json.loads(str(fields["meta"]))["vllm"]
    assert set(capture.optional) == set(OPTIONAL)


def test_packaged_data_names_no_path(fields):
    recipe = (PATH.parent / "tiny_moe" / "recipe.json").read_text()
    with np.load(TEST_DATA / "hf_fp32_logprobs.npz", allow_pickle=False) as archive:
        texts = [str(fields["meta"]), recipe, str(archive["meta"])]
    for text in texts:
        assert not re.findall(r'"[^"]*[/\\][^"]*"', json.dumps(json.loads(text)))
    assert json.loads(texts[0])["model_recipe"] == json.loads(recipe)


def test_optional_fields_may_be_left_out(load):
    capture = load({"num_experts": 8, "vocab_size": 512}, meta=None, **dict.fromkeys(OPTIONAL))
    assert (capture.optional, capture.meta) == ({}, {})


def test_ids_of_wider_types_are_the_same_capture(load, fields):
    wide = load(
        routed_experts=fields["routed_experts"].astype(np.int64),
        prompt_ids=fields["prompt_ids"].astype(np.uint16),
        route_offsets=fields["route_offsets"].astype(np.int32),
    )
    assert np.array_equal(wide.routes.values.numpy(), fields["routed_experts"])
    assert np.array_equal(np.concatenate(wide.prompt_ids), fields["prompt_ids"])
    swapped = {name: fields[name].astype(">i8") for name in REQUIRED if "logprobs" not in name}
    swapped["sampled_logprobs"] = fields["sampled_logprobs"].astype(">f8")
    other = load(**swapped)
    assert other.routes == wide.routes
    assert other.support == wide.support
    assert np.array_equal(np.concatenate(other.prompt_ids), fields["prompt_ids"])


def test_a_row_for_the_last_token_is_legal(load, fields):
    routes = np.concatenate([fields["routed_experts"], fields["routed_experts"][:1]])
    offsets = fields["route_offsets"].copy()
    offsets[-1] += 1
    capture = load(routed_experts=routes, route_offsets=offsets, hf_fp32_routes=None)
    assert capture.routes.lengths[-1] == capture.lengths[-1]


def edit(name, place, value):
    """The field ``name`` with one element changed."""

    def change(fields):
        array = fields[name].copy()
        array[place] = value
        return {name: array}

    return change


def edit_unsigned(name, place, value):
    def change(fields):
        array = fields[name].astype(np.uint64)
        array[place] = value
        return {name: array}

    return change


def grown_routes(fields):
    """Trajectory 2 (41 tokens, 40 rows) gets two more rows."""
    offsets = fields["route_offsets"].copy()
    routes = np.insert(fields["routed_experts"], offsets[3], fields["routed_experts"][:2], axis=0)
    offsets[3:] += 2
    return {"routed_experts": routes, "route_offsets": offsets, "hf_fp32_routes": None}


def shrunk_routes(fields):
    """Trajectory 2 loses its last row."""
    offsets = fields["route_offsets"].copy()
    routes = np.delete(fields["routed_experts"], offsets[3] - 1, axis=0)
    offsets[3:] -= 1
    return {"routed_experts": routes, "route_offsets": offsets, "hf_fp32_routes": None}


def without_sampled_id(fields):
    """Response token 5 of trajectory 1 was sampled from outside its candidates."""
    row = fields["response_offsets"][1] + 5
    start, end = fields["support_offsets"][row : row + 2]
    support = fields["support_ids"].copy()
    support[start:end] = (fields["response_ids"][row] + 1 + np.arange(end - start)) % 512
    return {"support_ids": support}


def without_candidates(fields):
    offsets = fields["support_offsets"].copy()
    row = fields["response_offsets"][1] + 5
    support = np.delete(fields["support_ids"], np.arange(offsets[row], offsets[row + 1]))
    offsets[row + 1 :] -= offsets[row + 1] - offsets[row]
    return {"support_ids": support, "support_offsets": offsets}


def empty_prompt(fields):
    offsets = fields["prompt_offsets"].copy()
    offsets[3] = offsets[4]
    return {"prompt_offsets": offsets, "routed_experts": fields["routed_experts"]}


BAD = {
    "missing-field": (lambda f: {"support_ids": None}, "field support_ids is missing"),
    "missing-layer": (
        lambda f: {"routed_experts": f["routed_experts"][:, :3]},
        "routed_experts of trajectory 0 has 3 layers, expected 4",
    ),
    "another-topk": (
        lambda f: {"routed_experts": f["routed_experts"][:, :, :1]},
        "trajectory 0 has 1 experts a token, expected 2",
    ),
    "expert-above": (
        edit("routed_experts", (20, 1, 0), 8),
        "routed_experts of trajectory 1, row 4, layer 1: expert 8 is not below num_experts=8",
    ),
    "expert-repeated": (
        edit("routed_experts", (20, 1), 3),
        "trajectory 1, row 4, layer 1: expert 3 is repeated",
    ),
    "rows-past-tokens": (grown_routes, "trajectory 2 has 42 rows for 41 tokens"),
    "rows-short": (
        shrunk_routes,
        "trajectory 2 has 39 rows; the last of its 41 tokens needs 40",
    ),
    "captured-nothing": (
        lambda f: {"routed_experts": np.zeros_like(f["routed_experts"])},
        "all zeros",
    ),
    "sampled-id-outside": (
        without_sampled_id,
        "support_ids of trajectory 1, row 5: the sampled id",
    ),
    "no-candidates": (
        without_candidates,
        "leaves response token 5 of trajectory 1 without a candidate",
    ),
    "support-out-of-vocabulary": (
        edit("support_ids", -1, 512),
        "trajectory 8, row 15: id 512 is not below vocab_size=512",
    ),
    "nan-logprob": (
        edit("sampled_logprobs", 17, np.nan),
        "sampled_logprobs of trajectory 1, token 1: nan is not finite",
    ),
    "positive-logprob": (
        edit("sampled_logprobs", 17, 0.25),
        "trajectory 1, token 1: 0.25 is positive",
    ),
    "logprobs-short": (
        lambda f: {"sampled_logprobs": f["sampled_logprobs"][:30]},
        "sampled_logprobs has 30 entries for 133 response tokens, wrong from trajectory 2 on",
    ),
    "prompt-id-above": (
        edit("prompt_ids", 7, 512),
        "prompt_ids of trajectory 2, token 1: id 512 is not in",
    ),
    "response-id-negative": (
        edit("response_ids", 16, -1),
        "response_ids of trajectory 1, token 0: id -1 is not in",
    ),
    "prompt-empty": (empty_prompt, "prompt_ids of trajectory 3 is empty"),
    "offsets-fall": (edit("route_offsets", 4, 20), "route_offsets falls in trajectory 3"),
    "offsets-wrap": (
        edit("route_offsets", slice(4, 6), [2**63 - 1, -2]),
        "route_offsets falls in trajectory 4",
    ),
    "prompt-offsets-wrap": (
        edit("prompt_offsets", slice(4, 6), [2**63 - 1, -2]),
        "prompt_offsets falls in trajectory 4",
    ),
    "response-offsets-wrap": (
        edit("response_offsets", slice(4, 6), [2**63 - 1, -2]),
        "response_offsets falls in trajectory 4",
    ),
    "support-offsets-wrap": (
        edit("support_offsets", slice(20, 22), [2**63 - 1, -2]),
        "support_offsets falls at response token 4 of trajectory 1",
    ),
    "support-offsets-unsigned": (
        edit_unsigned("support_offsets", 20, 2**64 - 1),
        "support_offsets falls at response token 4 of trajectory 1",
    ),
    "route-offsets-unsigned": (
        edit_unsigned("route_offsets", -1, 2**64 - 1),
        "route_offsets ends with 18446744073709551615 in trajectory 8",
    ),
    "support-id-unsigned": (
        edit_unsigned("support_ids", 3, 2**64 - 1),
        "support_ids: token_ids holds an integer past int64, 18446744073709551615 at [3]",
    ),
    "prompt-id-unsigned": (
        edit_unsigned("prompt_ids", 7, 2**64 - 1),
        "prompt_ids of trajectory 2, token 1: id 18446744073709551615 is not in",
    ),
    "offsets-first": (edit("prompt_offsets", 0, 1), "prompt_offsets begins with 1, not 0"),
    "offsets-last": (
        edit("response_offsets", -1, 132),
        "response_offsets ends with 132 in trajectory 8, but response_ids has 133 rows",
    ),
    "offsets-short": (
        lambda f: {"route_offsets": f["route_offsets"][:-1]},
        "route_offsets has 9 entries for 9 trajectories",
    ),
    "offsets-empty": (
        lambda f: {"prompt_offsets": f["prompt_offsets"][:1]},
        "prompt_offsets has 1 entries: there is no trajectory",
    ),
    "support-offsets-short": (
        lambda f: {"support_offsets": f["support_offsets"][:20]},
        "support_offsets has 20 entries for 133 response tokens, wrong from trajectory 1 on",
    ),
    "support-offsets-last": (edit("support_offsets", -1, 1455), "to 1455 in trajectory 8"),
    "float-ids": (
        lambda f: {"prompt_ids": f["prompt_ids"].astype(np.float32)},
        "prompt_ids must be 1-dimensional, integer, got float32",
    ),
    "flat-routes": (
        lambda f: {"routed_experts": f["routed_experts"].reshape(-1, 8)},
        "routed_experts must be 3-dimensional",
    ),
    "optional-short": (lambda f: {"conv": f["conv"][:-1]}, "conv has 8 rows for the 9"),
    "meta-broken": (lambda f: {"meta": np.array("{")}, "meta is not JSON"),
    "meta-too-deep": (lambda f: {"meta": np.array("[" * 10**5)}, "meta is not JSON"),
    "pickled": (
        lambda f: {"prompt_ids": np.array([None, 1], dtype=object)},
        "field prompt_ids cannot be read",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_field_is_one_line_naming_it(name, load, fields):
    change, message = BAD[name]
    with pytest.raises(ValueError, match=r"^Capture.load: .*capture\.npz: ") as error:
        load({"num_layers": 4, "topk": 2}, **change(fields))
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert "pack_" not in str(error.value)


@pytest.mark.parametrize("name", REQUIRED)
def test_each_required_field_is_required(name, load):
    with pytest.raises(ValueError, match=f"field {name} is missing"):
        load(**{name: None})


@pytest.mark.parametrize("kept", [0, 3, 100, 15_000, 20_000], ids=lambda n: f"{n}-bytes")
def test_a_truncated_file_is_one_line_naming_it(kept, tmp_path):
    path = tmp_path / "cut.npz"
    path.write_bytes(PATH.read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"Capture.load: .*cut\.npz: ") as error:
        Capture.load(path)
    assert "\n" not in str(error.value)


def test_a_damaged_field_is_one_line_naming_it(tmp_path):
    path = tmp_path / "damaged.npz"
    content = bytearray(PATH.read_bytes())
    at = content.index(b"routed_experts.npy") + 200
    content[at : at + 64] = bytes(64)
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"damaged\.npz: field routed_experts cannot be read"):
        Capture.load(path)


# --- files that were written wrong ----------------------------------------------------------------


def npy(fields, name, header: bytes | None = None) -> bytes:
    """The .npy bytes of a field, or these with another header before its values."""
    whole = io.BytesIO()
    np.lib.format.write_array(whole, fields[name], version=(1, 0))
    if header is None:
        return whole.getvalue()
    values = np.ascontiguousarray(fields[name]).tobytes()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + values


def write_zip(path, fields, replaced: dict[str, bytes], compression=zipfile.ZIP_DEFLATED) -> None:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name in fields:
            archive.writestr(f"{name}.npy", replaced.get(name) or npy(fields, name))


def refused(path) -> str:
    with pytest.raises(ValueError, match=f"^{re.escape(f'Capture.load: {path}: ')}") as error:
        Capture.load(path)
    assert len(str(error.value).splitlines()) == 1
    return str(error.value)


@pytest.mark.parametrize(
    "header",
    [
        b"{'descr': '|u1', 'fortran_order': False, 'shape': (1000000000000000, 4, 2), }\n",
        b"{'descr': '|u1', 'fortran_order': False, 'shape': (1012, 4, 2), }\n",
        b"{'descr': '|u1', 'fortran_order': False, 'shape': (-1011, -4, 2), }\n",
        b"{'descr': '|V0', 'fortran_order': False, 'shape': (1000000000000000, 4, 2), }\n",
        b"{'descr': '|O', 'fortran_order': False, 'shape': (1011, 4, 2), }\n",
        b"{'descr': '|u1', 'fortran_order': False, 'shape': (1011, 4, 2\n",
        b"{'descr': 7, 'fortran_order': False, 'shape': (1011, 4, 2), }\n",
        b"[" * 5000 + b"\n",
        b'"""\n',
        b"\xff\n",
    ],
    ids=[
        "huge", "row-more", "negative", "no-bytes", "objects", "cut", "descr", "deep", "open",
        "raw",
    ],
)  # fmt: skip
def test_a_header_that_its_member_does_not_hold_is_refused(header, fields, tmp_path):
    write_zip(tmp_path / "h.npz", fields, {"routed_experts": npy(fields, "routed_experts", header)})
    tracemalloc.start()
    try:
        message = refused(tmp_path / "h.npz")
        assert tracemalloc.get_traced_memory()[1] < 8 * 2**20
    finally:
        tracemalloc.stop()
    assert "field routed_experts cannot be read (" in message


def damaged_directory(at: int, value: bytes):
    """Bytes of the central directory's entry of ``routed_experts``."""

    def damage(content: bytearray) -> None:
        entry = content.rindex(b"routed_experts.npy") - 46
        content[entry + at : entry + at + len(value)] = value

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damaged_directory(6, b"\xff"), "not an .npz archive (zip file version"),
        (damaged_directory(8, b"\x01"), "field routed_experts cannot be read (File"),
        (damaged_directory(10, b"\x63"), "cannot be read (compression method 99)"),
        (damaged_directory(10, b"\x0c"), "cannot be read (compression method 12)"),
        (damaged_directory(24, b"\xff\xff\xff\x7f"), "(2147483647 bytes in a file of"),
        (damaged_directory(16, b"\0\0\0\0"), "cannot be read (Bad CRC-32"),
    ],
    ids=["version", "encrypted", "unknown-method", "another-method", "size", "checksum"],
)
def test_a_damaged_directory_is_one_line_naming_the_file(damage, message, tmp_path):
    content = bytearray(PATH.read_bytes())
    damage(content)
    (tmp_path / "damaged.npz").write_bytes(content)
    assert message in refused(tmp_path / "damaged.npz")


def test_a_field_that_is_there_twice_is_refused(fields, tmp_path):
    path = tmp_path / "twice.npz"
    write_zip(path, fields, {})
    with pytest.warns(UserWarning, match="Duplicate"), zipfile.ZipFile(path, "a") as archive:
        archive.writestr("prompt_ids.npy", npy(fields, "prompt_ids"))
    assert "field 'prompt_ids' is twice in the archive" in refused(path)


@pytest.mark.filterwarnings("ignore:Duplicate")
def test_any_corruption_loads_or_is_one_line_naming_the_file(fields, tmp_path):
    rng = np.random.default_rng(20)
    path = tmp_path / "fuzz.npz"
    whole = PATH.read_bytes()
    names = sorted(fields)

    def flip(content: bytes, first: int = 0, last: int | None = None) -> bytes:
        changed = bytearray(content)
        for at in rng.integers(first, len(content) if last is None else last, rng.integers(1, 4)):
            changed[at] = rng.integers(256)
        return bytes(changed)

    messages = []
    for case in range(120):
        name = names[rng.integers(len(names))]
        if case % 4 == 0:
            path.write_bytes(flip(whole))
        elif case % 4 == 1:  # the directory
            path.write_bytes(flip(whole, len(whole) - 1200))
        elif case % 4 == 2:  # whole members with headers or values that are not theirs
            changed = npy(fields, name)
            last = 100 if case % 8 == 2 else None
            write_zip(path, fields, {name: flip(changed, 0, last)}, zipfile.ZIP_STORED)
        else:
            start, end = sorted(rng.integers(0, len(whole), 2))
            path.write_bytes(whole[:start] + (whole[end:] if case % 8 == 3 else b""))
        try:
            Capture.load(path)
        except ValueError as error:
            messages.append(str(error))
    assert 40 < len(messages) < 120  # a flip of a time stamp changes nothing
    for message in messages:
        assert message.startswith(f"Capture.load: {path}: ")
        assert len(message.splitlines()) == 1


def test_other_files_are_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"absent\.npz: No such file"):
        Capture.load(tmp_path / "absent.npz")
    with pytest.raises(ValueError, match="Is a directory"):
        Capture.load(tmp_path)
    np.save(tmp_path / "array.npy", np.arange(3))
    with pytest.raises(ValueError, match=r"array\.npy: truncated, or not an \.npz archive"):
        Capture.load(tmp_path / "array.npy")
    (tmp_path / "text.npz").write_text("prompt_ids: 1 2 3")
    with pytest.raises(ValueError, match=r"text\.npz: truncated, or not an \.npz archive"):
        Capture.load(tmp_path / "text.npz")


def test_the_size_of_the_model_must_be_known(load):
    with pytest.raises(ValueError, match="num_experts is None"):
        load({"vocab_size": 512}, meta=None)
    with pytest.raises(ValueError, match="vocab_size is None"):
        load({"num_experts": 8}, meta=None)
    with pytest.raises(ValueError, match=r"vocab_size is 10+\.\.\.: give it"):
        load({"num_experts": 8, "vocab_size": 10**200}, meta=None)
