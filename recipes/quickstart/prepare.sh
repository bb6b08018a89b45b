#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# prepare.sh DIR SEED: the quickstart's model and problems (a minute on two cores).
exec "${PYTHON:-python3}" "$(dirname "$0")/../quickstart/prepare.py" --out "$1" --seed "$2"
