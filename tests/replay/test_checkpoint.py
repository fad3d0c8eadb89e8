"""read_config and Checkpoint. Oracle: the packaged model's config.json, one setting changed."""

import json
from pathlib import Path

import pytest

import packhorse.replay
from packhorse.replay.checkpoint import Checkpoint, read_config

DATA = Path(next(iter(packhorse.replay.__path__))) / "data"
MODEL = DATA / "tiny_moe"
CONFIG = json.loads((MODEL / "config.json").read_text())
GLM4_CONFIG = json.loads((DATA / "tiny_glm4_moe" / "config.json").read_text())


@pytest.fixture
def read(tmp_path):
    def read(_of=CONFIG, **changes):
        config = {name: value for name, value in (_of | changes).items() if value is not ...}
        (tmp_path / "config.json").write_text(json.dumps(config))
        return read_config(tmp_path)

    return read


def test_names_of_old_and_new_transformers_read_alike(read):
    new = read()
    old = read(
        num_local_experts=..., num_experts=8, rope_parameters=..., rope_theta=10000.0,
        rope_scaling=None,
    )  # fmt: skip
    assert old == new
    assert (new.num_experts, new.topk, new.head_dim, new.rope_theta) == (8, 2, 32, 10000.0)


@pytest.mark.parametrize(
    ("dense", "step", "layers"),
    [([], 1, (0, 1, 2, 3)), ([0, 2], 1, (1, 3)), ([], 2, (1, 3)), ([1], 2, (3,))],
)
def test_layers_with_experts_follow_transformers_rule(dense, step, layers, read):
    assert read(mlp_only_layers=dense, decoder_sparse_step=step).moe_layers == layers


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "deepseek_v3"},
            "model_type 'deepseek_v3' cannot be loaded; known: qwen3_moe, glm4_moe",
        ),
        ({"model_type": ...}, "model_type None cannot be loaded"),
        ({"attention_bias": True}, "attention_bias=True is not supported"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings=True is not supported"),
        ({"use_sliding_window": True}, "use_sliding_window=True is not supported"),
        (
            {"use_sliding_window": ..., "sliding_window": 128},
            "sliding_window=128 is not supported",
        ),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantization_config="),
        (
            {"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn", "factor": 4.0}},
            "rope_type='yarn' is not supported",
        ),
        (
            {"rope_parameters": ..., "rope_theta": 1e4, "rope_scaling": {"type": "linear"}},
            "rope_type='linear' is not supported",
        ),
        (
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor=0.5 is not supported",
        ),
        ({"rope_parameters": {}}, "rope_theta is missing"),
        ({"num_local_experts": ...}, "num_experts or num_local_experts is missing"),
        ({"hidden_size": -1}, "hidden_size=-1 is not a count"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok=9 of 8 experts"),
        ({"num_key_value_heads": 3}, "4 attention heads for 3 key-value heads"),
        ({"mlp_only_layers": [0, 1, 2, 3]}, "no layer has experts"),
        ({"mlp_only_layers": "0"}, "mlp_only_layers='0' is not a list"),
        ({"mlp_only_layers": [True]}, "mlp_only_layers=[True] is not a list"),
        ({"rms_norm_eps": None}, "rms_norm_eps=None is not a finite number above 0"),
        ({"rms_norm_eps": []}, "rms_norm_eps=[] is not a finite number"),
        ({"rms_norm_eps": {}}, "rms_norm_eps={} is not a finite number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan is not a finite number"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps=1000"),
        ({"rms_norm_eps": True}, "rms_norm_eps=True is not a finite number"),
        ({"rope_parameters": {"rope_theta": 10**400}}, "... is not a finite number above 0"),
        ({"rope_parameters": {"rope_theta": -1}}, "rope_theta=-1 is not a finite number above 0"),
        ({"rope_parameters": {"rope_theta": "1e4"}}, "rope_theta='1e4' is not a finite number"),
        ({"num_hidden_layers": 10**30}, "num_hidden_layers=1000000000000000000000000000000 is too"),
        ({"num_hidden_layers": 10_000}, "num_hidden_layers=10000 must be below 10000"),
        ({"hidden_size": 2**31}, "hidden_size=2147483648 is too large"),
        ({"vocab_size": 2**40}, "vocab_size=1099511627776 is too large"),
        ({"max_position_embeddings": 10**10}, "max_position_embeddings=10000000000 is too large"),
        ({"norm_topk_prob": "false"}, "norm_topk_prob='false' is not a flag"),
        ({"hidden_act": "x" * 10**5}, "hidden_act='xxx"),
    ],
)
def test_what_is_not_reproduced_is_refused_by_name(changes, message, read):
    with pytest.raises(ValueError, match="read_config: ") as error:
        read(**changes)
    assert message in str(error.value)
    assert len(str(error.value).splitlines()) == 1
    assert len(str(error.value)) < 400


