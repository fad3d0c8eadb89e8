"""The shims, and which Megatron-core these tests run."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from packhorse.replay.cpu_megatron import install_cpu_shims, remove_cpu_shims
from tests.megatron.helpers import make_config


def test_the_version_that_runs_is_the_one_that_was_meant():
    import megatron.core

    version = megatron.core.__version__.split("+")[0]
    print(f"\nmegatron-core {version}, torch {torch.__version__}")  # noqa: T201
    meant = os.environ.get("PACKHORSE_TEST_MEGATRON")
    assert meant in (None, version)


def test_installing_twice_and_removing_restores_every_name():
    if torch.cuda.is_available():
        pytest.skip("on a GPU nothing of torch is replaced")
    remove_cpu_shims()
    try:
        before = (torch.zeros, torch.cuda.current_device, torch.cuda.Stream, torch.compile)
        install_cpu_shims()
        install_cpu_shims()
        assert torch.zeros(2, device="cuda").device.type == "cpu"
        assert torch.zeros is not before[0]
        assert torch.zeros(2).type() == "torch.cuda.FloatTensor"
        assert torch.zeros(2).type(torch.int32).dtype == torch.int32
        assert torch.zeros(2).type(torch.zeros(2).int().type()).dtype == torch.int32
        assert torch.compile is before[3]
        remove_cpu_shims()
        assert before == (torch.zeros, torch.cuda.current_device, torch.cuda.Stream, torch.compile)
        assert "cuda" not in vars(torch.Tensor)
        assert torch.zeros(2).type() == "torch.FloatTensor"
        with pytest.raises((AssertionError, RuntimeError)):
            torch.zeros(2, device="cuda")
    finally:
        install_cpu_shims()


def in_a_new_process(*arguments: str, path: str = "") -> str:
    paths = [p for p in (os.environ.get("PYTHONPATH"), path) if p]
    done = subprocess.run(
        [sys.executable, "-c", *arguments],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_a_device_block_reaches_the_functions_that_are_replaced():
    """Even if it is the first one of its process."""
    if torch.cuda.is_available():
        pytest.skip("on a GPU nothing of torch is replaced")
    output = in_a_new_process(
        "import torch; from packhorse.replay.cpu_megatron import *; install_cpu_shims()\n"
        "with torch.device('meta'):\n"
        "    made = [torch.zeros(2), torch.ones(2), torch.empty(2), torch.tensor([1.0]),\n"
        "            torch.full((2,), 1.0), torch.arange(2), torch.rand(2), torch.randn(2)]\n"
        "print(*{tensor.device.type for tensor in made}, torch.zeros(2).device)\n"
        "remove_cpu_shims()\n"
        "with torch.device('meta'):\n"
        "    print(torch.zeros(2).device, torch.arange(2).device)\n"
    )
    assert output.split() == ["meta", "cpu", "meta", "meta"]


def test_transformers_loads_a_model_whole_after_the_shims(tmp_path):
    """It builds the model on the meta device, and computes the frequencies of RoPE afterwards."""
    apart = str(Path(sys.prefix) / "transformers")  # where tools/setup.sh puts it
    if importlib.util.find_spec("transformers") is None and not Path(apart).exists():
        pytest.skip("transformers is not installed")
    output = in_a_new_process(
        "import json, sys, torch\n"
        "from packhorse.replay.cpu_megatron import install_cpu_shims; install_cpu_shims()\n"
        "from transformers import AutoModelForCausalLM, Qwen3MoeConfig\n"
        "config = Qwen3MoeConfig(vocab_size=8, hidden_size=16, num_hidden_layers=1, head_dim=8,\n"
        "    num_attention_heads=2, num_key_value_heads=1, num_experts=4, num_experts_per_tok=2,\n"
        "    moe_intermediate_size=8, intermediate_size=16)\n"
        "AutoModelForCausalLM.from_config(config).save_pretrained(sys.argv[1])\n"
        "junk = [torch.full((4,), 7.5) for _ in range(999)]; del junk\n"
        "model = AutoModelForCausalLM.from_pretrained(sys.argv[1])\n"
        "print('@' + json.dumps(model.model.rotary_emb.inv_freq.tolist()))\n",
        str(tmp_path),
        path=apart,
    )
    got = json.loads(output.rpartition("@")[2])
    assert got == pytest.approx([10000.0 ** (-i / 8) for i in range(0, 8, 2)], rel=1e-6)


def test_the_norm_takes_sequence_parallelism_and_marks_its_weights():
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    for split in (False, True):
        config = make_config(tensor_model_parallel_size=2 if split else 1, sequence_parallel=split)
        norm = WrappedTorchNorm(config=config, hidden_size=8)
        assert all(p.sequence_parallel is split for p in norm.parameters())
        assert config.sequence_parallel is split


def test_replay_modules_import_without_megatron():
    code = (
        "import sys; sys.modules['megatron'] = None\n"
        "import packhorse.replay.session, packhorse.replay.expert_bias\n"
        "import packhorse.replay.routers, packhorse.replay.cpu_megatron\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
