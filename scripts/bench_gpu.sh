#!/usr/bin/env bash
# All GPU measurements of results/, one after the other: rows as JSON and a log each under OUT, a line each on the terminal.
#   scripts/bench_gpu.sh OUT [name …]        names: those at the start of the lines below; default: all
# Each has a time limit and keeps the rows that it has measured by then. The first use on a machine compiles kernels for minutes.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:?folder for the results} && shift
only=" $* "
mkdir -p "$out"
measure() {
  local name=$1 limit=$2
  shift 2
  [ "$only" = "  " ] || [[ "$only" == *" $name "* ]] || return 0
  timeout "$limit" python3 -m "$@" --output "$out/$name.json" > "$out/$name.log" 2>&1
  printf '%-14s exit status %s, %s s in all: %s\n' "$name" $? $SECONDS "$*"
}
train=linear_core.bench.train
two="torch.distributed.run --nproc-per-node 2 -m $train --batch-size 2"  # needs two GPUs
short="--batch-size 8 --sequence-length 1024"

measure train-8b     120 $train --model llama3.1-8b --recipe "gdn 56+8" --steps 3 --sequence-length 4096,16384
measure train-8b-32k 150 $train --model llama3.1-8b --recipe "gdn 56+8" --steps 2 --sequence-length 32768 --checkpoint-activations
measure train-0.6b   90  $train --model qwen3-0.6b-base --recipe "gdn 56+8" --steps 5 --batch-size 2 --sequence-length 4096,16384
measure train-32b    120 $train --model qwen3-32b --recipe "gdn 56+8" --steps 2 --checkpoint-activations
measure train-8b-int8 120 $train --model llama3.1-8b --recipe "gdn 56+8" --steps 3 --backbone int8
measure ddp-8b       120 $two --model llama3.1-8b --recipe "gdn 56+8" --steps 3
measure sharded-8b   120 $two --model llama3.1-8b --recipe "gdn 56+8" --steps 3 --shard-weights
measure sharded-32b  150 $two --model qwen3-32b --recipe "gdn 56+8" --steps 2 --shard-weights --checkpoint-activations
measure train-gdn    60  $train --model smollm2-135m --recipe "gdn 56+8" $short
measure train-gla    60  $train --model smollm2-135m --recipe "gla 56+8" $short
measure train-none   60  $train --model smollm2-135m --recipe "none 56+8 lora" $short
measure layerwise    90  $train --model smollm2-135m --recipe "gdn 56+8,gla 56+8,gdn 64+0,gla 64+0" --objective layerwise $short
measure decode       150 linear_core.bench.decode --lengths 2048,32768,65536,131072
measure prefill      150 linear_core.bench.prefill --lengths 2048,8192,32768,131072
measure mechanisms   300 linear_core.bench.mechanisms --device cuda --repeats 3
measure forms        300 linear_core.bench.forms --device cuda --first-config
measure evaluate     300 linear_core.bench.evaluate --tasks lambada_openai,mmlu
