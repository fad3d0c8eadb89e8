"""TokenLayout.from_megatron: what it takes of Megatron, against ``build`` with the same by hand."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from packhorse.replay.layout import TokenLayout
from tests.megatron.helpers import (
    DEVICE,
    RouteLog,
    assert_replayed,
    build_model,
    make_batch,
    make_config,
    make_inputs,
    make_session,
    run_schedule,
)

LENGTHS = [5, 12, 9]


class Group:
    """A process group as far as it is asked."""

    def __init__(self, size=1, rank=0):
        self._size, self._rank = size, rank

    def size(self):
        return self._size

    def rank(self):
        return self._rank


def groups(tp=(1, 0), cp=(1, 0)):
    return SimpleNamespace(tp=Group(*tp), cp=Group(*cp))


def config_of(**over):
    return SimpleNamespace(
        **{
            "tensor_model_parallel_size": 1,
            "context_parallel_size": 1,
            "sequence_parallel": False,
            "fp8": None,
            "fp8_recipe": "delayed",
            **over,
        }
    )


def packed(**fields):
    from megatron.core.packed_seq_params import PackedSeqParams

    options = {"qkv_format": "thd", **fields}
    known = set(PackedSeqParams.__dataclass_fields__)
    params = PackedSeqParams(**{name: options[name] for name in options if name in known})
    for name in options.keys() - known:  # a field of a later Megatron
        setattr(params, name, options[name])
    return params


def offsets(*padded):
    return torch.tensor([0, *np.cumsum(padded)], dtype=torch.int32)


FIELDS = (
    "format", "lengths", "padded_lengths", "first_columns", "batch_width", "tp_size", "tp_rank",
    "cp_size", "cp_rank", "cp_order", "sequence_parallel", "num_tokens", "num_rank_tokens",
)  # fmt: skip


def assert_same(layout, expected):
    for name in FIELDS:
        assert getattr(layout, name) == getattr(expected, name), name
    assert torch.equal(layout.token_row_ids().cpu(), expected.token_row_ids().cpu())


# --- ranks, groups, config ------------------------------------------------------------------------


def test_one_rank_of_parallel_state_with_a_real_config():
    layout = TokenLayout.from_megatron(LENGTHS, make_config())
    assert_same(layout, TokenLayout.build(LENGTHS))
    assert layout.device.type == DEVICE.type
    assert layout.cp_group is None


@pytest.mark.parametrize("format", ["thd", "bshd"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("cp_order", ["zigzag", "contiguous"])
def test_sizes_and_ranks_are_those_of_the_groups(format, sequence_parallel, cp_order):
    config = config_of(
        tensor_model_parallel_size=4, context_parallel_size=2, sequence_parallel=sequence_parallel
    )
    collection = groups(tp=(4, 3), cp=(2, 1))
    layout = TokenLayout.from_megatron(
        LENGTHS, config, process_groups=collection, format=format, cp_order=cp_order, device="cpu"
    )
    expected = TokenLayout.build(
        LENGTHS,
        format=format,
        tp_size=4,
        tp_rank=3,
        cp_size=2,
        cp_rank=1,
        cp_order=cp_order,
        sequence_parallel=sequence_parallel,
    )
    assert_same(layout, expected)
    assert layout.cp_group is collection.cp


def test_a_collection_of_megatrons_own_groups():
    from megatron.core.process_groups_config import ProcessGroupCollection

    collection = ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])
    layout = TokenLayout.from_megatron(LENGTHS, make_config(), process_groups=collection)
    assert_same(layout, TokenLayout.build(LENGTHS))


def test_a_collection_without_a_group_is_refused():
    from megatron.core.process_groups_config import ProcessGroupCollection

    collection = ProcessGroupCollection.use_mpu_process_groups(["tp"])
    with pytest.raises(ValueError, match="process_groups has no cp group"):
        TokenLayout.from_megatron(LENGTHS, make_config(), process_groups=collection)


@pytest.mark.parametrize(
    ("kind", "field"),
    [("tp", "tensor_model_parallel_size"), ("cp", "context_parallel_size")],
)
def test_groups_of_another_size_than_the_configs_are_refused(kind, field):
    with pytest.raises(ValueError, match=rf"the {kind} group has 2 ranks, config\.{field} is 1"):
        TokenLayout.from_megatron(LENGTHS, config_of(), process_groups=groups(**{kind: (2, 0)}))


def test_what_is_no_config_is_refused():
    with pytest.raises(TypeError, match="config must be a TransformerConfig, got dict without"):
        TokenLayout.from_megatron(LENGTHS, {})


def test_parallel_state_that_is_not_there_is_an_error(monkeypatch):
    from megatron.core import parallel_state

    monkeypatch.setattr(parallel_state, "model_parallel_is_initialized", lambda: False)
    with pytest.raises(ValueError, match="parallel_state is not initialized"):
        TokenLayout.from_megatron(LENGTHS, make_config())


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "mxfp8", "blockwise"])
@pytest.mark.parametrize("as_enum", [False, True])
def test_the_fp8_recipe_pads_as_build_does(recipe, as_enum):
    from megatron.core.enums import Fp8Recipe

    given = Fp8Recipe(recipe) if as_enum else recipe
    config = config_of(tensor_model_parallel_size=2, fp8="hybrid", fp8_recipe=given)
    layout = TokenLayout.from_megatron(
        LENGTHS, config, process_groups=groups(tp=(2, 1)), device="cpu"
    )
    assert_same(layout, TokenLayout.build(LENGTHS, tp_size=2, tp_rank=1, fp8=recipe))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fp8": "e4m3", "fp8_recipe": "custom"}, "alignment of fp8_recipe='custom' is not known"),
        ({"fp4": "e2m1"}, "alignment of fp4='e2m1' is not known"),
    ],
)
def test_a_recipe_of_unknown_alignment_needs_the_packers_lengths(settings, message):
    with pytest.raises(ValueError, match=message):
        TokenLayout.from_megatron(LENGTHS, config_of(**settings), process_groups=groups())
    layout = TokenLayout.from_megatron(
        LENGTHS, config_of(**settings), process_groups=groups(), padded_lengths=[16, 16, 32]
    )
    assert layout.padded_lengths == (16, 16, 32)


def test_a_recipe_without_fp8_pads_nothing():
    config = config_of(fp8=None, fp8_recipe="mxfp8")
    layout = TokenLayout.from_megatron(LENGTHS, config, process_groups=groups())
    assert layout.padded_lengths == tuple(LENGTHS)


# --- the packer's ---------------------------------------------------------------------------------


def from_packed(params, lengths=LENGTHS, cp=1, **options):
    config = config_of(context_parallel_size=cp)
    return TokenLayout.from_megatron(
        lengths,
        config,
        process_groups=groups(cp=(cp, 0)),
        packed_seq_params=params,
        device="cpu",
        **options,
    )


def test_padded_offsets_win_over_the_true_ones():
    params = packed(cu_seqlens_q=offsets(*LENGTHS), cu_seqlens_q_padded=offsets(8, 12, 16))
    assert from_packed(params).padded_lengths == (8, 12, 16)
    params = packed(cu_seqlens_q=offsets(8, 12, 16))
    assert from_packed(params).padded_lengths == (8, 12, 16)
    assert from_packed(packed()).padded_lengths == tuple(LENGTHS)


@pytest.mark.parametrize("kind", ["list", "numpy", "tensor"])
def test_offsets_of_any_host_kind(kind):
    given = offsets(8, 12, 16)
    given = {"list": given.tolist(), "numpy": given.numpy(), "tensor": given}[kind]
    assert from_packed(packed(cu_seqlens_q_padded=given)).padded_lengths == (8, 12, 16)


def test_a_pad_of_the_slab_is_one_sequence_more():
    params = packed(cu_seqlens_q_padded=offsets(8, 12, 16, 4))
    assert from_packed(params).padded_lengths == (8, 12, 16, 4)
    params = packed(cu_seqlens_q_padded=offsets(8, 12, 16), total_tokens=40)
    assert from_packed(params).padded_lengths == (8, 12, 16, 4)


def test_offsets_that_fill_a_static_buffer_are_no_sequences():
    params = packed(cu_seqlens_q_padded=offsets(8, 12, 16, 0, 0, 0))
    assert from_packed(params).padded_lengths == (8, 12, 16)
    params = packed(cu_seqlens_q_padded=offsets(8, 0, 16, 0))
    assert from_packed(params, lengths=[5, 0, 9, 0]).padded_lengths == (8, 0, 16, 0)


def test_total_tokens_of_one_context_parallel_rank():
    params = packed(cu_seqlens_q_padded=offsets(8, 12, 16), total_tokens=18)
    assert from_packed(params, cp=2).padded_lengths == (8, 12, 16)
    params = packed(cu_seqlens_q_padded=offsets(8, 12, 16), total_tokens=20)
    with pytest.raises(ValueError, match="total_tokens=20 does not fit offsets that end at 36"):
        from_packed(params, cp=2)


def test_given_padded_lengths_win_and_nothing_on_a_device_is_read():
    params = packed(cu_seqlens_q_padded=torch.empty(4, dtype=torch.int32, device="meta"))
    with pytest.raises(TypeError, match=r"cu_seqlens_q_padded is on meta, where reading it"):
        from_packed(params)
    assert from_packed(params, padded_lengths=[8, 12, 12]).padded_lengths == (8, 12, 12)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((4, 12, 16), "padded_lengths of trajectory 0 is 4, shorter than its 5 tokens"),
        ((8, 12), "cu_seqlens_q_padded describes 2 sequences for 3 trajectories"),
        ((8, 12, 16, 4, 4), "padded_lengths has 5 entries for 3 trajectories"),
    ],
)
def test_offsets_of_another_batch_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        from_packed(packed(cu_seqlens_q_padded=offsets(*given)))


def test_a_pad_of_the_slab_is_no_trajectory():
    params = packed(cu_seqlens_q_padded=offsets(8, 12), total_tokens=40)
    with pytest.raises(ValueError, match="describes 2 sequences for 3 trajectories"):
        from_packed(params)


@pytest.mark.parametrize("given", [[], [4, 8, 12], [0, 8, 6, 20]])
def test_what_are_no_offsets_is_refused(given):
    with pytest.raises(ValueError, match="must begin at 0 and ascend"):
        from_packed(packed(cu_seqlens_q_padded=given))


def test_the_group_of_a_microbatch_of_its_own():
    params = packed(cu_seqlens_q_padded=offsets(8, 12, 16), cp_group=Group(2, 1), local_cp_size=2)
    layout = from_packed(params, cp=4)
    assert (layout.cp_size, layout.cp_rank, layout.cp_group) == (2, 1, params.cp_group)
    params = packed(cu_seqlens_q_padded=offsets(8, 12, 16), local_cp_size=1)
    assert from_packed(params, cp=4).cp_size == 1
    params = packed(cu_seqlens_q_padded=offsets(8, 12, 16), local_cp_size=2)
    with pytest.raises(ValueError, match="local_cp_size=2 without its cp_group"):
        from_packed(params, cp=4)


def test_tokens_per_sample_of_several_samples_is_refused_and_of_one_is_not():
    params = packed(cu_seqlens_q_padded=offsets(8, 12, 16), tokens_per_sample=18)
    with pytest.raises(ValueError, match=r"tokens_per_sample=18 makes 2 samples of this rank's 36"):
        from_packed(params)
    params = packed(cu_seqlens_q_padded=offsets(8, 12, 16), tokens_per_sample=36)
    assert from_packed(params).num_tokens == 36


@pytest.mark.parametrize(
    ("qkv_format", "format"), [("sbhd", "thd"), (None, "thd"), ("thd", "bshd")]
)
def test_packed_params_of_another_format_are_refused(qkv_format, format):
    with pytest.raises(ValueError, match="they describe 'thd' only"):
        from_packed(packed(qkv_format=qkv_format), format=format)


# --- through the model ----------------------------------------------------------------------------


def test_a_session_replays_on_such_a_layout():
    model = build_model()
    batch = make_batch([6, 4], format="bshd")
    layout = TokenLayout.from_megatron([6, 4], model.config, format="bshd")
    batch.microbatch.layout = layout
    batch.inputs = make_inputs(layout, 0)
    with RouteLog() as log:
        run_schedule(make_session(model), model, [batch])
    assert_replayed(log, model, [batch])
