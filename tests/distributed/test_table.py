"""docs/megatron.md says what the cases show, and every test that it names is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.distributed import table
from tests.distributed.cases import CASES, ON_OLDEST

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "megatron.md"


def test_the_document_is_what_the_cases_say():
    text = DOCUMENT.read_text("utf-8")
    assert re.findall(r"<!-- begin (\w+) -->", text) == list(table.BLOCKS)
    assert table.filled(text) == text, "python -m tests.distributed.table --write docs/megatron.md"


def test_every_case_stands_in_the_document_once():
    shown = [line.split(" | ")[-1] for line in table.cases_block().splitlines()[2:]]
    assert sorted(name for cell in shown for name in re.findall(r"`(.+?)`", cell)) == sorted(CASES)


def test_every_hole_is_explained_and_every_explanation_is_of_a_hole():
    assert sorted(table.HOLES) == sorted(table.holes())
    assert not any(table.tried_together(*pair) for pair in table.IMPOSSIBLE)


def test_the_oldest_release_runs_a_case_of_each_feature_that_it_has():
    chosen = [CASES[name] for name in ON_OLDEST]
    major, minor, _ = map(int, table.OLDEST.split("."))
    assert all(case.since <= (major, minor) for case in chosen)
    for feature, has in table.FEATURES.items():
        if any(has(case) and case.since <= (major, minor) for case in CASES.values()):
            assert any(map(has, chosen)), feature


def test_the_releases_are_those_that_set_up_installs_and_the_test_script_runs():
    script = (ROOT / "tools" / "setup.sh").read_text("utf-8")
    for version in (table.NEWEST, table.OLDEST):
        assert re.search(rf"(?<![\d.]){re.escape(version)}(?![\d.])", script), version
    assert "-m oldest tests/distributed" in (ROOT / "tools" / "test.sh").read_text("utf-8")


@pytest.mark.parametrize("row", table.REFUSED, ids=lambda row: row[0])
def test_each_refusal_names_a_test_that_is_there(row):
    what, _, file, test = row
    assert re.search(rf"^def {test}\(", (ROOT / file).read_text("utf-8"), re.M), what


def test_tests_that_the_document_names_are_there():
    for file, test in re.findall(r"`(tests/[\w/]+\.py)::(\w+)", DOCUMENT.read_text("utf-8")):
        assert re.search(rf"^def {test}\(", (ROOT / file).read_text("utf-8"), re.M), test
