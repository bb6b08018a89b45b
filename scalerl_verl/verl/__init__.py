# SPDX-License-Identifier: Apache-2.0
"""The door to verl and vLLM: entry points, the start-up check, subclasses, and the few patches without another door."""
