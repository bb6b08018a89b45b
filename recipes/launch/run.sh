#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Linked into every recipe's folder: starts the recipe whose folder it is called in. --help explains the options.
set -euo pipefail
recipe=$(cd "$(dirname "$0")" && pwd)
exec "${PYTHON:-python3}" "$(dirname "$(readlink -f "$0")")/run.py" "$recipe" "$@"
