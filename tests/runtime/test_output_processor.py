"""Events to results, without an engine."""

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from trtllm_lite.runtime.output_processor import OutputProcessor, Stop
from trtllm_lite.runtime.outputs import Logprob, RequestOutput, TokenEvent
from trtllm_lite.runtime.request import FinishReason, Request
from trtllm_lite.runtime.sampling_params import SamplingParams
from trtllm_lite.runtime.tokenizer import Tokenizer

EOS = 0


def make_tokenizer() -> Tokenizer:
    """One token a byte, for ASCII letters and the bytes of two longer characters."""
    alphabet = sorted({*"abcdefgh xyz", *_byte_names("é😀")})
    vocab = {"<eos>": EOS} | {name: i + 1 for i, name in enumerate(alphabet)}
    raw = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(["<eos>"])
    return Tokenizer(raw)


def _byte_names(text: str) -> str:
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(text)
    return "".join(piece for piece, _ in pieces)


TOKENIZER = make_tokenizer()


class Setup:
    """A processor, a clock that is set by hand, and one request with id "r"."""

    def __init__(
        self,
        *,
        prompt: str | None = "hi",
        final_only: bool = False,
        tokenizer: Tokenizer | None = TOKENIZER,
        **params: object,
    ) -> None:
        self.now = 10.0
        self.processor = OutputProcessor(tokenizer, clock=lambda: self.now)
        made = SamplingParams(**params)  # type: ignore[arg-type]  # any parameter
        self.processor.add(Request("r", (1, 2), made, 7.0), prompt, final_only=final_only)
        self.stops: list[Stop] = []

    def feed(self, *events: TokenEvent) -> RequestOutput | None:
        processed = self.processor.process(events)
        self.stops += processed.stops
        return processed.outputs[0] if processed.outputs else None

    def tokens(self, text: str, index: int = 0) -> Iterator[RequestOutput]:
        """One event and one result a token."""
        for token in TOKENIZER.encode(text):
            result = self.feed(event(token, index))
            if result is not None:
                yield result


def event(token: int | None, index: int = 0, **more: object) -> TokenEvent:
    return TokenEvent("r", index, token, **more)  # type: ignore[arg-type]  # any field


@given(st.lists(st.integers(1, TOKENIZER.vocab_size - 1), max_size=30), st.data())
def test_deltas_concatenate_to_the_decoded_text(ids: list[int], data: st.DataObject) -> None:
    """Whatever the tokens, and however the events are spread over calls."""
    setup, shown = Setup(), ""
    events = [*map(event, ids), event(EOS, finish_reason="stop")]
    while events:
        count = data.draw(st.integers(1, len(events)))
        result = setup.feed(*events[:count])
        events = events[count:]
        assert result is not None
        shown += result.outputs[0].delta
        assert result.outputs[0].text == shown
        shown.encode("utf-8")
    assert result is not None
    assert result.finished
    assert shown == TOKENIZER.decode(ids)
    assert result.outputs[0].token_ids == (*ids, EOS)


def test_results_are_snapshots() -> None:
    setup = Setup(logprobs=0)
    first = setup.feed(event(3, logprobs={3: (-1.0, 1)}))
    setup.feed(event(4, logprobs={4: (-2.0, 1)}))
    assert first is not None
    assert first.outputs[0].token_ids == (3,)
    assert first.outputs[0].logprobs is not None
    assert len(first.outputs[0].logprobs) == 1
    assert not first.finished


def test_an_unfinished_character_waits_for_its_last_byte() -> None:
    deltas = [result.outputs[0].delta for result in Setup().tokens("a😀é")]
    assert deltas == ["a", "", "", "", "😀", "", "é"]


def test_a_stop_string_over_token_borders_ends_the_choice_and_is_reported() -> None:
    setup = Setup(stop=["cdx", "de"])
    results = list(setup.tokens("abcdefg"))
    assert [r.outputs[0].delta for r in results] == ["a", "b", "", "", "c"]
    last = results[-1]
    assert last.finished
    assert last.outputs[0].text == "abc"
    assert last.outputs[0].finish_reason == "stop"
    assert last.outputs[0].stop_reason == "de"
    assert len(last.outputs[0].token_ids) == 5
    assert setup.stops == [Stop("r", 0, "de")]


def test_events_after_a_stop_string_change_nothing() -> None:
    setup = Setup(stop="b", n=2)
    (stopped,) = list(setup.tokens("ab"))[1:]
    late = setup.feed(event(5, finish_reason="length"))
    assert late is not None
    assert late.outputs[0].token_ids == stopped.outputs[0].token_ids
    assert late.outputs[0].finish_reason == "stop"
    assert len(setup.stops) == 1


