#!/usr/bin/env bash
# The paper's own setting (Qwen3-235B-A22B on 8 GPUs), or less of it on fewer GPUs, in parts of under 9 minutes that may
# run on different days; docs/benchmarks/README.md says how. From the repository root:
#
#   benchmarks/paper.sh --gpus 8 --part 1 --out runs/paper     # again until it says that the part is done
#   benchmarks/paper.sh --gpus 8 --check                       # only look at the machine and at the time it would take
#   benchmarks/paper.sh merge runs/paper/paper_x8              # results so far, into one file
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3} # of an environment with the extras gpu and bench
case "${1:-}" in
  merge) exec "$python" -m benchmarks.paper "$@" ;;
  *) exec "$python" -m benchmarks.paper run "$@" ;;
esac
