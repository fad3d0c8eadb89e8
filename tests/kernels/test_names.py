"""The name of each kernel in a profiler says what it does and on which dtypes."""

from collections import defaultdict

import pytest

from tests.conftest import INTERPRET

if not INTERPRET:
    from tests.kernels.test_compile import LAUNCHES
    from tests.tools.aot import compile_only

pytestmark = pytest.mark.compile

#: whose dtype follows from the operator, not from the caller
INDICES = {"row_ids_ptr"}


def test_each_kernel_is_named_packhorse_and_after_its_function():
    with compile_only("sm_90") as compiled:
        for launch in LAUNCHES.values():
            launch.run()
    for kernel in compiled:
        verb_noun = kernel.src.fn.__name__.strip("_").removesuffix("_kernel")
        assert f"{kernel.metadata.name}_".startswith(f"packhorse_{verb_noun}_")
        assert kernel.metadata.name.encode() in kernel.asm["cubin"]


def test_kernels_of_different_dtypes_have_different_names():
    with compile_only("sm_90") as compiled:
        for launch in LAUNCHES.values():
            launch.run()
    dtypes = defaultdict(set)
    for kernel in compiled:
        for parameter, kind in kernel.src.signature.items():
            if kind.startswith("*") and parameter not in INDICES:
                dtypes[kernel.metadata.name, parameter].add(kind)
    assert {place: seen for place, seen in dtypes.items() if len(seen) > 1} == {}
