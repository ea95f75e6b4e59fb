"""`trtllm-lite plan`: what a model needs and how fast it can be, worked out and not run."""

from typing import Any

import click

from trtllm_lite.tools.command import argument, console_of, option, subcommand
from trtllm_lite.tools.options import NUMBER_HELP, Count, json_option
from trtllm_lite.tools.progress import progress_shown

EXAMPLES = (
    "trtllm-lite plan HuggingFaceTB/SmolLM2-135M-Instruct --gpu l4",
    "trtllm-lite plan ./llama-8b --gpu all --max-model-len 8K --max-num-seqs 16",
    "trtllm-lite plan ./llama-8b --gpu h100,l40s --quantize int4 --json",
    "trtllm-lite plan smollm2                    # a bundle, on this machine",
)


@subcommand("plan", examples=EXAMPLES)
@argument("model", "Checkpoint (folder, hub id, GGUF file) or bundle.")
@option(
    "Machine",
    "--gpu",
    help="Names separated by commas, current (the GPU here) or all. Default: this machine.",
)
@option("Machine", "--threads", type=Count(), help="Of the CPU. Default: its cores.")
@option(
    "Machine",
    "--rounding",
    type=click.Choice(["exact", "fast"]),
    help="Of activations by the CPU's native kernels. Default: fast.",
)
@option("Export", "--target", help="cpu, cuda or tensorrt. Default: tensorrt with --gpu, else cpu.")
@option("Export", "--quantize", help="Weights: none, int8, int4 or fp8. Default: none.")
@option("Export", "--dtype", help="float32, float16 or bfloat16. Default: the target's.")
@option(
    "Export",
    "--kv-dtype",
    type=click.Choice(["auto", "float32", "float16", "int8"]),
    help="KV cache of the native kernels. Default: float32, or what the bundle was made for.",
)
@option("Export", "--revision", help="Branch, tag or commit of a hub id.")
@option(
    "Engine",
    "--max-model-len",
    type=Count(),
    help=f"Most tokens of a sequence ({NUMBER_HELP}). Default: what the model declares.",
)
@option(
    "Engine",
    "--max-num-seqs",
    type=Count(),
    help="Requests at the same time. Default: 16, or what the bundle was made for.",
)
@option(
    "Engine",
    "--max-num-batched-tokens",
    type=Count(),
    help="Most tokens of a step. Default: 256; 512 for TensorRT.",
)
@option("Engine", "--share-weights", is_flag=True, help="Plans of TensorRT that read one copy.")
@option("Engine", "--single-engine", is_flag=True, help="One plan of TensorRT for all phases.")
@option("Work", "--input-len", type=Count(), default=512, help="Prompt tokens.")
@option("Work", "--output-len", type=Count(), default=128, help="New tokens.")
@json_option
@click.pass_context
def plan(ctx: click.Context, /, model: str, json: bool, **values: Any) -> None:
    """Estimate memory and speed of a model on a GPU or on this machine.

    Bytes of weights and of the KV cache are those of the export: it is gone through with fake
    weights and some of the layers, and only the configuration is read. Times on a GPU are the least
    that its memory rate and its rate of multiplying allow; a run takes longer, up to about twice as
    long. For this machine's CPU both rates are measured, and times are what is to be expected. The
    model is not run, so all of it is an estimate.
    """
    from trtllm_lite.tools.plan_gpus import gpu_here, named_gpus
    from trtllm_lite.tools.plan_machines import cpu_host, gpu_hosts, refusals
    from trtllm_lite.tools.plan_report import document, show
    from trtllm_lite.tools.plan_subject import CPU, Wanted, subject

    console = console_of(ctx)
    wanted = Wanted(**values)
    gpus = named_gpus(wanted.gpu)
    with progress_shown(console.settings) as progress:
        found = subject(model, wanted, console, progress)
        if found.target != CPU:
            gpus = gpus or (gpu_here(),)
            hosts = gpu_hosts(gpus, found)
        else:
            rounding = wanted.rounding or "fast"
            hosts = [cpu_host(found, wanted.threads, rounding, progress)]
    made = document(found, hosts, refusals(gpus, found), wanted)
    if json:
        console.json(made)
    else:
        show(console, made)
