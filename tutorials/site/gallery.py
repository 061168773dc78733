"""The gallery: of each recorded run a small picture, and the report that `ddp-lab report` makes, at build time.

The page names a run with `<!-- run: NAME -->`. Reports are pages of their own, in the folder `gallery` beside it.
"""

import re
from dataclasses import dataclass
from html import escape
from pathlib import Path

import ddp_lab
from ddp_lab.dashboard.paint import scene_svg
from ddp_lab.dashboard.report import page
from ddp_lab.dashboard.views.timeline import find_step, timeline_scene

PAGE = Path(__file__).with_name("gallery.md")
_RECORDINGS = Path(__file__).resolve().parents[1] / "recordings"
_PLACE = re.compile(r"^<!-- run: (\w+) -->$", re.MULTILINE)
_TEXT = re.compile(r"<text\b.*?</text>", re.DOTALL)
_AXIS = 34  # pixels below the last lane


@dataclass(frozen=True)
class Shown:
    """One run: the title of its card, and the name of its recording."""

    title: str
    recording: str

    def timeline(self):
        """The recording."""
        return ddp_lab.Timeline.load(_RECORDINGS / f"{self.recording}.npz")


RUNS = {
    "healthy": Shown("A healthy run", "run-0"),
    "slow_layer": Shown("One slow layer", "run-1"),
    "late_rank": Shown("A late rank", "run-3"),
    "uneven": Shown("Uneven inputs", "uneven"),
    "tiny_buckets": Shown("Tiny buckets", "run-6"),
    "one_bucket": Shown("A single bucket", "run-2"),
    "slow_network": Shown("A slow network", "run-4"),
    "comm_hook": Shown("The same network, with a comm hook", "half"),
    "unused": Shown("An unused parameter", "run-5"),
}


def filled(text):
    """A page's text with a title and a picture in the places that name a run.

    Raises:
        KeyError: there is none of a name.
    """
    return _PLACE.sub(lambda found: _card(found[1]), text)


def _card(name):
    shown = RUNS[name]
    link = f'<a href="gallery/{name}.html">'
    return (
        f'```{{raw}} html\n<p class="title">{link}{escape(shown.title)}</a></p>\n'
        f"{link}{picture(shown.timeline())}</a>\n```"
    )


def picture(timeline):
    """The step that a dashboard shows first, as small bars without words."""
    frame, _ = find_step(timeline, None, None)
    bars = _TEXT.sub("", scene_svg.picture(timeline_scene(frame)))
    found = re.match(r'<svg viewBox="0 0 (\d+) (\d+)"[^>]*>', bars)
    left = scene_svg._LANES_LEFT - 6
    box = f"{left} 0 {int(found[1]) - left} {int(found[2]) - _AXIS}"
    return (
        f"<svg class='ddp-picture small' viewBox='{box}' preserveAspectRatio='none' role='img' "
        f"aria-label='The timeline of step {frame.step}'><style>{scene_svg._CSS}</style>{bars[found.end() :]}"
    )


def write_reports(folder):
    """Writes each run's report, with its title and a way back."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, shown in RUNS.items():
        made = page(shown.timeline()).replace("Data-parallel training", escape(shown.title))
        back = '<body>\n<p class="note"><a href="../gallery.html">All recorded runs</a></p>\n'
        (folder / f"{name}.html").write_text(made.replace("<body>\n", back), encoding="utf-8")
