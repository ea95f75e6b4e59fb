"""Which versions of bundle.json are read, and which one is written."""

import json
from dataclasses import replace

import pytest

from trtllm_lite.runtime.errors import BundleError
from trtllm_lite.runtime.manifest import Manifest
from trtllm_lite.runtime.manifest_io import parse_manifest, render_manifest


def read_as(manifest: Manifest, **changed: object) -> Manifest:
    document = json.loads(render_manifest(manifest)) | changed
    return parse_manifest(json.dumps(document).encode())


def test_what_is_written_has_the_newest_version(plain_manifest: Manifest) -> None:
    assert json.loads(render_manifest(plain_manifest))["format_version"] == "1.1"


def test_a_bundle_of_the_first_version_is_read(plain_manifest: Manifest) -> None:
    document = json.loads(render_manifest(plain_manifest)) | {"format_version": "1.0"}
    del document["float32_values"]
    read = parse_manifest(json.dumps(document).encode())
    assert read == replace(plain_manifest, format_version="1.0")


def test_a_newer_minor_may_add_fields(plain_manifest: Manifest) -> None:
    expected = replace(plain_manifest, format_version="1.2")
    assert read_as(plain_manifest, format_version="1.2", added={"later": [1]}) == expected


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_known_minors_have_no_other_fields(plain_manifest: Manifest, version: str) -> None:
    with pytest.raises(BundleError, match=r"^added: unknown field"):
        read_as(plain_manifest, format_version=version, added=1)


@pytest.mark.parametrize("version", ["0.9", "2.0", "10.0"])
def test_unknown_majors(plain_manifest: Manifest, version: str) -> None:
    with pytest.raises(BundleError, match=rf"^format_version: .*{version}.*1\.x \(1\.1\)"):
        read_as(plain_manifest, format_version=version)


@pytest.mark.parametrize("version", ["1", "1.0.0", "01.0", "1.-1", "1.x", " 1.0", "", 1.0, None])
def test_malformed_versions(plain_manifest: Manifest, version: object) -> None:
    with pytest.raises(BundleError, match=r"^format_version: "):
        read_as(plain_manifest, format_version=version)


@pytest.mark.parametrize("kind", ["other-bundle", None, 1])
def test_another_format(plain_manifest: Manifest, kind: object) -> None:
    with pytest.raises(BundleError, match=r"^format: "):
        read_as(plain_manifest, format=kind)
