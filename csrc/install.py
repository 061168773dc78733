"""Installs packages with uv where it can be had, else with pip: `python csrc/install.py [EXTRA | REQUIREMENT] ...`.

An EXTRA is one of pyproject.toml's optional-dependencies, or "" for what the package itself needs. Run with the
interpreter of the environment that they go into. What pip is told (indexes, folders with wheels, constraints,
certificates), in its configuration files or by PIP_ variables, uv is told, too; UV_ variables that are set stay.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    from pip._vendor import tomli as tomllib

PROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"
UV = Path(sysconfig.get_path("scripts"), "uv")
# pip's option -> uv's variable, and what stands between several values
_VARIABLES = {
    "find-links": ("UV_FIND_LINKS", ","),
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "constraint": ("UV_CONSTRAINT", " "),
    "trusted-host": ("UV_INSECURE_HOST", " "),
    "cert": ("SSL_CERT_FILE", " "),
    "timeout": ("UV_HTTP_TIMEOUT", " "),
    "default-timeout": ("UV_HTTP_TIMEOUT", " "),
    "proxy": ("ALL_PROXY", " "),
    "no-index": ("UV_NO_INDEX", " "),
}


def pips_settings() -> dict[str, str]:
    """What pip's configuration says, by option: a variable before [install], and that before [global]."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    found: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}
    for line in listed.stdout.splitlines():
        name, _, value = line.partition("=")
        where, _, option = name.rpartition(".")
        if where in found:
            found[where][option.replace("_", "-")] = str(ast.literal_eval(value))
    return {**found["global"], **found["install"], **found[":env:"]}


def uvs_environment(settings: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    """The environment in which uv finds what pip with these settings finds."""
    made = dict(environment)
    for option, (variable, between) in _VARIABLES.items():
        if option in settings:
            made.setdefault(variable, between.join(settings[option].split()))
    if "extra-index-url" in settings:  # to pip all indexes are equal
        made.setdefault("UV_INDEX_STRATEGY", "unsafe-best-match")
    return made


def requirements(words: list[str], project: Mapping[str, Any]) -> list[str]:
    """The requirements that the words stand for."""
    extras: dict[str, list[str]] = {"": project["dependencies"], **project["optional-dependencies"]}
    found: list[str] = []
    for word in words:
        for one in extras.get(word, [word]):
            inner = re.fullmatch(r"ddp_lab\[(\w+)\]", one)
            found += requirements([inner[1]], project) if inner else [one]
    return list(dict.fromkeys(found))


def have_uv() -> bool:
    """Whether uv is there, or could be installed just now."""
    if not UV.exists():
        wanted = [sys.executable, "-m", "pip", "install", "--quiet", "--only-binary", "uv", "uv"]
        subprocess.run(wanted, check=False, capture_output=True)
    return UV.exists()


def main(words: list[str]) -> int:
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    wanted = requirements([word for word in words if not word.startswith("--")], project)
    options = [word for word in words if word.startswith("--")]
    if have_uv():
        command = [str(UV), "pip", "install", "--quiet", "--python", sys.executable]
        # pip compiles always. Left to the processes that import them, each would compile all anew.
        if sys.dont_write_bytecode and "" in words:
            command.append("--compile-bytecode")
        environment = uvs_environment(pips_settings(), os.environ)
    else:
        print("uv can't be had here, so pip installs: that takes some minutes", flush=True)
        command = [sys.executable, "-m", "pip", "install", "--quiet"]
        environment = dict(os.environ)
    return subprocess.run([*command, *options, *wanted], env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
