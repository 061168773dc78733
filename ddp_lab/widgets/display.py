"""How a dashboard appears in a notebook: the live view and, below it, a picture that a saved notebook keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import IPython
import IPython.display

if TYPE_CHECKING:
    from ..timeline.timeline import Timeline
    from .saved_picture import SavedPicture

__all__ = ["Displayed", "nothing_yet"]

_NOTHING = "No step recorded yet: train with ddp_lab.DistributedDataParallel in a %%distributed cell."
_NOTHING_WITHOUT_RANKS = "No step recorded yet: train with ddp_lab.DistributedDataParallel."
_NOTHING_PLAYED = "No step yet: the replay has not come to one."
_NOTHING_RECORDED = "No step was recorded."


def nothing_yet(timeline: Timeline, cluster: object, player: object) -> str:
    """Returns what a dashboard of these says while there is no step."""
    if player is not None:
        return _NOTHING_PLAYED
    if timeline.recorded:
        return _NOTHING_RECORDED
    return _NOTHING_WITHOUT_RANKS if cluster is None else _NOTHING


class Displayed:
    """The part of `Dashboard` that IPython calls."""

    if TYPE_CHECKING:
        _timeline: Timeline
        _picture: SavedPicture
        _frozen: bool
        _saved_version: int

        def refresh(self) -> None: ...
        def snapshot(self) -> None: ...
        def svg(self) -> str: ...
        def _words(self) -> str: ...

    _hooked: Any = None

    def _repr_mimebundle_(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the live view, with the picture for who can't show it."""
        data, metadata = self._live(**kwargs)
        return {**data, "image/svg+xml": self.svg(), "text/plain": self._words()}, metadata

    def _ipython_display_(self) -> None:
        """Displays the live view and, below it, the picture that a saved notebook keeps ([Note: two outputs])."""
        self.refresh()
        data, metadata = self._live()
        live = {**data, "text/plain": "ddp_lab dashboard: the live view; its last picture follows."}
        publish: Any = IPython.display.publish_display_data
        publish(live, metadata)
        self._picture.display(self.svg(), self._words())
        self._hook()

    def _live(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """The widget alone."""
        widget: Any = super()
        bundle: tuple[dict[str, Any], dict[str, Any]] | None = widget._repr_mimebundle_(**kwargs)
        return bundle or ({}, {})

    def _hook(self) -> None:
        """Asks IPython to call `_after_cell` at the end of every cell."""
        shell = IPython.get_ipython()  # type: ignore[attr-defined, no-untyped-call, unused-ignore]
        if shell is not None and self._hooked is None:
            shell.events.register("post_run_cell", self._after_cell)
            self._hooked = shell

    def _unhook(self) -> None:
        """Takes that back."""
        if self._hooked is not None:
            self._hooked.events.unregister("post_run_cell", self._after_cell)
            self._hooked = None

    def _after_cell(self, result: Any = None) -> None:
        """Keeps the notebook's picture up to date."""
        if self._frozen:
            self._unhook()
        elif self._saved_version != self._timeline.version:
            self.snapshot()
