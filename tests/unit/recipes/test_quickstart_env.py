# SPDX-License-Identifier: Apache-2.0
"""The quickstart's installation: which machine, which Python, uv or pip. All of these are small scripts here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import REPO

TOOLS = "bash cat cp cut dirname env grep head ln mkdir mktemp mv rm sed sh sha256sum sort tail tr xargs".split()

PYTHON = f"""#!/bin/sh
echo "python{{name}} $*" >> "$CALLS"
case "$1 $2" in
  "--version "*) echo "Python {{version}}.0" ;;
  "-c "*) shift; exec {sys.executable} -c 'import sys
sys.version_info = tuple(map(int, "{{version}}.0".split("."))) + ("final", 0)
exec(sys.argv.pop(1))' "$@" ;;
  "-m venv") for home; do :; done; mkdir -p "$home/bin" && ln -sf "$0" "$home/bin/python" ;;
  "-m pip") case "$*" in *uv==*) exit 1 ;; *install*) exit ${{{{PIP_FAILS:-0}}}} ;; esac ;;
  *uv_settings.py*) ;;
esac
"""
"""A Python of some version: it runs ``-c`` as that version would, and makes venvs that are itself; pip has no uv."""

UV = """#!/bin/sh
echo "uv $*" >> "$CALLS"
case "$1" in
  venv) for home; do :; done; mkdir -p "$home/bin" && ln -sf "$BROUGHT" "$home/bin/python" ;;
  pip)
    [ "$3" != "$KILLED_AT" ] || kill -9 $PPID
    exit ${UV_FAILS:-0}
    ;;
