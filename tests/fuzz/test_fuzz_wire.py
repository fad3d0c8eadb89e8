"""The fuzz target without the fuzzer: its seeds are read, and it sees what it is there to see."""

import random
import tracemalloc

import pytest

from packhorse.packed.wire import decode_frame, decode_json
from tests.fuzz.fuzz_wire import repaired_body, repaired_frame, seeds, try_one


@pytest.fixture(autouse=True, scope="module")
def _untraced():
    yield
    tracemalloc.stop()


def test_the_seeds_are_whole_and_a_repair_leaves_them_readable():
    made = seeds()
    assert len(made) == 21 + 17
    for seed in made:
        try_one(seed)
    for seed in made[:6]:
        assert str(decode_json(repaired_body(seed[1:]))) == str(decode_json(seed[1:]))
    for seed in made[6:8]:
        fields = decode_frame(repaired_frame(seed[1:])).fields
        assert str(fields) == str(decode_frame(seed[1:]).fields)


def test_a_repaired_message_gets_behind_the_checksums():
    frame, body = seeds()[6][1:], seeds()[0][1:]
    bad = bytearray(frame)
    bad[bad.index(b'"start":2') + 8] = ord("7")
    assert decode_frame(repaired_frame(bytes(bad))).fields["ids"].start == 7
    bad = bytearray(body)
    bad[bad.index(b'"start":2') + 8] = ord("7")
    bad[bad.index(b'"data":"') + 8] = ord("Q")
    tree = decode_json(repaired_body(bytes(bad)))
    assert tree["choices"][1]["a/b"]["ids"].start == 7
    assert tree["choices"][0]["routes"].values[0, 0, 0] == 64


def test_random_changes_of_the_seeds_find_nothing():
    rng, made = random.Random(0), seeds()
    for _ in range(1500):
        data = bytearray(rng.choice(made))
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        try_one(bytes(data))


def test_an_error_of_another_kind_is_found(monkeypatch):
    from packhorse.packed import wire

    def broken(message, **keywords):
        raise KeyError("start")

    monkeypatch.setattr(wire, "decode_json", broken)
    with pytest.raises(KeyError):
        try_one(seeds()[0])
