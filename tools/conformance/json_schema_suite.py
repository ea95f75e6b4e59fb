"""`python -m trtllm_lite.tools.conformance.json_schema_suite`: no schema of the
JSON-Schema-Test-Suite lets an invalid text through; what is not supported is refused by name."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import httpx

from trtllm_lite.runtime.grammar_compiler import CachedCompiler, open_llguidance
from trtllm_lite.tools.conformance.fetch import fetched
from trtllm_lite.tools.conformance.figures import finish, folder_option, output_option
from trtllm_lite.tools.conformance.json_schema_check import Checker, Finding
from trtllm_lite.tools.conformance.json_schema_groups import ARCHIVE, DRAFTS, Group, read_groups
from trtllm_lite.tools.conformance.toy import EOS, byte_tokenizer, toy_server
from trtllm_lite.tools.module_program import run_module

_QUOTED = re.compile(r"\"[^\"]*\"|'[^']*'|`[^`]*`|\d+")
_LISTED = re.compile(r"Unimplemented keys: \[(.*?)\]")
SECONDS = 60.0


def check_all(groups: Iterable[Group], url: str) -> list[Finding]:
    """Every group, at the grammar and through the server at `url`."""
    tokenizer = byte_tokenizer()
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    compiler = CachedCompiler(lambda: open_llguidance(tokenizer.to_str(), size, (EOS,)))
    with httpx.Client(base_url=url, timeout=SECONDS, trust_env=False) as client:
        checker = Checker(tokenizer, compiler, client)
        return [checker.check(group) for group in groups]


def summary(findings: Sequence[Finding]) -> dict[str, Any]:
    """Counts, and why schemas are refused."""
    taken = [each for each in findings if each.refusal is None]
    reasons = Counter(reason(each.refusal) for each in findings if each.refusal is not None)
    return {
        "schemas": len(findings),
        "taken": len(taken),
        "refused": len(findings) - len(taken),
        "instances_of_taken": {
            "valid_taken": sum(len(each.taken) for each in taken),
            "valid_not_written": sum(len(each.narrow) for each in taken),
            "invalid_refused": sum(each.refused for each in taken),
            "invalid_taken": sum(line.startswith("takes") for each in taken for line in each.wrong),
        },
        "texts_validated": sum(each.judged for each in findings),
        "wrong": sum(len(each.wrong) for each in findings),
        "refused_because": dict(reasons.most_common()),
    }


def reason(refusal: str) -> str:
    """A refusal without what is particular to one schema: keywords stay, values do not."""
    listed = _LISTED.search(refusal)
    if listed:
        return f"keywords not supported: {listed[1].replace(chr(34), '')}"
    text = refusal.removeprefix("response_format: ")
    text = text.removeprefix("the json_schema cannot be used: ")
    return _QUOTED.sub("*", text)[:100]


def document(results: dict[str, list[Finding]]) -> dict[str, Any]:
    """What is recorded of a run."""
    return {
        "suite": f"JSON-Schema-Test-Suite in {ARCHIVE.package} {ARCHIVE.version}",
        "llguidance": version("llguidance"),
        "drafts": {draft: summary(findings) for draft, findings in results.items()},
    }


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@folder_option
@output_option
@click.option("--verbose", is_flag=True, help="Tell of every valid instance that is not written.")
def cli(folder: Path, output: Path | None, verbose: bool) -> None:
    """Run the JSON-Schema-Test-Suite. Exits with 1 when a text that is invalid is let through."""
    home = fetched(ARCHIVE, folder.resolve() / "cache", click.echo)
    with toy_server() as url:
        results = {draft: check_all(read_groups(home, draft), url) for draft in DRAFTS}
    for findings in results.values():
        _tell(findings, verbose=verbose)
    wrong = any(each.wrong for findings in results.values() for each in findings)
    finish(document(results), output, passed=not wrong)


def _tell(findings: Iterable[Finding], *, verbose: bool) -> None:
    for each in findings:
        for line in each.wrong:
            click.echo(f"wrong: {each.group}: {line}", err=True)
        for name in each.narrow if verbose else ():
            click.echo(f"not written: {each.group}: {name}")


if __name__ == "__main__":
    run_module(cli, "trtllm_lite.tools.conformance.json_schema_suite")
