# SPDX-License-Identifier: Apache-2.0
"""Settings of every test process and of what it starts."""

import os

# Small tensors on one core a process: threads that wait for each other cost more than they compute, and many times that
# where the cores are shared with another worker of pytest.
os.environ.setdefault("OMP_NUM_THREADS", "1")
