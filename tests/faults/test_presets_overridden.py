# SPDX-License-Identifier: Apache-2.0
"""A run that overrides its preset, or a file that loses to one, trains as something else without a word."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import pytest
import verl  # noqa: F401 - loads the plugin, which puts our presets on Hydra's search path
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import open_dict

from scalerl_verl.cli import main as scalerl
from scalerl_verl.config import preset_layers
from scalerl_verl.config.preset_report import LEFT_TO_YOU, describe, find_differences
from scalerl_verl.planning.resolve import PRESETS, compose_and_compare
from tests.paths import RECIPES, REPO

ALL_PRESETS = sorted(path.stem for path in PRESETS.glob("*.yaml"))
ALL_RECIPES = [f"+{path.parent.name}=config" for path in sorted(RECIPES.glob("*/config.yaml"))] + ["+tiny-gpu=two"]
RECIPES_ON_PATH = f"hydra.searchpath=['file://{RECIPES}']"
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
LR, N = f"{ACTOR}.optim.lr", f"{ROLLOUT}.n"
OF_A_SMALL_MODEL = {"+smollm2-reasoning=config": {"data.train_batch_size", LR, f"{ACTOR}.optim.lr_warmup_steps"}}
OVERRIDDEN = "this run overrides values of its presets, which is allowed:"
LOST = "presets override values of your files, which is allowed:"
FILE = f"""
defaults: [DEFAULTS]
hydra: {{searchpath: ["pkg://verl.trainer.config", "file://{RECIPES}"]}}
actor_rollout_ref:
  actor: {{optim: {{lr: 1e-6}}}}
  rollout: {{n: 8, temperature: 1.0}}
data: {{train_batch_size: 48}}
"""


def said(*overrides: str) -> list[str]:
    return describe(compose_and_compare(overrides)[1])


def said_of_file(defaults: str, folder: Path, *overrides: str, text: str = FILE) -> list[str]:
    (folder / "mine.yaml").write_text(text.replace("DEFAULTS", defaults))
    with initialize_config_dir(str(folder), version_base=None):
        config = compose("mine", overrides=list(overrides), return_hydra_config=True)
        with open_dict(config):
            hydra = config.pop("hydra")
        return describe(find_differences(config, hydra))


def test_preset_overrides_nothing_that_a_preset_set() -> None:
    """All of them at once: each that comes later is part of the combination."""
    assert said(f"+scalerl=[{','.join(ALL_PRESETS)}]") == []


@pytest.mark.parametrize("recipe", ALL_RECIPES)
def test_recipe_is_what_its_presets_say(recipe: str) -> None:
    """But for batch and learning rate of a model that is much smaller than the paper's."""
    lines = said(RECIPES_ON_PATH, recipe)
    assert {line.split(":")[0].strip() for line in lines[1:]} == OF_A_SMALL_MODEL.get(recipe, set())
    assert lines[:1] in ([], [OVERRIDDEN])