def test_settings_of_a_glm4_model_are_read(read):
    config = read(GLM4_CONFIG)
    assert (config.num_experts, config.topk, config.moe_layers) == (12, 4, (1, 2, 3))
    assert (config.score_function, config.correction_bias) == ("sigmoid", True)
    assert (config.num_groups, config.group_topk, config.scaling_factor) == (4, 2, 1.5)
    assert (config.shared_intermediate_size, config.rotary_percent) == (32, 0.5)
    assert config.qk_norm
    assert config.qkv_bias
    qwen3 = read()
    assert (qwen3.score_function, qwen3.correction_bias) == ("softmax", False)
    assert (qwen3.num_groups, qwen3.shared_intermediate_size) == (1, 0)
    assert (qwen3.qk_norm, qwen3.qkv_bias, qwen3.rotary_percent) == (True, False, 1.0)


def test_a_glm4_setting_that_is_not_there_is_transformers_default(read):
    names = ("partial_rotary_factor", "n_group", "topk_group", "n_shared_experts", "use_qk_norm",
             "attention_bias", "routed_scaling_factor", "first_k_dense_replace")  # fmt: skip
    config = read(GLM4_CONFIG, rope_parameters={"rope_theta": 1e4}, **dict.fromkeys(names, ...))
    assert (config.rotary_percent, config.num_groups, config.group_topk) == (0.5, 1, 1)
    assert (config.shared_intermediate_size, config.scaling_factor) == (32, 1.0)
    assert (config.qk_norm, config.qkv_bias, config.moe_layers) == (False, False, (1, 2, 3))


@pytest.mark.parametrize(("first", "layers"), [(0, (0, 1, 2, 3)), (3, (3,))])
def test_the_first_layers_of_a_glm4_model_are_dense(first, layers, read):
    assert read(GLM4_CONFIG, first_k_dense_replace=first).moe_layers == layers


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers=1 is not supported"),
        ({"num_mtp_layers": 2}, "num_mtp_layers=2 is not supported"),
        ({"norm_topk_prob": False}, "norm_topk_prob=False with num_experts_per_tok=4 is not"),
        (
            {"num_experts_per_tok": 1, "topk_group": 1},
            "norm_topk_prob=True with num_experts_per_tok=1 is not supported",
        ),
        ({"n_group": 5}, "n_group=5, topk_group=2 of 12 experts, 4 a token, is not supported"),
        ({"topk_group": 5}, "n_group=4, topk_group=5 of 12 experts"),
        # groups are ranked by the sum of 4 // 1, 4 // 3 and 6 // 2 of their scores, not of two
        ({"topk_group": 1}, "n_group=4, topk_group=1 of 12 experts, 4 a token"),
        ({"topk_group": 3}, "n_group=4, topk_group=3 of 12 experts, 4 a token"),
        ({"num_experts_per_tok": 6}, "topk_group=2 of 12 experts, 6 a token, is not supported"),
        ({"n_group": 12}, "n_group=12, topk_group=2 of 12 experts"),
        ({"n_group": 0}, "n_group=0 is not a count"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace=-1 is not a count"),
        ({"first_k_dense_replace": 4}, "no layer has experts"),
        ({"n_shared_experts": 0}, "n_shared_experts=0 is not a count"),
        ({"routed_scaling_factor": 0}, "routed_scaling_factor=0 is not a finite number above 0"),
        ({"attention_bias": 1}, "attention_bias=1 is not a flag"),
        ({"use_qk_norm": "yes"}, "use_qk_norm='yes' is not a flag"),
        ({"n_routed_experts": ...}, "n_routed_experts or num_local_experts is missing"),
        (
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1.5}},
            "partial_rotary_factor=1.5 of head_dim=32 is not supported",
        ),
        (
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.1}},
            "partial_rotary_factor=0.1 of head_dim=32 is not supported",
        ),
        (
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": "half"}},
            "partial_rotary_factor='half' is not a finite number above 0",
        ),
    ],
)
def test_what_is_not_reproduced_of_a_glm4_model_is_refused_by_name(changes, message, read):
    with pytest.raises(ValueError, match="read_config: ") as error:
        read(GLM4_CONFIG, **changes)
    assert message in str(error.value)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("topk_group", [1, 4])
