"""Log-probabilities of tokens in the shape of chat completions."""

from collections.abc import Callable, Mapping
from typing import Any

from trtllm_lite.runtime.outputs import Logprob


class TokenScores:
    """Makes the entries of `logprobs.content`. `token_bytes`: the bytes of a token id; joined over
    an answer they are its UTF-8, although one token may hold a part of a character only. `top`: how
    many alternatives are shown."""

    def __init__(self, token_bytes: Callable[[int], bytes], top: int) -> None:
        self._token_bytes = token_bytes
        self._top = top

    def entry(self, scores: Mapping[int, Logprob]) -> dict[str, Any]:
        """Of one place in the text: `scores` has the token that was taken first."""
        taken = next(iter(scores.items()))
        best = sorted(scores.items(), key=lambda each: each[1].rank)[: self._top]
        return {**self._token(*taken), "top_logprobs": [self._token(*each) for each in best]}

    def _token(self, token_id: int, score: Logprob) -> dict[str, Any]:
        return {
            "token": score.decoded_token,
            "logprob": score.logprob,
            "bytes": list(self._token_bytes(token_id)),
        }
