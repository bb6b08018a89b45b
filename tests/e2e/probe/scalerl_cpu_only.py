# SPDX-License-Identifier: Apache-2.0
"""The CPU platform without the rest of the plugin: what a CPU run without us would need at the least.

Loaded by VERL_USE_EXTERNAL_MODULES while VERL_USE_EXTERNAL_PLUGINS=none keeps the plugin itself out.
"""

from types import ModuleType

from scalerl_verl.cpu.vllm_alias import install_vllm_alias

install_vllm_alias()

import scalerl_verl.cpu.platform  # noqa: E402, F401
from scalerl_verl.cpu.verl import HostMemoryEngine  # noqa: E402
from scalerl_verl.upstream import registry  # noqa: E402
from scalerl_verl.upstream.import_hooks import after_import  # noqa: E402
from scalerl_verl.verl.patches import VERL_SPECS  # noqa: E402

registry.install(spec for spec in VERL_SPECS if spec.when == "cpu")


def _register_engines(module: ModuleType) -> None:
    """verl's own engines for the CPU; ours have our loss besides."""
    for model_type, engine in (
        ("language_model", module.FSDPEngineWithLMHead),
        ("value_model", module.FSDPEngineWithValueHead),
    ):
        plain = type(engine.__name__, (HostMemoryEngine, engine), {})
        module.EngineRegistry.register(model_type=model_type, backend=["fsdp", "fsdp2"], device="cpu")(plain)


after_import("verl.workers.engine.fsdp.transformer_impl", _register_engines)
