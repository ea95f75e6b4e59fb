"""Grammars of the llguidance library (MIT): an Earley parser over derivatives of regexes.

It is native code that works in the tokens of the bundle's own tokenizer.json. Where the grammar
leaves one way to go on, it allows only the token that the tokenizer itself would write there, so
the mask holds a part of all tokens that fit, never one that does not.
"""

import json
import logging

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from trtllm_lite.runtime.errors import RequestError, StepError
from trtllm_lite.runtime.grammar import Bools
from trtllm_lite.runtime.grammar_spec import GrammarSpec
from trtllm_lite.runtime.json_schema_rules import ALLOWED_ESCAPES, tightened

_log = logging.getLogger(__name__)

MAX_GRAMMAR_SIZE = 200_000
"""Symbols in productions."""
MAX_LEXER_STATES = 50_000
"""Of one grammar, at one to two kilobytes each. They are made as texts reach them."""
WHITESPACE = r" {1,32}|\n {0,32}"
"""Between the tokens of JSON: what indents it. A model that writes only white space never ends."""
_LONGEST_REASON = 300


class LLGuidanceCompiler:
    """Compiles for one vocabulary: that of `tokenizer_json`, padded to the `vocab_size` of the
    model. Making one takes about as long as making the tokenizer.

    Raises ValueError for a bundle without an end token below `vocab_size`, and that or a panic of
    the library, which is no Exception, for a tokenizer whose tokens it cannot turn into bytes.
    """

    def __init__(
        self, tokenizer_json: str, vocab_size: int, eos_token_ids: tuple[int, ...]
    ) -> None:
        ends = [token for token in eos_token_ids if token < vocab_size]
        if not ends:
            raise ValueError("it has no end token, which every text needs")
        self._vocab_size = vocab_size
        self._table = LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=ends[0])

    def compile(self, spec: GrammarSpec) -> "LLGuidanceGrammar":
        """See `GrammarCompiler`. The first mask is part of it, so that what is too complex to be
        used is refused here."""
        try:
            source = _source(spec)
        except ValueError as error:
            raise RequestError(spec.param, _reason(spec, str(error))) from None
        matcher = LLMatcher(self._table, source, log_level=0, limits=_limits())
        first = matcher.deep_copy()
        first.compute_bitmask()
        for one in (matcher, first):
            if one.is_error():
                raise RequestError(spec.param, _reason(spec, one.get_error()))
        for warning in matcher.get_grammar_warnings():
            _log.debug("a grammar of kind %s: %s", spec.kind, warning)
        return LLGuidanceGrammar(self._table, matcher, self._vocab_size)


class LLGuidanceGrammar:
    """A `Grammar`. Its states share what the library learns about its lexer, up to
    MAX_LEXER_STATES in all."""

    def __init__(self, table: LLTokenizer, matcher: LLMatcher, vocab_size: int) -> None:
        self._table = table
        self._matcher = matcher
        self._usable = True
        self.vocab_size = vocab_size

    @property
    def usable(self) -> bool:
        return self._usable

    def start(self) -> "LLGuidanceState":
        return LLGuidanceState(self, self._matcher.deep_copy())

    def is_special(self, token_id: int) -> bool:
        return self._table.is_special_token(token_id)

    def spoiled(self) -> None:
        """One of its states has failed."""
        self._usable = False


class LLGuidanceState:
    """A `GrammarState`."""

    def __init__(self, grammar: LLGuidanceGrammar, matcher: LLMatcher) -> None:
        self._grammar = grammar
        self._matcher = matcher

    def allowed(self) -> Bools:
        words = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        count = self._grammar.vocab_size
        return np.unpackbits(words, count=count, bitorder="little").view(np.bool_)

    def may_stop(self) -> bool:
        # A matcher that has stopped without an error has read a whole text.
        return self._matcher.is_stopped() or self._matcher.is_accepting()

    def advance(self, token_id: int) -> None:
        self._matcher.consume_token(token_id)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            self._grammar.spoiled()
            reason = _one_line(self._matcher.get_error())
            raise StepError(f"the grammar cannot be followed any further: {reason}")


def _limits() -> LLParserLimits:
    """What one grammar and one mask may cost. The library's defaults bound the work besides: about
    20 ms for making a grammar's lexer and 15 ms for a mask."""
    return LLParserLimits(
        max_lexer_states=MAX_LEXER_STATES,
        max_grammar_size=MAX_GRAMMAR_SIZE,
        verbose_errors=False,
    )


def _source(spec: GrammarSpec) -> str:
    """The description in the library's own form. Raises ValueError for what is no JSON, and for
    schemas that nothing can be made of."""
    match spec.kind:
        case "json_object":
            return _json_source('{"type":"object"}')
        case "json_schema":
            return _json_source(spec.text)
        case "regex":
            return LLMatcher.grammar_from_regex(spec.text)
        case "choice":
            texts: list[str] = json.loads(spec.text)
            # As one terminal they are one automaton, in which no choice hides another.
            one_of = " | ".join(map(json.dumps, texts))
            return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {one_of}\n")
        case "lark":
            return LLMatcher.grammar_from_lark(spec.text)


def _json_source(schema: str) -> str:
    """Whatever the schema itself says of these options counts for nothing. Raises ValueError."""
    return LLMatcher.grammar_from_json_schema(
        json.dumps(tightened(json.loads(schema))),
        overrides={
            "whitespace_pattern": WHITESPACE,
            "item_separator": ",",
            "key_separator": ":",
            "coerce_one_of": False,
            "lenient": False,
            "json_allowed_escapes": ALLOWED_ESCAPES,
        },
    )


def _reason(spec: GrammarSpec, error: str) -> str:
    if "coerce_one_of" in error:
        # What the library advises is not for callers of ours.
        error = "the keyword oneOf is supported where no value fits two cases; use anyOf"
    return f"the {spec.kind} cannot be used: {_one_line(error)}"


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST_REASON else f"{line[:_LONGEST_REASON]}..."