esac
"""
"""uv: its venvs have the Python ``$BROUGHT``."""


class Machine:
    """A PATH with chosen tools only, and a copy of the quickstart's files in a folder with an awkward name."""

    def __init__(self, folder: Path) -> None:
        """Copy what the shell files need."""
        self.bin = folder / "bin"
        self.bin.mkdir()
        for tool in TOOLS:
            (self.bin / tool).symlink_to(str(shutil.which(tool)))
        self.repo = folder / "it's a clone"
        quickstart = self.repo / "recipes" / "quickstart"
        quickstart.mkdir(parents=True)
        for file in [*(REPO / "recipes" / "quickstart").glob("*.sh"), *(REPO / "recipes" / "quickstart").glob("*.txt")]:
            shutil.copy(file, quickstart)
        for name in ("setup.cfg", "pyproject.toml"):
            shutil.copy(REPO / name, self.repo)
        self.calls = folder / "calls"
        self.calls.touch()
        self.env = {"PATH": str(self.bin), "CALLS": str(self.calls), "HOME": str(folder)}
        self.linux()

    def script(self, name: str, text: str) -> Path:
        """Put a command on the PATH."""
        path = self.bin / name
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755)
        return path

    def linux(self, machine: str = "x86_64", glibc: str = "glibc 2.36", system: str = "Linux") -> None:
        """Say what ``uname`` and ``getconf`` say; an empty ``glibc`` is a system without one."""
        self.script("uname", f'#!/bin/sh\n[ "$1" = -s ] && echo {system} || echo {machine}\n')
        self.script("getconf", f'#!/bin/sh\n[ -n "{glibc}" ] && echo "{glibc}"\n')

    def python(self, name: str, version: str = "") -> Path:
        """Put a Python on the PATH: ``python("3", "3.12")`` is a python3 that is a 3.12."""
        return self.script(f"python{name}", PYTHON.format(name=name, version=version or name))

    def run(self, line: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Run a line of bash with ``env.sh`` sourced; ``$repo`` is the copy."""
        text = f'set -euo pipefail; repo=$1; source "$repo/recipes/quickstart/env.sh"; {line}'
        return subprocess.run(
            [str(self.bin / "bash"), "-c", text, "bash", str(self.repo)],
            env={**self.env, **env},
            capture_output=True,
            text=True,
            check=False,
        )

    def installs(self, tool: str) -> list[str]:
        """Return the calls by which ``tool`` ("uv" or "python") installed something of the stack."""
        lines = self.calls.read_text(encoding="utf-8").splitlines()
        return [
            line
            for line in lines
            if line.startswith(tool) and "pip install" in line and "--dry-run" not in line and "uv==" not in line
        ]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """Return a Linux machine without any Python."""
    return Machine(tmp_path)


@pytest.mark.parametrize(
    ("there", "chosen"),
    [
        ({"3.11": "", "3.12": "", "3.13": ""}, "python3.11"),
        ({"3.13": "", "3.12": "", "3.10": ""}, "python3.12"),
        ({"3.13": "", "3": "3.12"}, "python3.13"),
        ({"3": "3.12"}, "python3"),
        ({"3": "3.14", "3.10": ""}, ""),
        ({"3.11": "3.9", "3": "3.13"}, "python3"),
        ({}, ""),
    ],
)
def test_the_first_python_that_fits_is_taken(machine: Machine, there: dict[str, str], chosen: str) -> None:
    for name, version in there.items():
        machine.python(name, version)
    found = machine.run("find_python")
    assert (found.returncode, found.stdout.strip()) == (0, chosen), found.stderr


def test_a_name_on_the_path_that_does_not_run_is_passed_over(machine: Machine) -> None:
    machine.script("python3.11", "#!/bin/sh\necho 'python3.11: not in this version of the manager' >&2\nexit 127\n")
    machine.python("3.12")
    assert machine.run("find_python").stdout.strip() == "python3.12"


def test_given_python_is_taken_or_refused_but_never_replaced(machine: Machine) -> None:
    machine.python("3.11")
    assert machine.run("find_python", PYTHON=str(machine.python("3.13"))).stdout.strip().endswith("python3.13")
    for given, said in ((str(machine.python("3.10")), "3.10"), ("python9", "python9"), ("ls -l", "ls -l"), ("/", "/")):
        refused = machine.run('ensure_env "$repo"', PYTHON=given)
        assert refused.returncode != 0 and f"PYTHON={given} " in refused.stderr and said in refused.stderr
        assert len(refused.stderr.splitlines()) == 1
    assert not machine.installs("python")


@pytest.mark.parametrize("kind", [{}, {"machine": "aarch64"}, {"glibc": "glibc 2.31"}])
def test_platforms_with_a_wheel_of_every_pin_are_accepted(machine: Machine, kind: dict[str, str]) -> None:
    machine.linux(**kind)
    accepted = machine.run('check_platform "$repo" tests/run.sh')
    assert (accepted.returncode, accepted.stderr) == (0, "")


@pytest.mark.parametrize(
    "kind",
    [
        {"system": "Darwin", "machine": "arm64", "glibc": ""},
        {"system": "Darwin", "machine": "x86_64", "glibc": ""},
        {"machine": "riscv64"},
        {"glibc": "glibc 2.28"},
        {"glibc": ""},
    ],
)
def test_other_platforms_are_told_a_container_command_that_a_shell_can_read(
    machine: Machine, kind: dict[str, str]
) -> None:
    machine.linux(**kind)
    refused = machine.run('check_platform "$repo" tests/run.sh; echo went on')
    assert refused.returncode == 1 and "went on" not in refused.stdout
    machine.script("docker", '#!/bin/sh\nfor word; do echo "$word"; done\n')
    (command,) = [line for line in refused.stderr.splitlines() if line.strip().startswith("docker")]
    words = machine.run(command).stdout.splitlines()
    assert words[0] == "run" and words[words.index("-v") + 1] == f"{machine.repo}:/scalerl"
    assert words[-3:] == ["python:3.11", "bash", "tests/run.sh"] and words[words.index("-w") + 1] == "/scalerl"


def pins(machine: Machine) -> list[str]:
    """Return the lock files that every stack takes."""
    return [str(machine.repo / "recipes/quickstart/requirements-cpu.txt")]


def test_uv_installs_where_it_can_be_had(machine: Machine) -> None:
    brought = machine.python("3.11")
    machine.script("uv", UV)
    done = machine.run('ensure_env "$repo"', BROUGHT=str(brought))
    assert done.returncode == 0, done.stderr
    calls = machine.installs("uv")
    assert all(any(pin in call for call in calls) for pin in pins(machine)) and any("torch" in call for call in calls)
    assert not machine.installs("python")
    machine.calls.write_text("", encoding="utf-8")
    assert machine.run('ensure_env "$repo"').returncode == 0
    assert not machine.installs("uv") and not machine.installs("python")


@pytest.mark.parametrize("why", ["no uv", "uv fails", "uv is switched off"])
def test_pip_installs_the_same_where_uv_does_not(machine: Machine, why: str) -> None:
    brought = machine.python("3.12")
    env = {"BROUGHT": str(brought)}
    if why != "no uv":
        machine.script("uv", UV)
        env |= {"UV_FAILS": "1"} if why == "uv fails" else {"SCALERL_INSTALLER": "pip"}
    (machine.repo / "extra.txt").write_text("pytest==9.2.0\n", encoding="utf-8")
    done = machine.run('ensure_env "$repo" "$repo/extra.txt"', **env)
    assert done.returncode == 0, done.stderr
    calls = machine.installs("python")
    assert all(any(pin in call for call in calls) for pin in [*pins(machine), "torch==", "extra.txt"])
    if why == "uv is switched off":
        assert not machine.installs("uv")


@pytest.mark.parametrize("installer", ["uv", "pip"])
def test_given_index_is_the_one_that_torch_comes_from(machine: Machine, installer: str) -> None:
    brought = machine.python("3.11")
    machine.script("uv", UV)
    url = "https://cpu.example/torch"
    env = {"BROUGHT": str(brought), "TORCH_INDEX_URL": url, "SCALERL_INSTALLER": installer}
    assert machine.run('ensure_env "$repo"', **env).returncode == 0
    calls = machine.installs("uv" if installer == "uv" else "python")
    assert [f"--index-url {url}" in call for call in calls] == ["torch==" in call for call in calls]


def test_bytecode_is_written_where_imports_may_not(machine: Machine) -> None:
    brought = machine.python("3.11")
    machine.script("uv", UV)
    assert machine.run('ensure_env "$repo"', BROUGHT=str(brought)).returncode == 0
    assert not any("--compile-bytecode" in call for call in machine.installs("uv"))
    shutil.rmtree(machine.repo / ".venv")
    machine.calls.write_text("", encoding="utf-8")
    assert machine.run('ensure_env "$repo"', BROUGHT=str(brought), PYTHONDONTWRITEBYTECODE="1").returncode == 0
    assert all("--compile-bytecode" in call for call in machine.installs("uv"))


def test_uv_brings_a_python_where_none_fits(machine: Machine, tmp_path: Path) -> None:
    machine.python("3", "3.10")
    hidden = machine.python("3.11").rename(tmp_path / "python-of-uv")
    machine.script("uv", UV)
    done = machine.run('ensure_env "$repo"', BROUGHT=str(hidden))
    assert done.returncode == 0, done.stderr
    assert (machine.repo / ".venv/bin/python").resolve() == hidden
    assert machine.installs("uv")


def test_without_a_python_and_without_uv_it_says_which_to_install(machine: Machine) -> None:
    machine.python("3", "3.10")
    refused = machine.run('ensure_env "$repo"; echo went on')
    assert refused.returncode != 0 and "went on" not in refused.stdout
    assert "3.11" in refused.stderr and "3.13" in refused.stderr
    assert not (machine.repo / ".venv").exists()


def test_failed_installation_is_an_error_and_is_tried_again(machine: Machine) -> None:
    machine.python("3.11")
    failed = machine.run('ensure_env "$repo"; echo went on', PIP_FAILS="1")
    assert failed.returncode != 0 and "went on" not in failed.stdout and "install.log" in failed.stderr
    assert machine.run('ensure_env "$repo"').returncode == 0


def test_failed_environment_is_kept_and_one_that_was_killed_is_made_anew(machine: Machine) -> None:
    """A killed uv leaves packages half there, which the next uv takes for whole."""
    brought = machine.python("3.11")
    machine.script("uv", UV)
    rounds = [{"UV_FAILS": "1", "PIP_FAILS": "1"}, {"KILLED_AT": "--python"}, {}, {}]
    made = []
    for env in rounds:
        machine.calls.write_text("", encoding="utf-8")
        done = machine.run('ensure_env "$repo"; echo went on', BROUGHT=str(brought), **env)
        assert ("went on" in done.stdout) == (done.returncode == 0) == (not env), done.stderr
        made.append("uv venv" in machine.calls.read_text(encoding="utf-8"))
    assert made == [True, False, True, False]


def test_stamp_without_the_package_is_not_believed(machine: Machine) -> None:
    """Also where the command is run in a checkout, from which Python would import the package."""
    machine.python("3.11")
    assert machine.run('ensure_env "$repo"').returncode == 0
    machine.calls.write_text("", encoding="utf-8")
    package = machine.repo / "scalerl_verl"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('the checkout')\n", encoding="utf-8")
    assert machine.run('cd "$repo"; ensure_env "$repo"').returncode == 0
    assert not machine.installs("python")


@pytest.mark.parametrize("given", ["conda", "UV"])
def test_unknown_installer_is_refused(machine: Machine, given: str) -> None:
    machine.python("3.11")
    refused = machine.run('ensure_env "$repo"', SCALERL_INSTALLER=given)
    assert refused.returncode != 0 and f"SCALERL_INSTALLER={given}" in refused.stderr and "pip" in refused.stderr
    assert not (machine.repo / ".venv").exists()


def test_index_that_cannot_be_reached_is_said(machine: Machine) -> None:
    text = PYTHON.replace("*install*)", "*install*) echo \"Retrying after connection broken by 'X'\" >&2;")
    machine.script("python3.11", text.format(name="3.11", version="3.11"))
    failed = machine.run('ensure_env "$repo"', PIP_FAILS="1")
    assert failed.returncode != 0 and "no package index answers" in failed.stderr
    machine.python("3.11")
    assert "no package index answers" not in machine.run('ensure_env "$repo"', PIP_FAILS="1").stderr


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser writes everywhere")
def test_clone_that_cannot_be_written_is_said(machine: Machine) -> None:
    machine.python("3.11")
    machine.repo.chmod(0o555)
    refused = machine.run('ensure_env "$repo"')
    assert refused.returncode != 0 and "cannot be written" in refused.stderr


def test_another_python_makes_the_environment_anew(machine: Machine) -> None:
    machine.python("3.11")
    assert machine.run('ensure_env "$repo"').returncode == 0
    other = machine.python("3.13")
    assert machine.run('ensure_env "$repo"', PYTHON=str(other)).returncode == 0
    assert (machine.repo / ".venv/bin/python").resolve() == other
    # Without PYTHON the environment that is there stays, though another Python comes first.
    assert machine.run('ensure_env "$repo"').returncode == 0
    assert (machine.repo / ".venv/bin/python").resolve() == other
