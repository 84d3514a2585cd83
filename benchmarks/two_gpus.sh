#!/usr/bin/env bash
# Measures again what docs/benchmarks has of two GPUs, in parts of a few minutes; from the repository root:
#
#   bash benchmarks/two_gpus.sh list                # the parts, with all their commands
#   bash benchmarks/two_gpus.sh switch runs/x2      # one of them; its results go to runs/x2
#   bash benchmarks/two_gpus.sh publish runs/x2     # all that is there to docs/benchmarks, or to another folder
#
# PYTHON names an interpreter with the extras gpu and bench. docs/benchmarks/README.md explains the numbers.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
config=configs/shape_30b_x2.yaml
parts="sweep large memory switch layers weights policies serving tail deepep graphs hybrids strawmen"
part=${1:-list} out=${2:-runs/x2} docs=${3:-docs/benchmarks} listing=

run() {
  if [ "$listing" ]; then echo "  $*"; else echo "== $*"; "$@"; fi
}
bench() { # name, command, options: results in $out/<name>/<command>.json
  local name=$1 command=$2
  shift 2
  run "$python" -m moebius.rollout.cli bench "$command" --out "$out/$name" "$@"
}
alone() { # the same with engines of its own: name, command, KV in GiB, options
  local name=$1 command=$2 kv=$3
  shift 3
  bench "$name" "$command" --config "$config" --set engine.kv_cache_bytes=$((kv << 30)) "$@"
}
up() { # engines, largest batch, options: ends with the script
  local words=("$python" -m moebius.rollout.cli bench up --dir "$out/up" --config "$config" --engines "$1" --largest-batch "$2" "${@:3}")
  if [ "$listing" ]; then
    run "${words[@]}"
    return
  fi
  echo "== ${words[*]}"
  touch "$out/began" # a file of engines that have ended may be there still
  "${words[@]}" &
  engines=$!
  trap 'kill "$engines" 2>/dev/null && wait "$engines" || true' EXIT
  until [ "$out/up/daemon.json" -nt "$out/began" ] || ! kill -0 "$engines" 2>/dev/null; do sleep 0.2; done
}

measure() {
  case $1 in
  sweep) # ours beside stock in both layouts, and steps with and without the switch
    up moebius,stock_tp,stock_ep 1024 --set engine.kv_cache_bytes=$((8 << 30))
    bench sweep sweep --dir "$out/up" --batches 8,32,128,256,512,1024 --context 16
    bench rollout_tail rollout --dir "$out/up" --trace long-tail --requests 512 --body 150 --curves "$out/sweep/sweep.json"
    bench rollout_deepmath rollout --dir "$out/up" --scale 0.1 --cap 2000 --requests 512 --no-update-weights
    ;;
  large) alone sweep_large sweep 12 --engines moebius,stock_ep --batches 1024,2048 --context 16 --set engine.max_num_seqs=2048 ;;
  memory) alone memory memory 8 --largest-batch 512 ;;
  switch) # needs `memory` for memory_overhead_pct
    alone switch switch 40 --set engine.max_num_seqs=512 --memory-json "$out/memory/memory.json"
    ;;
  layers) alone layers switch 40 --set engine.max_num_seqs=512 --fills 135000,270000 --prepare-layers 12,24,34,48 --soak 0 ;;
  weights) run "$python" -m benchmarks.weights --config "$config" --out "$out/weights/weights.json" ;;
  policies)
    alone policies policies 20
    run "$python" -m benchmarks.policy_sim --gpu "$out/policies/policies.json" --out "$docs"
    ;;
  serving) alone serving serving 20 --time-scale 0.2 --requests-scale 0.2 --cooldown-s 1 --threshold 400 ;; # about where the layouts cross
  tail)
    run "$python" -m benchmarks.arithmetic_model "$out/arithmetic"
    run "$python" -m benchmarks.tail_spec --model "$out/arithmetic" --seconds 300 --out "$out/tail_spec_x2.json"
    ;;
  deepep) # needs deep_ep: docs/deepep.md
    run "$python" -m benchmarks.deepep --config "$config" --set engine.kv_cache_bytes=$((16 << 30)) --out "$out/deepep_x2.json"
    ;;
  graphs) alone graphs graphs 4 --set engine.hf_overrides.num_hidden_layers=24 --batches 8,64,256 --context 128 ;;
  hybrids)
    alone hybrids sweep 4 --engines moebius,stock_dp_tp,stock_tp_ep --set engine.hf_overrides.num_hidden_layers=24 \
      --batches 8,64,256,512 --context 128
    ;;
  strawmen) alone strawmen strawmen 8 ;;
  *) echo "two_gpus: there is no part '$1'; there are: $parts, and list and publish" >&2; exit 2 ;;
  esac
}

publish() { # results that are there, under the names that the documentation uses
  local from to
  while read -r from to; do
    if [ -e "$out/$from" ]; then
      "$python" -m moebius.rollout.cli bench publish "$out/$from" "$docs/$to"
    fi
  done <<'NAMES'
sweep/sweep.json sweep_30b_x2.json
rollout_tail/rollout.json rollout_30b_x2.json
rollout_deepmath/rollout.json rollout_deepmath_30b_x2.json
sweep_large/sweep.json sweep_large_30b_x2.json
memory/memory.json memory_30b_x2.json
switch/switch.json switch_30b_x2.json
layers/switch.json switch_layers_30b_x2.json
weights/weights.json weights_x2.json
serving/serving.json serving_30b_x2.json
graphs/graphs.json graphs_30b_24l_x2.json
hybrids/sweep.json hybrids_30b_24l_x2.json
strawmen/strawmen.json strawmen_30b_x2.json
NAMES
  for to in tail_spec_x2.json deepep_x2.json; do # portable as they are
    if [ -e "$out/$to" ]; then cp "$out/$to" "$docs/$to"; fi
  done
}

case $part in
list)
  listing=yes
  for each in $parts; do echo "$each"; measure "$each"; done
  ;;
publish) publish ;;
*)
  mkdir -p "$out"
  measure "$part"
  ;;
esac
