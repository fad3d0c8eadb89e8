"""The tallies of two ranks, all-reduced, against counts by hand, for each way to be two ranks.

The tests run this file twice as a program (gloo). Each process makes a stack of Megatron's routers
for each layout, answers them without a forward, and writes what its session counted.
"""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.megatron.two_ranks import WORLD, join, leave, run_two_ranks

LAYERS, EXPERTS, TOPK = 2, 8, 2
#: trajectories of a micro-batch: tokens, captured rows; the last one is missing and runs live
LENGTHS, CAPTURED, MISSING = (6, 5, 3), (5, 4, 0), (False, False, True)
#: two micro-batches of a rank's data
REPLAYED, LIVE, TOKENS, TRAJECTORIES = 2 * 9, 2 * 3, 2 * 14, 2 * 3

#: name -> sizes of the parallelisms, and tokens of a micro-batch with its pads
LAYOUTS = {
    "dp": ({}, 14),
    "tp": ({"tensor_model_parallel_size": 2}, 16),
    "tp-sp": ({"tensor_model_parallel_size": 2, "sequence_parallel": True}, 16),
    "cp": ({"context_parallel_size": 2}, 20),
    "pp": ({"pipeline_model_parallel_size": 2}, 14),
}


def run_rank(rank: int, folder: Path) -> None:
    join(rank, folder)
    from megatron.core import parallel_state, tensor_parallel

    results = {}
    for name, (sizes, _) in LAYOUTS.items():
        groups = {key: value for key, value in sizes.items() if key != "sequence_parallel"}
        parallel_state.initialize_model_parallel(**groups)
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        results[name] = count(sizes)
        parallel_state.destroy_model_parallel()
    leave(results, rank, folder)


def count(sizes: dict) -> dict:
    """The tally of all ranks, and this rank's figures."""
    from megatron.core import parallel_state

    from packhorse import CapturedLayers, PackedTensor, ReplayMicrobatch, ReplaySession, TokenLayout
    from tests.megatron.helpers import make_config

    config = make_config(num_layers=LAYERS, moe_router_enable_expert_bias=False, **sizes)
    layers = range(1, LAYERS + 1)
    if sizes.get("pipeline_model_parallel_size"):
        layers = [1 + parallel_state.get_pipeline_model_parallel_rank()]
    model = RouterStack(config, layers)
    layout = TokenLayout.from_megatron(LENGTHS, config, format="thd", device="cpu")
    draw = torch.rand(2, sum(CAPTURED), LAYERS, EXPERTS).topk(TOPK, -1).indices.to(torch.uint8)
    microbatches = [
        ReplayMicrobatch(layout, PackedTensor.from_lengths(values, CAPTURED), missing=MISSING)
        for values in draw
    ]
    session = ReplaySession(
        model, captured_layers=CapturedLayers.decoder(LAYERS), sample_routes_every=1
    )
    scores = torch.rand(layout.num_rank_tokens, EXPERTS)
    with session.schedule(microbatches), torch.no_grad():
        for _ in microbatches:
            session.begin(model)
            for layer in model.decoder.layers:
                replay = layer.mlp.router.router_replay
                replay.get_replay_topk(scores, TOPK, None, None, lambda s, k, *_: s.topk(k, 1))
    joined = {}
    for name, value in session.tally().items():
        joined[name] = torch.as_tensor(value).clone()
        op = dist.ReduceOp.MAX if name.endswith("_max") else dist.ReduceOp.SUM
        dist.all_reduce(joined[name], op=op)
    figures = session.metrics()
    return {
        "tally": {name: value.tolist() for name, value in joined.items()},
        "replayed_share": figures["rows/replayed_share"],
        "missing_share": figures["coverage/missing_share"],
        "assignments": figures["padding/assignments"].item(),
    }


class RouterStack(torch.nn.Module):
    """As much of a stage as a session looks for: routers at these layers."""

    def __init__(self, config, layer_numbers) -> None:
        from megatron.core.process_groups_config import ProcessGroupCollection
        from megatron.core.transformer.moe.router import TopKRouter

        super().__init__()
        self.config = config
        self.decoder = torch.nn.Module()
        self.decoder.layers = torch.nn.ModuleList()
        for number in layer_numbers:
            layer = torch.nn.Module()
            layer.layer_number = number
            layer.mlp = torch.nn.Module()
            groups = ProcessGroupCollection.use_mpu_process_groups()
            layer.mlp.router = TopKRouter(config, pg_collection=groups)
            layer.mlp.router.set_layer_number(number)
            self.decoder.layers.append(layer)


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> list[dict]:
    return run_two_ranks(__file__, tmp_path_factory.mktemp("tally_ranks"))


@pytest.mark.parametrize("name", LAYOUTS)
def test_an_all_reduce_counts_every_microbatch_token_and_layer_once(name, results):
    padded = LAYOUTS[name][1]
    data = WORLD if name == "dp" else 1  # ranks with data of their own
    dummy = 2 * padded - REPLAYED - LIVE
    expected = {
        "rows/replayed": data * REPLAYED,
        "rows/live": data * LIVE,
        "rows/dummy": data * dummy,
        "coverage/tokens": data * TOKENS,
        "coverage/trajectories": data * TRAJECTORIES,
        "coverage/missing": data * 2,
        "coverage/uncovered_max": 3,
        "routes/rows": [data * REPLAYED] * LAYERS,
        "routes/assignments": [data * REPLAYED * TOPK] * LAYERS,
        "padding/per_ep_rank": [[data * dummy * TOPK]] * LAYERS,
    }
    for rank in range(WORLD):
        tally = results[rank][name]["tally"]
        assert {key: tally[key] for key in expected} == expected
        assert tally.keys() - expected.keys() == {
            "routes/rows_differing",
            "routes/assignments_differing",
        }
        assert results[0][name]["tally"] == tally


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_figures_of_a_rank_are_of_what_it_ran(name, results):
    """Not of what it adds to the others' tallies."""
    dummy = 2 * LAYOUTS[name][1] - REPLAYED - LIVE
    for rank in range(WORLD):
        figures = results[rank][name]
        assert figures["replayed_share"] == REPLAYED / (REPLAYED + LIVE + dummy)
        assert figures["missing_share"] == 1 / 3
    assignments = [result[name]["assignments"] for result in results]
    if name in ("dp", "tp"):
        assert assignments == [dummy * TOPK * LAYERS] * WORLD
    else:
        assert sum(assignments) == dummy * TOPK * LAYERS


if __name__ == "__main__":
    run_rank(int(sys.argv[1]), Path(sys.argv[2]))
