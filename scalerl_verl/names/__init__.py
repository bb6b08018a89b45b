# SPDX-License-Identifier: Apache-2.0
"""Every name of ours that a user types: where it stands in the config, and what may stand there.

`keys` has the keys of our own sections with their defaults, `numbers` those of verl's that are read as numbers,
`reading` the readers, `asking` what a config or a command line asks for. All of it imports the standard library only:
the guard of a plugin that failed to load reads these names, too. OmegaConf is imported where a composed config is at
hand.
"""

from __future__ import annotations

from scalerl_verl.names.reading import select as select
from scalerl_verl.names.reading import select_list as select_list

COMMAND = PLUGIN = PRESET_GROUP = "scalerl"
"""Of the shell; of the entry points and of VLLM_PLUGINS; of Hydra."""
ACTIVE_ENV = "SCALERL_VERL_ACTIVE"
PLATFORM_ENV = "VERL_PLATFORM"

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"
FSDP = f"{ACTOR}.fsdp_config"
VLLM = f"{ROLLOUT}.engine_kwargs.vllm"
V1 = "trainer.v1"
RAY = "ray_kwargs.ray_init"
"""Sections of verl's that hold many of its keys."""

ACTOR_CLASS = f"{ACTOR}._target_"
ACTOR_CLASSES = ("FSDPActorConfig", "McoreActorConfig", "VeOmniActorConfig", "TorchTitanActorConfig")
"""verl's own, of which we have one each that takes our aggregation mode."""
MEGATRON = "megatron"
STRATEGIES = ("fsdp", "fsdp2", "fsdp_turbo", MEGATRON, "veomni", "torchtitan", "automodel")
"""verl's engines of the trainer, of which we have one each with our loss."""
LOSS_SECTION = f"{ACTOR}.policy_loss"
LOSS_MODE, CISPO = f"{LOSS_SECTION}.loss_mode", "scalerl_cispo"
LOSSES = {CISPO: "cispo"}
"""Policy loss of ours -> its module in `scalerl_verl.loss`."""
SEQUENCE_TRUNCATION = f"{LOSS_SECTION}.sequence_truncation"
PRODUCT, GEOMETRIC_MEAN = "product", "geometric_mean"
LOSS_AGG_MODE, PROMPT_MEAN = f"{ACTOR}.loss_agg_mode", "prompt-mean"
CORRECTION = "algorithm.rollout_correction"
BYPASS_MODE = f"{CORRECTION}.bypass_mode"

ADV_ESTIMATOR, ESTIMATOR = "algorithm.adv_estimator", "scalerl"
ALGORITHM_KEY = "scalerl"
ALGORITHM_SECTION = f"algorithm.{ALGORITHM_KEY}"
ZERO_VARIANCE = f"{ALGORITHM_SECTION}.zero_variance"
BATCH, PROMPT, NONE = "batch", "prompt", "none"
DROP, KEEP = "drop", "keep"
SHAPING_SECTION = f"{ALGORITHM_SECTION}.reward_shaping"
LENGTH_PENALTY, EXCLUDE_TRUNCATED = "length_penalty", "exclude_truncated"
INTERRUPTION_SECTION = f"{ALGORITHM_SECTION}.interruption"
ALARM_SECTION = f"{ALGORITHM_SECTION}.truncation_alarm"
WARN, STOP = "warn", "stop"
PASS_KEY, PASS_THRESHOLD = f"{ALGORITHM_SECTION}.pass_key", f"{ALGORITHM_SECTION}.pass_threshold"
FAST_FRONTEND = f"{ALGORITHM_SECTION}.fast_frontend"
FILTER_GROUPS = "algorithm.filter_groups.enable"
FILTER_METRIC = "algorithm.filter_groups.metric"
FILTER_MAX_BATCHES = "algorithm.filter_groups.max_num_gen_batches"

SAMPLER_SECTION = "data.sampler"
SAMPLER_CLASS_PATH = f"{SAMPLER_SECTION}.class_path"
SAMPLER_LOG_FILE, SAMPLER_LOG_NAME = f"{SAMPLER_SECTION}.log_file", "curriculum.jsonl"
SAMPLER_CLASS = "scalerl_verl.curriculum.NoPositiveResampling"
LATEST, CUMULATIVE = "latest", "cumulative"

