"""export, verify and families, with a stand-in where the exporter would work."""

import json
import logging
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner, Result

from trtllm_lite.exporter.options import ExportOptions
from trtllm_lite.exporter.quantize.apply import FormatSize
from trtllm_lite.runtime.errors import UnsupportedError, VerificationError
from trtllm_lite.runtime.kv_dtype import KVDtype
from trtllm_lite.runtime.manifest import (
    FileEntry,
    KVLayer,
    KVSpec,
    Limits,
    Manifest,
    ModelFacts,
    Quantization,
    Source,
)
from trtllm_lite.runtime.progress import Progress
from trtllm_lite.tools.cli import cli

GATE = {"name": "greedy agreement", "passed": True, "value": 1.0, "limit": 0.99}
PARITY = {"passed": True, "gates": [GATE]}


def make_manifest() -> Manifest:
    return Manifest(
        model=ModelFacts("llama", "LlamaForCausalLM", 10, 1, 8, 16, 1, (2,)),
        source=Source("tiny", "safetensors"),
        target="cpu",
        dtype="float32",
        quantization=Quantization(),
        limits=Limits(4, 128),
        kv=KVSpec("float32", (KVLayer(2, 4),)),
        graphs=(),
        weights="weights.bin",
        files=(FileEntry("weights.bin", 2048, "0" * 64),),
    )


@dataclass(frozen=True)
class Report:
    """As `exporter.pipeline.ExportReport`."""

    output: Path | None
    parity: dict[str, Any] | None = None
    manifest: Manifest = field(default_factory=make_manifest)
    seconds: dict[str, float] = field(default_factory=lambda: {"trace prefill": 1.25})
    peak_rss_bytes: int = 3 * 2**20
    weight_bytes: int = 2048
    formats: tuple[FormatSize, ...] = ()
    quantize: str = "none"
    why: str = ""
    kv_dtypes: tuple[KVDtype, ...] = ("float32",)

    def to_json(self) -> dict[str, Any]:
        return {"output": None if self.output is None else str(self.output), "parity": self.parity}


@dataclass(frozen=True)
class Certificate:
    """As `exporter.certificate.Certificate`."""

    passed: bool
    failure: str | None = None

    def to_json(self) -> dict[str, Any]:
        gate = {**GATE, "passed": self.passed}
        return {"passed": self.passed, "failure": self.failure, "gates": [gate]}


Export = Callable[[ExportOptions, Progress], Report]


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **members: object) -> None:
    """Put a module in the place of an exporter module."""
    module = ModuleType(f"trtllm_lite.exporter.{name}")
    vars(module).update(members)
    monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[ExportOptions]:
    """Replaces the pipeline; collects what it was asked for."""
    seen: list[ExportOptions] = []

    def export(options: ExportOptions, progress: Progress) -> Report:
        seen.append(options)
        progress.step("trace prefill")
        print("library chatter")  # noqa: T201  (a library that writes to stdout)
        warnings.warn("library warning", stacklevel=1)
        logging.getLogger("library").warning("library log")
        parity = PARITY if options.verify and not options.dry_run else None
        return Report(None if options.dry_run else options.output, parity)

    stand_in(monkeypatch, "pipeline", export=export)
    return seen


def run(*args: str) -> Result:
    return CliRunner().invoke(cli, args)


def test_export_passes_every_option(asked: list[ExportOptions]) -> None:
    result = run(
        *("export", "org/model", "-o", "out dir", "--target", "cpu", "--dtype", "bfloat16"),
        *("--max-model-len", "4K", "--max-num-seqs", "8", "--revision", "v1", "--overwrite"),
        *("--no-verify", "--dry-run"),
    )
    assert result.exit_code == 0, result.output
    assert asked == [
        ExportOptions(
            model="org/model",
            output=Path("out dir"),
            target="cpu",
            dtype="bfloat16",
            max_model_len=4096,
            max_num_seqs=8,
            revision="v1",
            overwrite=True,
            verify=False,
            dry_run=True,
        )
    ]


