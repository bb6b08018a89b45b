# SPDX-License-Identifier: Apache-2.0
"""One process as a run would have it: loads the plugin, imports what we patch, prints its status as JSON.

Run as ``python -m scalerl_verl.doctor.probe driver|worker|engine``.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import sys
import warnings
from typing import Any

ROLES = ("driver", "worker", "engine")
MARK = "SCALERL_PROBE "


def probe_here(role: str) -> dict[str, Any]:
    """Load the plugin the way a process of this role does and import every patched module.

    Returns:
        The process status (see `scalerl_verl.upstream.status`) plus ``role`` and ``import_errors``.
    """
    from scalerl_verl.upstream import status
    from scalerl_verl.verl.patches import VERL_SPECS, VLLM_SPECS

    errors: dict[str, str] = {}
    if role == "engine":
        plugins = importlib.import_module("vllm.plugins")
        plugins.load_general_plugins()
        specs = VLLM_SPECS
    else:
        importlib.import_module("verl")
        specs = VERL_SPECS
    for name in sorted({spec.module for spec in specs}):
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001 - a broken upstream import is a finding to report, of any type
            errors[name] = f"{type(error).__name__}: {error}"
    return {**status.process_status(), "role": role, "import_errors": errors}


def probe_ray_worker() -> dict[str, Any]:
    """The same inside a Ray worker of a local cluster that lives for this call."""
    import ray

    # Of its own, also where RAY_ADDRESS names a running one, which takes no number of CPUs.
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        return ray.get(ray.remote(probe_here).remote("worker"))
    finally:
        ray.shutdown()


def main() -> int:
    """Print one marked line of JSON; whatever libraries print on import goes to stderr."""
    role = sys.argv[1] if len(sys.argv) > 1 else ""
    if role not in ROLES:
        raise SystemExit(f"usage: python -m scalerl_verl.doctor.probe {'|'.join(ROLES)}")
    warnings.simplefilter("ignore")
    noise = io.StringIO()
    with contextlib.redirect_stdout(noise):
        result = probe_ray_worker() if role == "worker" else probe_here(role)
    print(noise.getvalue(), file=sys.stderr)
    print(MARK + json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
