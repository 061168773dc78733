"""Which file is loaded for which torch, and what is said where there is none."""

from __future__ import annotations

import platform
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

from ddp_lab import ExtensionError, native


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Extensions for three torches, one of them a nightly build, as a wheel has them."""
    for version in ("2.15.0", "2.9.1+cpu", "2.16.0.dev20261101+cpu"):
        made = tmp_path / f"torch{'.'.join(version.split('.')[:2])}"
        made.mkdir()
        (made / "built_for.txt").write_text(f"{version}\n")
        (made / f"_C{EXTENSION_SUFFIXES[0]}").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("version", "minor"),
    [
        ("2.15.0", "2.15"),
        ("2.15.3", "2.15"),
        ("2.15.0+cu130", "2.15"),
        ("2.9.0", "2.9"),
        ("2.10.0", None),
        ("2.15.0a0+git1234567", None),
        ("2.16.0", None),
        ("2.16.0.dev20261101+cpu", "2.16"),
        ("2.16.0.dev20261102+cpu", None),
    ],
)
def test_releases_of_one_minor_load_the_same_file(folder: Path, version: str, minor: str | None) -> None:
    """Any release and any build of a minor loads the file of that minor, a nightly build only the one made for it."""
    expected = None if minor is None else folder / f"torch{minor}" / f"_C{EXTENSION_SUFFIXES[0]}"
    assert native.path_of("_C", version, folder) == expected


def test_what_is_built_and_what_is_not(folder: Path) -> None:
    """2.9 comes before 2.15; there is no file of the backend mpi where only `_C` was built."""
    assert native.built_for(folder) == ["2.9.1+cpu", "2.15.0", "2.16.0.dev20261101+cpu"]
    assert native.path_of("_mpi", "2.15.0", folder) is None


def test_a_torch_that_is_not_served_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the torch that is there, those that would do, and how to build for it."""
    import torch

    monkeypatch.setattr(native, "_FOLDER", folder)
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    with pytest.raises(ExtensionError, match=r"built for torch .*2\.15\.0.*torch 2\.99\.0 is installed") as caught:
        native.load("_none")
    assert "make" in str(caught.value)


def test_a_build_for_another_processor_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the torch is served, but not this Python and processor, the error says so, and names both."""
    import torch

    monkeypatch.setattr(native, "_FOLDER", folder)
    monkeypatch.setattr(torch, "__version__", "2.15.0")
    (folder / "torch2.15" / f"_C{EXTENSION_SUFFIXES[0]}").rename(folder / "torch2.15" / "_C.cpython-39-armv7.so")
    with pytest.raises(ExtensionError, match=rf"another Python or processor .* on {platform.machine()}: ") as caught:
        native.load("_none")
    assert "make" in str(caught.value)
