"""`trtllm-lite verify`: prove a bundle against its reference model."""

from pathlib import Path

import click

from trtllm_lite.tools.command import console_of, option, subcommand
from trtllm_lite.tools.export import libraries_quiet
from trtllm_lite.tools.failures import FAILED, needs_extra
from trtllm_lite.tools.gates import gate_table
from trtllm_lite.tools.options import bundle_argument, hash_option, json_option
from trtllm_lite.tools.progress import progress_shown

EXAMPLES = (
    "trtllm-lite verify smollm2 --reference HuggingFaceTB/SmolLM2-135M-Instruct",
    "trtllm-lite verify smollm2 --json > parity.json",
)


@subcommand("verify", examples=EXAMPLES)
@bundle_argument
@option(
    "Bundle",
    "--reference",
    help="The model it was made from (folder, hub id, GGUF). Default: the hub id in the bundle.",
)
@hash_option
@json_option
@click.pass_context
def verify(
    ctx: click.Context, /, bundle: str, reference: str | None, hash_check: bool, json: bool
) -> None:
    """Verify a bundle against its reference model, gate by gate.

    Exits with 1 when a gate fails.
    """
    console = console_of(ctx)
    with needs_extra("export"), libraries_quiet(console):
        from trtllm_lite.exporter.verify import verify_bundle

        with progress_shown(console.settings) as progress:
            certificate = verify_bundle(Path(bundle), reference, progress, check_hashes=hash_check)
    document = certificate.to_json()
    if json:
        console.json(document)
    else:
        console.table(gate_table(document))
    if not certificate.passed:
        console.error(certificate.failure or "a gate failed")
        ctx.exit(FAILED)
