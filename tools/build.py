"""`trtllm-lite build`: TensorRT plans of a bundle, beside its graphs."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trtllm_lite.tools.command import console_of, option, subcommand
from trtllm_lite.tools.console import Console
from trtllm_lite.tools.options import NUMBER_HELP, Count, bundle_argument, hash_option, json_option
from trtllm_lite.tools.progress import progress_shown

if TYPE_CHECKING:
    from trtllm_lite.runtime.bundle import Bundle

EXAMPLES = (
    "trtllm-lite build my-bundle                             # for the GPU of this machine",
    "trtllm-lite build my-bundle --gpu sm86,sm89,sm120       # without one, by TensorRT-RTX",
    "trtllm-lite build my-bundle --max-num-seqs 64 --max-model-len 4K",
    "trtllm-lite build my-bundle --share-weights             # one copy of the weights, not three",
)
LIMITS = ("max_num_seqs", "max_model_len", "max_num_batched_tokens")


@subcommand("build", examples=EXAMPLES)
@bundle_argument
@option(
    "Build",
    "--gpu",
    default="current",
    help="Compute capabilities such as sm86,sm89, or current: the GPU of this machine.",
)
@option(
    "Build",
    "--max-num-seqs",
    type=Count(),
    help="Most requests at the same time. Default: what the bundle was made for.",
)
@option(
    "Build",
    "--max-model-len",
    type=Count(),
    help=f"Most tokens of a sequence ({NUMBER_HELP}). Default: what the bundle was made for.",
)
@option(
    "Build",
    "--max-num-batched-tokens",
    type=Count(),
    help="Most tokens computed in one step. Default: 512, or the length of a sequence.",
)
@option(
    "Build", "--timing-cache", type=click.Path(), help="File of kernel timings to use and extend."
)
@option(
    "Build",
    "--attention",
    type=click.Choice(["lengths", "mask"]),
    help="How attention learns which keys of a row are valid. Default: lengths, from TensorRT 11.",
)
@option(
    "Build",
    "--share-weights",
    is_flag=True,
    help="Keep the weights once on the device, read by all plans; not for int4. Default: each plan "
    "has a copy.",
)
@option(
    "Build",
    "--single-engine",
    is_flag=True,
    help="One plan for all phases, which has the weights once; prefill then attends over the whole "
    "slot, which is slower.",
)
@option("Build", "--force", is_flag=True, help="Build again what is there.")
@hash_option
@json_option
@click.pass_context
def build(
    ctx: click.Context,
    /,
    bundle: str,
    hash_check: bool,
    json: bool,
    **values: Any,
) -> None:
    """Build TensorRT plans of a bundle for one or more kinds of GPU.

    They lie in its folder `engines`, under a name made of all that they depend on. What is there
    is not built again.
    """
    from trtllm_lite.runtime.bundle import open_bundle

    _run(console_of(ctx), open_bundle(Path(bundle), check_hashes=hash_check), values, json)


def _run(console: Console, bundle: "Bundle", values: dict[str, Any], json: bool) -> None:
    from trtllm_lite.runtime.engines.engine_builder import build_engines
    from trtllm_lite.runtime.engines.engine_key import (
        BuildOptions,
        check_target,
        engine_key,
        planned_ledger,
    )
    from trtllm_lite.runtime.engines.gpus import current_gpu, parse_gpus
    from trtllm_lite.runtime.engines.profiles import engine_limits
    from trtllm_lite.runtime.engines.trt_module import require_tensorrt
    from trtllm_lite.tools import build_tables as tables

    check_target(bundle)
    limits = engine_limits(bundle.manifest.limits, *(values[name] for name in LIMITS))
    here = current_gpu()
    gpus = parse_gpus(values["gpu"], here)
    trt = require_tensorrt(gpus, here.name if here else None)
    timing = values["timing_cache"]
    options = BuildOptions(
        gpus=gpus,
        limits=limits,
        # TensorRT alone measures on the GPU of this machine.
        driver=here.driver if here and not trt.nameable_gpus else None,
        timing_cache=None if timing is None else Path(timing),
        force=values["force"],
        form=values["attention"],
        share_weights=values["share_weights"],
        single_engine=values["single_engine"],
    )
    key = engine_key(bundle, options, trt)
    console.info(f"{trt.words}, plans for {', '.join(gpus)}")
    if not json:
        console.table(tables.memory(planned_ledger(bundle, key, options.limits), "before"))
    with progress_shown(console.settings) as progress:
        report = build_engines(bundle, options, trt, progress)
    if json:
        console.json(tables.document(report))
        return
    console.table(tables.plans(report.engine.record))
    console.table(tables.memory(report.ledger, "built"))
    console.out(tables.outcome(report))
