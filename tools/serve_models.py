"""The models that `trtllm-lite serve` is asked for: bundles, their names, their share of memory."""

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trtllm_lite.runtime.errors import UsageError
from trtllm_lite.runtime.loading import LoadOptions
from trtllm_lite.runtime.manifest import MANIFEST_NAME
from trtllm_lite.runtime.manifest_io import read_manifest
from trtllm_lite.runtime.server.service import check_model_name


@dataclass(frozen=True)
class Wanted:
    """A bundle and its names for clients: the usual one first, then aliases."""

    bundle: Path
    names: tuple[str, ...]


def wanted_models(
    bundles: Sequence[str], names: Sequence[str], aliases: Sequence[str]
) -> tuple[Wanted, ...]:
    """From the command line: `bundles` are FOLDER or NAME=FOLDER, `names` those of the only bundle,
    `aliases` ALIAS=NAME. Bundles of one content are one model. Raises UsageError, and BundleError
    for one of several bundles that is none."""
    models = _merged([_wanted(text) for text in bundles])
    if names:
        models = [_renamed(models, bundles, names)]
    for text in aliases:
        models = _with_alias(models, text)
    for name in (name for model in models for name in model.names):
        check_model_name(name)
    return tuple(models)


def default_name(bundle: Path) -> str:
    """The folder's name, with what no model name may hold replaced."""
    return re.sub(r"[^\w.+@-]+", "-", bundle.resolve().name, flags=re.ASCII) or "model"


def shared_options(
    options: LoadOptions, models: Sequence[Wanted], available: int | None
) -> LoadOptions:
    """For each of several models, so that all of them fit: of what their files leave of the
    `available` bytes half is for KV, in equal parts, and so is what one model may keep of prefixes.
    `available` None: the system does not say. Raises UsageError where the files alone are more."""
    if len(models) == 1:
        return options
    options = replace(options, prefix_cache_bytes=options.prefix_cache_bytes // len(models))
    if available is None:
        return options
    weights = sum(_size(model.bundle) for model in models)
    if weights >= available:
        raise UsageError(
            f"the {len(models)} bundles hold {weights} bytes; {available} bytes of memory are "
            "available; serve fewer of them"
        )
    return replace(options, kv_bytes=(available - weights) // 2 // len(models))


def _wanted(text: str) -> Wanted:
    """A folder whose own name has an equals sign is a folder."""
    name, equals, folder = text.partition("=")
    if not equals or Path(text).exists():
        return Wanted(Path(text), (default_name(Path(text)),))
    if not folder:
        raise UsageError(f"bundle {text!r}; allowed: FOLDER or NAME=FOLDER")
    return Wanted(Path(folder), (name,))


def _merged(models: Sequence[Wanted]) -> list[Wanted]:
    """One model for all bundles of the same content, under all their names."""
    if len(models) == 1:
        return list(models)
    by_content: dict[str, Wanted] = {}
    for model in models:
        content = _content(model.bundle)
        first = by_content.get(content, model)
        names = tuple(dict.fromkeys((*first.names, *model.names)))
        by_content[content] = Wanted(first.bundle, names)
    made = list(by_content.values())
    _check_distinct(name for model in made for name in model.names)
    return made


def _check_distinct(names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise UsageError(f"model name {name!r} is that of two bundles; write NAME=FOLDER")
        seen.add(name)


def _renamed(models: Sequence[Wanted], bundles: Sequence[str], names: Sequence[str]) -> Wanted:
    given = models[0].names != (default_name(models[0].bundle),)
    if len(bundles) > 1 or given:
        action = "name it NAME=FOLDER, and add --alias ALIAS=NAME"
        raise UsageError(f"--served-model-name is for one bundle without a name; {action}")
    return replace(models[0], names=tuple(dict.fromkeys(names)))


def _with_alias(models: Sequence[Wanted], text: str) -> list[Wanted]:
    alias, _, name = text.partition("=")
    known = [each for model in models for each in model.names]
    if name not in known:
        raise UsageError(f"--alias {text!r}; allowed: ALIAS=NAME with NAME of {', '.join(known)}")
    if alias in known:
        raise UsageError(f"--alias {text!r}: there is a model of the name {alias!r} already")
    return [
        replace(model, names=(*model.names, alias)) if name in model.names else model
        for model in models
    ]


def _content(bundle: Path) -> str:
    """What tells bundles apart: the manifest holds the hashes of all other files."""
    read_manifest(bundle)
    return hashlib.sha256((bundle / MANIFEST_NAME).read_bytes()).hexdigest()


def _size(bundle: Path) -> int:
    return sum(file.size for file in read_manifest(bundle).files)
