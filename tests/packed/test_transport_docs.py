"""The snippets of docs/transport.md run, in order; that with Ray in ``test_transport``."""

import multiprocessing

import torch

from packhorse.packed.microbatch import plan_by_count
from packhorse.packed.transport_device import DeviceStager
from packhorse.packed.transport_shared import share_batch
from tests.packed.transport_helpers import DOCUMENT, ROUTES, chosen, flat, make_batch, snippets


def test_the_page_without_ray_runs(device):
    _, writer, reader, closing, loop, some, layers = snippets()
    batch, trained = make_batch(6, 40, layers=16), []
    pipe, theirs = multiprocessing.Pipe(duplex=False)
    names = {"batch": batch, "pipes": [theirs], "device": device}
    exec(writer, names)
    received = {"pipe": pipe}
    exec(reader, received)
    exec(closing, names)
    assert flat(received["batch"]) == flat(batch)

    names |= {
        "plan": plan_by_count(6, microbatch_size=4, equal_sizes=False),
        "train": lambda microbatch: trained.append(flat(microbatch.to("cpu"))),
    }
    exec(loop, names)
    assert [len(microbatch["names"]) for microbatch in trained] == [4, 2]
    assert trained[1] == chosen(flat(batch), [4, 5])
    names["microbatch"] = batch
    exec(some, names)
    assert flat(names["staged"].to("cpu")) == chosen(flat(batch), [5, 2, 3])
    exec(layers, names)
    staged = names["staged_layers"].values
    assert torch.equal(staged.cpu(), batch[ROUTES].values[:, 8:16])


def test_the_page_says_what_is_so():
    text = DOCUMENT.read_text()
    with share_batch(make_batch(2, 4)) as shared:
        assert len(bytes(str(tuple(shared.handle)), "ascii")) < 120  # "about 100 bytes"
    stager = DeviceStager("cpu")
    assert stager._buffer_bytes == 8 * 2**20
    assert stager._num_threads <= 8
    assert "(8 MiB each, 4 more than the threads that fill them, which are at most 8)" in text
