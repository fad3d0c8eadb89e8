#!/usr/bin/env bash
# Fuzzes the wire's decoders, coverage-guided, with atheris (installed where it is not there).
#
# usage: tests/fuzz/run.sh [SECONDS] [PYTHON] [libFuzzer options]     60 seconds by default
# What is found is written to fuzz-found/ as an input that shows it, and the exit code is not 0.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
seconds=${1:-60}
python=${2:-${VIRTUAL_ENV:-$PWD/.venv}/bin/python}
shift $(($# < 2 ? $# : 2))

"$python" -c 'import atheris' 2>/dev/null ||
    "$python" -m pip install --quiet --disable-pip-version-check --no-input 'atheris>=3.0'
mkdir -p fuzz-found
export OMP_NUM_THREADS=1
code=0
"$python" -m tests.fuzz.fuzz_wire "-max_total_time=$seconds" -artifact_prefix=fuzz-found/ \
    -print_final_stats=1 "$@" || code=$?
rmdir fuzz-found 2>/dev/null || true
exit "$code"
