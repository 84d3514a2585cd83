#!/usr/bin/env bash
# The same on two GPUs, with a model whose training fits there: OLMoE, 7 billion parameters, 64 experts.
#
#   python examples/verl/prepare.py deepmath data/deepmath
#   examples/verl/grpo_deepmath_2gpu.sh [verl settings ...]
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
export MODEL=${MODEL:-allenai/OLMoE-1B-7B-0125-Instruct}
export GPUS=2 PROMPTS=${PROMPTS:-64} SAMPLES=${SAMPLES:-8} THRESHOLD=${THRESHOLD:-32}
export PROMPT_TOKENS=${PROMPT_TOKENS:-1024} RESPONSE_TOKENS=${RESPONSE_TOKENS:-3072} MEMORY_SHARE=${MEMORY_SHARE:-0.5}
exec "$here/grpo_deepmath_qwen3_30b_a3b.sh" "$@"
