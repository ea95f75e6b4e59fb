"""serve: from BUNDLE, names and aliases to models, and what memory each may take."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from trtllm_lite.runtime.errors import BundleError, UsageError
from trtllm_lite.runtime.loading import LoadOptions
from trtllm_lite.tools.serve_models import Wanted, default_name, shared_options, wanted_models

Copy = Callable[..., str]


@pytest.fixture
def copy(tiny_bundle: Path, tmp_path: Path) -> Copy:
    """A folder with the bundle's manifest, which is all that is read here; `source` makes it
    another content."""

    def make(name: str, source: str | None = None) -> str:
        document = json.loads((tiny_bundle / "bundle.json").read_text())
        if source is not None:
            document["source"]["id"] = source
        folder = tmp_path / name
        folder.mkdir(parents=True)
        (folder / "bundle.json").write_text(json.dumps(document))
        return str(folder)

    return make


def names_of(models: tuple[Wanted, ...]) -> list[tuple[str, ...]]:
    return [model.names for model in models]


def test_one_bundle_has_its_folders_name_or_those_given() -> None:
    assert wanted_models(["x/b"], [], []) == (Wanted(Path("x/b"), ("b",)),)
    assert wanted_models(["x/b"], ["m", "n", "m"], []) == (Wanted(Path("x/b"), ("m", "n")),)
    assert wanted_models(["m=x/b"], [], ["n=m", "o=n"]) == (Wanted(Path("x/b"), ("m", "n", "o")),)
    assert default_name(Path("/x/Smol LM2 (int8)")) == "Smol-LM2-int8-"
    assert default_name(Path("/x/smollm2")) == "smollm2"


def test_a_folder_with_an_equals_sign_is_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "a=b"
    folder.mkdir()
    assert wanted_models([str(folder)], [], []) == (Wanted(folder, ("a-b",)),)


def test_several_bundles_are_several_models(copy: Copy) -> None:
    a, b = copy("a"), copy("b", "other")
    models = wanted_models([a, f"big={b}"], [], ["small=a", "large=big"])
    assert names_of(models) == [("a", "small"), ("big", "large")]
    assert [model.bundle for model in models] == [Path(a), Path(b)]


def test_bundles_of_one_content_are_one_model(copy: Copy) -> None:
    a, b, c = copy("a"), copy("c", "other"), copy("b")
    assert names_of(wanted_models([a, f"x={b}", c, f"y={a}"], [], [])) == [("a", "b", "y"), ("x",)]
    assert names_of(wanted_models([a, a], [], [])) == [("a",)]


@pytest.mark.parametrize(
    ("bundles", "names", "aliases", "text"),
    [
        (["x="], [], [], "NAME=FOLDER"),
        (["a b=x"], [], [], "'a b'"),
        (["x"], ["bad name"], [], "'bad name'"),
        (["m=x"], ["n"], [], "--alias"),
        (["x"], [], ["n"], "ALIAS=NAME"),
        (["x"], [], ["n=y"], "NAME of x"),
        (["x"], [], ["x=x"], "already"),
        (["x"], [], ["=x"], "''"),
    ],
)
def test_what_makes_no_sense_is_refused(
    bundles: list[str], names: list[str], aliases: list[str], text: str
) -> None:
    with pytest.raises(UsageError, match=text):
        wanted_models(bundles, names, aliases)


def test_names_of_several_are_theirs_alone(copy: Copy) -> None:
    a, b = copy("one/m"), copy("two/m", "other")
    with pytest.raises(UsageError, match="'m' is that of two bundles"):
        wanted_models([a, b], [], [])
    with pytest.raises(UsageError, match="NAME=FOLDER"):
        wanted_models([a, f"n={b}"], ["x"], [])
    with pytest.raises(BundleError, match=r"no bundle\.json|not a bundle|bundle"):
        wanted_models([a, "nowhere"], [], [])


def test_memory_is_shared_by_several(copy: Copy) -> None:
    models = wanted_models([copy("a"), copy("b", "other")], [], [])
    options = LoadOptions(max_num_seqs=3)
    size = sum(
        e["size"] for e in json.loads((models[0].bundle / "bundle.json").read_text())["files"]
    )
    made = shared_options(options, models, 2 * size + 4000)
    assert (made.kv_bytes, made.max_num_seqs) == (1000, 3)
    assert made.prefix_cache_bytes == options.prefix_cache_bytes // 2
    assert shared_options(options, models, None).kv_bytes is None
    assert shared_options(options, models[:1], 10) == options
    with pytest.raises(UsageError, match=f"hold {2 * size} bytes; {2 * size} bytes"):
        shared_options(options, models, 2 * size)