def test_a_stop_string_wins_over_the_length_that_its_token_reaches() -> None:
    setup = Setup(stop="b")
    setup.feed(event(TOKENIZER.encode("a")[0]))
    result = setup.feed(event(TOKENIZER.encode("b")[0], finish_reason="length"))
    assert result is not None
    assert (result.outputs[0].finish_reason, result.outputs[0].stop_reason) == ("stop", "b")
    assert result.outputs[0].text == "a"
    assert setup.stops == []


@pytest.mark.parametrize(("reason", "expected"), [("length", "stop"), ("abort", "abort")])
def test_a_stop_string_that_only_the_end_completes(reason: str, expected: str) -> None:
    """The last byte is held back as the beginning of a character until there is no more."""
    setup = Setup(stop="\ufffd")
    setup.feed(event(TOKENIZER.encode("a")[0]))
    setup.feed(event(TOKENIZER.encode("é")[0]))
    result = setup.feed(event(None, finish_reason=reason))
    assert result is not None
    assert result.outputs[0].finish_reason == expected
    assert result.outputs[0].text == "a"


def test_held_back_text_comes_out_at_the_end() -> None:
    setup = Setup(stop="abx")
    held = list(setup.tokens("ab"))
    last = setup.feed(event(EOS, finish_reason="stop"))
    assert [r.outputs[0].text for r in held] == ["", ""]
    assert last is not None
    assert (last.outputs[0].text, last.outputs[0].delta) == ("ab", "ab")


def test_a_stop_token_is_a_token_but_no_text() -> None:
    setup = Setup(stop_token_ids=[5], include_stop_str_in_output=True)
    result = setup.feed(event(5, finish_reason="stop", stop_reason=5))
    assert result is not None
    assert result.outputs[0].token_ids == (5,)
    assert result.outputs[0].text == ""
    assert result.outputs[0].stop_reason == 5


@pytest.mark.parametrize(("reason", "error"), [("error", "it broke"), ("abort", None)])
def test_an_end_without_a_token_keeps_what_there_was(reason: str, error: str | None) -> None:
    setup = Setup()
    list(setup.tokens("ab"))
    result = setup.feed(event(None, finish_reason=reason, error=error))
    assert result is not None
    assert result.finished
    assert result.outputs[0].text == "ab"
    assert result.outputs[0].finish_reason == reason
    assert result.outputs[0].error == error


def test_a_request_is_finished_with_its_last_choice() -> None:
    setup = Setup(n=2)
    list(setup.tokens("ab", index=1))
    first = setup.feed(event(EOS, 1, finish_reason="stop"))
    (second,) = setup.tokens("c", index=0)
    last = setup.feed(event(EOS, 0, finish_reason="stop"))
    assert first is not None
    assert not first.finished
    assert [c.delta for c in second.outputs] == ["c", ""]
    assert last is not None
    assert last.finished
    assert [(c.index, c.text, c.finish_reason) for c in last.outputs] == [
        (0, "c", "stop"),
        (1, "ab", "stop"),
    ]
    assert setup.processor.unfinished == ()


def test_logprobs_have_their_text_and_add_up() -> None:
    setup = Setup(logprobs=1)
    a, b = TOKENIZER.encode("ab")
    setup.feed(event(a, logprobs={a: (-0.5, 1), b: (-1.5, 2)}))
    result = setup.feed(event(b, logprobs={b: (-2.0, 3), a: (-0.25, 1)}, finish_reason="length"))
    assert result is not None
    assert result.outputs[0].logprobs == [
        {a: Logprob(-0.5, 1, "a"), b: Logprob(-1.5, 2, "b")},
        {b: Logprob(-2.0, 3, "b"), a: Logprob(-0.25, 1, "a")},
    ]
    assert list(result.outputs[0].logprobs[1]) == [b, a]
    assert result.outputs[0].cumulative_logprob == pytest.approx(-2.5)


def test_without_logprobs_there_is_no_sum() -> None:
    (result,) = Setup().tokens("a")
    assert result.outputs[0].logprobs is None
    assert result.outputs[0].cumulative_logprob is None


def test_prompt_logprobs_stay_from_the_first_token_on() -> None:
    setup = Setup(prompt_logprobs=0)
    token = TOKENIZER.encode("x")[0]
    setup.feed(event(3, prompt_logprobs=[None, {token: (-1.0, 4)}]))
    result = setup.feed(event(3))
    assert result is not None
    assert result.prompt_logprobs == [None, {token: Logprob(-1.0, 4, "x")}]


