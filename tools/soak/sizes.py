"""How long prompts and answers are, in a context of a given length."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """short, long: words of a prompt. answer, endless: tokens of an ordinary answer, and of one
    that its client does not wait for."""

    short: int
    long: int
    answer: int
    endless: int

    @classmethod
    def of(cls, room: int) -> "Sizes":
        """`room`: tokens of the context. A word is taken for five, with as much for the template
        as in a small model."""
        return cls(
            short=4 if room < 1024 else 8,
            long=min(400, room // 16),
            answer=min(48, room // 8),
            endless=min(2000, room // 3),
        )
