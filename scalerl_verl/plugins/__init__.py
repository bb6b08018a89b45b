# SPDX-License-Identifier: Apache-2.0
"""What verl, vLLM and Hydra load: registers our names, records the outcome, is loud when something is wrong."""
