"""`tqdm.notebook` and `tqdm.auto` on a rank draw their bars as text.

A bar made of widgets needs a front end that is connected to its kernel; a rank has none, but its text reaches the
notebook, where the bars of all ranks are merged. tqdm is not imported here: its notebook module is changed when
it is imported.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

_MODULE = "tqdm.notebook"


def install() -> None:
    """Makes every import of tqdm's notebook bars in this process return text bars, including past imports."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    if _MODULE in sys.modules:
        _use_text(sys.modules[_MODULE])


class _Finder(importlib.abc.MetaPathFinder):
    """Finds tqdm's notebook module as Python does, and has it changed once it has been executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _MODULE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def then_use_text(module: ModuleType) -> None:
                execute(module)
                if module.__name__ == _MODULE:  # a loader may be that of other modules, too
                    _use_text(module)

            loader.exec_module = then_use_text
        return spec


def _use_text(module: Any) -> None:
    text_bar: Any = module.std_tqdm

    class TextBar(text_bar):  # type: ignore[misc]
        """tqdm's text bar with the arguments of its notebook bar."""

        def __init__(self, *args: Any, display: bool = True, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)

    def text_range(*args: Any, **kwargs: Any) -> Any:
        return TextBar(range(*args), **kwargs)

    module.tqdm = module.tqdm_notebook = TextBar
    module.trange = module.tnrange = text_range