VERL_MODES = ("sync", "separate_async", "colocate_async")
"""Modes of verl's trainer; its steps have ours in front."""
TRAINER_MODE, PIPELINE_RL, PPO_OFF_POLICY = f"{V1}.trainer_mode", "pipeline_rl", "ppo_off_policy"
PIPELINE_SECTION, OFF_POLICY_SECTION = f"{V1}.{PIPELINE_RL}", f"{V1}.{PPO_OFF_POLICY}"
MAX_STALENESS, STAGING = f"{PIPELINE_SECTION}.max_staleness", f"{PIPELINE_SECTION}.staging"
REQUEST_TIMEOUT, TRANSFER_TIMEOUT = f"{PIPELINE_SECTION}.request_timeout_s", f"{PIPELINE_SECTION}.transfer_timeout_s"
MAX_RELAUNCHES = f"{PIPELINE_SECTION}.max_relaunches"
RECOMPUTE = "recompute"
ADAPTIVE, FULL = "adaptive", "full"
DEVICE, HOST = "device", "host"
POLL_SECTION, POLL_INTERVAL_KEY = f"{V1}.sampler.sampler_kwargs", "poll_interval_s"
POLL_INTERVAL = f"{POLL_SECTION}.{POLL_INTERVAL_KEY}"
CUSTOM_SAMPLER = f"{V1}.sampler.custom_sampler"

HYBRID_ENGINE = "actor_rollout_ref.hybrid_engine"
GROUP_SIZE = f"{ROLLOUT}.n"
AGENT_LOOP, INTERRUPTION_LOOP = f"{ROLLOUT}.agent.default_agent_loop", "forced_interruption"
AGENT_LOOP_MANAGER = f"{ROLLOUT}.agent.agent_loop_manager_class"
CHECKPOINT_BACKEND, GLOO = f"{ROLLOUT}.checkpoint_engine.backend", "gloo"
BUCKET = f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes"
HEAD_BACKEND = f"{MODEL}.fused_kernel_options.impl_backend"
FP32, SHARED_PASS = "fp32", "fp32_shared_pass"
HF_OVERRIDES = f"{VLLM}.hf_overrides"
HEAD_DTYPE, GENERATOR_DTYPE = f"{HF_OVERRIDES}.head_dtype", "float32"
FUSED_KERNELS = f"{MODEL}.use_fused_kernels"

VALUES: dict[str, frozenset[str]] = {
    LOSS_MODE: frozenset(LOSSES),
    LOSS_AGG_MODE: frozenset({PROMPT_MEAN}),
    ADV_ESTIMATOR: frozenset({ESTIMATOR}),
    SAMPLER_CLASS_PATH: frozenset({SAMPLER_CLASS}),
    CHECKPOINT_BACKEND: frozenset({GLOO}),
    TRAINER_MODE: frozenset({PIPELINE_RL, PPO_OFF_POLICY}),
    AGENT_LOOP: frozenset({INTERRUPTION_LOOP}),
    HEAD_BACKEND: frozenset({FP32, SHARED_PASS}),
    HEAD_DTYPE: frozenset({GENERATOR_DTYPE, "float"}),
}
"""Config path of verl's -> our values of it."""

DEFAULT_EPS_MAX = 5.0
"""Absolute cap of the importance ratio; the paper finds 4, 5 and 8 alike."""
LOW_ESS_FRAC = 0.5
"""Alarm below this effective sample size, a fraction of the tokens. It is 1 / (1 + (standard deviation / mean)^2) of
the ratios: at a half they spread by as much as their mean. No key: only a warning and a metric depend on it, and the
fraction itself is logged for any other threshold."""
VERL_POLL_INTERVAL_S = 2.0
VERL_BUCKET_MB = 2048
"""Defaults of verl's."""
DEFAULT_SYNC_TIMEOUT_S = 600.0
"""Seconds without a sign of life of the receiver after which a weight update of verl's trainers fails."""
