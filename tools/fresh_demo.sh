#!/usr/bin/env bash
# The demo of a capture that is made now: vLLM samples the demo's prompts, in the environment of
# tools/vllm.sh, and Megatron replays them. OUT=DIR keeps the captures there.
#
# usage: tools/fresh_demo.sh PYTHON qwen3_moe|glm4_moe|all [options of the demo]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=$1
families=$2
shift 2
[ "$families" != all ] || families="qwen3_moe glm4_moe"

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
out=${OUT:-$scratch}
mkdir -p "$out"

tools/vllm.sh install
for family in $families; do
    capture=$out/vllm_$family.npz
    # what vLLM and its libraries say is shown where sampling fails
    if ! tools/vllm.sh python -m packhorse.replay.demo_fresh --family "$family" --out "$capture" \
        >"$scratch/said" 2>"$scratch/log"; then
        tail -n 20 "$scratch/log" >&2
        echo "fresh_demo: $family could not be sampled" >&2
        exit 1
    fi
    grep '^sampled ' "$scratch/said"
    env -u TRITON_INTERPRET "$python" -m packhorse demo --capture "$capture" "$@"
done