def test_export_passes_the_weight_formats(asked: list[ExportOptions]) -> None:
    args = ("export", "m", "-o", "out", "--quantize", "int8", "--prefill-format", "same")
    assert run(*args).exit_code == 0
    assert asked == [
        ExportOptions(model="m", output=Path("out"), quantize="int8", prefill_format="same")
    ]


def test_export_passes_the_type_of_the_cache(asked: list[ExportOptions]) -> None:
    assert run("export", "m", "-o", "out", "--kv-dtype", "auto").exit_code == 0
    assert asked == [ExportOptions(model="m", output=Path("out"), kv_dtype="auto")]
    result = run("export", "m", "-o", "out", "--kv-dtype", "fp8")
    assert result.exit_code == 2
    assert "--kv-dtype: got 'fp8'; allowed: auto, float32, float16, int8" in result.stderr


def test_export_passes_the_form_of_attention(asked: list[ExportOptions]) -> None:
    args = ("export", "m", "-o", "out", "--target", "tensorrt", "--attention")
    assert run(*args, "mask").exit_code == 0
    assert [x.attention for x in asked] == ["mask"]
    result = run(*args, "paged")
    assert "--attention: got 'paged'; allowed: lengths, mask" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--target", "cuda", "--kv-dtype", "float32"), "--kv-dtype: with --target cuda"),
        (("--target", "tensorrt", "--kv-dtype", "auto"), "--kv-dtype: with --target tensorrt"),
        (("--no-scout",), "--scout, --no-scout: got --target cpu"),
        (("--target", "cuda", "--attention", "lengths"), "--attention: got --target cuda"),
        (
            ("--target", "tensorrt", "--dtype", "bfloat16", "--scout"),
            "--scout, --no-scout: got --dtype bfloat16",
        ),
    ],
)
def test_what_the_target_has_no_use_for_is_refused(
    asked: list[ExportOptions], arguments: tuple[str, ...], told: str
) -> None:
    result = run("export", "m", "-o", "out", *arguments)
    assert result.exit_code == 2
    assert told in result.stderr
    assert asked == []


def test_the_report_has_the_bytes_of_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def export(options: ExportOptions, progress: Progress) -> Report:
        kinds: tuple[KVDtype, ...] = ("float16", "float32")
        return Report(options.output, None, kv_dtypes=kinds)

    stand_in(monkeypatch, "pipeline", export=export)
    result = run("export", "m", "-o", "out")
    size = "KV cache: 32 B a token, 4.0 KiB for 128 tokens"
    said = f"{size}, in float16 under the native kernels (elsewhere float32)"
    assert said in " ".join(result.stdout.split())


def test_the_report_shows_each_weight_format_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def export(options: ExportOptions, progress: Progress) -> Report:
        formats = (FormatSize("int8_block64", 3, 4000, 4250), FormatSize("float32", 2, 10, 40))
        return Report(options.output, None, formats=formats, quantize="int8", why="auto chose")

    stand_in(monkeypatch, "pipeline", export=export)
    result = run("export", "m", "-o", "out", "--quantize", "auto")
    assert result.exit_code == 0, result.output
    for part in ("int8_block64", "4.2 KiB", "1.062", "4.000", "(int8, because auto chose)"):
        assert part in result.stdout


def test_export_defaults_are_those_of_its_options(asked: list[ExportOptions]) -> None:
    assert run("export", "m", "-o", "out").exit_code == 0
    assert asked == [ExportOptions(model="m", output=Path("out"))]


def test_export_ends_with_tables_and_the_next_commands(asked: list[ExportOptions]) -> None:
    result = run("export", "m", "-o", "out dir")
    for part in (
        *("weights.bin", "2.0 KiB", "trace prefill", "1.25 s", "Peak memory: 3.0 MiB"),
        *("Certificate: passed", "greedy agreement", "pass", "0.99"),
        *("KV cache: 64 B a token, 8.0 KiB for 128 tokens", "trtllm-lite chat 'out dir'"),
    ):
        assert part in result.stdout
    assert result.stderr.startswith("trace prefill ... ")
    assert "\x1b" not in result.output


