"""Text of one sequence as it grows: whole characters, stop strings found and held back."""

from trtllm_lite.runtime.sampling_params import SamplingParams
from trtllm_lite.runtime.stop_strings import StopMatcher
from trtllm_lite.runtime.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_WINDOW = 16
"""Tokens kept as context before the oldest are forgotten."""
_NO_TEXT = 64
"""Tokens without a place where all text was final: more than any text needs."""


class Detokenizer:
    """Incremental text of one sequence.

    Without a stop, all pieces and the flush together are exactly `Tokenizer.decode` of the
    generated ids alone, so a SentencePiece space before the first generated word is dropped as it
    is there. With a stop string, they are that text up to it (or its end, with
    include_stop_str_in_output). The caller keeps back the end-of-sequence or stop token id that
    ended the sequence: it is no part of the text.

    Text is held back as long as a later token may change it: an unfinished UTF-8 character, a run
    of byte-fallback tokens (which decodes as a whole or not at all), or the beginning of a stop
    string. A stop string counts when the token that completes it is number min_tokens or later.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._decoder = _StableDecoder(tokenizer, skip_special=params.skip_special_tokens)
        self._matcher = StopMatcher(params.stops)
        self._min_tokens = params.min_tokens
        self._include_stop = params.include_stop_str_in_output
        self._num_tokens = 0
        self._held = ""
        self._text = ""
        self._stop_reason: str | None = None

    @property
    def text(self) -> str:
        """All text given out so far."""
        return self._text

    @property
    def stop_reason(self) -> str | None:
        """The stop string that was completed; `text` is then final."""
        return self._stop_reason

    def append(self, token_id: int) -> str:
        """Take one more token; the new text that is safe to show, which may be empty. Tokens after
        a completed stop string change nothing."""
        if self._stop_reason is not None:
            return ""
        self._num_tokens += 1
        return self._take(self._decoder.append(token_id))

    def flush(self) -> str:
        """The rest of the text, when the sequence has ended. Bytes that never became a character
        come out as U+FFFD. It may still complete a stop string."""
        if self._stop_reason is not None:
            return ""
        shown = self._take(self._decoder.flush())
        return shown + self._release(len(self._held))

    def _take(self, new: str) -> str:
        start = len(self._held)
        self._held += new
        found = self._matcher.feed(new, armed=self._num_tokens >= self._min_tokens)
        if found is None:
            return self._release(len(self._held) - self._matcher.hold)
        consumed, self._stop_reason = found
        end = start + consumed
        shown = self._release(end if self._include_stop else end - len(self._stop_reason))
        self._held = ""
        return shown

    def _release(self, count: int) -> str:
        shown, self._held = self._held[:count], self._held[count:]
        self._text += shown
        return shown


class LateDetokenizer:
    """The same text for a sequence without stop strings of which nothing is shown before its end:
    decoded once instead of a window for each token."""

    stop_reason: str | None = None
    """Never any."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._skip_special = params.skip_special_tokens
        self._token_ids: list[int] = []
        self._text = ""

    @property
    def text(self) -> str:
        """All text given out so far."""
        return self._text

    def append(self, token_id: int) -> str:
        """Take one more token. Nothing is safe to show."""
        self._token_ids.append(token_id)
        return ""

    def flush(self) -> str:
        """The whole text, when the sequence has ended; nothing more after that."""
        ids, self._token_ids = self._token_ids, []
        new = self._tokenizer.decode(ids, skip_special_tokens=self._skip_special)
        self._text += new
        return new


class _StableDecoder:
    """Token ids to text that no later token can change.

    A window of recent tokens is decoded again for each new one, since what a token reads as
    depends on its neighbours. The window starts where all text before it was final, and keeps at
    least one token with text, so that its first token is not taken for the first of a text.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._window: list[int] = []
        self._shown = 0
        """Characters of the decoded window that were given out."""
        self._settled = 0
        """Tokens at the front of the window after which all text was final."""

    def append(self, token_id: int) -> str:
        if not self._tokenizer.has_text(token_id, skip_special_tokens=self._skip_special):
            return ""
        self._window.append(token_id)
        if self._tokenizer.is_byte(token_id):
            return ""
        text = self._decode(self._window)
        # Of bytes that are no UTF-8, only the last replacement character can still be completed.
        final = len(text) - text.endswith(_REPLACEMENT)
        new = text[self._shown : final]
        self._shown = max(self._shown, final)
        if final == len(text):
            self._settle()
        elif len(self._window) > _NO_TEXT:
            self._cut()
        return new

    def flush(self) -> str:
        new = self._decode(self._window)[self._shown :]
        self._shown += len(new)
        return new

    def _settle(self) -> None:
        """All text is final: remember the place, and forget what lies before the last such place
        once the window is long."""
        if len(self._window) > _WINDOW:
            recent = self._window[self._settled :]
            shown = len(self._decode(recent))
            if shown:
                self._window, self._shown = recent, shown
        self._settled = len(self._window)

    def _cut(self) -> None:
        """The last of many broken characters is still open. It began at most three bytes ago, so
        some tokens more than that decode to the same end as the whole window."""
        recent = self._window[-_WINDOW:]
        text = self._decode(recent)
        if text.endswith(_REPLACEMENT):
            self._window, self._shown, self._settled = recent, len(text) - 1, 0

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)
