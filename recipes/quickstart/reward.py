# SPDX-License-Identifier: Apache-2.0
"""The reward of the quickstart, for verl's `reward.custom_reward_function.path`."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

DATA_SOURCE = "scalerl/chain_sum"


def _load_task() -> ModuleType:
    """Load task.py from beside this file.

    verl loads this file by path, so its folder is not on sys.path, and a module as plainly named as `task` must not be
    put there: the module gets a name of its own instead.
    """
    name = "scalerl_quickstart_task"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, Path(__file__).resolve().with_name("task.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up while it is being executed
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


_grade = _load_task().grade


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None, **kwargs: Any
) -> dict[str, float]:
    """Return the reward, 1.0 or -1.0, and the accuracy, 1.0 or 0.0, of one response.

    Args:
        data_source: must be `scalerl/chain_sum`.
        solution_str: the response without special tokens, think markers included.
        ground_truth: the exact total as text.
        extra_info, kwargs: what verl passes along; not used.
    """
    if data_source != DATA_SOURCE:
        raise ValueError(
            f"this reward grades data_source {DATA_SOURCE!r}, got {data_source!r}; use the files that prepare.py wrote."
        )
    right = _grade(solution_str, ground_truth)
    return {"score": 1.0 if right else -1.0, "acc": 1.0 if right else 0.0}
