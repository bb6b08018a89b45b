# SPDX-License-Identifier: Apache-2.0
"""Pictures of curves: what they look like, static ones, pages with hover, the page of a running run."""
