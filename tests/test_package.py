"""What may import what, what an import does, and what is installed under which name."""

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

import packhorse
from packhorse import _env
from packhorse.__main__ import COMMANDS, main

ROOT = Path(__file__).parents[1]
PARTS = ("kernels", "packed", "replay")
SOURCES = sorted(path for part in PARTS for path in (ROOT / part).glob("*.py"))
FACADE = sorted((ROOT / "packhorse").glob("*.py"))

#: what each part may import of ours, beside itself
ALLOWED = {
    "kernels": {"packhorse._env", "packhorse._nvtx", "packhorse.packed.sentinels"},
    "packed": {"packhorse._env", "packhorse._nvtx", "packhorse.kernels"},
    "replay": {"packhorse._env", "packhorse._nvtx", "packhorse.kernels", "packhorse.packed"},
}
#: which modules import a heavy or optional package; each does so inside a function
OPTIONAL = {
    "megatron": {
        "replay/compare.py", "replay/cpu_megatron.py", "replay/demo.py",
        "replay/demo_model.py", "replay/demo_parallel.py", "replay/expert_bias.py",
        "replay/layout_megatron.py", "replay/megatron.py", "replay/packed_attention.py",
        "replay/router_replay.py", "replay/routers.py", "replay/scoring_megatron.py",
    },
    "vllm": {"replay/demo_fresh.py", "replay/vllm.py", "replay/capture_cli.py"},
    "ray": {"packed/transport.py"},
    "safetensors": {
        "replay/capture.py", "replay/capture_save.py", "replay/checkpoint.py", "replay/tiny_moe.py",
    },
    "matplotlib": {"replay/demo_plot.py"},
    "tensordict": {"packed/batch_tensordict.py"},
    "nvtx": {"packhorse/_nvtx.py"},
    "xxhash": {"packed/wire_format.py"},
    "pybase64": {"packed/wire_base64.py"},
    "orjson": {"packed/wire_json.py"},
    "aiohttp": {"replay/client_http.py", "replay/proxy.py"},
}  # fmt: skip
READS_SWITCH = re.compile(r"(?:environ|getenv).{0,9}[\"'](PACKHORSE_\w+)")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """(module, whether at import time) for each import statement or ``import_module("...")``."""

    def visit(node: ast.AST, at_import: bool) -> Iterator[tuple[str, bool]]:
        if isinstance(node, ast.Import):
            yield from ((alias.name, at_import) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: a relative import"
            # from packhorse import x may name a module
            yield from ((f"{node.module}.{alias.name}", at_import) for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            if isinstance(node.args[0], ast.Constant):
                yield node.args[0].value, at_import
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            return
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            at_import = False
        for child in ast.iter_child_nodes(node):
            yield from visit(child, at_import)

    yield from visit(ast.parse(path.read_text()), True)


def under(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_a_part_imports_only_what_it_may(path):
    part = path.parent.name
    allowed = ALLOWED[part] | {f"packhorse.{part}"}
    ours = [module for module, _ in imports(path) if under(module, "packhorse")]
    assert [m for m in ours if not any(under(m, name) for name in allowed)] == []


@pytest.mark.parametrize("path", FACADE, ids=name_of)
def test_nothing_but_the_public_names_and_the_commands_imports_replay(path):
    if path.name not in ("__init__.py", "__main__.py"):
        assert [m for m, _ in imports(path) if under(m, "packhorse.replay")] == []


@pytest.mark.parametrize("package", OPTIONAL)
def test_an_optional_package_is_imported_by_the_modules_named_and_late(package):
    for path in [*SOURCES, *FACADE]:
        found = [eager for module, eager in imports(path) if under(module, package)]
        if found:
            assert name_of(path) in OPTIONAL[package]
            assert not any(found), f"{name_of(path)} imports {package} at import time"


def test_our_switches_are_read_in_one_module_and_listed():
    for path in [*SOURCES, *FACADE]:
        if path.name != "_env.py":
            assert not READS_SWITCH.search(path.read_text()), path.name
    source = (ROOT / "packhorse" / "_env.py").read_text()
    assert set(READS_SWITCH.findall(source)) == set(_env.SWITCHES)


@pytest.mark.parametrize("path", [*SOURCES, *FACADE], ids=name_of)
def test_a_file_holds_one_thing(path):
    assert len(path.read_text().splitlines()) <= 600


# --- what an import does --------------------------------------------------------------------------


def in_a_new_process(program: str) -> dict:
    result = subprocess.run(
        [sys.executable, "-c", f"import json, sys\n{program}\nprint(json.dumps(seen))"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    return json.loads(result.stdout)


def test_importing_packhorse_imports_nothing_heavy():
    seen = in_a_new_process("import packhorse; dir(packhorse); seen = sorted(sys.modules)")
    assert not {"torch", "triton", "numpy", "megatron", "vllm", "ray"} & set(seen)


def test_importing_every_module_has_no_effect_but_definitions():
    modules = [f"packhorse.{path.parent.name}.{path.stem}" for path in SOURCES]
    seen = in_a_new_process(
        "import os, threading, warnings, torch\n"
        "def state():\n"
        "    return [\n"
        "        dict(os.environ), str(torch.get_default_dtype()), torch.get_num_threads(),\n"
        "        threading.active_count(), torch.cuda.is_initialized(), len(warnings.filters),\n"
        "        torch.initial_seed(), torch.is_grad_enabled(), len(sys.path),\n"
        "    ]\n"
        "before = state()\n"
        f"for name in {modules!r}: __import__(name)\n"
        "seen = {'before': before, 'after': state(), 'modules': sorted(sys.modules)}"
    )
    assert seen["before"] == seen["after"]
    assert not set(OPTIONAL) & set(seen["modules"])


# --- the public names -----------------------------------------------------------------------------


def test_each_public_name_is_that_of_the_module_it_lives_in():
    assert sorted(packhorse._HOME) == sorted(packhorse.__all__)
    for name, home in packhorse._HOME.items():
        assert getattr(packhorse, name) is getattr(import_module(f"packhorse.{home}"), name)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'packhorse' has no attribute 'gather_cows'"):
        packhorse.gather_cows  # noqa: B018


def test_type_checkers_are_told_the_same_names():
    (block,) = (
        node
        for node in ast.parse((ROOT / "packhorse" / "__init__.py").read_text()).body
        if isinstance(node, ast.If)
    )
    told = {alias.name: node.module for node in block.body for alias in node.names}
    assert told == {name: f"packhorse.{home}" for name, home in packhorse._HOME.items()}


def test_the_version_is_that_of_the_project_file():
    text = (ROOT / "pyproject.toml").read_text()
    assert re.search(r'^version = "(.+)"$', text, re.MULTILINE)[1] == packhorse.__version__


# --- what is installed ----------------------------------------------------------------------------


@pytest.mark.parametrize("part", PARTS)
def test_the_folder_at_the_root_is_no_package_and_is_linked(part):
    """An ``__init__.py`` there would shadow the ``kernels`` package that transformers imports."""
    assert not (ROOT / part / "__init__.py").exists()
    assert os.readlink(ROOT / "packhorse" / part) == f"../{part}"


def test_only_packhorse_is_installed():
    result = subprocess.run(
        [sys.executable, "-c", "import setuptools, sys\n"
         "setuptools.setup = lambda **keywords: print(keywords['packages'])\n"
         "exec(open('setup.py').read())"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    packages = ast.literal_eval(result.stdout)
    assert {f"packhorse.{part}" for part in PARTS} <= set(packages)
    assert all(under(package, "packhorse") for package in packages)


# --- commands -------------------------------------------------------------------------------------


def test_help_names_each_command(capsys):
    with pytest.raises(SystemExit) as left:
        main(["--help"])
    assert left.value.code == 0
    said = capsys.readouterr().out
    assert all(does in said for does in COMMANDS.values())


def test_version_is_the_packages(capsys):
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    assert left.value.code == 0
    assert capsys.readouterr().out == f"packhorse {packhorse.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: command"),
        (["ride"], "invalid choice: 'ride'"),
        (["doctor", "--cure"], "unrecognized arguments: --cure"),
        (["demo", "--break", "legs"], "invalid choice: 'legs'"),
        (["warmup", "--topk", "8"], "required: --captured-layers, --experts"),
        (["capture", "--support", "guess"], "invalid choice: 'guess'"),
    ],
)
def test_an_unknown_command_or_option_is_refused(arguments, message, capsys):
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2
    assert message in capsys.readouterr().err


def test_help_of_the_commands_imports_no_torch():
    seen = in_a_new_process(
        "import contextlib, io\nfrom packhorse.__main__ import main\n"
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):\n"
        "    main(['--help'])\n"
        "seen = sorted(sys.modules)"
    )
    assert "torch" not in seen
