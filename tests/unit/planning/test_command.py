# SPDX-License-Identifier: Apache-2.0
"""``scalerl plan`` from the command line to its exit code, on verl's real config."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from scalerl_verl.cli import main
from scalerl_verl.shapes.public import read_public

RUN = (
    "+scalerl=[recipe,pipeline]",
    "actor_rollout_ref.model.path=Qwen/Qwen3-8B-Base",
    "data.max_prompt_length=2048",
    "data.max_response_length=14336",
    "actor_rollout_ref.actor.use_dynamic_bsz=True",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.max_model_len=16384",
    "actor_rollout_ref.rollout.gpu_memory_utilization=0.7",
    "trainer.nnodes=2",
    "actor_rollout_ref.rollout.nnodes=8",
    "actor_rollout_ref.rollout.n_gpus_per_node=8",
)
SYNC = ("+scalerl=recipe", *RUN[1:8])
"""The same on GPUs that train and generate by turns."""


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = main(["plan", *arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def problems(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a refused plan says."""
    code, found = plan(capsys, *arguments)
    assert code == 3 and not found["fits"]
    return "\n".join(found["problems"])


def test_run_that_fits(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = plan(capsys, *RUN, "--gpus", "80")
    assert code == 0 and found["fits"] and found["problems"] == []
    assert found["gpus"]["train"] == 16 and found["gpus"]["generate"] == 64
    assert found["batch"]["responses_per_update"] == 768
    # 8.19B parameters x 4 bytes over 16 shards, and twice that for AdamW.
    assert found["trainer_gib"]["weights"] == 1.91 and found["trainer_gib"]["optimizer"] == 3.81
    assert found["generator_gib"]["weights"] == 15.26
    best = found["balance"]["best_split"]
    assert best["trainers"] + best["generators"] <= 80 and 768 % best["trainers"] == 0
    this = found["balance"]["this_split"]
    assert max(best["training_s"], best["generation_s"]) <= max(this["training_s"], this["generation_s"])


def test_text_names_the_parts_and_the_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *RUN]) == 0
    text = capsys.readouterr().out
    for part in ("8.19B parameters", "16 train + 64 generate", "KV cache", "optimizer", "best split", "\nfits\n"):
        assert part in text


