"""The seam between the sampler and whatever compiles and follows grammars, and the mask itself.

A `GrammarCompiler` makes a `Grammar` of a `GrammarSpec`, once for all requests that ask for the
same. Each sequence follows it with a `GrammarState` of its own, inside the `Constraint` of its
sampler.
"""

from typing import Protocol

import numpy as np
import numpy.typing as npt

from trtllm_lite.runtime.errors import StepError
from trtllm_lite.runtime.grammar_spec import GrammarSpec

Bools = npt.NDArray[np.bool_]
F32 = npt.NDArray[np.float32]
Ids = npt.NDArray[np.intp]


class GrammarState(Protocol):
    """Where one sequence stands in its grammar. Methods raise StepError when it cannot go on."""

    def allowed(self) -> Bools:
        """[vocab], the caller's to keep: the tokens with which the text can still become a whole
        one. What it says of end tokens that are not special means nothing."""

    def may_stop(self) -> bool:
        """Whether the text so far is a whole one. Asked after `allowed`."""

    def advance(self, token_id: int) -> None:
        """The token, one of the allowed ones, is now part of the text."""


class Grammar(Protocol):
    """A compiled description. Any number of sequences and threads share it."""

    @property
    def usable(self) -> bool:
        """False when a state has failed in a way that may have spoiled what the states share."""

    def start(self) -> GrammarState:
        """The state before the first token."""

    def is_special(self, token_id: int) -> bool:
        """Whether the token stands for no text: only a grammar that names it allows it."""


class GrammarCompiler(Protocol):
    """Makes grammars for one vocabulary. Safe to use from several threads."""

    def compile(self, spec: GrammarSpec) -> Grammar:
        """Raises RequestError, which names `spec.param`, for what cannot be compiled."""


class Constraint:
    """A grammar at work on one sequence: masks its logits, and follows the tokens it chose.

    `end_ids`, the end tokens of the model and the stop tokens of the request, are no part of the
    text. They are allowed exactly where it may stop, or where the grammar itself names a special
    one of them.
    """

    def __init__(self, grammar: Grammar, end_ids: Ids) -> None:
        self._state = grammar.start()
        self._end_ids = end_ids
        ends: list[int] = end_ids.tolist()
        self._ends = frozenset(ends)
        self._special = np.array([grammar.is_special(i) for i in ends], np.bool_)
        self.must_end = False
        """Whether, by the last mask, nothing but an end token may follow."""

    def mask(self, logits: F32) -> F32:
        """A copy of `logits` [vocab] with -inf for every token that may not come next. Raises
        StepError where none may: where a text needs a token that ends it."""
        allowed = self._state.allowed()
        named = allowed[self._end_ids] & self._special
        ends = named | self._state.may_stop()
        allowed[self._end_ids] = False
        self.must_end = not allowed.any()
        if self.must_end and not ends.any():
            raise StepError("the grammar allows no further token, and its text is not complete")
        allowed[self._end_ids] = ends
        masked: F32 = np.where(allowed, logits, np.float32(-np.inf))
        return masked

    def advance(self, token_id: int) -> None:
        """`token_id` was chosen. An end token is the last one."""
        if token_id not in self._ends:
            self._state.advance(token_id)
