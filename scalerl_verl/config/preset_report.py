# SPDX-License-Identifier: Apache-2.0
"""Where a run is not what its presets say: values that something overrides, and values that a preset took the place of.

Several presets on one line are a combination, so a later one that overrides an earlier one is not reported.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from scalerl_verl import names
from scalerl_verl.config.preset_layers import DELETED, Layer, read_layers, verl_defaults
from scalerl_verl.names import ACTOR, HEAD_BACKEND, HEAD_DTYPE, MODEL, PIPELINE_SECTION, ROLLOUT, V1, VALUES
from scalerl_verl.names.asking import generator_head_dtype

LEFT_TO_YOU = (
    "ray_kwargs",
    "transfer_queue",
    "reward.num_workers",
    "data.dataloader_num_workers",
    "data.val_batch_size",
    f"{names.SAMPLER_SECTION}.log_file",
    *(f"trainer.{name}" for name in ("device", "nnodes", "n_gpus_per_node", "project_name", "experiment_name")),
    *(f"trainer.{name}" for name in ("logger", "total_epochs", "total_training_steps", "val_before_train")),
    *(f"trainer.{name}" for name in ("test_freq", "save_freq", "max_actor_ckpt_to_keep")),
    f"{V1}.sampler",
    *(f"{PIPELINE_SECTION}.{name}" for name in ("staging", "request_timeout_s", "transfer_timeout_s")),
    *(f"{PIPELINE_SECTION}.{name}" for name in ("max_attempts", "max_strikes", "max_relaunches")),
    *(f"{MODEL}.{name}" for name in ("use_remove_padding", "enable_gradient_checkpointing", "use_fused_kernels")),
    f"{MODEL}.override_config.attn_implementation",
    *(f"{ACTOR}.{name}" for name in ("strategy", "use_dynamic_bsz", "ppo_micro_batch_size_per_gpu")),
    *(f"{ACTOR}.{name}" for name in ("use_torch_compile", "fsdp_config.strategy", "fsdp_config.use_torch_compile")),
    "actor_rollout_ref.ref.use_torch_compile",
    *(f"{ROLLOUT}.{name}" for name in ("name", "nnodes", "n_gpus_per_node", "tensor_model_parallel_size")),
    *(f"{ROLLOUT}.{name}" for name in ("enforce_eager", "free_cache_engine", "enable_sleep_mode", "agent.num_workers")),
    *(f"{ROLLOUT}.{name}" for name in ("checkpoint_engine", "log_prob_micro_batch_size_per_gpu", "val_kwargs")),
    *(f"{ROLLOUT}.{name}" for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens")),
)
"""What presets set and a run may change and still train the same: machines, memory, length of the run, its records."""
_SAME_HEAD = (HEAD_BACKEND, HEAD_DTYPE)
"""Keys of which all our values mean the same arithmetic."""
_COPIED = 50
"""So many values of verl's own in a file, of 117 in `ppo_trainer.yaml`: a copy of verl's, whose values nobody chose."""


@dataclass(frozen=True)
class Difference:
    """A key whose value is not the one that was written for it.

    Args:
        key: config path.
        wanted: value of the preset, or of the file that lost it to one.
        given: value of the run.
        loser: whose value `wanted` is.
        winner: whose value `given` is.
    """

    key: str
    wanted: str
    given: str
    loser: Layer
    winner: Layer

    def describe(self) -> str:
        """One line."""
        return f"{self.key}: {self.wanted} in {_name(self.loser)}, {self.given} in this run ({_name(self.winner)})"


def report(config: DictConfig) -> None:
    """Say in the driver's log what of the presets does not hold in this run, and what of its files."""
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.errors import HydraException

    # Where the config was composed otherwise, nobody knows its steps.
    if not (HydraConfig.initialized() and GlobalHydra.instance().is_initialized()):
        return
    try:
        lines = describe(find_differences(config, HydraConfig.get()))
    except (HydraException, OSError) as error:  # a file changed under the run
        lines = [f"it cannot be told which values of presets this run overrides: {error}"]
    for line in lines:
        print(f"[scalerl_verl] {line}", file=sys.stderr, flush=True)


def find_differences(config: DictConfig, hydra: DictConfig) -> list[Difference]:
    """What presets set and the run has otherwise, then what its files set and a preset overrode.

    Args:
        config: composed by Hydra.
        hydra: the section `hydra` of that composition.

    Raises:
        HydraException: it does not compose any more.
    """
    layers = read_layers(hydra)
    keys = dict.fromkeys(key for layer in layers if layer.kind == "preset" for key in layer.values)
    histories = {key: list(_history(key, layers)) for key in keys if not _is_left_to_you(key)}
    copies = _copies(layers)
    overridden = [found for key, history in histories.items() if (found := _overridden(config, key, history))]
    lost = [found for key, history in histories.items() if (found := _lost(config, key, history, copies))]
    # A section that is taken away is one line.
    return list({(difference.key, difference.loser.kind): difference for difference in [*overridden, *lost]}.values())


