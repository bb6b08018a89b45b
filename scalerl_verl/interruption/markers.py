# SPDX-License-Identifier: Apache-2.0
"""Where thinking begins and ends in a stream of token ids.

A marker may be one token of its own or ordinary text; then it can lie across any token boundaries, so it is looked for
in the decoded text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from scalerl_verl.interruption.budgets import InterruptionSettings

_PROMPT_TAIL_TOKENS = 64


class ThinkingScript:
    """Markers and phrase of one tokenizer. Built once, shared by all responses.

    Args:
        settings: markers and phrase.
        encode: text -> token ids, without special tokens added.
        decode: token ids -> text, special tokens kept.

    Attributes:
        decode: as given.
        phrase_ids: token ids of the phrase.
        grace_tokens: what may be missing of an end marker that was begun: its tokens less one.
    """

    def __init__(
        self,
        settings: InterruptionSettings,
        encode: Callable[[str], list[int]],
        decode: Callable[[Sequence[int]], str],
    ) -> None:
        self._encode, self.decode = encode, decode
        self._phrase, self._start, self._end = settings.phrase, settings.start_marker, settings.end_marker
        self.phrase_ids = tuple(encode(self._phrase))
        self.start_ids = tuple(encode(self._start)) if self._start is not None else ()
        self.end_ids = tuple(encode(self._end))
        self.grace_tokens = len(self.end_ids) - 1

    def problem(self) -> str | None:
        """Why this tokenizer cannot write the phrase; None if it can."""
        text = self.decode(self.phrase_ids)
        if self._end not in text:
            return (
                f"phrase={self._phrase!r} reads {text!r} in this tokenizer, which has lost end_marker={self._end!r}: "
                "choose a phrase and a marker that it can write"
            )
        if text.strip() != self._phrase.strip():
            return f"phrase={self._phrase!r} reads {text!r} in this tokenizer: use characters that it knows"
        return None

    def thinks_from_start(self, prompt_ids: Sequence[int]) -> bool | None:
        """Whether a response to this prompt begins inside the thinking.

        Returns:
            True: the chat template opened it at the end of the prompt, or there is no start marker. False: the template
            closed it (thinking switched off). None: it is for the response to open it.
        """
        tail = self.decode(prompt_ids[-_PROMPT_TAIL_TOKENS:]).rstrip()
        if tail.endswith(self._end.rstrip()):
            return False
        if self._start is None or tail.endswith(self._start.rstrip()):
            return True
        return None

    def has_opened(self, ids: Sequence[int]) -> bool:
        """Whether a response has opened its thinking."""
        return self._start is None or self._holds(ids, self.start_ids, self._start)

    def has_closed(self, ids: Sequence[int]) -> bool:
        """Whether a response has closed its thinking."""
        return self._holds(ids, self.end_ids, self._end)

    def count_thinking(self, ids: Sequence[int]) -> int:
        """Tokens up to and including the one that completes the first end marker; all of them if there is none."""
        if not self.has_closed(ids):
            return len(ids)
        if len(self.end_ids) == 1 and self.end_ids[0] in ids:
            return list(ids).index(self.end_ids[0]) + 1
        low, high = 1, len(ids)
        while low < high:
            middle = (low + high) // 2
            if self._end in self.decode(ids[:middle]):
                high = middle
            else:
                low = middle + 1
        return low

    def missing_of_marker(self, ids: Sequence[int]) -> int:
        """Tokens that would complete an end marker at the very end of ``ids``; 0 if none has been begun."""
        if self.grace_tokens == 0:
            return 0
        begun = _overlap(self._tail(ids, len(self._end)), self._end)
        return len(self._encode(self._end[begun:])) if begun else 0

    def phrase_after(self, ids: Sequence[int]) -> list[int]:
        """The phrase, or what is left of it if the response was about to write it itself (from its first word on)."""
        first_word = len(self._phrase.split(maxsplit=1)[0])
        begun = _overlap(self._tail(ids, len(self._phrase)), self._phrase)
        if begun < first_word or begun == len(self._phrase):
            return list(self.phrase_ids)
        rest = self._encode(self._phrase[begun:])
        # Cut inside a token, the rest could take more tokens than were reserved.
        return rest if len(rest) <= len(self.phrase_ids) else list(self.phrase_ids)

    def _holds(self, ids: Sequence[int], marker_ids: tuple[int, ...], marker: str) -> bool:
        # A token of its own first: a lookup, where decoding thousands of tokens is not.
        return (len(marker_ids) == 1 and marker_ids[0] in ids) or marker in self.decode(ids)

    def _tail(self, ids: Sequence[int], num_chars: int) -> str:
        # Every token is at least a byte, so as many tokens hold at least as many characters of an ASCII text.
        return self.decode(ids[-num_chars:])


def _overlap(text: str, target: str) -> int:
    """Length of the longest end of ``text`` that is a beginning of ``target``."""
    return next((size for size in range(min(len(text), len(target)), 0, -1) if text.endswith(target[:size])), 0)
