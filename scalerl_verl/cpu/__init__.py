# SPDX-License-Identifier: Apache-2.0
"""verl on a CPU: the platform, gloo weight sync, vLLM's other name."""
