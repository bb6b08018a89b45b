# SPDX-License-Identifier: Apache-2.0
"""A second plugin, on PYTHONPATH of the end-to-end tests only: records weights on both sides and plants faults.

PROBE_DIR: where ``sent-<n>.pt`` (trainer) and ``held-<n>.pt`` (engine, after the n-th update) go.
PROBE_FAIL_LOAD=n: the engine's n-th weight update raises while it loads.
"""
