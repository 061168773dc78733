"""Shared by the commands and magics: their help and errors, and the values that they accept."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from .errors import DdpLabError
from .files import write_text


class Parser(argparse.ArgumentParser):
    """A parser whose errors are two lines and whose help ends with examples.

    Args:
        examples: command lines, shown as they are.
        options: those of `argparse.ArgumentParser`.
    """

    def __init__(self, *, examples: Sequence[str] = (), **options: Any) -> None:
        super().__init__(**options)
        self._examples = examples

    def format_help(self) -> str:
        """The help, with the examples below it."""
        if not self._examples:
            return super().format_help()
        return "\n  ".join([f"{super().format_help()}\nexamples:", *self._examples]) + "\n"

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Refuses unknown arguments in the command's own parser, whose help is named in the error."""
        given, unknown = super().parse_known_args(args, namespace)
        if unknown:
            known = [name for action in self._actions for name in action.option_strings]
            kind = "option" if unknown[0].startswith("-") else "argument"
            self.error(f"unknown {kind} {unknown[0]!r}{_closest(unknown[0].split('=')[0], known)}")
        return given, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Adds the closest choice to the error: `action` lists them all."""
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            error.message += _closest(str(value), map(str, action.choices or ()))
            raise

    def error(self, message: str) -> NoReturn:
        """Exits: one line reports the error, another the help command; the full usage may fill a screen."""
        self.exit(2, f"{self.prog}: {message}\n`{self.prog} --help` lists the options.\n")


def _closest(word: str, known: Iterable[str]) -> str:
    """The end of an error that suggests a known word; "" if none is close."""
    close = difflib.get_close_matches(word, list(known), 1)
    return f"; did you mean {close[0]}?" if close else ""


def number_from(lowest: int) -> Callable[[str], int]:
    """A converter to whole numbers of at least `lowest`."""

    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = lowest - 1
        if value < lowest:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {lowest}")
        return value

    return convert


count = number_from(1)


def _above_0(what: str, or_0: bool = False) -> Callable[[str], float]:
    """A converter to finite numbers above 0, or from 0 on; `what` describes them."""

    def convert(text: str) -> float:
        value = _finite(text)
        if value is None or value < 0 or (value == 0 and not or_0):
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
        return value

    return convert


seconds = _above_0("a time in seconds (for example 30 or 0.5)")
seconds_or_never = _above_0("a time in seconds (for example 30), or 0", or_0=True)
positive = _above_0("a number above 0")


def percent(text: str) -> float:
    """A percentage, with or without its sign."""
    value = _finite(text.removesuffix("%"))
    if value is None or value < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a percentage (for example 5%)")
    return value


def _finite(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def file_to_write(text: str) -> Path:
    """A file that can be created or overwritten; parent folders may be missing."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder: give a file name")
    return _below_a_folder(path, path.parent)


def folder_to_write(text: str) -> Path:
    """A folder that exists or can be created."""
    return _below_a_folder(Path(text), Path(text))


def folder_of_a_record(text: str) -> Path:
    """A folder to create, even if the disk is full: the recorded program runs anyway."""
    _nearest_folder(Path(text))
    return Path(text)


def _below_a_folder(path: Path, folder: Path) -> Path:
    """Refuses a path at which nothing can be created, before any work is done."""
    there = _nearest_folder(folder)
    if not os.access(there, os.W_OK | os.X_OK):
        raise argparse.ArgumentTypeError(f"{there} is not writable")
    return path


def _nearest_folder(path: Path) -> Path:
    """The deepest existing part of a path; refuses one that is not a folder."""
    while not os.path.lexists(path):
        path = path.parent
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is not a folder")
    return path


def write_json(path: Path, found: Any) -> None:
    """Writes a result to the requested file, and creates its parent folders.

    Raises:
        DdpLabError: it can't be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(found, indent=2) + "\n")
    except OSError as error:
        raise DdpLabError(f"can't write {path}: {error.strerror}") from error


def tell(line: str) -> None:
    """Prints a line on stderr, if possible."""
    with contextlib.suppress(OSError, ValueError):  # it is full or closed
        print(f"ddp-lab: {line}", file=sys.stderr, flush=True)
