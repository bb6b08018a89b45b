#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# prepare.sh DIR SEED: Polaris' problems and the programming problems of Eurus-2, 1,000 of each held out.
exec "${PYTHON:-python3}" "$(dirname "$0")/../common/to_parquet.py" --out "$1" polaris eurus-code
