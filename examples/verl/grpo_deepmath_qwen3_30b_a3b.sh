#!/usr/bin/env bash
# GRPO on DeepMath-103K with Qwen3-30B-A3B on the eight GPUs of one node: trainer (FSDP) and rollouts share them.
#
#   python examples/verl/prepare.py deepmath data/deepmath
#   examples/verl/grpo_deepmath_qwen3_30b_a3b.sh [verl settings ...]
#
# To compare with verl's own rollout: ROLLOUT=vllm, all else equal (in an environment with the vLLM that verl pins).
# Weights in float32 with Adam take 16 bytes a parameter, 480 GB in all: they wait in host memory during rollouts.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
model=${MODEL:-Qwen/Qwen3-30B-A3B}
data=$(realpath -m "${DATA:-data/deepmath}")
gpus=${GPUS:-8}                 # of this node
group=${GROUP:-$gpus}           # of a replica: a switch group; verl spreads prompts over gpus/group of them
prompts=${PROMPTS:-256}         # a step: so many prompts,
samples=${SAMPLES:-8}           # and so many samples of each
prompt_tokens=${PROMPT_TOKENS:-2048}
response_tokens=${RESPONSE_TOKENS:-16384}
share=${MEMORY_SHARE:-0.6}      # of a GPU's memory, for rollouts: both layouts' weights and KV
threshold=${THRESHOLD:-128}     # switch to TP at so many live trajectories; docs/policies.md on how to find it
rollout=${ROLLOUT:-moebius}
mode=${MODE:-sync}              # or colocate_async
tokens_per_gpu=$((prompt_tokens + response_tokens))
[ -e "$data/train.parquet" ] || { echo "no $data/train.parquet; run: python examples/verl/prepare.py deepmath $data" >&2; exit 2; }

own=()
if [ "$rollout" = moebius ]; then
  own=("+actor_rollout_ref.rollout.engine_kwargs.moebius.policy.threshold=$threshold"
       "+actor_rollout_ref.rollout.engine_kwargs.moebius.service.reports=runs/verl/reports")
fi

# NVLink multicast stays off in the ranks; a trainer on the same GPUs must agree.
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1

exec python -m verl.trainer.main_ppo \
  algorithm.adv_estimator=grpo algorithm.use_kl_in_reward=False \
  data.train_files="$data/train.parquet" data.val_files="$data/val.parquet" \
  data.train_batch_size="$prompts" data.max_prompt_length="$prompt_tokens" \
  data.max_response_length="$response_tokens" data.filter_overlong_prompts=True \
  actor_rollout_ref.model.path="$model" \
  actor_rollout_ref.actor.strategy=fsdp2 \
  actor_rollout_ref.actor.ppo_mini_batch_size="$((prompts / 4))" \
  actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.use_kl_loss=False \
  actor_rollout_ref.actor.clip_ratio_low=0.2 actor_rollout_ref.actor.clip_ratio_high=0.28 \
  actor_rollout_ref.actor.use_dynamic_bsz=True \
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu="$tokens_per_gpu" \
  actor_rollout_ref.actor.fsdp_config.param_offload=True \
  actor_rollout_ref.actor.fsdp_config.optimizer_offload=True \
  actor_rollout_ref.rollout.name="$rollout" \
  actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
  actor_rollout_ref.rollout.data_parallel_size="$group" \
  actor_rollout_ref.rollout.expert_parallel_size="$group" \
  actor_rollout_ref.rollout.gpu_memory_utilization="$share" \
  actor_rollout_ref.rollout.n="$samples" actor_rollout_ref.rollout.calculate_log_probs=True \
  actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True \
  actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu="$tokens_per_gpu" \
  "${own[@]}" \
  reward.custom_reward_function.path="$here/reward.py" \
  trainer.v1.trainer_mode="$mode" \
  trainer.n_gpus_per_node="$gpus" trainer.nnodes=1 \
  trainer.total_epochs=1 trainer.save_freq=20 trainer.test_freq=10 trainer.val_before_train=False \
  trainer.project_name=moebius trainer.experiment_name="$(basename "$model")-$rollout" trainer.logger=[console] \
  "$@"
