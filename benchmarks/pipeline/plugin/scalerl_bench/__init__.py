# SPDX-License-Identifier: Apache-2.0
"""On PYTHONPATH of the pipeline benchmark's runs only, alike in every trainer mode.

BENCH_ENGINE_LOG=folder: what each vLLM engine did, by `engine_log`.
BENCH_PROMPT_TOKENS=48,960: lengths of the data's prompts; a request with a longer prompt was sent again.
BENCH_LANE=name: several runs at a time on one host, each under another name (`verl_side`).
"""
