#!/usr/bin/env bash
# Everything that needs a GPU, in one call: tests, the demo, compute-sanitizer where it exists, and
# the benchmarks. A stage that fails does not stop the others; the exit code says whether all passed.
#
# usage: tools/gpu.sh PYTHON all|tests|bench [options for every benchmark]
#
#   RESULTS=DIR      where the JSON lines go (default benchmarks/results): one file a benchmark, and
#                    stages.jsonl with each stage's exit code and seconds
#   BENCH_COMMIT=C   the commit to name in the lines, for a copy of the tree without its history
#   STAGE_SECONDS=N  the most one stage may take (default 900)
#   SANITIZER_TESTS=E, SANITIZER_SECONDS=N   the kernel tests that compute-sanitizer runs, a pytest
#                    -k expression (default: all but those that capture graphs, which torch cannot
#                    without its caching allocator, that compile, or that fail an assertion of the
#                    device on purpose), and the most that each of its tools may take (default 300)
#
# PYTHON needs torch, triton, numpy, pytest and hypothesis; packhorse need not be installed. Without
# megatron-core the stages that need it are left out, and said to be. Without a GPU `bench` says so
# and succeeds, since there is nothing to measure; `all` and `tests` fail.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=$1
what=$2
shift 2
results=${RESULTS:-benchmarks/results}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
status=0
sanitized="cuda and not graph and not captur and not compiles and not contract and not warm"
sanitized="$sanitized and not on_request and not wrong_index"

if ! gpu=$("$python" -c 'import torch; print(torch.cuda.get_device_name())' 2>/dev/null); then
    if [ "$what" = bench ]; then
        echo "bench: no GPU here, so nothing to measure"
        exit 0
    fi
    echo "gpu: no GPU here ($python -m packhorse doctor says what torch sees)" >&2
    exit 1
fi
mkdir -p "$results"
results=$(cd "$results" && pwd)
commit=${BENCH_COMMIT:-$(git describe --always --dirty 2>/dev/null || echo unknown)}

stage() { # NAME COMMAND...
    local name=$1 begin=$SECONDS code=0
    shift
    echo "== $name"
    timeout "${STAGE_SECONDS:-900}" "$@" || code=$?
    [ "$code" -eq 0 ] || status=1
    echo "== $name: exit code $code, $((SECONDS - begin)) s"
    printf '{"stage": "%s", "exit_code": %d, "seconds": %d, "gpu": "%s", "commit": "%s", "date": "%s"}\n' \
        "$name" "$code" "$((SECONDS - begin))" "$gpu" "$commit" "$(date +%F)" \
        >>"$results/stages.jsonl"
}

has_module() {
    "$python" -c "import importlib.util as u, sys; sys.exit(u.find_spec('$1') is None)" 2>/dev/null
}

tests() {
    # several processes share the card; what needs most of its memory runs alone
    local several=() files=()
    if has_module xdist; then
        several=(-n 8)
        files=(-n 6 --dist loadfile)
    fi
    stage "doctor" "$python" -m packhorse doctor
    stage "tests" "$python" -m pytest -q "${several[@]}" -m "not compile and not gpu_memory" \
        --ignore=tests/megatron --ignore=tests/distributed tests
    stage "tests of large tensors" "$python" -m pytest -q -m gpu_memory tests/kernels
    if has_module megatron.core; then
        stage "tests with megatron-core" "$python" -m pytest -q "${files[@]}" tests/megatron
        stage "ranks on one GPU" "$python" -m pytest -q tests/distributed/test_gpu.py
        stage "demo" "$python" -m packhorse demo
    else
        echo "== no megatron-core here: its tests and the demo are left out"
    fi
    if command -v compute-sanitizer >/dev/null; then
        # memcheck: accesses outside an allocation; racecheck: hazards in shared memory
        sanitize memcheck
        sanitize racecheck
    else
        echo "== no compute-sanitizer here: its stages are left out"
    fi
}

sanitize() { # TOOL
    # torch's caching allocator would hide an access past the end of a tensor
    STAGE_SECONDS=${SANITIZER_SECONDS:-300} stage "compute-sanitizer $1" \
        env PYTORCH_NO_CUDA_MEMORY_CACHING=1 \
        compute-sanitizer --tool "$1" --error-exitcode 9 --launch-timeout 120 \
        "$python" -m pytest -q -x -m "not compile and not gpu_memory" \
        -k "${SANITIZER_TESTS:-$sanitized}" tests/kernels tests/replay/test_staging.py
}

benchmarks() {
    local script
    if has_module megatron.core; then
        stage "session_overhead" "$python" benchmarks/session_overhead.py \
            --json "$results/session_overhead.jsonl"
    fi
    stage "lm_head_scoring" "$python" benchmarks/lm_head_scoring.py \
        --json "$results/lm_head_scoring.jsonl"
    stage "transport_speed" "$python" benchmarks/transport_speed.py --only device \
        --json "$results/transport_speed.jsonl"
    for script in benchmarks/bench_*.py; do
        stage "$(basename "$script" .py)" \
            "$python" "$script" --json "$results/$(basename "$script" .py).jsonl" "$@"
    done
}

echo "gpu: $gpu, results in $results"
case $what in
tests) tests ;;
bench) benchmarks "$@" ;;
all)
    tests
    benchmarks "$@"
    ;;
*)
    echo "gpu: '$what' is not all, tests or bench" >&2
    exit 2
    ;;
esac
exit "$status"
