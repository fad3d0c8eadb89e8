"""The shims, and which Megatron-core these tests run."""

import os

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


def test_the_norm_takes_sequence_parallelism_and_marks_its_weights():
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    for split in (False, True):
        config = make_config(tensor_model_parallel_size=2 if split else 1, sequence_parallel=split)
        norm = WrappedTorchNorm(config=config, hidden_size=8)
        assert all(p.sequence_parallel is split for p in norm.parameters())
        assert config.sequence_parallel is split


def test_replay_modules_import_without_megatron():
    import subprocess
    import sys

    code = (
        "import sys; sys.modules['megatron'] = None\n"
        "import packhorse.replay.session, packhorse.replay.expert_bias\n"
        "import packhorse.replay.routers, packhorse.replay.cpu_megatron\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
