"""migrate: every setting of an old engine is mapped, or named with the reason why not."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from trtllm_lite.exporter.families import families
from trtllm_lite.exporter.options import ExportOptions
from trtllm_lite.runtime.errors import UsageError
from trtllm_lite.tools.cli import COMMANDS, cli
from trtllm_lite.tools.migration.fixed_rules import RULES, fixed_rule
from trtllm_lite.tools.migration.formats import CLOSEST
from trtllm_lite.tools.migration.models import FAMILIES
from trtllm_lite.tools.migration.old_config import read_old_config
from trtllm_lite.tools.migration.recipe import make_recipe
from trtllm_lite.tools.migration.row import Recipe, Row

MODEL = {
    "architecture": "LlamaForCausalLM",
    "dtype": "bfloat16",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "rotary_scaling": None,
    "moe": {"num_experts": 0, "top_k": 0},
    "mapping": {"world_size": 1, "gpus_per_node": 8, "tp_size": 1, "pp_size": 1},
    "quantization": {"quant_algo": None, "kv_cache_quant_algo": None, "group_size": 128},
    "use_parallel_embedding": False,
}
BUILD = {
    "max_input_len": 1024,
    "max_seq_len": 4096,
    "opt_batch_size": 8,
    "max_batch_size": 64,
    "max_beam_width": 1,
    "max_num_tokens": 8192,
    "kv_cache_type": "PAGED",
    "gather_context_logits": 0,
    "strongly_typed": True,
    "speculative_decoding_mode": 1,
    "max_draft_len": 0,
    "output_timing_cache": "model.cache",
    "lora_config": {"lora_dir": [], "lora_ckpt_source": "hf", "max_lora_rank": 64},
    "weight_streaming": False,
    "plugin_config": {
        "dtype": "bfloat16",
        "gemm_plugin": "auto",
        "moe_plugin": "auto",
        "context_fmha": True,
        "paged_kv_cache": True,
        "tokens_per_block": 64,
        "lora_plugin": None,
        "manage_weights": False,
    },
}


def document(
    model: dict[str, Any] | None = None,
    build: dict[str, Any] | None = None,
    plugins: dict[str, Any] | None = None,
    version: str = "0.17.0.post1",
) -> dict[str, Any]:
    """What trtllm-build writes, with changes."""
    merged = {**BUILD, **(build or {})}
    merged["plugin_config"] = {**BUILD["plugin_config"], **(plugins or {})}  # type: ignore[dict-item]  # the literal's values are of many types
    return {
        "version": version,
        "pretrained_config": {**MODEL, **(model or {})},
        "build_config": merged,
    }


def write(folder: Path, value: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(value))
    return folder


def recipe_of(tmp_path: Path, *args: Any, **kwargs: Any) -> Recipe:
    return make_recipe(read_old_config(write(tmp_path / "engine", document(*args, **kwargs))))


def row(recipe: Recipe, name: str) -> Row:
    return next(r for r in recipe.rows if r.old.endswith(name))


def pairs(words: tuple[str, ...]) -> dict[str, str]:
    return {a: b for a, b in pairwise(words) if a.startswith("-")}


def run(*args: str) -> Result:
    return CliRunner().invoke(cli, ["migrate", *args])


def test_the_plain_engine(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path)
    assert pairs(recipe.export) == {
        "-o": "engine",
        "--target": "tensorrt",
        "--dtype": "bfloat16",
        "--max-model-len": "4096",
        "--max-num-seqs": "64",
    }
    assert recipe.build[:3] == ("trtllm-lite", "build", "engine")
    assert pairs(recipe.build) == {
        "--max-num-batched-tokens": "8192",
        "--timing-cache": "model.cache",
    }
    assert pairs(recipe.serve) == {"--max-num-batched-tokens": "8192"}
    assert [r.old for r in recipe.rows if r.kind == "no equivalent"] == []


def test_version_0_9_gives_lengths_of_prompt_and_answer(tmp_path: Path) -> None:
    old = document(build={"max_input_len": 1000, "max_output_len": 200}, version="0.9.0")
    del old["build_config"]["max_seq_len"]
    recipe = make_recipe(read_old_config(write(tmp_path, old)))
    assert pairs(recipe.export)["--max-model-len"] == "1200"


def test_a_length_that_was_left_to_the_model_stays_so(tmp_path: Path) -> None:
    assert "--max-model-len" not in recipe_of(tmp_path, build={"max_seq_len": None}).export


@pytest.mark.parametrize("algo", sorted(CLOSEST))
def test_every_format_has_a_word(tmp_path: Path, algo: str) -> None:
    recipe = recipe_of(tmp_path, {"quantization": {"quant_algo": algo, "group_size": 128}})
    found, bits = row(recipe, "quant_algo"), {"W8": "int8", "W4": "int4", "IN": "int8"}
    weights = "fp8" if algo.startswith("FP8") or algo == "MXFP8" else bits.get(algo[:2])
    if "FP4" in algo:
        weights = None
    assert pairs(recipe.export).get("--quantize") == weights
    assert found.kind == ("mapped" if weights else "no equivalent")
    assert found.note


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"model": {"mapping": {"world_size": 2, "tp_size": 2}}}, "mapping.tp_size"),
        ({"model": {"quantization": {"kv_cache_quant_algo": "FP8"}}}, "kv_cache_quant_algo"),
        ({"model": {"quantization": {"exclude_modules": ["lm_head"]}}}, "exclude_modules"),
        ({"model": {"use_parallel_embedding": True}}, "use_parallel_embedding"),
        ({"build": {"max_beam_width": 4}}, "max_beam_width"),
        ({"build": {"kv_cache_type": "DISABLED"}}, "kv_cache_type"),
        ({"build": {"speculative_decoding_mode": 4}}, "speculative_decoding_mode"),
        ({"build": {"speculative_decoding_mode": "eagle"}}, "speculative_decoding_mode"),
        ({"build": {"lora_config": {"lora_dir": ["a"]}}}, "lora_dir"),
        ({"build": {"weight_streaming": True}}, "weight_streaming"),
        ({"build": {"use_refit": True}}, "use_refit"),
        ({"build": {"auto_parallel_config": {"world_size": 8}}}, "world_size"),
        ({"build": {"max_prompt_embedding_table_size": 576}}, "max_prompt_embedding_table_size"),
        ({"plugins": {"use_fp8_context_fmha": True}}, "use_fp8_context_fmha"),
        ({"plugins": {"streamingllm": True}}, "streamingllm"),
        ({"plugins": {"lora_plugin": "float16"}}, "lora_plugin"),
        ({"build": {"no_such_setting": 7}}, "no_such_setting"),
        ({"build": {"use_refit": 1}}, "use_refit"),
    ],
)
def test_what_has_no_equivalent_says_why(
    tmp_path: Path, changes: dict[str, Any], name: str
) -> None:
    found = row(recipe_of(tmp_path, **changes), name)
    assert (found.kind, found.new) == ("no equivalent", "")
    assert found.note
    assert found.value not in ("-", "false")


@pytest.mark.parametrize(
    ("changes", "command", "words"),
    [
        (
            {"build": {"speculative_decoding_mode": 64, "max_draft_len": 5}},
            "serve",
            ["--speculation", "ngram", "--max-draft-tokens", "5"],
        ),
        (
            {"build": {"speculative_decoding_mode": "LOOKAHEAD_DECODING"}},
            "serve",
            ["--speculation", "ngram"],
        ),
        ({"build": {"input_timing_cache": "old.cache"}}, "build", ["--timing-cache", "old.cache"]),
        ({"build": {"max_batch_size": 10**6}}, "export", ["--max-num-seqs", "4096"]),
        ({"model": {"dtype": "float16"}}, "export", ["--dtype", "float16"]),
    ],
)
def test_what_becomes_an_option(
    tmp_path: Path, changes: dict[str, Any], command: str, words: list[str]
) -> None:
    made: tuple[str, ...] = getattr(recipe_of(tmp_path, **changes), command)
    at = made.index(words[0])
    assert list(made[at : at + len(words)]) == words


def test_no_setting_is_dropped(tmp_path: Path) -> None:
    """Every leaf that is on has a row of its own, or is counted in one."""
    recipe = recipe_of(tmp_path, {"rotary_base": 1e4, "moe": {"num_experts": 0, "top_k": 2}})
    counted = next(r for r in recipe.rows if r.old == "pretrained_config.*")
    facts = ("vocab_size", "hidden_size", "num_hidden_layers", "rotary_base", "moe.top_k")
    assert counted.value == f"{len(facts)} settings"
    plugins = next(r for r in recipe.rows if r.old == "build_config.plugin_config.*")
    assert plugins.value == "2 settings"


def test_refused_families_are_named(tmp_path: Path) -> None:
    found = row(recipe_of(tmp_path, {"architecture": "MixtralForCausalLM"}), "architecture")
    assert (found.kind, found.new) == ("no equivalent", "")
    assert "mixtral is refused" in found.note
    proved = row(recipe_of(tmp_path), "architecture")
    assert (proved.kind, proved.new) == ("automatic", "llama, mistral")
    encoder = row(recipe_of(tmp_path, {"architecture": "BertModel"}), "architecture")
    assert encoder.kind == "no equivalent"
    other = row(recipe_of(tmp_path, {"architecture": "SomethingForCausalLM"}), "architecture")
    assert "certificate decides" in other.note


def test_the_table_of_architectures_names_known_families() -> None:
    known = {family.model_type for family in families()}
    assert {name for names in FAMILIES.values() for name in names} - known == set()


def test_every_rule_can_be_reached() -> None:
    unreachable = [
        rule.pattern for rule in RULES if fixed_rule(rule.pattern.replace("*", "zzz")) is not rule
    ]
    assert unreachable == []


def test_a_checkpoint_of_convert_checkpoint(tmp_path: Path) -> None:
    recipe = make_recipe(read_old_config(write(tmp_path, {**MODEL, "producer": {"name": "x"}})))
    assert recipe.version == ""
    assert pairs(recipe.export)["--dtype"] == "bfloat16"
    assert "--max-num-seqs" not in recipe.export
    result = run(str(tmp_path))
    assert "made by convert_checkpoint" in result.stdout


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("algo", [None, *sorted(CLOSEST)])
def test_the_recipe_is_one_that_export_takes(tmp_path: Path, dtype: str, algo: str | None) -> None:
    recipe = recipe_of(tmp_path, {"dtype": dtype, "quantization": {"quant_algo": algo}})
    given = pairs(recipe.export)
    ExportOptions(
        model="m",
        output=tmp_path,
        target=given["--target"],
        dtype=given["--dtype"],
        quantize=given.get("--quantize", "none"),
        max_model_len=int(given["--max-model-len"]),
        max_num_seqs=int(given["--max-num-seqs"]),
    )


def test_weights_outside_of_the_plans_are_shared_ones(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, plugins={"manage_weights": True})
    found = row(recipe, "manage_weights")
    assert (found.kind, found.new) == ("mapped", "build --share-weights")
    assert recipe.build[-1] == "--share-weights"
    int4 = {"quantization": {"quant_algo": "W4A16_AWQ"}}
    held = recipe_of(tmp_path, int4, plugins={"manage_weights": True})
    assert row(held, "manage_weights").kind == "no equivalent"
    assert "--share-weights" not in held.build


def test_the_commands_have_those_options(tmp_path: Path) -> None:
    recipe = recipe_of(
        tmp_path,
        {"quantization": {"quant_algo": "W4A16_AWQ"}},
        {"speculative_decoding_mode": 8, "max_draft_len": 4},
    )
    for words in (recipe.export, recipe.build, recipe.serve):
        assert words[0] == "trtllm-lite"
        assert words[1] in COMMANDS
        options = [word for word in words[2:] if word.startswith("-")]
        help_text = CliRunner().invoke(cli, [words[1], "--help"]).output
        assert [option for option in options if option not in help_text] == []


def test_the_output(tmp_path: Path) -> None:
    folder = write(tmp_path / "my engine", document({"mapping": {"tp_size": 2}}))
    result = run(str(folder))
    assert result.exit_code == 0
    first, build, serve, _ = result.stdout.split("\n", 3)
    assert first.startswith("trtllm-lite export CHECKPOINT -o 'my engine' --target tensorrt")
    assert build.startswith("trtllm-lite build 'my engine' --max-num-batched-tokens 8192 ")
    assert serve.startswith("trtllm-lite serve 'my engine' ")
    assert "LlamaForCausalLM, made by TensorRT-LLM 0.17.0.post1" in result.stdout
    line = next(text for text in result.stdout.splitlines() if "mapping.tp_size" in text)
    assert line.split()[:4] == ["mapping.tp_size", "2", "no", "equivalent"]


def test_json(tmp_path: Path) -> None:
    folder = write(tmp_path / "engine", document())
    found = json.loads(run(str(folder / "config.json"), "--json").stdout)
    assert found["version"] == "0.17.0.post1"
    assert found["export"][:4] == ["trtllm-lite", "export", "CHECKPOINT", "-o"]
    assert {r["kind"] for r in found["rows"]} == {"mapped", "automatic"}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "not JSON"),
        ("[]", "must be a JSON object"),
        ("{}", "neither pretrained_config nor architecture"),
        (json.dumps({"builder_config": {}, "plugin_config": {}}), "before 0.8"),
        (json.dumps({"architectures": ["X"], "model_type": "llama"}), "Hugging Face"),
        (json.dumps(document(version="0.8.0")), "made by TensorRT-LLM '0.8.0'"),
        (json.dumps(document(version="2.0.0")), "made by TensorRT-LLM '2.0.0'"),
        (json.dumps(document(version="soon")), "version is 'soon'"),
        (json.dumps({**document(), "version": None}), "version is None"),
        (json.dumps({**document(), "build_config": 3}), "build_config must be an object"),
        (json.dumps(document({"architecture": None})), "no pretrained_config.architecture"),
        (json.dumps(document({"dtype": "int8"})), "pretrained_config.dtype: got 'int8'"),
        (json.dumps(document({"quantization": {"quant_algo": "W1"}})), "quant_algo: got 'W1'"),
        (json.dumps(document(build={"max_seq_len": "4k"})), "max_seq_len: got '4k'"),
        (json.dumps(document(build={"max_batch_size": -1})), "max_batch_size: got -1"),
        (json.dumps(document(build={"speculative_decoding_mode": 3})), "mode: got 3"),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    result = run(str(path))
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_folder_without_a_config_and_no_folder(tmp_path: Path) -> None:
    assert "no config.json in it" in run(str(tmp_path)).stderr
    missing = run(str(tmp_path / "none"))
    assert (missing.exit_code, missing.stderr.count("\n")) == (1, 1)
    (tmp_path / "big.json").write_bytes(b" " * (4 * 2**20 + 1))
    with pytest.raises(UsageError, match="over 4194304 bytes"):
        read_old_config(tmp_path / "big.json")
