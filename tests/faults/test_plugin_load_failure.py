# SPDX-License-Identifier: Apache-2.0
"""Our plugin cannot be loaded -> verl hides that and goes on -> a run with our names ends at once with the cause."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from scalerl_verl.names import VALUES
from scalerl_verl.names.asking import SECTIONS, asked_names, asks_on_command_line

BREAK_PLUGIN = '''
import sys

class _Broken:
    """Stands for a broken installation: the module behind the entry point cannot be imported."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname == "scalerl_verl.verl.install":
            raise RuntimeError("planted fault")

sys.meta_path.insert(0, _Broken())
'''
CAUSE = "scalerl_verl failed to load: RuntimeError: planted fault"


class BrokenInstall:
    """Runs main_ppo in an environment whose plugin raises on import."""

    def __init__(self, folder: Path) -> None:
        self.ray_folder = folder / "ray"
        self.ray_folder.mkdir()
        (folder / "sitecustomize.py").write_text(BREAK_PLUGIN)
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("SCALERL_", "VERL_"))}
        path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
        self.environment = {**clean, "PYTHONPATH": path, "RAY_TMPDIR": str(self.ray_folder)}
        self.cwd = folder

    def main_ppo(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """The finished process."""
        return subprocess.run(
            [sys.executable, "-m", "verl.trainer.main_ppo", *arguments],
            env={**self.environment, **environment},
            cwd=self.cwd,
            capture_output=True,
            text=True,
            timeout=300,
        )

    def check_refused(self, done: subprocess.CompletedProcess[str]) -> None:
        assert done.returncode != 0
        # Shown when the plugin failed, and once more as the reason of the exit.
        assert done.stderr.count(CAUSE) >= 2
        assert "scalerl doctor" in done.stderr
        # Ray makes its session folder first of all.
        assert list(self.ray_folder.iterdir()) == []
        assert "Started a local Ray instance" not in done.stderr + done.stdout


@pytest.fixture
def broken(tmp_path_factory: pytest.TempPathFactory) -> BrokenInstall:
    """The folder's name must hold none of our names: it stands on command lines."""
    return BrokenInstall(tmp_path_factory.mktemp("broken"))


def test_run_with_our_name_on_the_command_line_ends_at_once_with_the_cause(broken: BrokenInstall) -> None:
    """One of the names that `test_guard_recognises_every_name_wherever_it_stands` has."""
    broken.check_refused(broken.main_ppo("trainer.v1.trainer_mode=pipeline_rl"))
    assert not (broken.cwd / "outputs").exists(), "the end has to come before Hydra composes a config"


def test_run_with_our_name_in_a_config_file_only_is_refused_before_ray_starts(broken: BrokenInstall) -> None:
    text = "defaults:\n  - ppo_trainer\n  - _self_\ntrainer:\n  v1:\n    trainer_mode: ppo_off_policy\n"
    (broken.cwd / "mine.yaml").write_text(text)
    broken.check_refused(broken.main_ppo("--config-dir", str(broken.cwd), "--config-name", "mine"))
    assert (broken.cwd / "outputs").exists(), "Hydra makes this folder, or the test above proves nothing"


def test_run_without_our_names_still_works_and_shows_the_cause(broken: BrokenInstall) -> None:
    done = broken.main_ppo("--cfg", "job")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "adv_estimator: gae" in done.stdout
    assert CAUSE in done.stderr
    assert "Traceback" in done.stderr


NAMES = [(path, value) for path, values in VALUES.items() for value in sorted(values)]
KEYS = [(section, prefix) for section, prefixes in SECTIONS.items() if section for prefix in prefixes]


@pytest.mark.parametrize(("path", "value"), NAMES)
def test_guard_recognises_every_name_wherever_it_stands(path: str, value: str) -> None:
    parent, _, leaf = path.rpartition(".")
    for argument in (f"{path}={value}", f"++{path}='{value}'", f"+{parent}={{{leaf}:{value}}}"):
        assert asks_on_command_line([argument], {}), argument
    config = OmegaConf.create({})
    OmegaConf.update(config, path, value, force_add=True)
    assert asked_names(config) == {path: value}


@pytest.mark.parametrize(("section", "key"), KEYS)
def test_guard_recognises_every_section_of_ours(section: str, key: str) -> None:
    for argument in (f"+{section}.{key}=1", f"++{section}.{key}.x=1", f"+{section}={{{key}:1}}"):
        assert asks_on_command_line([argument], {}), argument
    config = OmegaConf.create({})
    OmegaConf.update(config, f"{section}.{key}", 1, force_add=True)
    assert asked_names(config) == {f"{section}.{key}": "set"}


@pytest.mark.parametrize(
    ("arguments", "environment", "expected"),
    [
        (["+scalerl=recipe"], {}, True),
        (["'+scalerl=[recipe,pipeline]'"], {}, True),
        (["scalerl@_global_=recipe"], {}, True),
        (["++algorithm.scalerl.adv_norm=batch"], {}, True),
        (["trainer.logger=console", "actor_rollout_ref.actor.loss_agg_mode=prompt-mean"], {}, True),
        (["actor_rollout_ref.actor.policy_loss.loss_mode=scalerl-cispo"], {}, True),
        (["""+actor_rollout_ref.rollout.engine_kwargs.vllm.hf_overrides='{"head_dtype": "float32"}'"""], {}, True),
        (["algorithm={adv_estimator:scalerl,gamma:1.0}"], {}, True),
        (["actor_rollout_ref.model.fused_kernel_options.impl_backend=triton"], {}, False),
        (["actor_rollout_ref.rollout.dtype=float32"], {}, False),
        (["actor_rollout_ref.actor.policy_loss.loss_mode=cispo"], {}, False),
        (["algorithm.adv_estimator=grpo"], {}, False),
        (["~algorithm.scalerl"], {}, False),
        (["trainer.default_local_dir=/data/scalerl/prompt-mean"], {}, False),
        (["data.train_files=/data/algorithm.adv_estimator=scalerl.parquet"], {}, False),
        ([], {}, False),
        ([], {"SCALERL_VERL_ACTIVE": "1"}, True),
        ([], {"SCALERL_VERL_ACTIVE": "0"}, False),
        ([], {"VERL_PLATFORM": "cpu"}, True),
        ([], {"VERL_PLATFORM": "CPU"}, True),
        ([], {"VERL_PLATFORM": "nvidia"}, False),
    ],
)
def test_command_line_or_environment_asks_for_us(
    arguments: list[str], environment: dict[str, str], expected: bool
) -> None:
    assert asks_on_command_line(arguments, environment) is expected
