"""The generated parts of ``docs/megatron.md``: what the cases show, and what is refused.

    python -m tests.distributed.table [--write FILE | --check FILE]

A block stands between ``<!-- begin NAME -->`` and ``<!-- end NAME -->``: "cases" is one row for
each setup of ``cases.py``, "pairs" says which settings were tried together, "refused" names the
test of each refusal. ``test_table.py`` holds the document to them.
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
from collections.abc import Callable
from pathlib import Path

from tests.distributed.case import Case
from tests.distributed.cases import CASES, NCCL_CASES, ON_OLDEST

#: releases on which ``tools/test.sh`` runs all cases, and those of ``ON_OLDEST``
NEWEST, OLDEST = "0.19.2", "0.16.1"

_BLOCK = re.compile(
    r"(?P<begin><!-- begin (?P<name>\w+) -->)\n.*?(?P<end><!-- end (?P=name) -->)", re.S
)

#: what is told apart in "pairs"
FEATURES: dict[str, Callable[[Case], bool]] = {
    "TP + SP": lambda case: case.tp > 1,
    "PP": lambda case: case.pp > 1,
    "VPP": lambda case: case.vpp > 1,
    "EP": lambda case: case.ep > 1,
    "CP": lambda case: case.cp > 1,
    "thd": lambda case: case.format == "thd",
    "full recompute": lambda case: case.recompute in ("full", "block"),
    "selective": lambda case: case.recompute == "moe",
    "dist. optimizer": lambda case: case.optimizer == "distributed",
    "router losses": lambda case: case.router_losses,
    "MTP": lambda case: case.mtp > 0,
    "hybrid": lambda case: bool(case.pattern),
    "bf16": lambda case: case.dtype == "bf16",
}

#: why two of them were not tried together
HOLES: dict[tuple[str, str], str] = {
    ("CP", "MTP"): "Megatron divides a head's loss by the targets of each context-parallel rank"
    " alone, so that its gradients are not those of one rank",
    ("router losses", "MTP"): "the reference takes one trajectory at a time, and a head's loss is"
    " then the mean of another number of targets; heads' router losses on one rank are"
    " `tests/megatron/test_aux_loss.py::test_mtp_heads_balance_over_their_real_tokens`",
    ("MTP", "bf16"): "a head's router chooses by itself, and rounding decides what it chooses, so"
    " that its routes are not those of one rank",
}

_SETTING = "test_a_setting_that_replay_cannot_serve_is_refused_at_the_start"
_REFUSALS = "tests/megatron/test_refusals.py"
_FAULTS = "tests/distributed/test_faults.py"
_ALL_RANKS = "test_all_ranks_refuse_before_the_first_forward_and_the_next_schedule_is_right"

#: (what, why, file, test)
REFUSED: list[tuple[str, str, str, str]] = [
    ("`moe_router_fusion`", "a fused kernel chooses without asking", _REFUSALS, _SETTING),
    (
        "`moe_router_load_balancing_type` sinkhorn, quantile_balancing",
        "chooses without asking",
        _REFUSALS,
        "test_routing_that_does_not_consult_replay_is_refused",
    ),
    (
        "`moe_expert_capacity_factor`, `moe_expert_rank_capacity_factor`",
        "padding would take the place of real tokens",
        _REFUSALS,
        _SETTING,
    ),
    (
        "`moe_router_force_load_balancing`, `moe_router_force_biased`",
        "the scores are not the router's",
        _REFUSALS,
        _SETTING,
    ),
    (
        "CUDA graphs that hold a router",
        "a graph repeats the routes of its capture",
        _REFUSALS,
        "test_each_part_that_holds_a_router_is_refused_and_each_other_is_legal",
    ),
    (
        "`overlap_moe_expert_parallel_comm`",
        "layers run from a plan, after `forward_step`",
        _REFUSALS,
        "test_a_schedule_plan_is_refused_before_wrap_forward_step_is_asked_for_one",
    ),
    (
        "a Megatron-core before 0.16",
        "its router has no replay",
        _REFUSALS,
        "test_a_megatron_without_replay_in_its_router_is_refused",
    ),
    (
        "a router of another class than `TopKRouter`",
        "nobody knows what it asks",
        _REFUSALS,
        "test_a_router_of_another_class_is_refused",
    ),
    (
        "a router without a captured layer",
        "it would run live in silence",
        "tests/megatron/test_layers.py",
        "test_a_router_without_a_captured_layer_is_refused",
    ),
    (
        "a captured layer of this stage without a router",
        "its routes would go nowhere",
        "tests/megatron/test_layers.py",
        "test_a_captured_layer_without_a_router_is_refused",
    ),
    (
        "`PackedSeqParams.tokens_per_sample` of several samples",
        "Megatron re-orders rows before the router",
        "tests/megatron/test_from_megatron.py",
        "test_tokens_per_sample_of_several_samples_is_refused_and_of_one_is_not",
    ),
    ("an expert id not below E", "no such expert", _FAULTS, _ALL_RANKS),
    (
        "an expert twice in a row",
        "breaks the all-to-all's split sizes",
        _FAULTS,
        _ALL_RANKS,
    ),
    (
        "a microbatch without the routes field among others that have it",
        "it would run live in silence",
        _FAULTS,
        _ALL_RANKS,
    ),
    (
        "a layout of another TP or CP rank",
        "as many rows, of other tokens",
        _FAULTS,
        _ALL_RANKS,
    ),
    (
        "a router that never asked (at the end of the schedule)",
        "it ran live",
        _FAULTS,
        "test_a_router_that_never_asked_is_named_on_its_rank_and_no_rank_hangs",
    ),
    (
        "a recompute that is not re-entrant (in the backward)",
        "no first pass was remembered for it",
        "tests/megatron/test_lifecycle.py",
        "test_a_non_reentrant_checkpoint_is_a_loud_error",
    ),
]


# --- cases ----------------------------------------------------------------------------------------


def versions(case: Case) -> tuple[str, ...]:
    """Releases on which `make test` runs it."""
    tried = (NEWEST, OLDEST) if case.name in ON_OLDEST else (NEWEST,)
    return (*tried, "NCCL") if shown_on_nccl(case) else tried


def shown_on_nccl(case: Case) -> bool:
    """Whether ``make gpu-multi`` has run it: two GPUs were at hand."""
    return case.name in NCCL_CASES and case.world <= 2


def setup(case: Case) -> str:
    sizes = [("TP", case.tp), ("PP", case.pp), ("VPP", case.vpp), ("EP", case.ep)]
    parts = [f"{name} {size}" + " + SP" * (name == "TP") for name, size in sizes if size > 1]
    if case.vpp_given:
        parts.append(f"VPP {case.vpp}")
    if case.etp:
        parts.append(f"ETP {case.etp}")
    if case.cp > 1:
        parts.append(f"CP {case.cp} {case.cp_order}")
    if case.dp > 1:
        parts.append(f"DP {case.dp}")
    return ", ".join(parts)


def particulars(case: Case) -> str:
    """What else the case sets, in words."""
    said = []
    if case.pattern:
        said.append(f"`HybridModel` `{case.pattern}`".replace("|", r"\|"))
    if case.mtp:
        said.append(f"MTP, {case.mtp} head{'s' * (case.mtp > 1)} (live)")
    if case.dense and not case.pattern:
        which = ", ".join(map(str, case.dense))
        said.append(f"layer{'s' * (len(case.dense) > 1)} {which} dense")
    if case.captured != "decoder":
        said.append(f"captured axis `{case.captured}`")
    if case.dtype == "bf16":
        said.append("bf16 in `Float16Module`")
    if case.fp8:
        said.append(f"lengths padded for fp8 ({case.fp8})")
    if case.width == 8 and case.tp == 2:
        said.append("8 tokens on each rank, 8 experts")
    if case.aux:
        said.append(f"`{case.aux}`" + " and z-loss" * case.z_loss)
    if case.ties:
        said.append("equal scores at rank K")
    if case.rounds > 1:
        said.append("forward-only and training in turn, each with routes of its own")
    if case.optimizer == "distributed":
        said.append("distributed Adam, three steps")
    said += [f"`{name}={_value(value)}`" for name, value in (case.settings | case.ddp).items()]
    return "; ".join(said)


def _value(value: object) -> str:
    """A layout by the number of layers in each chunk; all else as it is."""
    if isinstance(value, list):
        return "/".join("+".join(part[0] for part in chunk) for chunk in value)
    return str(value)


def cases_block() -> str:
    rows: dict[tuple[str, ...], list[Case]] = {}
    for case in CASES.values():
        key = (setup(case), case.format, particulars(case), ", ".join(versions(case)))
        rows.setdefault(key, []).append(case)
    lines = [
        "| setup | format | recompute | beside it | tried on | cases |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for (where, form, beside, tried), group in sorted(
        rows.items(), key=lambda row: row[1][0].world
    ):
        recompute = ", ".join(dict.fromkeys(case.recompute for case in group))
        names = ", ".join(f"`{case.name}`" for case in group)
        lines.append(f"| {where} | {form} | {recompute} | {beside} | {tried} | {names} |")
    return "\n".join(lines) + "\n"


# --- pairs ----------------------------------------------------------------------------------------


def tried_together(first: str, second: str) -> int:
    return sum(FEATURES[first](case) and FEATURES[second](case) for case in CASES.values())


#: pairs that cannot be: VPP is of PP, one recompute a run, one kind of model
IMPOSSIBLE = {("full recompute", "selective"), ("MTP", "hybrid")}


def holes() -> list[tuple[str, str]]:
    return [
        pair
        for pair in itertools.combinations(FEATURES, 2)
        if pair not in IMPOSSIBLE and not tried_together(*pair)
    ]


def pairs_block() -> str:
    names = list(FEATURES)
    lines = [f"| | {' | '.join(names[1:])} |", f"| --- |{' :---: |' * (len(names) - 1)}"]
    for i, first in enumerate(names[:-1]):
        cells = [""] * i
        for second in names[i + 1 :]:
            count = tried_together(first, second)
            cells.append("/" if (first, second) in IMPOSSIBLE else str(count or "no"))
        lines.append(f"| {first} | {' | '.join(cells)} |")
    reasons: dict[str, list[str]] = {}
    for first, second in holes():
        why = HOLES.get((first, second), "UNEXPLAINED")
        reasons.setdefault(why, []).append(f"{first} with {second}")
    lines += ["", "Not tried together:", ""]
    lines += [f"- {', '.join(which)}: {why}" for why, which in reasons.items()]
    return "\n".join(lines) + "\n"


# --- refused --------------------------------------------------------------------------------------


def refused_block() -> str:
    lines = ["| refused | why | test |", "| --- | --- | --- |"]
    lines += [f"| {what} | {why} | `{file}::{test}` |" for what, why, file, test in REFUSED]
    return "\n".join(lines) + "\n"


# --- the document ---------------------------------------------------------------------------------

BLOCKS = {"cases": cases_block, "pairs": pairs_block, "refused": refused_block}


def filled(text: str) -> str:
    """``text`` with every block made anew."""

    def make(found: re.Match[str]) -> str:
        return f"{found['begin']}\n{BLOCKS[found['name']]()}{found['end']}"

    return _BLOCK.sub(make, text)


def main() -> int:
    parser = argparse.ArgumentParser(description="Blocks of docs/megatron.md, from the cases.")
    parser.add_argument("--write", type=Path, metavar="FILE")
    parser.add_argument("--check", type=Path, metavar="FILE")
    args = parser.parse_args()
    if args.write:
        args.write.write_text(filled(args.write.read_text("utf-8")), "utf-8")
    if args.check:
        text = args.check.read_text("utf-8")
        if filled(text) != text:
            sys.stderr.write(f"{args.check}: not what the cases say; --write makes it so\n")
            return 1
    if not args.write and not args.check:
        sys.stdout.write("\n".join(block() for block in BLOCKS.values()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
