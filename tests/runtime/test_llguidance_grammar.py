"""llguidance's masks against a search that tries every token, and what it refuses.

The reference is Brzozowski's derivative (J. ACM 11(4), 1964): what is left to match after a
character. A token may come next where something is left after all of its characters.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from trtllm_lite.runtime.errors import RequestError, StepError
from trtllm_lite.runtime.grammar import Constraint
from trtllm_lite.runtime.grammar_compiler import CachedCompiler, open_llguidance
from trtllm_lite.runtime.grammar_spec import GrammarSpec
from trtllm_lite.runtime.llguidance_grammar import LLGuidanceCompiler, LLGuidanceState

EOS, MARK, PADDING = 0, 1, 3
"""Two special tokens, and ids of the model that the tokenizer does not have."""


def make_tokenizer(alphabet: list[str], merges: list[tuple[str, str]]) -> tokenizers.Tokenizer:
    """Byte-level BPE over `alphabet`, in the byte-level spelling."""
    texts = [*alphabet, *(left + right for left, right in merges)]
    vocab = {"<eos>": EOS, "<mark>": MARK} | {text: i + 2 for i, text in enumerate(texts)}
    raw = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(["<eos>", "<mark>"])
    return raw


def compiler_of(tokenizer: tokenizers.Tokenizer) -> LLGuidanceCompiler:
    size = tokenizer.get_vocab_size(with_added_tokens=True) + PADDING
    return LLGuidanceCompiler(tokenizer.to_str(), size, (EOS,))


FEW = make_tokenizer(
    list("abc"), [("a", "b"), ("b", "c"), ("a", "a"), ("c", "a"), ("ab", "c"), ("aa", "b")]
)
IDS = FEW.get_vocab()
TEXTS = {i: text for text, i in IDS.items() if i not in (EOS, MARK)}
COMPILER = compiler_of(FEW)
VOCAB = len(TEXTS) + 2 + PADDING

Regex = tuple[Any, ...]
NONE, EMPTY = ("none",), ("empty",)


def cat(left: Regex, right: Regex) -> Regex:
    if NONE in (left, right):
        return NONE
    if left == EMPTY or right == EMPTY:
        return right if left == EMPTY else left
    return ("cat", left, right)


def either(left: Regex, right: Regex) -> Regex:
    if left == right or right == NONE:
        return left
    return right if left == NONE else ("either", left, right)


def is_whole(regex: Regex) -> bool:
    """Whether it matches the empty text."""
    kind, *parts = regex
    if kind == "either":
        return any(map(is_whole, parts))
    return kind in ("empty", "star") or (kind == "cat" and all(map(is_whole, parts)))


def after(regex: Regex, text: str) -> Regex:
    """What is left to match, NONE when nothing can."""
    for char in text:
        regex = _after(regex, char)
    return regex


def _after(regex: Regex, char: str) -> Regex:
    match regex:
        case ("char", one):
            return EMPTY if one == char else NONE
        case ("star", inner):
            return cat(_after(inner, char), regex)
        case ("either", left, right):
            return either(_after(left, char), _after(right, char))
        case ("cat", left, right):
            first = cat(_after(left, char), right)
            return either(first, _after(right, char)) if is_whole(left) else first
    return NONE


def pattern(regex: Regex) -> str:
    match regex:
        case ("char", one):
            return str(one)
        case ("star", inner):
            return f"(?:{pattern(inner)})*"
        case ("either", left, right):
            return f"(?:{pattern(left)}|{pattern(right)})"
        case ("cat", left, right):
            return pattern(left) + pattern(right)
    return "(?:)"


def literal(text: str) -> Regex:
    regex: Regex = EMPTY
    for char in text:
        regex = cat(regex, ("char", char))
    return regex


regexes = st.recursive(
    st.sampled_from("abc").map(literal),
    lambda inner: st.one_of(
        st.builds(cat, inner, inner),
        st.builds(either, inner, inner),
        inner.map(lambda r: ("star", r)),
        inner.map(lambda r: either(r, EMPTY)),
    ),
    max_leaves=8,
)


def check_walk(state: LLGuidanceState, regex: Regex, picks: list[int]) -> None:
    """Compare mask and end at each step of a walk that `picks` lead."""
    for pick in picks:
        allowed = state.allowed()
        assert allowed.shape == (VOCAB,)
        got = {int(i) for i in np.flatnonzero(allowed)} - {EOS}
        fits = {i for i, text in TEXTS.items() if after(regex, text) != NONE}
        assert state.may_stop() == is_whole(regex)
        assert got <= fits
        assert bool(got) == bool(fits)
        if is_whole(regex) or len({TEXTS[i][0] for i in fits}) > 1:
            # No way to go on is forced, so none is left out.
            assert got == fits
        if not got:
            return
        token = sorted(got)[pick % len(got)]
        state.advance(token)
        regex = after(regex, TEXTS[token])


walks = st.lists(st.integers(0, 99), min_size=1, max_size=12)


@given(regexes, walks)
@settings(max_examples=150, deadline=None)
def test_a_regex_allows_what_trying_every_token_finds(regex: Regex, picks: list[int]) -> None:
    spec = GrammarSpec.regex(pattern(regex))
    check_walk(COMPILER.compile(spec).start(), regex, picks)


@given(st.lists(st.text("abc", min_size=1, max_size=6), min_size=1, max_size=5), walks)
@settings(max_examples=100, deadline=None)
def test_a_choice_allows_what_trying_every_token_finds(texts: list[str], picks: list[int]) -> None:
    regex = NONE
    for text in texts:
        regex = either(regex, literal(text))
    check_walk(COMPILER.compile(GrammarSpec.choice(texts)).start(), regex, picks)


def test_states_of_one_grammar_know_nothing_of_each_other() -> None:
    grammar = COMPILER.compile(GrammarSpec.choice(["ab", "bc", "ca"]))
    one, other = grammar.start(), grammar.start()
    before = other.allowed().tolist()
    one.advance(IDS["ab"])
    assert (one.may_stop(), other.may_stop()) == (True, False)
    assert other.allowed().tolist() == before
    assert grammar.start().allowed().tolist() == before


def test_a_wrong_token_is_an_error_of_its_state_and_spoils_the_grammar() -> None:
    grammar = COMPILER.compile(GrammarSpec.regex("ab"))
    fine, state = grammar.start(), grammar.start()
    assert grammar.usable
    with pytest.raises(StepError, match=r"^the grammar cannot be followed any further: "):
        state.advance(IDS["c"])
    assert not grammar.usable
    with pytest.raises(StepError):
        state.allowed()
    fine.advance(IDS["ab"])
    assert fine.may_stop()


def test_a_special_token_is_allowed_where_the_grammar_names_it() -> None:
    assert [COMPILER.compile(GrammarSpec.regex("a")).is_special(i) for i in (EOS, MARK, 2)] == [
        True,
        True,
        False,
    ]
    grammar = COMPILER.compile(GrammarSpec.lark('start: <mark> "ab" <mark>\n'))
    constraint = Constraint(grammar, np.array([EOS, MARK]))
    logits = np.zeros(VOCAB, np.float32)
    steps = []
    state = grammar.start()
    for token in (MARK, IDS["ab"]):
        steps.append(np.flatnonzero(state.allowed()).tolist())
        state.advance(token)
    assert steps[0] == [MARK]
    assert IDS["ab"] in steps[1]
    # As a stop token of the request it is still the grammar's own.
    assert np.flatnonzero(np.isfinite(constraint.mask(logits))).tolist() == [MARK]


def test_free_text_holds_no_special_token() -> None:
    state = COMPILER.compile(GrammarSpec.regex("(?s:.*)")).start()
    allowed = state.allowed()
    assert not allowed[MARK]
    assert not allowed[-PADDING:].any()
    assert allowed[sorted(TEXTS)].all()
    assert state.may_stop()


@pytest.mark.parametrize("text", ["(", "a(?=b)", "[z-a]", "a{3,2}", r"(a)\1", "*"])
def test_a_regex_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match=r"^guided_regex: the regex cannot be used: "):
        COMPILER.compile(GrammarSpec.regex(text, param="guided_regex"))


def test_a_text_that_nothing_can_write_is_refused() -> None:
    with pytest.raises(RequestError, match=r"^grammar: the regex cannot be used: "):
        COMPILER.compile(GrammarSpec.regex("[^abc]"))


def test_a_tokenizer_without_bytes_or_end_token_is_refused() -> None:
    words = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1}, "a"))
    for text, ends in ((words.to_str(), (0,)), (FEW.to_str(), ()), (FEW.to_str(), (VOCAB,))):
        compiler = CachedCompiler(_opener(text, ends))
        with pytest.raises(RequestError, match=r"^grammar: grammars cannot be used with"):
            compiler.compile(GrammarSpec.regex("a"))


def _opener(text: str, ends: tuple[int, ...]) -> Callable[[], Any]:
    return lambda: open_llguidance(text, VOCAB, ends)