def describe(differences: Sequence[Difference]) -> list[str]:
    """The report, line by line."""
    headings = {
        "preset": "this run overrides values of its presets, which is allowed:",
        "file": "presets override values of your files, which is allowed:",
    }
    lines = []
    for kind, heading in headings.items():
        found = [f"  {difference.describe()}" for difference in differences if difference.loser.kind == kind]
        lines += [heading, *found] if found else []
    return [*lines, *(f"  {fix}" for fix in find_fixes(differences))]


def find_fixes(differences: Sequence[Difference]) -> list[str]:
    """What to change where an order was hardly meant."""
    return list(dict.fromkeys(fix for difference in differences if (fix := _fix(difference))))


def _is_left_to_you(key: str) -> bool:
    return any(f"{key}.".startswith(f"{left}.") for left in LEFT_TO_YOU)


History = list[tuple[Layer, str, Any]]
"""Steps that touch a key: step, path that it sets (the key, or a section around it), value."""


def _history(key: str, layers: Sequence[Layer]) -> Iterator[tuple[Layer, str, Any]]:
    for layer in layers:
        for path, value in layer.values.items():
            if path == key or key.startswith(f"{path}."):
                yield layer, path, value


def _last_of_a_preset(key: str, history: History) -> int:
    return max(i for i, (layer, path, _) in enumerate(history) if layer.kind == "preset" and path == key)


def _overridden(config: DictConfig, key: str, history: History) -> Difference | None:
    """What comes after the last preset that sets the key."""
    preset, _, wanted = history[_last_of_a_preset(key, history)]
    winner, path, given = history[-1]
    if winner.kind == "preset" or wanted == "???" or _is_same(config, key, wanted, DELETED if path != key else given):
        return None
    if path != key:
        # JSON text may hold the preset's value.
        said_otherwise = key == HEAD_DTYPE and generator_head_dtype(config) in VALUES[HEAD_DTYPE]
        return None if said_otherwise else Difference(path, "set", _show(given), preset, winner)
    return Difference(key, _value(config, key, wanted), _value(config, key, given), preset, winner)


def _lost(config: DictConfig, key: str, history: History, copies: dict[str, dict[str, Any]]) -> Difference | None:
    """The last file before the preset that decides the key."""
    last = _last_of_a_preset(key, history)
    files = [step for step in history[:last] if step[0].kind == "file"]
    if last != len(history) - 1 or not files:
        return None
    (preset, _, given), (file, path, wanted) = history[last], files[-1]
    if wanted == "???" or copies.get(file.name, {}).get(path, DELETED) == wanted:
        return None
    if path != key:
        return Difference(path, _show(wanted), "set", file, preset)
    if _is_same(config, key, wanted, given):
        return None
    return Difference(key, _value(config, key, wanted), _value(config, key, given), file, preset)


def _copies(layers: Sequence[Layer]) -> dict[str, dict[str, Any]]:
    """Name of a file that was copied from verl's -> what verl's has."""
    large = [layer for layer in layers if layer.kind == "file" and len(layer.values) > _COPIED]
    verl = verl_defaults() if large else {}
    return {
        layer.name: verl
        for layer in large
        if sum(key in verl and verl[key] == value for key, value in layer.values.items()) > _COPIED
    }


def _is_same(config: DictConfig, key: str, first: Any, second: Any) -> bool:
    if DELETED in (first, second):
        return None in (first, second)
    if key in _SAME_HEAD and str(first) in VALUES[key] and str(second) in VALUES[key]:
        return True
    if first == second:
        return True
    return bool(_plain(_resolve(config, key, first)) == _plain(_resolve(config, key, second)))


def _plain(value: Any) -> Any:
    """Numbers and switches by value: 1e-6, 0.000001 and "1e-6" are the same."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if not isinstance(value, str):
        return value
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    try:
        return float(value)
    except ValueError:
        return value


def _resolve(config: DictConfig, key: str, value: Any) -> Any:
    """What a reference would be at its place in this run."""
    if not (isinstance(value, str) and "${" in value):
        return value
    place = copy.deepcopy(config)
    try:
        with open_dict(place):
            OmegaConf.update(place, key, value, force_add=True)
        return OmegaConf.select(place, key)
    except OmegaConfBaseException:
        return value  # leads nowhere: the checks report it


def _value(config: DictConfig, key: str, value: Any) -> str:
    resolved = _resolve(config, key, value)
    return _show(value) if resolved is value else f"{value} = {_show(resolved)}"


def _show(value: Any) -> str:
    return "deleted" if value is DELETED else "null" if value is None else str(value)


def _name(layer: Layer) -> str:
    return f"the preset {layer.name}" if layer.kind == "preset" else layer.name


def _fix(difference: Difference) -> str | None:
    loser, winner = difference.loser, difference.winner
    if winner.kind == "verl":
        return f"verl's own files come after the preset {loser.name} in a defaults list: name the preset after them"
    if loser.kind == "preset":
        return None
    if winner.named_by != loser.config_path:
        where = f"name the preset {winner.name} before {loser.name}"
    elif winner.typed:
        where = f"name the preset in the defaults list of {loser.name}, before _self_, and not on the command line"
    else:
        where = f"put _self_ last in the defaults list of {loser.name}"
    return f"to keep them, {where}; or give the values on the command line"
