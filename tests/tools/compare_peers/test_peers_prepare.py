"""Preparation: steps run once, failures leave nothing, and what is missing is skipped by name."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtllm_lite.tools.compare_peers.adapters.base import ADAPTERS
from trtllm_lite.tools.compare_peers.contenders import (
    CATALOGUE,
    catalogue,
    chosen,
    ours,
    parse_ours,
)
from trtllm_lite.tools.compare_peers.genai_builder import patch
from trtllm_lite.tools.compare_peers.prepare import (
    PrepareError,
    Step,
    environment_steps,
    model_steps,
    run_steps,
)
from trtllm_lite.tools.compare_peers.prompts import (
    WINDOW,
    WINDOWS,
    Texts,
    cut_windows,
    python_documentation,
    random_texts,
    read_texts,
    speed_prompt,
    write_texts,
)


def python_step(name: str, made: Path, code: str) -> Step:
    return Step(name, made, (sys.executable, "-c", code))


def run(
    steps: list[Step], folder: Path, *, keep_going: bool = False
) -> tuple[list[str], list[str]]:
    told: list[str] = []
    return run_steps(steps, folder, told.append, keep_going=keep_going), told


def test_a_step_is_done_once(tmp_path: Path) -> None:
    made, count = tmp_path / "made", tmp_path / "count"
    code = f"open({str(count)!r}, 'a').write('x'); open({str(made)!r}, 'w')"
    step = python_step("make it", made, code)
    assert run([step, step], tmp_path) == ([], ["make it"])
    assert count.read_text() == "x"


def test_a_step_without_output_leaves_a_stamp(tmp_path: Path) -> None:
    run([python_step("install", tmp_path / "stamp", "pass")], tmp_path)
    assert (tmp_path / "stamp").exists()


def test_what_a_failed_step_made_is_removed(tmp_path: Path) -> None:
    made = tmp_path / "made"
    code = f"import os; os.mkdir({str(made)!r}); print('why'); raise SystemExit(3)"
    step = python_step("make it", made, code)
    with pytest.raises(PrepareError, match=r"make it failed; see .*prepare-make-it\.txt"):
        run([step], tmp_path)
    assert not made.exists()
    assert "why" in (tmp_path / "prepare-make-it.txt").read_text()


def test_going_on_tells_every_failure(tmp_path: Path) -> None:
    bad = python_step("bad", tmp_path / "bad", "raise SystemExit(1)")
    good = python_step("good", tmp_path / "good", "pass")
    failed, told = run([bad, good], tmp_path, keep_going=True)
    assert told == ["bad", "good"]
    assert [line.split(";")[0] for line in failed] == ["bad failed"]


def test_every_contender_is_prepared(tmp_path: Path) -> None:
    """What the catalogue asks for is what the steps make."""
    home = tmp_path / "models" / "m"
    home.mkdir(parents=True)
    (home / "source.gguf").touch()
    steps = [*environment_steps(tmp_path), *model_steps(tmp_path, "m")]
    assert len(catalogue(tmp_path, "m")[1]) == len(CATALOGUE)
    for step in steps:
        step.made.parent.mkdir(parents=True, exist_ok=True)
        step.made.touch()
    ready, missing = catalogue(tmp_path, "m")
    assert [c.name for c in ready] == [entry.name for entry in CATALOGUE]
    assert missing == []


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    _, missing = catalogue(tmp_path, "m")
    python = tmp_path / "llama" / "bin" / "python"
    assert missing[0] == f"llama.cpp Q8_0 is skipped: no {python}; run prepare"


def test_a_random_model_needs_no_reference(tmp_path: Path) -> None:
    made = [step.made.name for step in model_steps(tmp_path, "m")]
    assert "texts.json" in made
    assert "reference.npy" not in made


def test_a_bundle_is_named_with_its_width(tmp_path: Path) -> None:
    found = parse_ours(f"int8:8={tmp_path}")
    assert (found.name, found.bits, found.path) == ("trtllm-lite int8", 8, str(tmp_path))
    assert found.python == sys.executable
    plain = parse_ours(f"int8-ort:8:ort={tmp_path}")
    assert (found.peer, plain.peer) == ("trtllm-lite", "trtllm-lite-ort")
    exact = parse_ours(f"int8-exact:8:exact={tmp_path}")
    assert exact.peer == "trtllm-lite-exact"
    assert {found.peer, plain.peer, exact.peer} <= ADAPTERS.keys()


@pytest.mark.parametrize(
    "text", ["int8=.", "int8:8", ":8=.", "int8:eight=.", "int8:8:gpu=.", "int8:8=no/where"]
)
def test_what_names_no_bundle_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"NAME:BITS\[:ort\|:exact\]=FOLDER|no folder"):
        parse_ours(text)


def test_contenders_are_chosen_by_part_of_the_name(tmp_path: Path) -> None:
    made = [ours(name, tmp_path, 8) for name in ("int8", "int4", "f32")]
    assert [c.name for c in chosen(made, ["int"])] == ["trtllm-lite int8", "trtllm-lite int4"]
    assert chosen(made, []) == made


@given(st.lists(st.integers(0, 9), max_size=3000), st.one_of(st.none(), st.just(77)))
def test_windows_are_whole_and_in_order(tokens: list[int], bos: int | None) -> None:
    windows = cut_windows(tokens, bos)
    head = [] if bos is None else [bos]
    body = [token for window in windows for token in window[len(head) :]]
    assert body == tokens[: len(body)]
    assert all(len(w) == WINDOW and list(w[: len(head)]) == head for w in windows)
    assert len(windows) == min(WINDOWS, len(tokens) // (WINDOW - len(head)))


def test_a_prompt_depends_on_its_key_alone() -> None:
    texts = Texts(tuple(range(5000)), (), 9)
    first, again = speed_prompt(texts, (1, 2), 128), speed_prompt(texts, (1, 2), 128)
    assert first == again
    assert len(first) == 128
    assert first[0] == 9
    assert first[1:] == list(range(first[1], first[1] + 127))
    assert speed_prompt(texts, (1, 3), 128) != first


def test_texts_survive_the_file(tmp_path: Path) -> None:
    texts = Texts((1, 2, 3), ((4, 5), (6, 7)), None)
    write_texts(texts, tmp_path / "t.json")
    assert read_texts(tmp_path / "t.json") == texts


def test_random_texts_stay_in_the_vocabulary() -> None:
    texts = random_texts(100)
    assert set(texts.speed) == set(range(100))
    assert texts.windows == ()


def test_there_is_enough_documentation_for_fresh_prompts() -> None:
    assert len(python_documentation()) > 400_000


class Builder:
    """Notes the configuration it is made with."""

    def __init__(self, config: SimpleNamespace, precision: str) -> None:
        self.config, self.precision = config, precision


def test_the_builder_gets_ropes_where_it_looks_for_them() -> None:
    class Patched(Builder):
        pass

    patch(Patched)
    full, local = ({"rope_type": "default", "rope_theta": t} for t in (1e6, 1e4))
    nested = {"full_attention": full, "sliding_attention": local}
    made = Patched(SimpleNamespace(rope_parameters=nested), precision="int4")
    assert made.config.rope_parameters == full
    assert (made.config.rope_theta, made.config.rope_local_base_freq) == (1e6, 1e4)
    assert made.precision == "int4"
    plain = SimpleNamespace(rope_parameters={"rope_type": "yarn"})
    assert vars(Patched(plain, "int4").config) == {"rope_parameters": {"rope_type": "yarn"}}
    scaled = {**nested, "full_attention": {"rope_type": "linear", "rope_theta": 1e6}}
    left = Patched(SimpleNamespace(rope_parameters=scaled), "int4")
    assert vars(left.config) == {"rope_parameters": scaled}
