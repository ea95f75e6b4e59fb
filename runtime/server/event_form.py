"""How the parts of a streamed answer become server-sent events
(https://html.spec.whatwg.org/multipage/server-sent-events.html)."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from trtllm_lite.runtime.server.exchange import DONE, frame


@dataclass(frozen=True)
class EventForm:
    """named: an event bears the "type" of its data as its name. end: what follows the last one of
    a stream that ends well."""

    named: bool
    end: bytes

    def frames(self, parts: Iterable[Mapping[str, Any]]) -> bytes:
        """The events, one behind the other."""
        return b"".join(map(self._frame, parts))

    def _frame(self, part: Mapping[str, Any]) -> bytes:
        data = frame(orjson.dumps(part))
        return b"event: " + part["type"].encode() + b"\n" + data if self.named else data


DATA_ONLY = EventForm(named=False, end=DONE)
"""OpenAI's completions."""
NAMED = EventForm(named=True, end=b"")
"""OpenAI's responses, and Anthropic's messages."""