def test_run_of_verl_s_own_files_without_a_preset_is_not_composed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: every run pays for it at start, also one that names nothing of ours."""
    folder = str(files("verl.trainer.config"))
    with initialize_config_dir(folder, version_base=None):
        for overrides in ([f"{LR}=1e-6"], ["+scalerl=recipe"]):
            hydra = compose("ppo_trainer", overrides=overrides, return_hydra_config=True).hydra
            asked: list[str] = []
            loader = GlobalHydra.instance().config_loader()
            original = loader.compute_defaults_list
            with monkeypatch.context() as patch:
                patch.setattr(loader, "compute_defaults_list", lambda *a: asked.append(a[0]) or original(*a))
                layers = preset_layers.read_layers(hydra)
            assert bool(layers) == bool(asked) == (overrides == ["+scalerl=recipe"])


def test_preset_after_a_recipe_that_changes_no_value_of_its_file() -> None:
    assert said(RECIPES_ON_PATH, "+tiny-gpu=two", "+scalerl=tiny") == []


def test_every_override_of_a_preset_is_said_with_both_values() -> None:
    assert said("+scalerl=recipe", f"{LR}=1e-6", f"{N}=8", f"++{ROLLOUT}.temperature=0.7", "~data.sampler") == [
        OVERRIDDEN,
        f"  {LR}: 5e-07 in the preset recipe, 1e-06 in this run (command line)",
        f"  {N}: 16 in the preset recipe, 8 in this run (command line)",
        f"  {ROLLOUT}.temperature: 1.0 in the preset recipe, 0.7 in this run (command line)",
        "  data.sampler: set in the preset recipe, deleted in this run (command line)",
    ]


def test_override_is_seen_however_it_is_written() -> None:
    lines = {
        "algorithm={scalerl:{adv_norm:prompt}}": "algorithm.scalerl.adv_norm: batch in the preset recipe, prompt in",
        "data.sampler=null": "data.sampler: set in the preset recipe, null in this run",
        f"{ACTOR}.ppo_mini_batch_size=24": "${data.train_batch_size} = 48 in the preset recipe, 24 in this run",
        "~algorithm.scalerl.zero_variance": "zero_variance: drop in the preset recipe, deleted in this run",
        f"{ACTOR}.optim.lr_warmup_steps='${{data.train_batch_size}}'": "${data.train_batch_size} = 48 in this run",
        f"{ROLLOUT}.top_p='${{nowhere}}'": "top_p: 1.0 in the preset recipe, ${nowhere} in this run",
        f"++{ACTOR}.policy_loss.eps_max=4": "eps_max: 5.0 in the preset recipe, 4 in this run",
        "actor_rollout_ref.model.fused_kernel_options.impl_backend=torch": "fp32 in the preset recipe, torch in",
    }
    heading, *found = said("+scalerl=recipe", *lines)
    assert heading == OVERRIDDEN and len(found) == len(lines)
    assert [line for line in lines.values() if not any(line in shown for shown in found)] == []


def test_same_value_or_a_matter_of_the_machine_is_no_override() -> None:
    overrides = [
        f"{LR}=0.0000005",
        f"{ACTOR}.optim.weight_decay='1e-2'",
        f"{ACTOR}.use_kl_loss='False'",
        f"{ACTOR}.ppo_mini_batch_size=48",
        f"{ROLLOUT}.top_k=-1.0",
        "actor_rollout_ref.model.use_fused_kernels=False",
        "actor_rollout_ref.model.fused_kernel_options.impl_backend=fp32_shared_pass",
        f"""++{ROLLOUT}.engine_kwargs.vllm.hf_overrides='{{"head_dtype": "float32"}}'""",
        "trainer.nnodes=2",
        "++algorithm.scalerl.interruption.thinking_budget=[100,200]",
    ]
    assert said("+scalerl=recipe", *overrides) == []


def test_preset_of_a_list_is_named_by_itself() -> None:
    (_, cap, head) = said(
        "+scalerl=[cispo,fp32_head]", f"{ACTOR}.policy_loss.eps_max=8", f"~{ROLLOUT}.engine_kwargs.vllm"
    )
    assert "in the preset cispo" in cap and "in the preset fp32_head" in head


@pytest.mark.filterwarnings("ignore:.*Defaults list is missing `_self_`")
@pytest.mark.parametrize("defaults", ["ppo_trainer, scalerl: recipe, _self_", "ppo_trainer, scalerl: recipe"])
def test_file_with_self_last_overrides_the_preset(defaults: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    assert said_of_file(defaults, tmp_path) == [
        OVERRIDDEN,
        f"  {LR}: 5e-07 in the preset recipe, 1e-06 in this run ({file})",
        f"  {N}: 16 in the preset recipe, 8 in this run ({file})",
    ]


def test_file_with_self_first_loses_to_the_preset_and_learns_how_not_to(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    assert said_of_file("ppo_trainer, _self_, scalerl: recipe", tmp_path) == [
        LOST,
        f"  {LR}: 1e-06 in {file}, 5e-07 in this run (the preset recipe)",
        f"  {N}: 8 in {file}, 16 in this run (the preset recipe)",
        f"  to keep them, put _self_ last in the defaults list of {file}; or give the values on the command line",
    ]


def test_page_shows_what_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (REPO / "docs" / "adopt.md").read_text()
    section = page[page.index("## Which value holds") : page.index("## Leave one piece out")]
    (text,) = re.findall(r"```yaml\n(.*?)```", section, re.DOTALL)
    shown = re.findall(r"```text\n(.*?)```", section, re.DOTALL)
    first = text.replace("  - scalerl: recipe\n  - _self_\n", "  - _self_\n  - scalerl: recipe\n")
    monkeypatch.chdir(tmp_path)
    lines = [said_of_file("", tmp_path, f"{N}=8", text=text), said_of_file("", tmp_path, text=first)]
    assert ["".join(f"[scalerl_verl] {line}\n" for line in block) for block in lines] == shown


def test_file_loses_to_a_preset_on_the_command_line(tmp_path: Path) -> None:
    found = said_of_file("ppo_trainer, _self_", tmp_path, "+scalerl=recipe")
    assert found[0] == LOST and len(found) == 4
    assert f"name the preset in the defaults list of {tmp_path / 'mine.yaml'}, before _self_" in found[-1]


@pytest.mark.parametrize(
    ("defaults", "overrides"),
    [
        ("ppo_trainer, scalerl: [recipe], _self_", []),
        ("ppo_trainer, _self_", ["+scalerl=recipe", f"{LR}=1e-6", f"{N}=8"]),
        ("ppo_trainer, _self_, scalerl: recipe", [f"{LR}=1e-6", f"{N}=8"]),
    ],
)
def test_offered_fixes_keep_the_values_of_the_file(defaults: str, overrides: list[str], tmp_path: Path) -> None:
    heading, lr, n = said_of_file(defaults, tmp_path, *overrides)
    assert heading == OVERRIDDEN and "1e-06 in this run" in lr and " 8 in this run" in n


def test_preset_may_be_chosen_or_taken_out_on_the_command_line(tmp_path: Path) -> None:
    assert "in the preset dapo" in said_of_file("ppo_trainer, scalerl: recipe, _self_", tmp_path, "scalerl=dapo")[1]
    assert said_of_file("ppo_trainer, scalerl: recipe, _self_", tmp_path, "~scalerl") == []


def test_preset_before_verl_s_own_files_is_lost_and_said_to_be(tmp_path: Path) -> None:
    lines = said_of_file("scalerl: recipe, ppo_trainer, _self_", tmp_path)
    loss = f"  {ACTOR}.policy_loss.loss_mode: scalerl_cispo in the preset recipe, vanilla in this run"
    assert f"{loss} (verl's actor/actor.yaml)" in lines
    assert lines[-1].endswith("come after the preset recipe in a defaults list: name the preset after them")


def test_file_among_others_that_a_later_preset_overrides(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "ours.yaml").write_text("# @package _global_\nactor_rollout_ref: {rollout: {n: 4}}\n")
    where = f"hydra.searchpath=['file://{tmp_path}']"
    first, *_, fix = said(where, "+site=ours", "+scalerl=recipe")
    assert first == LOST and f"name the preset recipe before {tmp_path / 'site' / 'ours.yaml'}" in fix
    assert said(where, "+scalerl=recipe", "+site=ours")[0] == OVERRIDDEN


def test_values_of_a_copy_of_verl_s_file_were_chosen_by_nobody(tmp_path: Path) -> None:
    copied = files("verl.trainer.config").joinpath("_generated_ppo_trainer.yaml").read_text()
    text = copied.replace("lr: 1.0e-06", "lr: 2.0e-06", 1)
    assert text != copied
    heading, lr, _ = said_of_file("", tmp_path, "+scalerl=recipe", text=text)
    assert heading == LOST and "2e-06" in lr


def test_plan_notes_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert scalerl(["plan", f"recipe={RECIPES}/scalerl-8b-math", f"{N}=8", "--gpus", "80", "--json"]) in (0, 3)
    (note,) = (note for note in json.loads(capsys.readouterr().out)["notes"] if "preset" in note)
    assert note == f"{N}: 16 in the preset recipe, 8 in this run (command line)"


def test_plan_takes_the_file_that_the_launch_names(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(FILE.replace("DEFAULTS", "ppo_trainer, {scalerl: recipe}, _self_"))
    launch = ("--config-path", str(tmp_path), "--config-name", "mine")
    model = ("actor_rollout_ref.model.path=Qwen/Qwen3-8B-Base", "data.max_response_length=14336")
    yours = (*model, f"{ACTOR}.use_dynamic_bsz=True", f"{ROLLOUT}.name=vllm", f"{N}=8")
    assert scalerl(["plan", *launch, *yours, "--json"]) in (0, 3)
    lr, n = (note for note in json.loads(capsys.readouterr().out)["notes"] if "preset" in note)
    assert lr == f"{LR}: 5e-07 in the preset recipe, 1e-06 in this run ({tmp_path}/mine.yaml)"
    assert n == f"{N}: 16 in the preset recipe, 8 in this run (command line)"


@pytest.mark.parametrize("name", ["mine", "mine.yaml"])
def test_plan_takes_a_folder_beside_verl_s(name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """With the launch's first file in it, or with files that verl's own is overridden by."""
    model = ("actor_rollout_ref.model.path=Qwen/Qwen3-8B-Base", "data.max_response_length=14336")
    yours = (*model, f"{ACTOR}.use_dynamic_bsz=True", f"{ROLLOUT}.name=vllm")
    text = FILE.replace("DEFAULTS", "ppo_trainer, {scalerl: recipe}, _self_")
    (tmp_path / "mine.yaml").write_text("\n".join(line for line in text.splitlines() if "search" not in line) + "\n")
    assert scalerl(["plan", "--config-dir", str(tmp_path), "--config-name", name, *yours, "--json"]) in (0, 3)
    lr, *_ = (note for note in json.loads(capsys.readouterr().out)["notes"] if "preset" in note)
    assert lr == f"{LR}: 5e-07 in the preset recipe, 1e-06 in this run ({tmp_path}/mine.yaml)"
    (tmp_path / "sizes").mkdir()
    (tmp_path / "sizes" / "small.yaml").write_text("# @package _global_\nactor_rollout_ref:\n  rollout:\n    n: 8\n")
    group = ("--config-dir", str(tmp_path), "+scalerl=recipe", "+sizes=small")
    assert scalerl(["plan", *group, *yours, "--json"]) in (0, 3)
    assert any(
        f"{N}: 16 in the preset recipe, 8 in this run" in note for note in json.loads(capsys.readouterr().out)["notes"]
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--config-dir", "/no/such"), "--config-dir /no/such is no folder: give the folder of your YAML"),
        (("--config-path", "."), f"--config-path .: give the absolute path, --config-path {Path.cwd()}"),
        (("--config-path", "/no/such"), "--config-path /no/such is no folder: give the folder of your YAML"),
        (("--config-name", "mine", "recipe=grpo"), "recipe=grpo beside --config-name: give one of them"),
    ],
    ids=str,
)
def test_plan_of_no_file_says_what_to_give(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str
) -> None:
    assert scalerl(["plan", *arguments]) == 1
    assert said in capsys.readouterr().err


@pytest.fixture
def fresh_hydra() -> Iterator[None]:
    GlobalHydra.instance().clear()
    yield
    GlobalHydra.instance().clear()
    HydraConfig.instance().cfg = None


@pytest.mark.usefixtures("fresh_hydra")
@pytest.mark.parametrize("preset", ["recipe", "grpo"])
def test_driver_says_it_at_start(
    preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """verl's own entry point, up to the place where it starts Ray."""
    from verl.trainer import main_ppo

    from scalerl_verl.verl import startup

    class StubRefusalError(Exception):
        """Ends the run where its checks begin."""

    def refuse(config: object) -> None:
        raise StubRefusalError

    monkeypatch.setattr(startup, "asked_names", refuse)
    (tmp_path / "mine.yaml").write_text(FILE.replace("DEFAULTS", "ppo_trainer, _self_"))
    line = [f"--config-path={tmp_path}", "--config-name=mine.yaml", f"+scalerl={preset}", f"{LR}=2e-6"]
    monkeypatch.setattr(sys, "argv", ["main_ppo", *line, f"hydra.run.dir={tmp_path}", "hydra/job_logging=none"])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(StubRefusalError):
        main_ppo.main()
    lines = [text for text in capsys.readouterr().err.splitlines() if text.startswith("[scalerl_verl]")]
    assert f"[scalerl_verl]   {LR}: 5e-07 in the preset {preset}, 2e-06 in this run (command line)" in lines
    assert any(f"{N}: 8 in {tmp_path / 'mine.yaml'}, 16 in this run (the preset {preset})" in text for text in lines)


def test_run_without_presets_reads_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preset_layers, "_read", lambda file, package: pytest.fail("read"))
    assert said("algorithm.adv_estimator=grpo") == []


def test_what_is_left_to_the_user_is_set_by_presets() -> None:
    """An entry that no preset sets would hide nothing, or a misspelt key."""
    keys = {key for path in PRESETS.glob("*.yaml") for key in preset_layers._read(path, "")}
    assert [left for left in LEFT_TO_YOU if not any(f"{key}.".startswith(f"{left}.") for key in keys)] == []


def test_first_level_of_verl_s_folder_is_known() -> None:
    folder = Path(str(files("verl.trainer.config")))
    others = ("sft_trainer_engine", "evaluation")  # of other entry points
    known = {*preset_layers.SHIPPED, *others}
    assert {path.stem for path in folder.glob("*.yaml") if not path.stem.startswith("_generated")} == known
