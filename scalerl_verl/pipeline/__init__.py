# SPDX-License-Identifier: Apache-2.0
"""PipelineRL-k: generators that go on during weight updates, a trainer that never sees data older than k versions.

This package's algorithm (`admission`, `versions`) imports the standard library only; the rest fits it into
verl and vLLM and is imported where a run asks for it.
"""

from scalerl_verl.pipeline.admission import AdmissionRule
from scalerl_verl.pipeline.versions import VersionRuns, count_by_age, oldest_version

__all__ = ["AdmissionRule", "VersionRuns", "count_by_age", "oldest_version"]
