"""The demo of the glm4_moe family, and how it finds the model that a capture was sampled from.

The bounds of "both" are those of the qwen3_moe demo, fp32 0.016 / 0.07 and bf16 0.025 / 0.15 (mean
/ max); the fp32 figures themselves are this demo's own, held so that no change moves them unseen.
That the model is right says test_hf_parity_glm4.py.
"""

import contextlib
import dataclasses
import io
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import packhorse.replay
from packhorse.replay.capture import Capture
from packhorse.replay.checkpoint import read_config
from packhorse.replay.demo_families import FAMILIES, choose
from packhorse.replay.demo_model import Sizes
from packhorse.replay.demo_ranks import check_model
from tests.megatron.test_demo import cells, gaps, refused, run

PACKAGED = Path(next(iter(packhorse.replay.__path__))) / "data"
CAPTURE = PACKAGED / "vllm_tiny_glm4_moe.npz"
MODEL = PACKAGED / "tiny_glm4_moe"
FIGURES = (
    ("neither", 0.4663, 0.733),
    ("routes", 0.4704, 0.733),
    ("support", 0.0267, 0.423),
    ("both", 0.0144, 0.069),
)


@pytest.fixture(scope="module")
def output(_megatron) -> str:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        assert run("--family", "glm4_moe") == 0
    return said.getvalue()


def test_replay_of_both_closes_the_gap(output):
    table = gaps(output)
    for variant, mean, largest in FIGURES:
        assert table[variant][0][0] == pytest.approx(mean, rel=0.02), variant
        assert table[variant][0][2] == pytest.approx(largest, rel=0.02), variant
    for i, (mean, largest) in enumerate([(0.016, 0.07), (0.025, 0.15)]):
        assert table["neither"][i][0] >= 0.2
        assert table["both"][i][0] <= mean
        assert table["both"][i][2] <= largest
        assert table["both"][i][0] < table["support"][i][0] / 1.5
        assert table["both"][i][2] < table["support"][i][2] / 3
        assert table["both"][i][3] < table["support"][i][3] / 4 < table["neither"][i][3] / 40


def test_only_the_layers_with_experts_are_asked_and_compared(output):
    assert cells(output, "routers asked, in the training schedule") == ["3 of 3, 9 times"] * 2
    assert cells(output, "and answered again in recompute") == ["9 times"] * 2
    assert cells(output, "rows replayed / dummy / live, a layer") == ["1,011 / 177 / 0"] * 2
    for cell in cells(output, "route sets that differ without replay"):
        share, total = cell.removesuffix(f" % of {3 * 1011:,}"), cell.split()[-1]
        assert total == "3,033"
        assert 1 < float(share) < 4
    for cell in cells(output, "gradients; norm at the routers"):
        assert cell.startswith("all finite, ")


def test_the_header_says_what_the_family_has(output):
    assert "\nmodel     glm4_moe, 4 layers (1 dense), 12 experts, top 4, vocabulary 512\n" in output
    assert (
        "\n          sigmoid scores with a correction bias, experts of 2 of 4 groups,"
        " a shared expert\n" in output
    )
    assert "9 trajectories, 1,020 tokens, 133 of them sampled by vLLM 0.32.0" in output


@pytest.mark.parametrize("how", ["late", "early", "batch-major", "layers"])
def test_routes_in_the_wrong_place_show(how, capsys):
    assert run("--capture", CAPTURE, "--break", how, "--dtype", "fp32") == 0
    table = gaps(capsys.readouterr().out)
    assert table["both"][0][0] > 5 * table["support"][0][0]
    assert table["both"][0][2] > 1


def test_packed_microbatches_give_the_same_figures(output, capsys):
    assert run("--capture", CAPTURE, "--format", "thd", "--dtype", "fp32") == 0
    table = gaps(capsys.readouterr().out)
    for variant, values in gaps(output).items():
        assert table[variant][0][:3] == pytest.approx(values[0][:3], rel=0.03), variant


