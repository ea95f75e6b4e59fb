"""The recipe for an old configuration: commands, and a row for every setting that is set.

Settings that decide an option here are read by name (`_Maker`); all others fall under the fixed
rules, or are listed as unknown. None is dropped: what has no row is off, or what it is by default,
and is counted.
"""

from collections.abc import Sequence

from trtllm_lite.exporter.options import MAX_SEQS
from trtllm_lite.runtime.errors import UsageError
from trtllm_lite.tools.migration.fixed_rules import NO_HEADS, FixedRule, fixed_rule
from trtllm_lite.tools.migration.formats import kv_row, quantize_for
from trtllm_lite.tools.migration.models import family_row
from trtllm_lite.tools.migration.old_config import BUILD, MODEL, OldConfig, Value
from trtllm_lite.tools.migration.row import Kind, Recipe, Row

CHECKPOINT = "CHECKPOINT"
"""Stands in the commands for what no engine records: where its weights came from."""

DTYPES = ("float16", "bfloat16", "float32")
OFF: tuple[Value, ...] = (None, False, 0, "", [])
NGRAM_MODES = {"lookahead_decoding": 8, "ngram": 64}
OTHER_MODES = {
    **{"draft_tokens_external": 2, "medusa": 4, "explicit_draft_tokens": 16, "eagle": 32},
    **{"user_provided": 128, "save_hidden_states": 256, "auto": 512},
}
NO_MODE = (None, 1, "none", "NONE")


def make_recipe(config: OldConfig) -> Recipe:
    """Raises UsageError for a value that TensorRT-LLM cannot have written."""
    return _Maker(config).recipe()


