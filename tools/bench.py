"""`trtllm-lite bench`: TTFT, TPOT and throughput over a grid, beside the bandwidth limit."""

import json as json_module
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trtllm_lite.tools.command import console_of, option, subcommand
from trtllm_lite.tools.failures import needs_extra
from trtllm_lite.tools.options import (
    Count,
    CountList,
    bundle_argument,
    json_option,
    open_llm,
    speculation_options,
    speed_options,
)
from trtllm_lite.tools.progress import progress_shown

if TYPE_CHECKING:
    from trtllm_lite.runtime.progress import Progress
    from trtllm_lite.tools.bench_run import BenchOptions

EXAMPLES = (
    "trtllm-lite bench smollm2",
    "trtllm-lite bench smollm2 --input-len 128,512 --output-len 64 --concurrency 1,4,8",
    "trtllm-lite bench smollm2 --threads 1 --repeats 5 --output one-thread.json",
    "trtllm-lite bench smollm2 --server --repeats 7",
)


@subcommand("bench", examples=EXAMPLES)
@bundle_argument
@option("Grid", "--input-len", type=CountList(), default="128", help="Prompt tokens.")
@option("Grid", "--output-len", type=CountList(), default="64", help="New tokens.")
@option("Grid", "--concurrency", type=CountList(), default="1,4,8", help="Requests at once.")
@option("Grid", "--repeats", type=Count(), default=3, help="Measured runs of each point.")
@option("Grid", "--warmup", type=Count(0), default=1, help="Runs of each point before that.")
@option("Grid", "--seed", type=Count(0), default=0, help="Of the random prompts.")
@option("Server", "--server", is_flag=True, help="What the HTTP server adds, in place of the grid.")
@option(
    "Server", "--idle-streams", type=Count(0), default=1000, help="Streams that wait; 0 skips them."
)
@speed_options
@speculation_options
@option("Output", "--breakdown", is_flag=True, help="Also where the time of a step goes.")
@option("Output", "--output", "-o", type=click.Path(dir_okay=False), help="JSON file to write.")
@json_option
@click.pass_context
def bench(
    ctx: click.Context, /, bundle: str, output: str | None, json: bool, **values: Any
) -> None:
    """Measure a bundle: time to first token, time per output token, tokens per second.

    Prompts are random tokens, end tokens are ignored, prefix caching is off, and all requests of a
    run arrive together. Repeats go round the whole grid. The limit is weight bytes over the read
    bandwidth of this machine, measured at the start, or that of its GPU by the table of `plan`: no
    lone request decodes faster. What `plan` says of this machine stands beside what is measured: on
    a CPU what is to be expected, on a GPU the least that is possible. Speculation is off unless
    asked for: answers to random prompts repeat themselves more than text does.

    With --server the first lengths of the grid run in process and over HTTP in turns, alone and
    sixteen at once, the client in a process of its own; and the program is started and left with
    streams that only wait.
    """
    if values["server"]:
        _bench_server(ctx, bundle, output, json, values)
        return
    for name in ("server", "idle_streams"):
        del values[name]
    from trtllm_lite.tools.bench_breakdown import breakdown_tables
    from trtllm_lite.tools.bench_report import result_table, summary
    from trtllm_lite.tools.bench_run import BenchOptions

    _check_output(output)
    options = BenchOptions(
        input_lens=values.pop("input_len"),
        output_lens=values.pop("output_len"),
        concurrencies=values.pop("concurrency"),
        repeats=values.pop("repeats"),
        warmup=values.pop("warmup"),
        seed=values.pop("seed"),
        breakdown=values.pop("breakdown"),
    )
    console = console_of(ctx)
    with progress_shown(console.settings) as progress:
        document = _measure(bundle, options, values, progress)
    _write(document, output)
    if json:
        console.json(document)
        return
    for line in summary(document):
        console.out(line)
    console.table(result_table(document))
    for table in breakdown_tables(document) if options.breakdown else ():
        console.table(table)


def _bench_server(
    ctx: click.Context, bundle: str, output: str | None, json: bool, values: dict[str, Any]
) -> None:
    with needs_extra("serve"):
        from trtllm_lite.tools.bench_server import measure_server
    from trtllm_lite.tools.bench_server_report import server_summary, server_table
    from trtllm_lite.tools.bench_server_run import ServerBenchOptions

    _check_output(output)
    if values.pop("breakdown"):
        raise click.UsageError("--breakdown: not with --server")
    del values["server"], values["concurrency"]
    options = ServerBenchOptions(
        input_len=values.pop("input_len")[0],
        output_len=values.pop("output_len")[0],
        rounds=values.pop("repeats"),
        warmup=values.pop("warmup"),
        seed=values.pop("seed"),
        idle_streams=values.pop("idle_streams"),
    )
    console = console_of(ctx)
    with progress_shown(console.settings) as progress:
        document = measure_server(bundle, options, values, progress)
    _write(document, output)
    if json:
        console.json(document)
        return
    for line in server_summary(document):
        console.out(line)
    console.table(server_table(document))


def _check_output(output: str | None) -> None:
    if output is not None and not Path(output).absolute().parent.is_dir():
        raise click.UsageError(f"--output: the folder of {output} does not exist")


def _write(document: dict[str, Any], output: str | None) -> None:
    if output is not None:
        text = json_module.dumps(document, indent=2, allow_nan=False)
        Path(output).write_text(text + "\n", encoding="utf-8")


def _measure(
    bundle: str, options: "BenchOptions", values: dict[str, Any], progress: "Progress"
) -> dict[str, Any]:
    from trtllm_lite.runtime.bundle import open_bundle
    from trtllm_lite.runtime.host import available_memory, physical_cores
    from trtllm_lite.runtime.native_weights import has_native
    from trtllm_lite.tools.bandwidth import read_bandwidth
    from trtllm_lite.tools.bench_prediction import gpu_predictions, known_gpu, predictions
    from trtllm_lite.tools.bench_report import Limit, report
    from trtllm_lite.tools.bench_run import grid, run_bench
    from trtllm_lite.tools.weights import graph_bytes, packed_bytes

    progress.step("open the bundle")
    opened = open_bundle(Path(bundle), check_hashes=values.pop("hash_check"))
    options.check(opened.manifest.limits.max_model_len)
    threads = values["threads"] or physical_cores()
    values["speculation"] = values["speculation"] or "off"
    progress.step("measure read bandwidth")
    rate = read_bandwidth(threads, available_memory())
    how = values["kernels"], values["rounding"], values["kv_dtype"]
    predicted = predictions(opened, grid(options), threads, available_memory(), *how)
    native = has_native(opened) and values["kernels"] != "onnxruntime"
    read = packed_bytes(opened.folder) if native else graph_bytes(opened.graph_path("decode"))
    limit = Limit(read, rate)
    engine: dict[str, Any] = {"threads": threads}
    progress.step("load")
    slots = max(options.concurrencies)
    fixed = {"max_num_seqs": slots, "enable_prefix_caching": False, "check_hashes": False}
    with open_llm(bundle, values, **fixed) as llm:
        engine.update(asdict(llm.config))
        if llm.tuning is not None:
            engine |= asdict(llm.tuning.setting) | {"tuning": llm.tuning.origin}
        if llm.device != "cpu":
            gpu = known_gpu()
            limit = Limit(read, gpu.bandwidth if gpu else None)
            predicted = gpu_predictions(opened, grid(options), gpu) if gpu else {}
            engine["gpu"] = gpu.title if gpu else llm.device
        samples = run_bench(llm, opened.manifest.model.vocab_size, options, progress)
    return report(opened, options, engine, limit, samples, predicted)
