# SPDX-License-Identifier: Apache-2.0
"""How upstream symbols are bound to their sources and patched; `scalerl_verl.verl.patches.SYMBOLS` lists every one."""
