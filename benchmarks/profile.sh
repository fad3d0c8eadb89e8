#!/usr/bin/env bash
# Profile the kernels of packhorse, with what NVIDIA's profilers there are.
#
# usage: benchmarks/profile.sh [nsys|ncu] [REGEX]
#
#   nsys   a timeline: the ranges of the domain packhorse, kernels by name, and tables of both
#   ncu    the hardware counters of each kernel whose name REGEX finds, and a table of them
#          (REGEX: all of ours by default; gather_routes; 'move_rows_u8.*SCATTER0')
#
# Without the first argument: whichever of the two there is. The clocks are left as they are.
#
#   PYTHON=...   a Python with torch and triton (default: the active environment, .venv, python3)
#   CASES=REGEX  cases of benchmarks/profile_kernels.py to run (default: all)
#   OUT=DIR      where reports go (default: a new folder in /tmp)
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export LC_ALL=C # ncu writes numbers as the locale does

fail() {
    echo "profile: $*" >&2
    exit 1
}

find_tool() { # NAME PATTERN...: on the path, else the last file that a pattern finds
    local name=$1 found
    shift
    if found=$(command -v "$name"); then
        echo "$found"
        return
    fi
    # shellcheck disable=SC2086
    found=$(ls -d $* 2>/dev/null | sort -V | tail -n 1)
    [ -n "$found" ] && echo "$found"
}

python=${PYTHON:-${VIRTUAL_ENV:+$VIRTUAL_ENV/bin/python}}
[ -n "$python" ] || { [ -x .venv/bin/python ] && python=.venv/bin/python || python=python3; }
places=${NSIGHT_PLACES-/opt/nvidia /usr/local}
nsys=$(find_tool nsys $(for at in $places; do
    echo "$at/nsight-systems/*/bin/nsys" "$at/cuda*/bin/nsys"
done)) || nsys=
ncu=$(find_tool ncu $(for at in $places; do
    echo "$at/nsight-compute/*/ncu" "$at/cuda*/bin/ncu"
done)) || ncu=
what=${1:-}
case $what in
nsys | ncu) [ -n "${!what}" ] || fail "no $what here, neither on PATH nor below $places" ;;
"") [ -n "$nsys$ncu" ] || fail "neither nsys nor ncu here, on PATH or below $places" ;;
*) fail "'$what' is not nsys or ncu" ;;
esac
regex=${2:-}
out=${OUT:-$(mktemp -d)}
mkdir -p "$out"
status=0

run_nsys() {
    echo "== nsys: $nsys"
    "$nsys" profile --trace=cuda,nvtx --sample=none --cpuctxsw=none --force-overwrite=true \
        --output "$out/packhorse" "$python" benchmarks/profile_kernels.py --only "${CASES:-}" ||
        return
    if [ ! -f "$out/packhorse.nsys-rep" ]; then
        echo "profile: nsys left no packhorse.nsys-rep in $out, so there are no tables" >&2
        return 1
    fi
    "$nsys" stats --report nvtx_sum --report nvtx_kern_sum --report cuda_gpu_kern_sum \
        "$out/packhorse.nsys-rep"
}

run_ncu() {
    local metrics
    metrics=$("$python" -c 'import sys; sys.path.insert(0, "benchmarks")
import ncu_table; print(",".join(ncu_table.METRICS.values()))') || return
    echo "== ncu: $ncu"
    "$ncu" --clock-control none --profile-from-start off --target-processes all \
        --kernel-name "regex:packhorse_${regex:+.*$regex}" --metrics "$metrics" \
        --csv --page raw --log-file "$out/ncu.csv" \
        "$python" benchmarks/profile_kernels.py --only "${CASES:-}" --cases "$out/cases.jsonl" || {
        local code=$?
        grep -h '^==ERROR==' "$out/ncu.csv" >&2
        return "$code"
    }
    if [ -n "$regex" ]; then # not every kernel of a case
        "$python" benchmarks/ncu_table.py "$out/ncu.csv"
    else
        "$python" benchmarks/ncu_table.py "$out/ncu.csv" --cases "$out/cases.jsonl"
    fi
}

if [ "$what" = nsys ] || { [ -z "$what" ] && [ -n "$nsys" ]; }; then run_nsys || status=1; fi
if [ "$what" = ncu ] || { [ -z "$what" ] && [ -n "$ncu" ]; }; then run_ncu || status=1; fi
[ -n "$nsys" ] || [ "$what" = ncu ] || echo "== no nsys here: no timeline"
[ -n "$ncu" ] || [ "$what" = nsys ] || echo "== no ncu here: no counters"
echo "== reports in $out"
exit "$status"