def test_machine_without_verl_is_told_what_plan_needs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in ("verl", "hydra") else found(name))
    assert main(["plan", *RUN]) == 1
    said = capsys.readouterr()
    assert said.out == "" and "verl, hydra cannot be imported here" in said.err and "scalerl doctor" in said.err


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (["--gpus", "64"], "the run takes 80 GPUs (16 train, 64 generate), the cluster has 64"),
        (["--gpu-memory-gib", "24"], "a weight update needs"),
        (["--trainer-gpus", "2", "--gpu-memory-gib", "80"], "train on 3 GPUs or more"),
        (["--trainer-gpus", "10"], "768 responses do not divide over 10 data-parallel ranks"),
        (["actor_rollout_ref.rollout.gpu_memory_utilization=0.25"], "cannot hold a single sequence of 16384 tokens"),
        (["actor_rollout_ref.rollout.gpu_memory_utilization=0.9"], "trainer.v1.pipeline_rl.staging=host"),
        (["actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192"], "do not fit into one micro-batch"),
        (
            ["actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=3"],
            "does not divide 32 attention heads",
        ),
        (["actor_rollout_ref.actor.fsdp_config.fsdp_size=6"], "fsdp_size=6 does not divide 16 GPUs"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_does_not_fit_is_refused_with_what_to_change(
    capsys: pytest.CaptureFixture[str], extra: list[str], said: str
) -> None:
    assert said in problems(capsys, *RUN, *extra)


def test_sequence_parallelism_makes_room_for_long_sequences(capsys: pytest.CaptureFixture[str]) -> None:
    halved = [
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192",
        "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=2",
    ]
    code, found = plan(capsys, *RUN, *halved)
    assert code == 0 and found["batch"]["tokens_per_micro_batch_and_gpu"] == 8192


def test_lengths_have_to_fit_the_engine_and_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    long = [text for text in RUN if "max_model_len" not in text]
    loop = "actor_rollout_ref.rollout.agent.default_agent_loop=single_turn_agent"
    assert main(["plan", *long, "actor_rollout_ref.rollout.max_model_len=16000", loop]) == 1, "the run is refused, too"
    said = capsys.readouterr().err
    assert "actor_rollout_ref.rollout.max_model_len=16000 is less than" in said and "16384" in said
    said = problems(capsys, *long, "actor_rollout_ref.rollout.max_model_len=40000")
    assert "exceeds the 32768 positions of the model" in said


def test_groups_that_dynamic_sampling_rejects_cost_generation_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """Two in five generated groups are rejected: five are generated for three that train."""
    filtered = [*RUN, "algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=acc"]
    (_, all_train), (_, rejecting) = (plan(capsys, *filtered, *more) for more in ([], ["--rejected-frac", "0.4"]))
    splits = [found["balance"]["this_split"] for found in (all_train, rejecting)]
    assert splits[1]["generation_s"] == pytest.approx(splits[0]["generation_s"] * 5 / 3, rel=1e-3)
    assert splits[1]["training_s"] == splits[0]["training_s"]


def test_gpus_that_train_and_generate_by_turns_hold_both(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = plan(capsys, *SYNC, "trainer.nnodes=2")
    assert code == 0 and found["gpus"]["shared"] and found["balance"]["best_split"] is None
    assert found["generator_gib"]["trainer beside it"] == round(8190735360 * 12 / 16 / 2**30, 2)
    greedy = "actor_rollout_ref.rollout.gpu_memory_utilization=0.93"
    assert "5.7 GiB of the trainer" in problems(capsys, *SYNC, "trainer.nnodes=2", greedy)
    offload = [f"actor_rollout_ref.actor.fsdp_config.{key}_offload=True" for key in ("param", "optimizer")]
    code, found = plan(capsys, *SYNC, "trainer.nnodes=2", greedy, *offload)
    assert code == 0


def test_a_preset_is_a_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = plan(capsys, "recipe=ppo_off_policy", *SYNC[1:])
    assert code == 0 and found["batch"]["updates_per_batch"] == 8


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["recipe=nothing_like_it"], "recipe=nothing_like_it is no folder"),
        (["recipe=grpo", "recipe=dapo"], "one recipe at a time"),
        ([*RUN, "actor_rollout_ref.nope=1"], "cannot be composed"),
        ([*RUN, "actor_rollout_ref.rollout.top_p=0.7"], "actor_rollout_ref.rollout.top_p=0.7"),
        ([*RUN, "++algorithm.scalerl.interruption.thinking_budget=[12000,14300]"], "do not fit into data.max_response"),
        ([*RUN, "--gpus", "0"], "--gpus=0: give a number above 0"),
        ([*RUN, "--gpu-memory-gib", "inf"], "--gpu-memory-gib=inf: give a number above 0"),
        ([*RUN, "--reserve-gib", "nan"], "--reserve-gib=nan: give 0 or more"),
        ([*RUN, "--mean-response", "14337"], "--mean-response=14337.0: the run's greatest response has 14336 tokens"),
        ([*RUN, "--mean-prompt", "2049"], "--mean-prompt=2049.0: the run's greatest prompt has 2048 tokens"),
        ([*RUN, "--decode-efficiency", "1.5"], "decode_efficiency=1.5: give a number above 0 and at most 1"),
        (
            [*RUN, "algorithm.filter_groups.enable=True", "--rejected-frac", "1"],
            "rejected_frac=1.0: give a number from",
        ),
        ([*RUN, "--rejected-frac", "0.4"], "--rejected-frac=0.4: algorithm.filter_groups.enable is off"),
        ([*RUN, "--device", "abacus"], "--device abacus: use one of a100"),
        ([*RUN, "--reserve-gib", "-1"], "--reserve-gib=-1.0"),
        ([*SYNC, "--generator-gpus", "4"], "generates on the GPUs that train"),
        ([*RUN, "actor_rollout_ref.model.lora_rank=8"], "lora_rank"),
        ([*SYNC, "critic.enable=True"], "critic.enable=True"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_arguments_end_with_code_1(capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    assert main(["plan", *arguments]) == 1
    captured = capsys.readouterr()
    assert said in captured.err and captured.out == ""


def test_overrides_may_stand_behind_options(capsys: pytest.CaptureFixture[str]) -> None:
    before = plan(capsys, *RUN, "--gpus", "80")
    assert plan(capsys, RUN[0], "--gpus", "80", *RUN[1:]) == before
    with pytest.raises(SystemExit):
        main(["plan", *RUN, "--gpuss", "80"])
    with pytest.raises(SystemExit):
        main(["doctor", "recipe=grpo"])
    assert "unrecognized arguments: recipe=grpo" in capsys.readouterr().err


def test_recipe_of_a_folder_brings_its_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = tmp_path / "my-recipe"
    folder.mkdir()
    (folder / "config.yaml").write_text(
        "# @package _global_\ndefaults:\n  - /scalerl: [setup]\n  - _self_\n"
        "actor_rollout_ref:\n  model:\n    path: made/here\n  actor:\n    use_dynamic_bsz: true\n  rollout:\n"
        "    name: vllm\n    tensor_model_parallel_size: 1\ntrainer:\n  n_gpus_per_node: 2\n"
    )
    assert main(["plan", f"recipe={folder}"]) == 1
    assert "the shape of made/here is not known here" in capsys.readouterr().err
    content = {**read_public()["Qwen/Qwen3-30B-A3B-Base"], "num_hidden_layers": 2}
    (folder / "model.json").write_text(json.dumps(content))
    code, found = plan(capsys, f"recipe={folder}")
    assert code == 0 and found["gpus"]["train"] == 2
    assert found["model"]["parameters"] < 2e9


def test_smaller_buckets_are_advised_where_they_are_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    bucket = "or lower actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes"
    share = "actor_rollout_ref.rollout.gpu_memory_utilization"
    assert bucket in problems(capsys, *RUN, f"{share}=0.77")
    assert bucket not in problems(capsys, *RUN, f"{share}=0.9")
