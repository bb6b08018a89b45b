# SPDX-License-Identifier: Apache-2.0
"""Does the loss decide where a run ends? A policy of tables that guesses or thinks, under the losses of real runs."""
