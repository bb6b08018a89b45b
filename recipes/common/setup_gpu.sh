#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: bash recipes/common/setup_gpu.sh [--print] [VENV]

Sets up a bare GPU host: a virtual environment (default .venv-gpu) with verl, vLLM, torch and flash-attn in the versions of
pins-gpu.txt, and scalerl-verl[gpu] from this clone. It ends with `scalerl doctor`. Run again, it goes on where it stopped.

It needs Linux (x86_64 or aarch64), an NVIDIA driver of release 580 or newer (CUDA 13), 25 GB of disk and a package index.
flash-attn 2.8.3 comes as a wheel from the index that verl 0.9.1 names; where no wheel can be had, it is built, which needs
nvcc of CUDA 13 and about half an hour.

  --print   print the commands and run none

Environment: PYTHON (a Python 3.12; else the first that is found, and uv brings one if none is), SCALERL_INSTALLER=pip
(leave uv out), FLASH_ATTN_INDEX (another index with the wheel), MAX_JOBS (compilers at a time if flash-attn is built).

Not tried: no GPU host of ours had a network. That these versions resolve together was checked for both kinds of
machine, and the GPU results of this repository were made with them, installed by other means.
TEXT
}

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
cd "$repo"
print=0 venv=""
while [ $# -gt 0 ]; do
  case $1 in
    --help | -h) usage; exit 0 ;;
    --print) print=1 ;;
    -*) echo "error: unknown option '$1'" >&2; usage >&2; exit 2 ;;
    *) [ -z "$venv" ] || { echo "error: one VENV, given: '$venv' and '$1'" >&2; exit 2; }; venv=$1 ;;
  esac
  shift
done
venv=${venv:-$repo/.venv-gpu}
# shellcheck source=recipes/quickstart/interpreter.sh
source recipes/quickstart/interpreter.sh
# shellcheck source=recipes/quickstart/installer.sh
source recipes/quickstart/installer.sh
SCALERL_PYTHONS=3.12  # the wheels of flash-attn are for this one
flash_attn=flash-attn==2.8.3
# Where verl 0.9.1 takes it from: [tool.uv.sources] and [[tool.uv.index]] of its pyproject.toml.
wheels=${FLASH_ATTN_INDEX:-https://verl-project.github.io/verl-wheelhouse/simple/}
least_driver=580

check_host() {
  local kind driver
  kind="$(uname -s) $(uname -m)"
  case $kind in
    "Linux x86_64" | "Linux aarch64") ;;
    *) echo "error: vLLM and flash-attn have wheels for Linux x86_64 and aarch64, this is $kind" >&2; return 1 ;;
  esac
  driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1) || driver=""
  if [ -z "$driver" ]; then
    echo "error: nvidia-smi shows no GPU here: run this on the GPU host, or install its driver ($least_driver or newer)" >&2
    return 1
  fi
  if [ "${driver%%.*}" -lt "$least_driver" ]; then
    echo "error: the driver is $driver, CUDA 13 needs $least_driver or newer: update it" >&2
    return 1
  fi
}

step() {
  printf '+'
  printf ' %q' "$@"
  printf '\n'
  [ "$print" = 1 ] || "$@"
}

install_flash_attn() {
  step "${packages[@]}" --no-deps --only-binary flash-attn --index-url "$wheels" "$flash_attn" && return 0
  echo "no wheel from $wheels: building flash-attn here, which needs nvcc (half an hour; MAX_JOBS says how many at a time)"
  step "${packages[@]}" ninja psutil setuptools wheel && step "${packages[@]}" --no-deps --no-build-isolation "$flash_attn" && return 0
  echo "error: flash-attn could neither be fetched nor built. Without it set" \
    "actor_rollout_ref.model.use_remove_padding=False, which costs speed; all else is installed" >&2
  return 1
}

[ "$print" = 1 ] || check_host
log=$(mktemp)
trap 'rm -f "$log"' EXIT
python=$(find_python)
uv=""
if [ "$print" = 0 ]; then
  uv=$(find_uv "$repo" "$python" "$log") || [ -n "$python" ] || no_python "$log"
  [ -z "$uv" ] || settings_for_uv "$repo" "${python:-python3}"
  keeps_venv "$venv" || make_venv "$venv" "$python" "$uv"
fi
set_packages "$venv" "$uv"
step "${packages[@]}" -r recipes/common/pins-gpu.txt -e "${repo}[gpu]"
install_flash_attn
step "$venv/bin/python" -c 'import flash_attn, torch, verl, vllm; assert torch.cuda.is_available(), "torch sees no GPU"'
step "$venv/bin/scalerl" doctor
[ "$print" = 1 ] || echo "ready: source $venv/bin/activate"
