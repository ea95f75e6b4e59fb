"""Islands of float32 in the float16 graphs of an export: found, put in, and looked at again."""

from collections.abc import Callable, Sequence
from pathlib import Path

import onnx_ir as ir

from trtllm_lite.exporter.passes.islands import keep_float32
from trtllm_lite.exporter.quality.texts import text_windows
from trtllm_lite.exporter.scout.islands import PhaseGraph, Prompts, find_islands, overflows
from trtllm_lite.runtime.errors import UnsupportedError
from trtllm_lite.runtime.manifest import GraphSpec, KVSpec
from trtllm_lite.runtime.progress import Progress

PROMPTS, PROMPT_TOKENS = 4, 128

Encode = Callable[[str], Sequence[int]]


def scout_prompts(encode: Encode | None, vocab_size: int, longest: int) -> Prompts:
    """A few windows of the calibration text, or of random ids where there is no tokenizer."""
    length = min(PROMPT_TOKENS, longest)
    windows: list[list[int]] = text_windows("calibration", encode, vocab_size, length).tolist()
    return windows[:PROMPTS]


def put_islands(
    specs: Sequence[GraphSpec],
    models: Sequence[ir.Model],
    kv: KVSpec,
    folder: Path,
    prompts: Prompts,
    progress: Progress,
) -> frozenset[str]:
    """Change float16 models, bound to weights in `folder`, in place; returns the names of the
    values that are float32 now.

    Raises UnsupportedError where float16 does not do: what `find_islands` refuses, and prompts
    whose logits are not finite all the same once every other value is rounded to float16.
    """
    graphs = [PhaseGraph(spec, model) for spec, model in zip(specs, models, strict=True)]
    names = find_islands(graphs, kv, folder, prompts, progress)
    if names:
        for model in models:
            keep_float32(model, names)
        if phases := overflows(graphs, kv, folder, prompts):
            raise UnsupportedError(
                f"a wider type than float16 (logits of {', '.join(phases)} are not finite, with "
                f"{len(names)} values in float32)",
                "float16 where values stay within its range, or a few in float32",
                "export with --dtype bfloat16",
            )
    return names
