# SPDX-License-Identifier: Apache-2.0
"""``scalerl plan``: its arguments, which import nothing heavy, and what it does."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scalerl_verl.errors import ScaleRLConfigError
from scalerl_verl.names import FILTER_GROUPS, MODEL, ROLLOUT, select
from scalerl_verl.planning.balance import DEVICES, Assumptions
from scalerl_verl.terminal import say

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from scalerl_verl.planning.layout import RunLayout
    from scalerl_verl.planning.plan import Plan

_POSITIVE = (
    "gpus",
    "trainer_gpus",
    "generator_gpus",
    "gpu_memory_gib",
    "node_memory_gib",
    "mean_prompt",
    "mean_response",
)
FITS, WRONG, REFUSED = 0, 1, 3
EPILOG = f"""exit codes: 0 the run fits; 1 the recipe or an argument is wrong; 2 usage; 3 it does not fit, with numbers
and what to change.

examples:
  scalerl plan recipe=recipes/scalerl-8b-math --gpus 80 --gpu-memory-gib 80
  scalerl plan '+scalerl=[recipe,pipeline]' {MODEL}.path=Qwen/Qwen3-8B-Base --gpus 8
  scalerl plan -cp /home/me/configs -cn mine --gpus 16 --json"""


def add_plan(commands: Any) -> None:
    """Add `plan` to the sub-parsers of `scalerl`."""
    parser = commands.add_parser(
        "plan",
        help="say whether a run fits a cluster, GPU by GPU, and which split is best; starts nothing",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="recipe=NAME | OVERRIDE",
        help="a recipe's folder or a preset, and verl's overrides",
    )
    parser.add_argument(
        "-cp", "--config-path", metavar="DIR", help="folder of your own YAML, absolute, as for main_ppo"
    )
    parser.add_argument("-cd", "--config-dir", metavar="DIR", help="a folder of yours beside verl's, as for main_ppo")
    parser.add_argument("-cn", "--config-name", metavar="NAME", help="name of that YAML (default: verl's ppo_trainer)")
    parser.add_argument("--gpus", type=int, help="GPUs of the cluster (default: as many as the run takes)")
    parser.add_argument("--gpu-memory-gib", type=float, default=80.0, help="memory of one GPU (default 80)")
    parser.add_argument("--node-memory-gib", type=float, help="host memory of a node (default: any amount)")
    parser.add_argument(
        "--device", default="h100", help="a100, h100, h200, b200 or gb200 (default h100); changes the times only"
    )
    parser.add_argument("--trainer-gpus", type=int, help="GPUs that train, instead of the recipe's")
    parser.add_argument("--generator-gpus", type=int, help="GPUs that generate, instead of the recipe's")
    parser.add_argument("--model-config", help="config.json of the model, where it is not on this machine")
    parser.add_argument(
        "--reserve-gib", type=float, help="memory kept for CUDA, NCCL and fragmentation (default 5%% of a GPU)"
    )
    parser.add_argument("--mean-prompt", type=float, help="mean tokens of a prompt (default: a quarter of the longest)")
    parser.add_argument("--mean-response", type=float, help="mean tokens of a response (default: half of the longest)")
    assumed = {
        "training_efficiency": "share of a GPU's peak that training reaches (default %(default)g)",
        "decode_efficiency": "share of its ideal speed that decoding reaches (default %(default)g)",
        "network_gbs": "GB/s of one GPU's network card, for weight updates (default %(default)g)",
        "rejected_frac": "share of the generated groups that dynamic sampling rejects (default %(default)g)",
    }
    for name, text in assumed.items():
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=float, default=getattr(Assumptions, name), help=text)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run_plan)


def run_plan(arguments: argparse.Namespace) -> int:
    """Print the plan; returns the exit code."""
    lacking = [name for name in ("verl", "hydra", "omegaconf") if importlib.util.find_spec(name) is None]
    if lacking:
        print(
            f"error: plan composes the run with verl's own config, and {', '.join(lacking)} cannot be imported here: "
            "run it in an environment with verl, which needs no GPU (scalerl doctor says which version to install)",
            file=sys.stderr,
        )
        return WRONG
    from scalerl_verl.planning import report

    try:
        plan = plan_from_arguments(arguments)
    except ScaleRLConfigError as error:
        print("\n".join(f"error: {problem}" for problem in error.problems), file=sys.stderr)
        return WRONG
    say(json.dumps(report.to_dict(plan), indent=2) if arguments.json else report.to_text(plan))
    return REFUSED if plan.problems else FITS


def plan_from_arguments(arguments: argparse.Namespace) -> Plan:
    """Compose, read and estimate.

    Raises:
        ScaleRLConfigError: a wrong argument, recipe or config.
    """
    from scalerl_verl.config.preset_report import find_fixes
    from scalerl_verl.planning.layout import GIB, read_layout
    from scalerl_verl.planning.plan import make_plan, with_gpus
    from scalerl_verl.planning.resolve import Primary, compose_and_compare

    _check_arguments(arguments, sorted(DEVICES))
    overrides, model_file = _resolve(arguments)
    primary = Primary(arguments.config_path, arguments.config_name or Primary.name, arguments.config_dir)
    config, differences = compose_and_compare(overrides, primary)
    problems = _startup_problems(config)
    if problems:
        raise ScaleRLConfigError(problems)
    shape = _find_shape(config, arguments.model_config, model_file)
    reserve = arguments.gpu_memory_gib * 0.05 if arguments.reserve_gib is None else arguments.reserve_gib
    if arguments.rejected_frac and not select(config, FILTER_GROUPS, False):
        raise ScaleRLConfigError(
            [f"--rejected-frac={arguments.rejected_frac}: {FILTER_GROUPS} is off and rejects no group; leave it out"]
        )
    layout = read_layout(config, shape, arguments.gpu_memory_gib, reserve)
    trainers = arguments.trainer_gpus or layout.trainer_gpus
    generators = arguments.generator_gpus or (layout.generator_gpus if layout.separate else trainers)
    if arguments.generator_gpus and not layout.separate and generators != trainers:
        raise ScaleRLConfigError(
            [f"--generator-gpus: trainer_mode={layout.mode} generates on the GPUs that train; leave it out"]
        )
    layout = with_gpus(layout, trainers, generators)
    wanted = trainers + (generators if layout.separate else 0)
    _check_means(arguments, layout)
    mean = Assumptions(
        mean_prompt=arguments.mean_prompt or layout.max_prompt / 4,
        mean_response=arguments.mean_response or layout.max_response / 2,
        training_efficiency=arguments.training_efficiency,
        decode_efficiency=arguments.decode_efficiency,
        network_gbs=arguments.network_gbs,
        rejected_frac=arguments.rejected_frac,
    )
    node_bytes = None if arguments.node_memory_gib is None else arguments.node_memory_gib * GIB
    plan = make_plan(shape, layout, arguments.gpus or wanted, arguments.device, mean, node_bytes)
    presets = [*(difference.describe() for difference in differences), *find_fixes(differences)]
    return replace(plan, preset_notes=tuple(presets))


def _check_arguments(arguments: argparse.Namespace, devices: list[str]) -> None:
    problems = [
        f"--{name.replace('_', '-')}={value}: give a number above 0"
        for name in _POSITIVE
        if (value := getattr(arguments, name)) is not None and not 0 < value < math.inf
    ]
    if arguments.reserve_gib is not None and not 0 <= arguments.reserve_gib < math.inf:
        problems.append(f"--reserve-gib={arguments.reserve_gib}: give 0 or more")
    if arguments.device not in devices:
        problems.append(f"--device {arguments.device}: use one of {', '.join(devices)}")
    if problems:
        raise ScaleRLConfigError(problems)


def _check_means(arguments: argparse.Namespace, layout: RunLayout) -> None:
    """No mean is above the greatest length."""
    lengths = {"prompt": layout.max_prompt, "response": layout.max_response}
    problems = [
        f"--mean-{name}={mean}: the run's greatest {name} has {longest} tokens; give at most that"
        for name, longest in lengths.items()
        if (mean := getattr(arguments, f"mean_{name}")) is not None and mean > longest
    ]
    if problems:
        raise ScaleRLConfigError(problems)


def _resolve(arguments: argparse.Namespace) -> tuple[list[str], Path | None]:
    """Hydra's overrides and the stored shape of a recipe's own model."""
    from scalerl_verl.planning.resolve import find_recipe

    names = [text.removeprefix("recipe=") for text in arguments.overrides if text.startswith("recipe=")]
    others = [text for text in arguments.overrides if not text.startswith("recipe=")]
    if len(names) > 1:
        raise ScaleRLConfigError([f"recipe={names[1]}: one recipe at a time; presets combine as +scalerl=[a,b]"])
    if not names:
        return others, None
    if arguments.config_name or arguments.config_path or arguments.config_dir:
        raise ScaleRLConfigError([f"recipe={names[0]} beside --config-name: give one of them"])
    recipe = find_recipe(names[0])
    return [*recipe.overrides, *others], recipe.model_file


def _find_shape(config: DictConfig, given: str | None, stored: Path | None) -> Any:
    from scalerl_verl.shapes import find_shape

    model = str(select(config, f"{MODEL}.path"))
    if given is None and stored is not None and not (Path(model).expanduser() / "config.json").is_file():
        given = str(stored)
    return find_shape(model, given)


def _startup_problems(config: DictConfig) -> list[str]:
    """What the run itself would refuse at start, as far as that needs no file; budgets by the phrase's letters."""
    from omegaconf import OmegaConf

    from scalerl_verl.config import checks as config_checks
    from scalerl_verl.interruption import settings as interruption_settings
    from scalerl_verl.interruption.budgets import resolve_budgets
    from scalerl_verl.names.asking import asked_names
    from scalerl_verl.names.numbers import check_numbers

    if not asked_names(config):
        return list(check_numbers(config)[0].values())
    problems = config_checks.find_problems(config)
    if problems or not interruption_settings.asks_for_interruption(config):
        return problems
    section = OmegaConf.select(config, interruption_settings.SECTION)
    settings = interruption_settings.read_settings(None if section is None else OmegaConf.to_container(section))
    total = int(select(config, f"{ROLLOUT}.response_length"))
    for validation in (False, True):
        try:
            resolve_budgets(settings, total, len(settings.phrase) // 3, 0, validation)
        except ValueError as error:
            problems.append(f"{interruption_settings.SECTION}.{error}")
    return problems
