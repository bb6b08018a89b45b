# SPDX-License-Identifier: Apache-2.0
"""The CPU platform and the weight transfer that needs no NCCL."""
