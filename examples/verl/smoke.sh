#!/usr/bin/env bash
# Two GRPO steps of a tiny mixture-of-experts model by unmodified verl: on a CPU, a few minutes on two cores, or with
# DEVICE=cuda on two GPUs.
#
#   examples/verl/smoke.sh [FOLDER] [verl settings ...]
#
# What to see: in each step's metrics "moebius/switches:1", "timing_s/gen/burst", ".../switch" and ".../tail", and
# "training/rollout_actor_probs_pearson_corr" near 1.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
folder=$(realpath -m "${1:-runs/verl_smoke}")
shift || true
python=${PYTHON:-python}

[ -e "$folder/train.parquet" ] || "$python" "$here/prepare.py" smoke "$folder"

export HF_HUB_OFFLINE=1 RAY_USAGE_STATS_ENABLED=0 RAY_enable_metrics_collection=0 TOKENIZERS_PARALLELISM=false
export HYDRA_FULL_ERROR=1
if [ "${DEVICE:-cpu}" = cpu ]; then
  export VERL_PLATFORM=cpu                      # this package's platform without devices
  export VERL_ENGINE_DEVICE=cuda                # so that verl takes its FSDP engine
  export GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=1
  # Ray is told of two GPUs, which verl places its workers by.
  device=(+ray_kwargs.ray_init.num_gpus=2 actor_rollout_ref.rollout.dtype=float32
          actor_rollout_ref.actor.fsdp_config.dtype=float32
          "+actor_rollout_ref.actor.fsdp_config.mixed_precision={param_dtype:fp32}")
else
  export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1
  device=(actor_rollout_ref.rollout.dtype=bfloat16)
fi

exec "$python" -m verl.trainer.main_ppo \
  algorithm.adv_estimator=grpo \
  data.train_files="$folder/train.parquet" data.val_files="$folder/val.parquet" \
  data.train_batch_size=4 data.max_prompt_length=64 data.max_response_length=64 data.dataloader_num_workers=0 \
  actor_rollout_ref.model.path="$folder/model" \
  actor_rollout_ref.model.use_remove_padding=False \
  actor_rollout_ref.model.enable_gradient_checkpointing=False \
  +actor_rollout_ref.model.override_config.attn_implementation=eager \
  actor_rollout_ref.actor.strategy=fsdp2 \
  actor_rollout_ref.actor.ppo_mini_batch_size=4 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 \
  actor_rollout_ref.actor.optim.lr=1e-3 \
  actor_rollout_ref.actor.use_torch_compile=False actor_rollout_ref.actor.fsdp_config.use_torch_compile=False \
  actor_rollout_ref.rollout.name=moebius \
  actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
  actor_rollout_ref.rollout.data_parallel_size=2 \
  actor_rollout_ref.rollout.expert_parallel_size=2 \
  actor_rollout_ref.rollout.enforce_eager=True \
  actor_rollout_ref.rollout.n=4 actor_rollout_ref.rollout.calculate_log_probs=True \
  actor_rollout_ref.rollout.max_num_seqs=32 actor_rollout_ref.rollout.max_num_batched_tokens=1024 \
  actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8 \
  actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=16 \
  actor_rollout_ref.rollout.agent.num_workers=1 \
  +actor_rollout_ref.rollout.engine_kwargs.moebius.policy.threshold=6 \
  +actor_rollout_ref.rollout.engine_kwargs.moebius.engine.kv_cache_bytes=67108864 \
  reward.custom_reward_function.path="$here/reward.py" reward.num_workers=1 \
  trainer.n_gpus_per_node=2 trainer.nnodes=1 \
  trainer.total_training_steps=2 trainer.total_epochs=1 \
  trainer.val_before_train=False trainer.test_freq=-1 trainer.save_freq=-1 \
  trainer.resume_mode=disable trainer.logger=[console] trainer.default_local_dir="$folder/checkpoints" \
  transfer_queue.backend.SimpleStorage.num_data_storage_units=1 \
  +ray_kwargs.ray_init.address=local ray_kwargs.ray_init.num_cpus=32 +ray_kwargs.ray_init.include_dashboard=False \
  "${device[@]}" "$@"
