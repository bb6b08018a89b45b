# SPDX-License-Identifier: Apache-2.0
"""Start-up checks of a composed config and of this machine; which preset said what."""