def test_times() -> None:
    setup = Setup()
    setup.now = 12.0
    first = setup.feed(event(3, first_scheduled_time=8.5))
    setup.now = 13.0
    setup.feed(event(3, first_scheduled_time=8.5))
    setup.now = 16.0
    last = setup.feed(event(3, finish_reason="length", first_scheduled_time=8.5))
    assert first is not None
    assert (first.metrics.queue_time, first.metrics.ttft) == (1.5, 5.0)
    assert first.metrics.finished_time is None
    assert first.metrics.tpot is None
    assert last is not None
    assert last.metrics.tpot == pytest.approx((16.0 - 12.0) / 2)
    assert last.metrics.num_generation_tokens == 3
    assert last.metrics.finished_time == 16.0


def test_a_request_that_never_ran_has_no_times() -> None:
    result = Setup().feed(event(None, finish_reason="abort"))
    assert result is not None
    assert result.metrics.queue_time is None
    assert result.metrics.ttft is None
    assert not math.isnan(result.metrics.arrival_time)


def test_cached_tokens_are_those_of_the_first_choices_first_token() -> None:
    setup = Setup(n=2)
    setup.feed(event(3, 1, cached_tokens=64))
    setup.feed(event(3, 0, cached_tokens=32))
    result = setup.feed(event(3, 0, cached_tokens=96))
    assert result is not None
    assert result.cached_tokens == 32


@pytest.mark.parametrize("last", [None, "length"])
def test_what_comes_behind_a_stop_string_in_one_step_is_dropped(last: FinishReason | None) -> None:
    setup = Setup(stop="b")
    ids = TOKENIZER.encode("abcd")
    *most, end = (event(token, accepted_tokens=3) for token in ids)
    result = setup.feed(*most, replace(end, finish_reason=last))
    assert result is not None
    (choice,) = result.outputs
    assert (choice.text, choice.delta) == ("a", "a")
    assert choice.token_ids == tuple(ids[:2])
    assert (choice.finish_reason, choice.stop_reason) == ("stop", "b")
    assert result.finished
    assert set(setup.stops) == {Stop("r", 0, "b")}
    assert setup.feed(event(ids[0])) is None


def test_guesses_are_counted_over_all_choices() -> None:
    setup = Setup(n=2)
    setup.feed(event(3, 0, draft_tokens=4, accepted_tokens=1))
    setup.feed(event(3, 1, draft_tokens=2, accepted_tokens=2))
    result = setup.feed(event(3, 0, draft_tokens=8, accepted_tokens=3))
    assert result is not None
    assert (result.metrics.num_draft_tokens, result.metrics.num_accepted_tokens) == (10, 5)


def test_a_final_only_request_gives_one_result_with_all_text() -> None:
    setup = Setup(final_only=True)
    assert list(setup.tokens("abc")) == []
    result = setup.feed(event(EOS, finish_reason="stop"))
    assert result is not None
    assert (result.outputs[0].text, result.outputs[0].delta) == ("abc", "abc")
    assert (result.prompt, result.prompt_token_ids) == ("hi", (1, 2))


@given(
    st.lists(st.integers(1, TOKENIZER.vocab_size - 1), max_size=30),
    st.sampled_from([(), "b", "cd"]),
    st.sampled_from(["stop", "length", "abort", "error"]),
)
def test_a_final_only_result_is_the_last_one_of_a_stream(
    ids: list[int], stop: str | tuple[str, ...], reason: str
) -> None:
    """But for the delta, which is all of its text."""
    streamed, whole = Setup(stop=stop), Setup(stop=stop, final_only=True)
    last: RequestOutput | None = None
    final: RequestOutput | None = None
    for one in [*map(event, ids), event(None, finish_reason=reason)]:
        last = streamed.feed(one) or last
        final = whole.feed(one) or final
    assert last is not None
    assert final is not None
    assert final.outputs[0] == replace(last.outputs[0], delta=last.outputs[0].text)
    assert whole.stops == streamed.stops


def test_unknown_and_forgotten_requests_give_nothing() -> None:
    setup = Setup()
    setup.processor.forget("r")
    setup.processor.forget("never")
    assert setup.feed(event(3), event(EOS, finish_reason="stop")) is None


def test_without_a_tokenizer_there_are_tokens_and_no_text() -> None:
    setup = Setup(tokenizer=None, prompt=None, logprobs=0)
    result = setup.feed(event(3, logprobs={3: (-1.0, 1)}, finish_reason="length"))
    assert result is not None
    assert result.outputs[0].token_ids == (3,)
    assert result.outputs[0].text == ""
    assert result.outputs[0].logprobs == [{3: Logprob(-1.0, 1, "")}]
