"""Option types: numbers with suffixes, lists, biases; one option a sampling field."""

from dataclasses import fields

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtllm_lite.runtime.sampling_params import SamplingParams
from trtllm_lite.tools.generate import generate
from trtllm_lite.tools.options import SUFFIXES, Count, CountList, LogitBias, Text, parse_count
from trtllm_lite.tools.sampling_options import sampling_params


@given(st.integers(0, 10**6), st.sampled_from(sorted(SUFFIXES)))
def test_a_number_is_itself_times_its_suffix(number: int, suffix: str) -> None:
    assert parse_count(f"{number}{suffix}") == number * SUFFIXES[suffix]


@given(st.integers(0, 10**6))
def test_a_fraction_counts_when_the_product_is_whole(thousandths: int) -> None:
    text = f"{thousandths // 1000}.{thousandths % 1000:03d}k"
    assert parse_count(text) == thousandths


@pytest.mark.parametrize("text", ["", "k", "1.5", "4kb", "0x10", "1e3", "nan", "1,5", "1.0001k"])
def test_what_is_no_whole_number_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="number"):
        parse_count(text)


@pytest.mark.parametrize("value", ["0", 0, "-4", True])
def test_a_count_has_a_minimum(value: object) -> None:
    with pytest.raises(click.BadParameter, match="from 1 on"):
        Count().convert(value, None, None)


def test_lists_come_as_text_or_as_a_list() -> None:
    assert CountList().convert("128, 1k,2K", None, None) == (128, 1000, 2048)
    assert CountList(0).convert([0, "1k"], None, None) == (0, 1000)
    with pytest.raises(click.BadParameter):
        CountList().convert("1,,2", None, None)


def test_a_bias_comes_as_text_or_as_a_table() -> None:
    assert LogitBias().convert("5=-100,7=1.5", None, None) == {5: -100.0, 7: 1.5}
    assert LogitBias().convert({"5": -100}, None, None) == {5: -100.0}
    for wrong in ("5", "5=", "a=1", "5=1;6=2"):
        with pytest.raises(click.BadParameter, match="ID=BIAS"):
            LogitBias().convert(wrong, None, None)


def test_text_of_the_environment_is_one_value() -> None:
    assert Text().split_envvar_value("User: \n") == ["User: \n"]


def test_every_sampling_field_has_its_option() -> None:
    """But grammars, which are objects."""
    options = {param.name for param in generate.params}
    assert {field.name for field in fields(SamplingParams)} - {"grammar"} <= options


def test_given_values_replace_the_defaults_and_others_stay() -> None:
    defaults = SamplingParams(temperature=0.5, top_k=7, stop=("a",))
    values = {"temperature": 0.0, "top_k": None, "stop": (), "seed": 3, "unrelated": 1}
    assert sampling_params(values, defaults) == SamplingParams(
        temperature=0.0, top_k=7, stop=("a",), seed=3
    )
    assert values == {"unrelated": 1}


def test_a_value_out_of_range_names_the_option() -> None:
    with pytest.raises(click.UsageError, match=r"^--top-p: got 2\.0; allowed: \(0, 1\]$"):
        sampling_params({"top_p": 2.0}, SamplingParams())
