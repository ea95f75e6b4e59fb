"""Which checkpoint tensor holds which parameter of the model."""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming

from trtllm_lite.runtime.errors import CheckpointError

# Recomputed from the configuration by every version of the modelling code.
RECOMPUTED = re.compile(r"(inv_freq|masked_bias|attn\.bias|attention\.bias|position_ids)$")
SHOWN = 4


def renamed(model: Any, stored: frozenset[str]) -> dict[str, str]:
    """The model's present name of every stored tensor -> the name it is stored under.

    transformers keeps a list of renamings per model for checkpoints made by earlier versions.
    """
    renamings = [r for r in get_model_conversion_mapping(model) if isinstance(r, WeightRenaming)]
    names: dict[str, str] = {}
    for key in sorted(stored):
        name = key
        for renaming in renamings:
            name, _ = renaming.rename_source_key(name)
        names[name] = key
    return names


def match_names(
    model: Any, aliases: Mapping[str, str], wanted: Iterable[str], stored: frozenset[str]
) -> dict[str, str]:
    """Parameter name -> checkpoint name, for every wanted parameter.

    A name may differ by the base model's prefix, and a tied tensor may stand under any of its
    names. Raises CheckpointError naming parameters without a tensor.
    """
    by_canonical: dict[str, list[str]] = {}
    for name, canonical in aliases.items():
        by_canonical.setdefault(canonical, []).append(name)
    found: dict[str, str] = {}
    missing = []
    for name in wanted:
        options = (o for alias in by_canonical[name] for o in _spellings(model, alias))
        key = next((o for o in options if o in stored), None)
        if key is None:
            missing.append(name)
        else:
            found[name] = key
    if missing:
        raise CheckpointError(f"the checkpoint has no tensor for {_some(missing)}")
    return found


def refuse_unused(
    model: Any, aliases: Mapping[str, str], found: Mapping[str, str], stored: frozenset[str]
) -> None:
    """Raise CheckpointError when the checkpoint holds tensors that the model does not know: they
    would be dropped silently, and the result would be another model."""
    known = {o for alias in aliases for o in _spellings(model, alias)} | set(found.values())
    ignored = [
        re.compile(p) for p in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    ]
    extra = [
        name
        for name in sorted(stored - known)
        if not RECOMPUTED.search(name) and not any(p.search(name) for p in ignored)
    ]
    if extra:
        raise CheckpointError(f"the model has no place for the checkpoint's {_some(extra)}")


def check_shapes(
    shapes: Mapping[str, tuple[int, ...]], stored: Mapping[str, tuple[int, ...]]
) -> None:
    """Raise CheckpointError when a tensor's shape is not the parameter's."""
    for name, shape in shapes.items():
        if stored[name] != shape:
            got, want = list(stored[name]), list(shape)
            raise CheckpointError(f"{name}: the checkpoint's shape is {got}, the model's {want}")


def _spellings(model: Any, name: str) -> Iterator[str]:
    prefix = f"{model.base_model_prefix}."
    yield name
    yield name.removeprefix(prefix)
    yield f"{prefix}{name}"


def _some(names: list[str]) -> str:
    rest = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")
