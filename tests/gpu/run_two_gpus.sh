#!/usr/bin/env bash
# What two GPUs of a host show, within about three minutes on a machine whose caches are empty:
#   tests/gpu/run_two_gpus.sh OUT [part …]      parts: tests, speed, alone; default: all, in this order
# Everything goes line by line into OUT/all.log, measured rows as JSON into OUT, a line for each command to the terminal. Each
# command has a time limit of its own. Needs torch, flash-linear-attention, pytest; torchao for the 8-bit backbone.
#   tests   two ranks against one GPU, the archive of kernels, the 8-bit backbone: side by side; 8B shapes compile meanwhile
#   speed   8B shapes on two GPUs, whole and sharded; 32B shapes sharded
#   alone   8B shapes on one GPU, in bfloat16 on the first and in 8 bits on the second
set -uo pipefail
cd "$(dirname "$0")/../.."
out=$(mkdir -p "${1:?folder for the results}" && cd "$1" && pwd) && shift
parts=" ${*:-tests speed alone} "
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-4} TORCHINDUCTOR_COMPILE_THREADS=${TORCHINDUCTOR_COMPILE_THREADS:-8}
export GOLINEAR_RANK_TEST_SECONDS=${GOLINEAR_RANK_TEST_SECONDS:-100}

part() { [[ "$parts" == *" $1 "* ]]; }
say() {  # name, time limit in seconds, command
  local name=$1 limit=$2 status from=$SECONDS
  shift 2
  timeout -k 10 "$limit" "$@" 2>&1 | sed -u "s/^/$name: /" >> "$out/all.log"
  status=${PIPESTATUS[0]}
  printf '%-13s exit status %s, %s s, at %s s: %s\n' "$name" "$status" $((SECONDS - from)) $SECONDS "$*" | tee -a "$out/all.log"
}
on() { CUDA_VISIBLE_DEVICES=$1 say "${@:2}"; }
tests() { say "$1" "$2" python3 -m pytest -m gpu -s -v -p no:cacheprovider "tests/gpu/$3"; }
train=(python3 -m linear_core.bench.train --recipe "gdn 56+8" --steps 5 --sequence-length 4096)
two=(python3 -m torch.distributed.run --nproc-per-node 2 -m "${train[@]:2}" --batch-size 2)
llama=(--model llama3.1-8b)

if part tests; then
  tests ranks 180 test_ranks_gpu.py &
  CUDA_VISIBLE_DEVICES=1 tests kernels 120 test_kernel_archive_gpu.py &
  CUDA_VISIBLE_DEVICES=0 tests backbone 120 test_backbone_gpu.py &
  on 0 beside-8b 100 "${train[@]}" "${llama[@]}" &  # memory and first steps count; the speed is disturbed by the tests
  on 1 beside-int8 100 "${train[@]}" "${llama[@]}" --backbone int8 &
  wait
fi
if part speed; then
  say ddp-8b 60 "${two[@]}" "${llama[@]}" --output "$out/ddp-8b.json"
  say sharded-8b 60 "${two[@]}" "${llama[@]}" --shard-weights --output "$out/sharded-8b.json"
  say sharded-32b 90 "${two[@]}" --model qwen3-32b --shard-weights --checkpoint-activations --output "$out/sharded-32b.json"
fi
if part alone; then
  on 0 alone-8b 60 "${train[@]}" "${llama[@]}" --output "$out/alone-8b.json" &
  on 1 int8-8b 60 "${train[@]}" "${llama[@]}" --backbone int8 --output "$out/int8-8b.json" &
  wait
fi
