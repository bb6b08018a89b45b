#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# prepare.sh DIR SEED: Polaris' problems, 1,000 of them held out; the same for every seed.
exec "${PYTHON:-python3}" "$(dirname "$0")/../common/to_parquet.py" --out "$1" polaris
