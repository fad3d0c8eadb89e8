#!/usr/bin/env bash
# Everything that needs several GPUs of one host, over NCCL: replay under Megatron's parallelisms,
# sharded scoring, the demo, the measurements. A stage that fails does not stop the others; the exit
# code says whether all passed. Cases that need more GPUs than there are are skipped.
#
# usage: tools/gpu_multi.sh PYTHON [pytest options]
#
#   RESULTS=DIR, BENCH_COMMIT=C, STAGE_SECONDS=N   as for tools/gpu.sh; the lines go to
#   multi_gpu.jsonl, the demo's figures to multi_gpu_demo.jsonl, each stage's exit code and seconds
#   to stages.jsonl
#
# NVLink multicast (NVLS) is left off where the machine has it off; it is set off here where nothing
# says otherwise.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=$1
shift
results=${RESULTS:-benchmarks/results}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0} OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
status=0

gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())' 2>/dev/null || echo 0)
if [ "$gpus" -lt 2 ]; then
    echo "gpu-multi: needs two GPUs or more, there are $gpus" >&2
    exit 1
fi
gpu=$("$python" -c 'import torch; print(torch.cuda.get_device_name())')
mkdir -p "$results"
results=$(cd "$results" && pwd)
export BENCH_COMMIT=${BENCH_COMMIT:-$(git describe --always --dirty 2>/dev/null || echo unknown)}

stage() { # NAME COMMAND...
    local name=$1 begin=$SECONDS code=0
    shift
    echo "== $name"
    timeout "${STAGE_SECONDS:-480}" "$@" || code=$?
    [ "$code" -eq 0 ] || status=1
    echo "== $name: exit code $code, $((SECONDS - begin)) s"
    printf '{"stage": "%s", "exit_code": %d, "seconds": %d, "gpus": %d, "gpu": "%s", "commit": "%s", "date": "%s"}\n' \
        "$name" "$code" "$((SECONDS - begin))" "$gpus" "$gpu" "$BENCH_COMMIT" "$(date +%F)" \
        >>"$results/stages.jsonl"
}

echo "gpu-multi: $gpus x $gpu, results in $results"
stage "scoring and restore over NCCL" "$python" -m pytest -q tests/distributed/test_nccl_scoring.py "$@"
for count in 2 4 8; do
    [ "$count" -le "$gpus" ] || break
    stage "multi_gpu on $count" "$python" -m torch.distributed.run --nproc-per-node "$count" \
        benchmarks/multi_gpu.py --json "$results/multi_gpu.jsonl"
done
stage "demo over NCCL" env RESULTS="$results" \
    "$python" -m pytest -q tests/distributed/test_nccl_demo.py "$@"
stage "replay over NCCL" "$python" -m pytest -q tests/distributed/test_nccl.py "$@"
exit "$status"
