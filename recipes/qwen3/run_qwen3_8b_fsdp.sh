#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Qwen3-8B with ScaleRL on 8 GPUs of 80 GB: verl's FSDP2 trains on 4, vLLM generates on 4 (PipelineRL-4).
#   bash run_qwen3_8b_fsdp.sh [overrides]          train
#   bash run_qwen3_8b_fsdp.sh --plan [options]     does it fit, and which split is best? Starts nothing.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

# ---- yours to set, here or in the environment -----------------------------------------------------------------------
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-8B}
# train.parquet and test.parquet: python recipes/common/to_parquet.py --out ~/data/polaris polaris
DATA_DIR=${DATA_DIR:-$HOME/data/polaris}
REWARD=${REWARD:-$here/../common/reward.py}
OUT_DIR=${OUT_DIR:-outputs/qwen3-8b}
TRAIN_NODES=${TRAIN_NODES:-1} TRAIN_GPUS_PER_NODE=${TRAIN_GPUS_PER_NODE:-4}
GENERATE_NODES=${GENERATE_NODES:-1} GENERATE_GPUS_PER_NODE=${GENERATE_GPUS_PER_NODE:-4}
MAX_STALENESS=${MAX_STALENESS:-4}  # k: no token trains more than so many weight versions late
MAX_PROMPT=${MAX_PROMPT:-2048}
MAX_RESPONSE=${MAX_RESPONSE:-8192}
# thinking is closed at a length drawn from this range; the rest of MAX_RESPONSE is for the answer
THINKING_BUDGET=${THINKING_BUDGET:-[5000,6000]}
BATCH_PROMPTS=${BATCH_PROMPTS:-48} RESPONSES=${RESPONSES:-16}
LEARNING_RATE=${LEARNING_RATE:-5e-7}
STEPS=${STEPS:-500}
VLLM_SHARE=${VLLM_SHARE:-0.72}  # of a GPU's memory
# ---------------------------------------------------------------------------------------------------------------------

args=(
  +scalerl=scalerl
  data.train_files="$DATA_DIR/train.parquet"
  data.val_files="$DATA_DIR/test.parquet"
  data.train_batch_size="$BATCH_PROMPTS"
  data.max_prompt_length="$MAX_PROMPT"
  data.max_response_length="$MAX_RESPONSE"
  data.filter_overlong_prompts=True
  reward.custom_reward_function.path="$REWARD"
  ++algorithm.scalerl.interruption.thinking_budget="$THINKING_BUDGET"
  actor_rollout_ref.model.path="$MODEL_PATH"
  actor_rollout_ref.actor.strategy=fsdp2
  actor_rollout_ref.actor.optim.lr="$LEARNING_RATE"
  actor_rollout_ref.actor.use_dynamic_bsz=True
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$((MAX_PROMPT + MAX_RESPONSE))
  actor_rollout_ref.rollout.name=vllm
  actor_rollout_ref.rollout.n="$RESPONSES"
  actor_rollout_ref.rollout.tensor_model_parallel_size=1
  actor_rollout_ref.rollout.max_model_len=$((MAX_PROMPT + MAX_RESPONSE))
  actor_rollout_ref.rollout.max_num_seqs=128
  actor_rollout_ref.rollout.gpu_memory_utilization="$VLLM_SHARE"
  actor_rollout_ref.rollout.val_kwargs.do_sample=True
  actor_rollout_ref.rollout.val_kwargs.temperature=1.0
  actor_rollout_ref.rollout.val_kwargs.top_p=1.0
  actor_rollout_ref.rollout.val_kwargs.n=4
  trainer.nnodes="$TRAIN_NODES"
  trainer.n_gpus_per_node="$TRAIN_GPUS_PER_NODE"
  actor_rollout_ref.rollout.nnodes="$GENERATE_NODES"
  actor_rollout_ref.rollout.n_gpus_per_node="$GENERATE_GPUS_PER_NODE"
  trainer.v1.pipeline_rl.max_staleness="$MAX_STALENESS"
  trainer.total_training_steps="$STEPS"
  trainer.total_epochs=1000
  trainer.test_freq=50
  trainer.save_freq=50
  trainer.logger='[console,file]'
  trainer.project_name=scalerl
  trainer.experiment_name="$(basename "$OUT_DIR")"
  trainer.default_local_dir="$OUT_DIR/checkpoints"
)

if [ "${1:-}" = --plan ]; then
  exec scalerl plan "${args[@]}" "${@:2}"
fi
mkdir -p "$OUT_DIR"
# what `scalerl fit` reads
export VERL_FILE_LOGGER_PATH=${VERL_FILE_LOGGER_PATH:-$OUT_DIR/metrics.jsonl}
exec python3 -m verl.trainer.main_ppo "${args[@]}" "$@"
