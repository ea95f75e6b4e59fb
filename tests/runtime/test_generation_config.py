"""generation_config.json as defaults: what is taken, what is left alone, what is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trtllm_lite.runtime.bundle import open_bundle
from trtllm_lite.runtime.errors import BundleError
from trtllm_lite.runtime.generation_config import (
    GenerationDefaults,
    parse_generation_config,
    read_generation_config,
)
from trtllm_lite.runtime.sampling_params import SamplingParams


def parsed(**document: Any) -> GenerationDefaults:
    return parse_generation_config(document, vocab_size=100)


def test_every_known_key_is_taken_when_sampling() -> None:
    document = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1}
    made = parsed(**document, repetition_penalty=1.1, max_new_tokens=77, eos_token_id=[3, 5, 3])
    assert made.params == SamplingParams(
        temperature=0.6, top_k=20, top_p=0.95, min_p=0.1, repetition_penalty=1.1, max_tokens=77
    )
    assert made.eos_token_ids == (3, 5)


def test_do_sample_false_is_greedy_whatever_else_is_said() -> None:
    made = parsed(do_sample=False, temperature=0.6, top_p=0.5, repetition_penalty=1.2)
    assert made.params == SamplingParams(temperature=0.0, repetition_penalty=1.2)


@pytest.mark.parametrize(
    ("document", "temperature"),
    [
        ({}, 0.0),
        ({"bos_token_id": 1, "max_length": 4096, "_from_model_config": True}, 0.0),
        ({"temperature": None, "top_k": None}, 0.0),
        ({"do_sample": True}, 1.0),
        ({"top_p": 0.9}, 1.0),
        ({"temperature": 0.7}, 0.7),
    ],
)
def test_an_absent_do_sample_follows_the_sampling_values(
    document: dict[str, Any], temperature: float
) -> None:
    assert parsed(**document).params.temperature == temperature


def test_a_single_end_token() -> None:
    assert parsed(eos_token_id=0).eos_token_ids == (0,)
    assert parsed(eos_token_id=None).eos_token_ids == ()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("do_sample", "yes"),
        ("do_sample", 1),
        ("temperature", -1),
        ("temperature", "0.5"),
        ("temperature", True),
        ("top_k", 1.5),
        ("top_p", 0),
        ("min_p", 2),
        ("repetition_penalty", 0),
        ("max_new_tokens", 0),
        ("eos_token_id", 100),
        ("eos_token_id", [1, True]),
        ("eos_token_id", "2"),
    ],
)
def test_bad_values_are_refused_by_their_own_name(key: str, value: Any) -> None:
    with pytest.raises(BundleError) as caught:
        parsed(**{"do_sample": True, key: value})
    assert caught.value.field == f"generation_config.{key}"


def test_reading_from_a_bundle(plain_bundle: Path, put_file: Callable[[str, bytes], None]) -> None:
    put_file("generation_config.json", b'{"do_sample": true, "top_k": 7, "eos_token_id": 4}')
    made = read_generation_config(open_bundle(plain_bundle))
    assert made == GenerationDefaults(SamplingParams(top_k=7), (4,))


@pytest.mark.parametrize(
    "data", [b"[]", b"{", b'{"top_k": 1, "top_k": 2}', b"\xff", b'{"top_p": NaN}']
)
def test_a_damaged_file_is_refused(
    plain_bundle: Path, put_file: Callable[[str, bytes], None], data: bytes
) -> None:
    put_file("generation_config.json", data)
    with pytest.raises(BundleError) as caught:
        read_generation_config(open_bundle(plain_bundle))
    assert caught.value.field == "generation_config"


def test_without_the_file_the_defaults_are_greedy(
    plain_bundle: Path, edit_manifest: Callable[[Callable[[dict[str, Any]], None]], None]
) -> None:
    edit_manifest(lambda document: document.update(generation_config=None))
    made = read_generation_config(open_bundle(plain_bundle))
    assert made == GenerationDefaults(SamplingParams(temperature=0.0), ())
