"""The gates of a parity certificate as a table, from the certificate's JSON form."""

from collections.abc import Iterator, Mapping
from typing import Any

from trtllm_lite.tools.console import Table, printable


def gate_table(certificate: Mapping[str, Any]) -> Table:
    """One row a gate: name, outcome, value and limit."""
    rows = tuple(_row(gate) for gate in certificate.get("gates", ()))
    title = f"Certificate: {outcome(certificate)}"
    return Table(title, ("gate", "result", "value", "limit"), rows, frozenset({2, 3}))


def outcome(certificate: Mapping[str, Any]) -> str:
    """ "passed" and what it did not cover, or "failed: <the first cause>"."""
    if certificate.get("passed") is True:
        return "passed" + "".join(f", {gap}" for gap in _gaps(certificate))
    failure = certificate.get("failure")
    return f"failed: {printable(str(failure))}" if failure else "failed"


def _gaps(certificate: Mapping[str, Any]) -> Iterator[str]:
    verified, layers = certificate.get("layers_verified"), certificate.get("num_layers")
    if verified != layers:
        yield f"first {printable(str(verified))} of {printable(str(layers))} layers only"
    skipped = certificate.get("skipped")
    if isinstance(skipped, list | tuple) and skipped:
        names = ", ".join(printable(str(name)) for name in skipped)
        yield f"without the prompts {names} (no memory for the reference)"


def _row(gate: Mapping[str, Any]) -> tuple[str, str, str, str]:
    result = "pass" if gate.get("passed") is True else "FAIL"
    name = printable(str(gate.get("name", "?")))
    return name, result, _number(gate.get("value")), _number(gate.get("limit"))


def _number(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else printable(str(value))