def test_groups_that_limit_nothing_are_read(topk_group, read):
    config = read(GLM4_CONFIG, n_group=topk_group, topk_group=topk_group)
    assert config.num_groups == config.group_topk == topk_group


@pytest.mark.parametrize("config", [CONFIG, GLM4_CONFIG], ids=["qwen3", "glm4"])
def test_any_value_of_any_setting_reads_or_is_one_line(config, read):
    values = [
        *(None, True, [], {}, "", "x", -1, 0, 1, 2.5, 1e308, 10**30, 10**400, float("nan")),
        *(float("inf"), [0], [None], {"rope_theta": None}, {"rope_type": []}, "\ud800", [[[]]]),
    ]
    messages = []
    for name in config:
        for value in values:
            try:
                read(config, **{name: value})
            except ValueError as error:
                messages.append(str(error))
    assert len(messages) > 200
    assert all(len(message.splitlines()) == 1 for message in messages)


def test_folders_without_a_model_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"config\.json: No such file"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not JSON"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="not a JSON object"):
        read_config(tmp_path)
    for text in ("[" * 10**5, '{"a":' * 10**5, f'{{"a": {"9" * 5000}}}', "\x00"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=r"config\.json: not JSON"):
            read_config(tmp_path)
    with pytest.raises(ValueError, match=r"neither model\.safetensors nor"):
        Checkpoint(tmp_path)


def test_a_broken_weight_file_is_named(tmp_path):
    pytest.importorskip("safetensors")
    whole = (MODEL / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"Checkpoint: .*model\.safetensors: "):
        Checkpoint(tmp_path)


def test_an_index_that_does_not_fit_is_refused(tmp_path):
    pytest.importorskip("safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": "absent.safetensors"}}))
    with pytest.raises(ValueError, match=r"absent\.safetensors"):
        Checkpoint(tmp_path)
    (tmp_path / "a.safetensors").write_bytes((MODEL / "model.safetensors").read_bytes())
    index.write_text(json.dumps({"weight_map": {"absent.weight": "a.safetensors"}}))
    with pytest.raises(ValueError, match=r"absent\.weight is missing"):
        Checkpoint(tmp_path)
    for broken in ('{"weight_map": {"a": ["b"]}}', '{"weight_map": {"a": null}}'):
        index.write_text(broken)
        with pytest.raises(ValueError, match="weight_map is missing or names no files"):
            Checkpoint(tmp_path)
    index.write_text("{}")
    with pytest.raises(ValueError, match="weight_map is missing"):
        Checkpoint(tmp_path)


def test_weights_are_read_by_name(tmp_path):
    pytest.importorskip("safetensors")
    with Checkpoint(MODEL) as checkpoint:
        assert "lm_head.weight" in checkpoint.names
        assert list(checkpoint.tensor("lm_head.weight").shape) == [512, 64]
        assert checkpoint.shape("lm_head.weight") == [512, 64]
        with pytest.raises(ValueError, match=r"weight absent\.weight is missing"):
            checkpoint.shape("absent.weight")
        with pytest.raises(ValueError, match=r"weight absent\.weight is missing"):
            checkpoint.tensor("absent.weight")