def test_an_unverified_export_says_how_to_verify(asked: list[ExportOptions]) -> None:
    result = run("export", "m", "-o", "out", "--no-verify")
    assert "Certificate" not in result.stdout
    assert "trtllm-lite verify out --reference m" in result.stdout


def test_a_dry_run_says_that_nothing_was_written(asked: list[ExportOptions]) -> None:
    assert "Dry run: nothing was written" in run("export", "m", "-o", "out", "--dry-run").stdout


def test_json_is_all_of_stdout(
    asked: list[ExportOptions], caplog: pytest.LogCaptureFixture
) -> None:
    result = run("export", "m", "-o", "out", "--json", "--quiet")
    assert caplog.records == []
    assert json.loads(result.stdout) == {"output": "out", "parity": PARITY}
    assert result.stderr == ""


def test_debug_shows_what_libraries_print_but_not_on_stdout(asked: list[ExportOptions]) -> None:
    with pytest.warns(UserWarning, match="library warning"):
        result = run("--debug", "export", "m", "-o", "out", "--json")
    json.loads(result.stdout)
    assert "library chatter" in result.stderr
    assert "library chatter" not in run("export", "m", "-o", "out").output


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (KeyboardInterrupt(), 130, "error: interrupted"),
        (VerificationError("gate x failed"), 1, "error: gate x failed"),
        (
            UnsupportedError("ALiBi", "rotary", "use another"),
            1,
            "error: the checkpoint needs ALiBi",
        ),
        (
            ModuleNotFoundError("No module named 'gguf'", name="gguf"),
            1,
            "error: gguf is not installed: pip install 'trtllm-lite[export]'",
        ),
    ],
)
def test_a_failing_export_is_one_line_after_its_step(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, said: str
) -> None:
    def export(options: ExportOptions, progress: Progress) -> Report:
        progress.step("weights")
        raise error

    stand_in(monkeypatch, "pipeline", export=export)
    result = run("export", "m", "-o", "out")
    assert result.exit_code == code
    assert result.stdout == ""
    lines = [line for line in result.stderr.splitlines() if line]
    assert lines[0].startswith("weights ... stopped after")
    assert lines[1].startswith(said)
    assert len(lines) == 2


@pytest.mark.parametrize(
    "option", [("--target", "tpu"), ("--dtype", "int3"), ("--max-num-seqs", "9999")]
)
def test_a_value_that_the_exporter_refuses_is_code_2(
    asked: list[ExportOptions], option: tuple[str, str]
) -> None:
    result = run("export", "m", "-o", "out", *option)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {option[0]}: got ")
    assert asked == []


@pytest.mark.parametrize("passed", [True, False])
def test_verify_shows_the_gates_and_fails_with_them(
    monkeypatch: pytest.MonkeyPatch, passed: bool
) -> None:
    calls: list[tuple[Path, str | None, bool]] = []

    def verify_bundle(
        folder: Path, reference: str | None, progress: Progress, *, check_hashes: bool = True
    ) -> Certificate:
        calls.append((folder, reference, check_hashes))
        return Certificate(passed, None if passed else "layer 3 departs")

    stand_in(monkeypatch, "verify", verify_bundle=verify_bundle)
    result = run("verify", "b", "--reference", "m", "--no-hash-check")
    assert calls == [(Path("b"), "m", False)]
    assert result.exit_code == (0 if passed else 1)
    assert ("pass" if passed else "FAIL") in result.stdout
    assert ("error: layer 3 departs\n" in result.stderr) is not passed
    as_json = run("verify", "b", "--json")
    assert json.loads(as_json.stdout)["passed"] is passed
    assert as_json.exit_code == result.exit_code
    assert calls[1] == (Path("b"), None, True)


def test_families_lists_the_three_kinds() -> None:
    result = run("families", "--json")
    rows = json.loads(result.stdout)
    assert {row["status"] for row in rows} == {"proved", "generic", "refused"}
    assert set(rows[0]) == {"model_type", "name", "status", "note"}
    table = run("families").stdout
    assert all(row["name"] in table and row["note"] in table for row in rows)
