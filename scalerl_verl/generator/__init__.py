# SPDX-License-Identifier: Apache-2.0
"""The generator behind verl's rollout: its server and worker in runs with our names, in the place of verl's."""
