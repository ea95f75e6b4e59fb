"""JSON files of doctor."""

import json
import math
from pathlib import Path


def write_json(folder: Path, name: str, document: object) -> Path:
    """Write a document, whole or not at all, into a folder that is made if need be; its path.
    Numbers that JSON lacks become null. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    path, partial = folder / name, folder / f".{name}.partial"
    partial.write_text(json.dumps(_finite(document), indent=1, allow_nan=False) + "\n")
    partial.replace(path)
    return path


def _finite(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value