class _Maker:
    """Collects rows and arguments; `_read` are the names that have theirs."""

    def __init__(self, config: OldConfig) -> None:
        self._config = config
        self._rows: list[Row] = []
        self._read: set[str] = set()
        self._export: list[str] = []
        self._serve: list[str] = []
        self._build: list[str] = []

    def recipe(self) -> Recipe:
        self._family()
        self._dtype()
        self._quantization()
        self._lengths()
        self._batch()
        self._timing_cache()
        self._shared_weights()
        self._speculation()
        self._beams_and_cache()
        self._others()
        name = self._config.folder or "bundle"
        start = ("trtllm-lite", "export", CHECKPOINT, "-o", name, "--target", "tensorrt")
        return Recipe(
            version=self._config.version,
            architecture=str(self._config.settings[f"{MODEL}.architecture"]),
            export=(*start, *self._export),
            build=("trtllm-lite", "build", name, *self._build),
            serve=("trtllm-lite", "serve", name, *self._serve),
            rows=tuple(self._rows),
            unset=self._unset(),
        )

    def _unset(self) -> tuple[str, ...]:
        told = {name for row in self._rows for name in (row.old, *row.names)}
        return tuple(name for name in self._config.settings if name not in told)

    def _row(self, name: str, kind: Kind, new: str, note: str) -> None:
        self._read.add(name)
        value = self._config.settings.get(name)
        self._rows.append(Row(name, _shown(value), kind, new, note))

    def _family(self) -> None:
        name = f"{MODEL}.architecture"
        kind, new, note = family_row(str(self._config.settings[name]))
        self._row(name, kind, new, note)

    def _dtype(self) -> None:
        name = f"{MODEL}.dtype"
        dtype = self._config.text(name)
        if dtype not in DTYPES:
            raise UsageError(f"{name}: got {dtype!r}; allowed: {', '.join(DTYPES)}")
        self._export += ["--dtype", dtype]
        note = "of the graphs and of the KV cache"
        self._row(name, "mapped", f"export --dtype {dtype}", note)

    def _quantization(self) -> None:
        name = f"{MODEL}.quantization.quant_algo"
        algo = self._config.text(name)
        self._read.add(name)
        if algo not in (None, "NO_QUANT"):
            found = quantize_for(algo)
            if found.quantize:
                self._export += ["--quantize", found.quantize]
            new = f"export --quantize {found.quantize}" if found.quantize else ""
            self._row(name, "mapped" if new else "no equivalent", new, found.note)
        self._group_size(algo)
        dtypes = (None, "NO_QUANT", self._config.text(f"{MODEL}.dtype"))
        for name in (f"{MODEL}.quantization.kv_cache_quant_algo", f"{MODEL}.kv_dtype"):
            self._read.add(name)
            if self._config.text(name) not in dtypes:
                self._row(name, *kv_row())

    def _group_size(self, algo: str | None) -> None:
        name = f"{MODEL}.quantization.group_size"
        self._read.add(name)
        if self._config.count(name) and algo not in (None, "NO_QUANT"):
            self._row(
                name,
                "automatic",
                "",
                "blocks are of 32, 64 or 128 weights, whichever fits the model",
            )

    def _lengths(self) -> None:
        whole, prompt, answer = (
            f"{BUILD}.{name}" for name in ("max_seq_len", "max_input_len", "max_output_len")
        )
        length, note = self._config.count(whole), "prompt and answer together"
        if length is None and self._config.count(answer) is not None:
            length = (self._config.count(prompt) or 0) + (self._config.count(answer) or 0)
            new = f"export --max-model-len {length}"
            self._row(answer, "mapped", new, "added to max_input_len")
        elif whole in self._config.settings and length is None:
            note = "without a value: what the checkpoint declares"
        if length:
            self._export += ["--max-model-len", str(length)]
        if length and answer not in self._read:
            self._row(whole, "mapped", f"export --max-model-len {length}", note)
            if self._config.count(answer):
                self._row(answer, "automatic", "", "max_seq_len says it")
        if prompt in self._config.settings:
            self._row(prompt, "automatic", "", "a prompt may fill --max-model-len, less one token")
        self._read.update((whole, prompt, answer))

    def _batch(self) -> None:
        name = f"{BUILD}.max_batch_size"
        count = self._config.count(name)
        if count:
            kept = min(count, MAX_SEQS)
            self._export += ["--max-num-seqs", str(kept)]
            note = "each has a slot of --max-model-len tokens: trtllm-lite plan says what fits"
            self._row(name, "mapped", f"export --max-num-seqs {kept}", note)
        name = f"{BUILD}.max_num_tokens"
        count = self._config.count(name)
        if count:
            option = ["--max-num-batched-tokens", str(count)]
            self._build += option
            self._serve += option
            note = "tokens of one step; longer prompts come in chunks"
            self._row(name, "mapped", f"build and serve {' '.join(option)}", note)

    def _timing_cache(self) -> None:
        read, written = (f"{BUILD}.{n}_timing_cache" for n in ("input", "output"))
        file = self._config.text(read) or self._config.text(written)
        if file:
            self._build += ["--timing-cache", file]
            new, note = f"build --timing-cache {file}", "read and written"
            for name in (read, written):
                if self._config.text(name):
                    self._row(name, "mapped", new, note)
        self._read.update((read, written))

    def _shared_weights(self) -> None:
        name = f"{BUILD}.plugin_config.manage_weights"
        if self._config.settings.get(name):
            if "int4" in self._export:
                self._row(name, "no equivalent", "", "plans hold int4 weights themselves")
            else:
                self._build.append("--share-weights")
                note = "plans read one copy of the weights, which is outside of them"
                self._row(name, "mapped", "build --share-weights", note)
        self._read.add(name)

    def _speculation(self) -> None:
        name, drafts = f"{BUILD}.speculative_decoding_mode", f"{BUILD}.max_draft_len"
        mode, length = self._config.settings.get(name), self._config.count(drafts)
        self._read.update((name, drafts))
        if mode in NO_MODE:
            if length:
                self._row(drafts, "no equivalent", "", NO_HEADS)
            return
        if _is_mode(mode, NGRAM_MODES):
            self._serve += ["--speculation", "ngram"]
            note = "drafts come from the text so far; no second model, no draft heads"
            self._row(name, "mapped", "serve --speculation ngram", note)
            if length:
                self._serve += ["--max-draft-tokens", str(length)]
                self._row(drafts, "mapped", f"serve --max-draft-tokens {length}", "of one row")
            return
        if not _is_mode(mode, OTHER_MODES):
            raise UsageError(f"{name}: got {mode!r}; allowed: the modes of TensorRT-LLM 0.9 to 1.x")
        self._row(name, "no equivalent", "", NO_HEADS)
        if length:
            self._row(drafts, "no equivalent", "", NO_HEADS)

    def _beams_and_cache(self) -> None:
        name = f"{BUILD}.max_beam_width"
        if (self._config.count(name) or 1) > 1:
            self._row(name, "no equivalent", "", "no beam search; requests may ask for n answers")
        self._read.add(name)
        name = f"{BUILD}.kv_cache_type"
        kind = (self._config.text(name) or "paged").lower()
        if kind == "disabled":
            self._row(name, "no equivalent", "", "graphs always keep a KV cache")
        elif name in self._config.settings:
            self._row(name, "automatic", "", "one slot of --max-model-len tokens a sequence")

    def _others(self) -> None:
        groups: dict[FixedRule, list[str]] = {}
        for name, value in self._config.settings.items():
            rule = fixed_rule(name)
            if name in self._read or value in OFF:
                continue
            if rule is None:
                self._row(name, "no equivalent", "", "not a setting of TensorRT-LLM 0.9 to 1.x")
            elif rule.kind == "automatic" and rule.pattern.endswith("*"):
                groups.setdefault(rule, []).append(name)
            elif not _among(value, rule.quiet):
                self._row(name, rule.kind, rule.new, rule.note)
        for rule, names in groups.items():
            value = f"{len(names)} settings"
            row = Row(rule.pattern, value, rule.kind, rule.new, rule.note, tuple(names))
            self._rows.append(row)


def _is_mode(value: Value, modes: dict[str, int]) -> bool:
    """Modes are written as numbers, or by name."""
    if isinstance(value, str):
        return value.lower() in modes
    return not isinstance(value, bool) and value in modes.values()


def _among(value: Value, quiet: Sequence[Value]) -> bool:
    """Whether `value` is one of them; True is not 1."""
    return any(type(value) is type(other) and value == other for other in quiet)


def _shown(value: Value) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "-" if value is None else str(value)
