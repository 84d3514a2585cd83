#!/usr/bin/env bash
# GRPO on DeepMath-103K with Qwen3-30B-A3B by OpenRLHF on the eight GPUs of one node.
#
#   examples/openrlhf/grpo_deepmath_qwen3_30b_a3b.sh [options of OpenRLHF, or --moebius.* ...]
#
# MODE=colocated: trainer and rollouts share all GPUs and sleep by turns; weights go as handles of CUDA memory.
# MODE=partial:   half of the GPUs train, half draw; weights come over NCCL while samples are half drawn.
# With ROLLOUT=vllm the same runs on OpenRLHF's own engines, in an environment with the vLLM that it pins.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
model=${MODEL:-Qwen/Qwen3-30B-A3B}
gpus=${GPUS:-8}                 # of this node
mode=${MODE:-colocated}
prompts=${PROMPTS:-128}         # a step: so many prompts,
samples=${SAMPLES:-8}           # and so many samples of each
tokens=${TOKENS:-16384}         # most tokens of a prompt and its output
threshold=${THRESHOLD:-128}     # switch to TP at so many live samples; docs/policies.md on how to find it
rollout=${ROLLOUT:-moebius}
python=${PYTHON:-python}

command=(openrlhf.cli.train_ppo_ray)
own=()
if [ "$rollout" = moebius ]; then
  command=(moebius.rollout.integrations.openrlhf.train_ppo_ray)
  own=(--moebius.policy.threshold="$threshold" --moebius.service.reports=runs/openrlhf/reports)
fi

# NVLink multicast stays off in the ranks; a trainer on the same GPUs must agree.
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1

if [ "$mode" = colocated ]; then
  trained=$gpus drawn=$gpus
  place=(--train.colocate_all --vllm.enable_sleep --ds.enable_sleep --vllm.gpu_memory_utilization 0.5)
else
  trained=$((gpus / 2)) drawn=$((gpus / 2))
  place=(--train.async_enable --train.partial_rollout_enable --vllm.gpu_memory_utilization 0.85)
fi

exec "$python" -m "${command[@]}" \
  --actor.model_name_or_path "$model" \
  --actor.num_nodes 1 --actor.num_gpus_per_node "$trained" \
  --vllm.num_engines 1 --vllm.tensor_parallel_size "$drawn" --vllm.enable_prefix_caching \
  "${place[@]}" \
  --data.prompt_dataset zwhe99/DeepMath-103K --data.input_key question --data.label_key final_answer \
  --data.apply_chat_template --data.max_len "$tokens" \
  --reward.remote_url "$here/reward.py" \
  --algo.advantage.estimator group_norm --algo.kl.init_coef 0 --algo.advantage.is_correction_level token \
  --rollout.batch_size "$prompts" --rollout.n_samples_per_prompt "$samples" --rollout.micro_batch_size 4 \
  --train.batch_size "$((prompts * samples))" --train.micro_batch_size 1 --train.dynamic_batch_enable \
  --train.max_tokens_per_gpu "$tokens" --actor.gradient_checkpointing_enable --actor.adam.lr 1e-6 \
  --ds.zero_stage 3 --ds.adam_offload --ds.packing_samples --ds.param_dtype bf16 \
  --ckpt.output_dir runs/openrlhf/model --ckpt.path runs/openrlhf/checkpoints \
  "${own[@]}" "$@"
