#!/usr/bin/env bash
# The Megatron tests against every older release line, one process and several ranks over gloo:
# `make test` runs the newest and, with some of the cases of several ranks, the oldest.
#
#   VERSIONS="0.16.1 0.17.1 0.18.2"
#                              releases to run; each is installed once, in a folder of its own beside
#                              the environment's packages and without its dependencies (16 MB each)
#   MEGATRON_SOURCE=DIR        also run a source tree: the folder that holds megatron/
#
# One failing version does not stop the next; the exit code says whether all passed. The folders are
# not those of tools/setup.sh, so `make test` does not run them.
#
# usage: tools/megatron_matrix.sh PYTHON [pytest options for every run]
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=$1
shift
versions=${VERSIONS:-0.16.1 0.17.1 0.18.2}
folders=$("$python" -c 'import sys; print(sys.prefix)')/megatron-matrix
summary=()
status=0

run() { # NAME COMMAND...
    local name=$1 begin=$SECONDS code=0
    shift
    echo "== $name"
    "$@" || code=$?
    # pytest gives 5 when it ran no test: also a failure here
    [ "$code" -eq 0 ] || status=1
    summary+=("$name: exit code $code, $((SECONDS - begin)) s")
    echo "== ${summary[-1]}"
}

megatron() { # VERSION FOLDER [pytest options]
    local version=$1 folder=$2
    shift 2
    local -a with=(env "PYTHONPATH=$folder${PYTHONPATH:+:$PYTHONPATH}"
        "PACKHORSE_TEST_MEGATRON=$version" "$python" -m pytest -q)
    run "megatron-core $version" "${with[@]}" -n 2 --dist loadfile tests/megatron "$@"
    run "distributed, megatron-core $version" "${with[@]}" -n 1 tests/distributed "$@"
}

install() { # VERSION: says Python >= 3.12 from 0.17 on, has wheels for 3.11 and runs there
    [ -d "$folders/$1/megatron" ] ||
        "$python" -m pip install --quiet --disable-pip-version-check --no-input --no-deps \
            --ignore-requires-python --only-binary=:all: --target "$folders/$1" "megatron-core==$1"
}

for version in $versions; do
    if install "$version"; then
        megatron "$version" "$folders/$version" "$@"
    else
        rm -rf "${folders:?}/$version"
        summary+=("megatron-core $version: not installed")
        status=1
    fi
done
if [ -n "${MEGATRON_SOURCE:-}" ]; then
    if version=$(PYTHONPATH=$MEGATRON_SOURCE "$python" -c \
        'from megatron.core import package_info as p; print(p.__version__)'); then
        megatron "$version" "$MEGATRON_SOURCE" "$@"
    else
        summary+=("MEGATRON_SOURCE=$MEGATRON_SOURCE holds no megatron.core")
        status=1
    fi
fi
printf '== %s\n' "${summary[@]}"
exit "$status"
