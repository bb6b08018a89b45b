# SPDX-License-Identifier: Apache-2.0
"""Let ``data.sampler`` choose our sampler, which wraps the one verl would have used."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from scalerl_verl.upstream.spec import VERL_VERSIONS, PatchSpec


def _build_sampler(original: Any, module: ModuleType) -> Any:
    @functools.wraps(original)
    def create_rl_sampler(data_config: Any, dataset: Any) -> Any:
        from scalerl_verl.curriculum.verl import wrap_sampler

        return wrap_sampler(original(data_config, dataset), data_config, dataset)

    return create_rl_sampler


SPECS = (
    PatchSpec(
        name="verl.curriculum.sampler",
        module="verl.trainer.ppo.v1.trainer_base",
        target="create_rl_sampler",
        build=_build_sampler,
        kind="wrap",
        why="verl 0.9 chooses between a random and a sequential sampler and has no key for another one.",
        distribution="verl",
        versions=VERL_VERSIONS,
        sources=("5ef5e803e63e5700dfc5a9035dd31abcf5c01da63838fc98710a22f105bcc208",),
        when="named",
        removal="verl takes a sampler class from data.sampler and feeds it the results of each step",
        late_ok=True,
    ),
)
