"""The gates of a parity certificate as a table, from the certificate's JSON form."""

from collections.abc import Mapping
from typing import Any

from trtllm_lite.tools.console import Table, printable


def gate_table(certificate: Mapping[str, Any]) -> Table:
    """One row a gate: name, outcome, value and limit."""
    rows = tuple(_row(gate) for gate in certificate.get("gates", ()))
    title = f"Certificate: {outcome(certificate)}"
    return Table(title, ("gate", "result", "value", "limit"), rows, frozenset({2, 3}))


def outcome(certificate: Mapping[str, Any]) -> str:
    """ "passed", or "failed: <the first cause>"."""
    if certificate.get("passed") is True:
        return "passed"
    failure = certificate.get("failure")
    return f"failed: {printable(str(failure))}" if failure else "failed"


def _row(gate: Mapping[str, Any]) -> tuple[str, str, str, str]:
    result = "pass" if gate.get("passed") is True else "FAIL"
    name = printable(str(gate.get("name", "?")))
    return name, result, _number(gate.get("value")), _number(gate.get("limit"))


def _number(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else printable(str(value))
