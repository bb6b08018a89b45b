# SPDX-License-Identifier: Apache-2.0
"""What asking for tokens costs the front end of a generator."""
