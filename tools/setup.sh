#!/usr/bin/env bash
# Makes the environment that `make demo` and `make test` run in: one line a step, with its seconds.
#
#   the active virtual environment, else .venv, made here from the first Python 3.10 .. 3.13 found
#   torch (the CPU build where there is no NVIDIA driver), triton where torch brought none,
#   requirements-dev.txt, tensordict, megatron-core twice, transformers, and this package
#
# What an active environment holds of torch, triton and megatron-core is kept as it is.
# A second run finds its stamp and ends at once. PYTHON=... names the Python that .venv is made from.
# pip's own environment variables (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, ...) are honoured.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

TORCH=2.13.0
TRITON=3.6.0          # only where torch brings none
TENSORDICT=0.15.3     # without dependencies, or pip would replace the torch of the machine
TENSORDICT_TORCH=2.11 # the oldest torch it runs with; its tests skip on an older one
MEGATRON=0.19.2       # says Python >= 3.12, has a wheel for 3.11 and runs there
MEGATRON_OLD=0.16.1   # in a folder of its own, reached by PYTHONPATH; the newest for Python 3.10

env=${VIRTUAL_ENV:-$PWD/.venv}
python=$env/bin/python
stamp=$env/packhorse-setup.stamp
log=$env/packhorse-setup.log

key() {
    cat requirements-*.txt pyproject.toml setup.py tools/setup.sh | "$python" -c '
import hashlib, sys
print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest(), sys.version.split()[0], sys.argv[1])
' "$PWD"
}

fail() {
    echo "setup: $*" >&2
    exit 1
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.12 python3.11 python3.13 python3.10}; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' \
            2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    if [ -n "${PYTHON:-}" ]; then
        fail "PYTHON=$PYTHON is not a Python 3.10, 3.11, 3.12 or 3.13"
    fi
    fail "no Python 3.10, 3.11, 3.12 or 3.13 on PATH; install one, or name it with PYTHON=..."
}

# step NAME COMMAND...: quiet; the output goes to the log, and its end to the terminal on failure
step() {
    local name=$1 begin=$SECONDS
    shift
    printf 'setup: %-52s' "$name"
    echo "== $name: $*" >>"$log"
    if ! "$@" >>"$log" 2>&1 </dev/null; then
        echo " failed after $((SECONDS - begin)) s"
        grep -vE '^(WARNING|\[notice\])' "$log" | tail -n 12 | cut -c1-300 >&2
        fail "'$name' failed; the whole output is in $log"
    fi
    echo " $((SECONDS - begin)) s"
}

pip_install() {
    "$python" -m pip install --quiet --disable-pip-version-check --no-input "$@"
}

has() {
    "$python" -c 'import importlib.metadata as m, sys; print(m.version(sys.argv[1]))' "$1" \
        2>/dev/null
}

torch_is_at_least() { # MAJOR.MINOR
    "$python" -c '
import importlib.metadata, sys
have = importlib.metadata.version("torch").split(".")[:2]
sys.exit([*map(int, have)] < [*map(int, sys.argv[1].split("."))])
' "$1"
}

active_has() {
    [ -n "${VIRTUAL_ENV:-}" ] && has "$1"
}

install_torch() {
    if [ -e /proc/driver/nvidia/version ] || command -v nvidia-smi >/dev/null; then
        pip_install "torch==$TORCH"
    else
        pip_install "torch==$TORCH+cpu" || pip_install "torch==$TORCH"
    fi
}

install_megatron() { # VERSION [pip options]: its dependencies are there; the rest is not needed
    local version=$1
    shift
    pip_install --no-deps --ignore-requires-python --only-binary=:all: "$@" "megatron-core==$version"
}

if [ -n "${PYTHON:-}" ] && [ -z "${VIRTUAL_ENV:-}" ] && [ -x "$python" ]; then
    asked=$("$PYTHON" --version 2>/dev/null) || asked="nothing that runs"
    made=$("$python" --version 2>&1) || true
    if [ "$asked" != "$made" ]; then
        echo "setup: .venv is $made and kept, though PYTHON=$PYTHON is $asked; 'make clean' removes it"
    fi
fi
if [ -x "$python" ] && [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$(key)" ]; then
    exit 0
fi

begin=$SECONDS
if [ -n "${VIRTUAL_ENV:-}" ]; then
    [ -x "$python" ] || fail "VIRTUAL_ENV=$VIRTUAL_ENV holds no bin/python"
    echo "setup: in the active environment $VIRTUAL_ENV"
elif ! "$python" -m pip --version >/dev/null 2>&1; then
    base=$(find_python)
    mkdir -p "$env"
    step "$(basename "$env") from $("$base" --version 2>&1)" "$base" -m venv --clear "$env"
fi
minor=$("$python" -c 'import sys; print(sys.version_info.minor if sys.version_info[0] == 3 else 0)')
case $minor in
10) MEGATRON=$MEGATRON_OLD ;;
11 | 12 | 13) ;;
*) fail "$python is $("$python" --version 2>&1); Python 3.10 to 3.13 is needed" ;;
esac
rm -f "$stamp"
: >"$log"

if kept=$(active_has torch); then
    echo "setup: torch $kept is there and kept"
else
    step "torch $TORCH" install_torch
fi
step "development requirements" pip_install -r requirements-dev.txt
if ! has triton >/dev/null; then
    step "triton $TRITON" pip_install "triton==$TRITON"
fi
if torch_is_at_least "$TENSORDICT_TORCH"; then
    step "tensordict $TENSORDICT" pip_install --no-deps "tensordict==$TENSORDICT"
fi
if kept=$(active_has megatron-core); then
    echo "setup: megatron-core $kept is there and kept"
else
    step "megatron-core $MEGATRON" install_megatron "$MEGATRON"
fi
if [ "$MEGATRON" != "$MEGATRON_OLD" ] && [ ! -d "$env/megatron/$MEGATRON_OLD/megatron" ]; then
    step "megatron-core $MEGATRON_OLD, in a folder of its own" \
        install_megatron "$MEGATRON_OLD" --target "$env/megatron/$MEGATRON_OLD"
fi
if ! cmp -s requirements-transformers.txt "$env/transformers/requirements.txt"; then
    rm -rf "$env/transformers"
    step "transformers, in a folder of its own" \
        pip_install --no-deps --target "$env/transformers" -r requirements-transformers.txt
    cp requirements-transformers.txt "$env/transformers/requirements.txt"
fi
step "packhorse, editable" pip_install --no-deps --no-build-isolation --editable .
key >"$stamp"
echo "setup: done in $((SECONDS - begin)) s"
