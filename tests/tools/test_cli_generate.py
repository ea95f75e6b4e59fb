"""generate: where prompts come from, what reaches the engine, and what is printed where."""

import json
import os
from dataclasses import replace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from trtllm_lite.runtime.sampling_params import SamplingParams
from trtllm_lite.tools import generate as generate_module
from trtllm_lite.tools.cli import cli
from trtllm_lite.tools.console import Console

ScriptedLLM = Any  # of conftest.py, which cannot be imported


def run(*args: str, stdin: str | bytes | None = None) -> Result:
    return CliRunner().invoke(cli, ["generate", *args], input=stdin)


def test_a_prompt_gives_its_text_and_a_line_of_figures(scripted_llm: ScriptedLLM) -> None:
    result = run("bundle", "hello there")
    assert result.stdout == "<there>\n"
    assert result.stderr == (
        "TTFT 500.0 ms, TPOT 166.7 ms, 6.0 tokens/s (11 prompt tokens, 3 cached; 7 new)\n"
    )
    assert result.exit_code == 0
    assert scripted_llm.closed == 1


@pytest.mark.parametrize("args", [(), ("-",)])
def test_stdin_is_one_prompt(scripted_llm: ScriptedLLM, args: tuple[str, ...]) -> None:
    result = run("bundle", *args, stdin="two\nlines\n")
    assert scripted_llm.prompts == ["two\nlines"]
    assert result.stdout == "<lines>\n"


def test_several_prompts_run_together_and_are_told_apart(scripted_llm: ScriptedLLM) -> None:
    result = run("bundle", "a", "-", "--n", "2", stdin="b")
    assert scripted_llm.prompts == ["a", "b"]
    assert result.stdout.splitlines() == [
        *("--- prompt 1, choice 1", "<a>", "--- prompt 1, choice 2", "<a>"),
        *("--- prompt 2, choice 1", "<b>", "--- prompt 2, choice 2", "<b>"),
    ]
    assert "2 requests, 12 tokens in 1.50 s, 8.0 tokens/s" in result.stderr


def test_chat_puts_prompts_through_the_template(scripted_llm: ScriptedLLM) -> None:
    run("bundle", "hi", "yo", "--chat", "--system", "be kind")
    assert scripted_llm.prompts == [
        "system: be kind\nuser: hi\n",
        "system: be kind\nuser: yo\n",
    ]


def test_every_sampling_option_arrives(scripted_llm: ScriptedLLM) -> None:
    options = {
        **{"--n": "2", "--temperature": "0.25", "--top-k": "5", "--top-p": "0.5", "--min-p": "0.1"},
        **{"--repetition-penalty": "1.5", "--presence-penalty": "-1", "--frequency-penalty": "1"},
        **{"--logit-bias": "3=-5", "--seed": "9", "--max-tokens": "1k", "--min-tokens": "2"},
        **{"--stop": "END now", "--stop-token-ids": "4,5", "--logprobs": "1"},
        **{"--prompt-logprobs": "2"},
    }
    flags = ("--ignore-eos", "--include-stop-str-in-output", "--no-skip-special-tokens", "--json")
    result = run("b", "x", *(part for pair in options.items() for part in pair), *flags)
    assert result.exit_code == 0, result.output
    assert scripted_llm.params == [
        SamplingParams(
            **{"n": 2, "temperature": 0.25, "top_k": 5, "top_p": 0.5, "min_p": 0.1},  # type: ignore[arg-type]
            repetition_penalty=1.5,
            presence_penalty=-1.0,
            frequency_penalty=1.0,
            logit_bias={3: -5.0},
            seed=9,
            max_tokens=1000,
            min_tokens=2,
            stop=("END now",),
            stop_token_ids=(4, 5),
            logprobs=1,
            prompt_logprobs=2,
            ignore_eos=True,
            include_stop_str_in_output=True,
            skip_special_tokens=False,
        )
    ]


def test_without_options_the_bundle_decides(scripted_llm: ScriptedLLM) -> None:
    scripted_llm.defaults = SamplingParams(temperature=0.3, top_k=7)
    run("b", "x")
    assert scripted_llm.params == [replace(scripted_llm.defaults, max_tokens=256)]


@pytest.mark.parametrize(("size", "expected"), [(1000, 256), (100, 60), (40, 256)])
def test_max_tokens_is_what_the_context_leaves(
    scripted_llm: ScriptedLLM, size: int, expected: int
) -> None:
    scripted_llm.max_model_len = size
    result = run("b", "y" * 40)
    assert [p.max_tokens for p in scripted_llm.params] == [expected]
    assert ("maximum context length" in result.stderr) == (size == 40)
    assert result.exit_code == (2 if size == 40 else 0)