# --- which model ----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_a_packaged_capture_was_sampled_from_the_packaged_model(family):
    """So says its meta, and so do its routes: all of these layers have experts."""
    path, folder = choose(str(FAMILIES[family].capture))
    assert (path, folder) == (FAMILIES[family].capture, FAMILIES[family].model)
    config = read_config(folder)
    assert config.model_type == family
    capture = Capture.load(path, num_experts=config.num_experts, moe_layers=config.moe_layers)
    recipe = json.loads((folder / "recipe.json").read_text())
    assert recipe["family"] == family
    if "sha256" in recipe:
        assert capture.meta["model_sha256"] == recipe["sha256"]
    assert capture.meta["vllm"] == "0.32.0"


def test_the_two_turns_of_the_packaged_capture_share_their_rows():
    """And the second took its first block from vLLM's prefix cache."""
    with np.load(CAPTURE, allow_pickle=False) as archive:
        fields = {name: archive[name] for name in archive.files}
    first, second = np.flatnonzero(fields["conv"] >= 0)
    assert fields["turn"][[first, second]].tolist() == [0, 1]
    assert fields["num_cached_tokens"][second] == 128
    offsets = fields["route_offsets"]
    earlier, later = (
        fields["routed_experts"][offsets[i] : offsets[i + 1]] for i in (first, second)
    )
    assert len(later) > len(earlier) > 128
    np.testing.assert_array_equal(later[: len(earlier)], earlier)


def test_without_options_the_default_family_is_taken():
    assert choose(None) == (PACKAGED / "vllm_tiny_moe.npz", PACKAGED / "tiny_moe")
    assert choose(None, family="glm4_moe") == (CAPTURE, MODEL)


@pytest.fixture
def capture_with(tmp_path):
    def write(**meta: object) -> str:
        with np.load(CAPTURE, allow_pickle=False) as archive:
            fields = {name: archive[name] for name in archive.files}
        changed = json.loads(str(fields["meta"])) | meta
        fields["meta"] = np.array(json.dumps({k: v for k, v in changed.items() if v is not None}))
        np.savez(tmp_path / "changed.npz", **fields)
        return str(tmp_path / "changed.npz")

    return write


def test_a_capture_whose_weights_have_no_sum_is_taken_by_its_type(capture_with):
    assert choose(capture_with(model_sha256=None))[1] == MODEL


def test_a_capture_that_names_no_model_is_of_the_default_family_or_the_one_named(
    capture_with, tmp_path
):
    path = capture_with(model_config=None, model_sha256=None)
    assert choose(path)[1] == PACKAGED / "tiny_moe"
    assert choose(path, family="glm4_moe")[1] == MODEL
    (tmp_path / "broken.npz").write_bytes(b"PK")
    assert choose(str(tmp_path / "broken.npz"))[1] == PACKAGED / "tiny_moe"  # refused as it is read
    assert choose(str(tmp_path / "absent.npz"))[1] == PACKAGED / "tiny_moe"


def test_a_capture_of_other_weights_needs_its_model_named(capture_with, tmp_path, capsys):
    path = capture_with(model_sha256="0" * 64)
    message = refused(capsys, "--capture", path)
    assert "sampled from weights with sha256 '0000" in message
    assert "not from the packaged tiny_glm4_moe: name their folder with --model" in message
    folder = shutil.copytree(MODEL, tmp_path / "named")
    assert choose(path, str(folder)) == (Path(path), folder)


def test_a_capture_of_another_family_is_refused_by_name(capture_with, capsys):
    path = capture_with(model_config={"model_type": "deepseek_v3", "vocab_size": 512})
    message = refused(capsys, "--capture", path)
    assert "sampled from a model of type 'deepseek_v3', none is packaged: name its" in message
    message = refused(capsys, "--capture", CAPTURE, "--family", "qwen3_moe")
    assert "sampled from a model of type glm4_moe, not --family qwen3_moe" in message


@pytest.mark.parametrize("options", [("--tp", 4), ("--ep", 5), ("--ep", 8)])
def test_sizes_that_do_not_divide_the_model_are_refused(options, capsys):
    message = refused(capsys, "--family", "glm4_moe", *options)
    assert f"{options[0]} {options[1]} does not divide the model's " in message


def test_a_shared_expert_that_cannot_be_cut_is_refused():
    config = dataclasses.replace(read_config(MODEL), shared_intermediate_size=33)
    with pytest.raises(ValueError, match="--tp 2 does not divide the model's 33 columns of the sh"):
        check_model(Sizes(tp=2), config, [])
