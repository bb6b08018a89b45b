# SPDX-License-Identifier: Apache-2.0
"""What a pipeline run left behind: every trained response with its versions, and the weights of each version."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM


@dataclass(frozen=True)
class Response:
    """A trained response: the step that trained it, tokens, log-probs at sampling, version runs, prompt's content.

    Where ``mask`` is 0 a token was not sampled, but came from a tool.
    """

    step: int
    group: str
    prompt: list[int]
    tokens: list[int]
    mask: list[int]
    log_probs: list[float]
    runs: list[list[int]]
    reissues: int
    content: str


def read_responses(folder: Path) -> list[Response]:
    """All responses of all recorded batches, padding rows left out."""
    files = sorted(folder.glob("batch-*.pt"), key=_number)
    return [response for path in files for response in _read_batch(path)]


def _number(path: Path) -> int:
    return int(path.stem.split("-")[1])


def _read_batch(path: Path) -> Iterator[Response]:
    rows = torch.load(path, weights_only=False)
    for i, (key, tag) in enumerate(zip(rows["keys"], rows["tags"], strict=True)):
        if not tag.get("is_padding", False):
            extra = rows["extra_fields"][i]
            yield Response(
                step=_number(path),
                group=key.split("_")[0],
                prompt=rows["prompts"][i].tolist(),
                tokens=rows["responses"][i].tolist(),
                mask=rows["response_mask"][i].tolist(),
                log_probs=rows["rollout_log_probs"][i].tolist(),
                runs=[list(run) for run in extra["versions"]],
                reissues=extra["reissues"],
                content=json.dumps(rows["raw_prompt"][i], default=str),
            )


class PiecewiseScorer:
    """Log-probs of a response under the weights of each token's version, earlier KV as it was computed then.

    The forward pass that samples a token has the token before it as its input, whose KV lies under the same version.

    Args:
        model_path: architecture.
        weights: folder with ``sent-<n>.pt``, the weights of version n later than ``first``.
        first: version with which the run began.
    """

    def __init__(self, model_path: Path, weights: Path, first: int = 0) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
        self._weights, self._first = weights, first
        self._loaded: dict[int, dict[str, torch.Tensor]] = {}

    def _load(self, version: int) -> None:
        if version not in self._loaded:
            path = self._weights / f"sent-{version - self._first}.pt"
            self._loaded[version] = torch.load(path, map_location="cpu")
        missing = self._model.load_state_dict(self._loaded[version], strict=False)
        assert not missing.unexpected_keys

    @torch.no_grad()
    def score(self, response: Response, version_shift: int = 0) -> torch.Tensor:
        """One log-prob a token; ``version_shift`` asks for the weights of another version instead."""
        sequence, past, start, logits = response.prompt + response.tokens, None, 0, []
        end = len(response.prompt) - 1
        for version, count in response.runs:
            self._load(max(self._first, version + version_shift))
            end += count
            out = self._model(torch.tensor([sequence[start:end]]), past_key_values=past, use_cache=True)
            logits.append(out.logits[0, -count:])
            past, start = out.past_key_values, end
        scores = torch.log_softmax(torch.cat(logits), -1)
        return scores.gather(-1, torch.tensor(response.tokens)[:, None])[:, 0]
