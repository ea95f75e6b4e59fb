"""How many tokens of an answer were reasoning."""

from collections.abc import Sequence

from trtllm_lite.runtime.server.parsers.reasoning import CLOSING
from trtllm_lite.runtime.tokenizer import Tokenizer


def count_thought(tokenizer: Tokenizer, ids: Sequence[int], text: str) -> int:
    """Tokens up to the end of `</think>`; all of them where the text has none. `text` is that of
    `ids`, and begins with reasoning."""
    if CLOSING not in text:
        return len(ids)
    tag = tokenizer.encode(CLOSING, add_special_tokens=False)
    if len(tag) == 1 and tag[0] in ids:
        return list(ids).index(tag[0]) + 1
    return _shortest(tokenizer, ids)


def _shortest(tokenizer: Tokenizer, ids: Sequence[int]) -> int:
    """Length of the shortest beginning of `ids` whose text has the tag: found by halving, since a
    longer one has it too."""
    low, high = 0, len(ids)
    while low < high:
        middle = (low + high) // 2
        if CLOSING in tokenizer.decode(ids[:middle], skip_special_tokens=False):
            high = middle
        else:
            low = middle + 1
    return high