def test_engine_options_arrive(scripted_llm: ScriptedLLM) -> None:
    run("b", "x")
    run(
        *("b", "x", "--max-num-seqs", "2", "--max-model-len", "64", "--threads", "3", "--spin"),
        *("--max-num-batched-tokens", "32", "--no-prefix-caching", "--no-hash-check"),
        *("--no-host-cache", "--no-huge-pages"),
        *("--kernels", "onnxruntime", "--rounding", "exact", "--kv-dtype", "float16"),
        *("--backend", "onnxruntime", "--provider", "tensorrt"),
    )
    default, given = (dict(opened) for opened in scripted_llm.opened)
    assert str(given.pop("bundle")) == str(default.pop("bundle")) == "b"
    assert default == {
        **{"host_cache": True, "check_hashes": True, "enable_prefix_caching": True},
        **{"kernels": "auto", "rounding": "fast", "kv_dtype": "auto", "backend": "auto"},
        "provider": "auto",
    }
    assert given == {
        **{"max_num_seqs": 2, "max_model_len": 64, "max_num_batched_tokens": 32},
        **{"intra_op_num_threads": 3, "spin": True, "check_hashes": False},
        **{"enable_prefix_caching": False, "host_cache": False, "huge_pages": False},
        **{"kernels": "onnxruntime", "rounding": "exact", "kv_dtype": "float16"},
        **{"backend": "onnxruntime", "provider": "tensorrt"},
    }


def test_settings_are_told_when_they_were_measured_or_to_debug(scripted_llm: ScriptedLLM) -> None:
    assert "settings for this machine" not in run("b", "x").stderr
    told = "settings for this machine: 3 threads, spinning off"
    assert f"{told} (remembered)" in run("b", "x", "--debug").stderr
    scripted_llm.tuning = replace(scripted_llm.tuning, origin="measured")
    assert f"{told} (measured)" in run("b", "x").stderr
    assert told not in run("b", "x", "--quiet").stderr


def test_streaming_shows_each_piece(
    scripted_llm: ScriptedLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces: list[str] = []
    monkeypatch.setattr(Console, "stream", lambda self, text: pieces.append(text))
    run("b", "x", "--stream")
    assert pieces == ["<", "x", ">", "\n"]


def test_a_terminal_streams_one_prompt_by_itself(
    scripted_llm: ScriptedLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Console, "out_is_terminal", True)
    streamed: list[str] = []

    def stream(console: Console, llm: ScriptedLLM, given: str, params: SamplingParams) -> Any:
        streamed.append(given)
        return llm.generate([given], params)[0]

    monkeypatch.setattr(generate_module, "_stream", stream)
    run("b", "alone")
    run("b", "x", "y")
    run("b", "x", "--n", "2")
    run("b", "x", "--no-stream")
    run("b", "x", "--json")
    assert streamed == ["alone"]


def test_json_is_the_whole_result(scripted_llm: ScriptedLLM) -> None:
    result = run("b", "é", "--json", "--quiet")
    (found,) = json.loads(result.stdout)["results"]
    assert found["prompt"] == "é"
    assert found["outputs"][0]["text"] == "<é>"
    assert found["outputs"][0]["finish_reason"] == "stop"
    assert found["metrics"]["first_token_time"] == 1.5
    assert result.stderr == ""


def test_a_failed_request_shows_its_text_and_fails(scripted_llm: ScriptedLLM) -> None:
    scripted_llm.step_error = "the step broke"
    result = run("b", "x")
    assert result.exit_code == 1
    assert result.stdout == "<x>\n"
    assert result.stderr.endswith("error: the step broke\n")


def test_an_interrupt_ends_the_request(scripted_llm: ScriptedLLM) -> None:
    scripted_llm.script = lambda prompt: ["a", KeyboardInterrupt(), "b"]
    result = run("b", "x", "--stream")
    assert result.exit_code == 130
    assert result.stdout == "a"
    assert (scripted_llm.aborted, scripted_llm.closed) == (1, 1)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("a", "b", "--stream"), "--stream shows one prompt"),
        (("a", "--n", "2", "--stream"), "--stream shows one prompt"),
        (("a", "--json", "--stream"), "--stream and --json exclude each other"),
        (("a", "--logprobs", "1"), "--logprobs needs --json"),
        (("a", "--prompt-logprobs", "1"), "--prompt-logprobs needs --json"),
        (("a", "--system", "s"), "--system needs --chat"),
        (("-", "-"), "'-' stands for stdin"),
        (("a", "--temperature", "-1"), "--temperature: got -1.0"),
        (("a", "--max-tokens", "1", "--min-tokens", "2"), "--min-tokens: 2 is more than"),
        ((os.fsdecode(b"\xff"),), "a prompt is not UTF-8 text"),
    ],
)
def test_what_cannot_be_honoured_is_refused(
    scripted_llm: ScriptedLLM, args: tuple[str, ...], said: str
) -> None:
    result = run("b", *args)
    assert result.exit_code == 2
    assert said in result.stderr
    assert scripted_llm.prompts == []


def test_stdin_that_is_no_text_is_refused(scripted_llm: ScriptedLLM) -> None:
    result = run("b", stdin=b"\xff\xfe")
    assert result.exit_code == 2
    assert "stdin is not utf-8 text" in result.stderr
