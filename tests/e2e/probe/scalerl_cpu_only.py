# SPDX-License-Identifier: Apache-2.0
"""The CPU platform without the rest of the plugin: what a CPU run without us would need at the least.

Loaded by VERL_USE_EXTERNAL_MODULES while VERL_USE_EXTERNAL_PLUGINS=none keeps the plugin itself out.
"""

from scalerl_verl.cpu.vllm_alias import install_vllm_alias

install_vllm_alias()

import scalerl_verl.cpu.platform  # noqa: E402, F401
from scalerl_verl.upstream import registry  # noqa: E402
from scalerl_verl.verl.patches import VERL_SPECS  # noqa: E402

registry.install(spec for spec in VERL_SPECS if spec.when == "cpu")
