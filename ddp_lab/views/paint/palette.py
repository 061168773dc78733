"""The one palette, of pictures, figures and the browser's views: Okabe-Ito, and Cividis for what has an order.

`bundle` hands it to the browser: as `generated.js`, and as properties of its style sheets (``--ddp-role-waiting``).
"""

from __future__ import annotations

from html import escape

__all__ = [
    "COLOURS",
    "LETTERS",
    "PARTS",
    "PATTERNS",
    "PHASES",
    "RAMP",
    "RAMP_ON_DARK",
    "RANK_COLOURS",
    "ROLE_RULES",
    "TITLES",
    "bucket_colour",
]
__all__ += ["plotly_text", "rank_role"]

# What a step consists of, as it is stacked: field of `Breakdown` -> colour and name.
PHASES: dict[str, tuple[str, str]] = {
    "other": ("#9aa1a9", "other"),
    "forward": ("#0072b2", "forward"),
    "alone": ("#56b4e9", "backward alone"),
    "hidden": ("#009e73", "hidden communication"),
    "exposed": ("#d55e00", "exposed communication"),
}
# Of contributions and ranks; beyond eight they repeat, and the place tells.
RANK_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#9aa1a9")
# What a bucket's time consists of, in order: the parts of its row in a timeline.
PARTS = ("filling", "queued", "waiting", "reducing", "exposed")
# By role, of what a view shows.
COLOURS = {
    **{key: colour for key, (colour, _) in PHASES.items()},
    **{f"rank{index}": colour for index, colour in enumerate(RANK_COLOURS)},
    "filling": "#56b4e9",
    "queued": "#f0e442",
    "waiting": "#e69f00",
    "reducing": "#009e73",
    "heat": "#d55e00",
    "good": "#009e73",
    "bad": "#d55e00",
    "adds": "#0072b2",
    "replaces": "#009e73",
    "noise": "#cc79a7",
    "phase-other": "rgba(154, 161, 169, 0.35)",
    "phase-forward": "#6fa8d6",
    "phase-backward": "#c8c8c8",
    "phase-finalize": "rgba(0, 0, 0, 0)",
    "line": "#808080",  # reads on light and dark pages
}
PATTERNS = {"queued": "dots", "waiting": "hatch", "exposed": "line"}
LETTERS = {"waiting": "w"}
TITLES = {
    "filling": "first gradient ready → bucket ready",
    "queued": "ready → launched: buckets are launched in their order",
    "waiting": "launched → launched on the last rank",
    "reducing": "launched on the last rank → reduced",
    "other": "optimizer, input data and the rest: from the end of the step before, without the phases above it",
    "forward": "the last forward before the backward",
    "alone": "backward's computation while no collective is under way",
    "hidden": "backward's computation while collectives are under way behind it",
    "exposed": "communication after the backward's computation: nothing hides it",
}
# The same as rules of a style sheet: selector -> what it sets.
ROLE_RULES = {
    **{f".role-{role}": f"fill:{colour};background:{colour}" for role, colour in COLOURS.items()},
    ".role-phase-finalize": "fill:none;stroke:#aaa",
    **{f".role-{role}-line": f"stroke:{colour};fill:none" for role, colour in COLOURS.items()},
}
RAMP = (
    (0, 32, 76),
    (33, 61, 107),
    (85, 91, 108),
    (123, 122, 119),
    (165, 156, 116),
    (211, 192, 100),
    (255, 233, 69),
)
# On dark paper the ramp's dark end would look like a hole: this one begins where it is seen, and is as ordered.
RAMP_ON_DARK = (
    (84, 121, 184),
    (108, 132, 170),
    (126, 140, 152),
    (146, 148, 138),
    (172, 164, 120),
    (213, 194, 100),
    (255, 233, 69),
)


def rank_role(rank: int) -> str:
    """Returns the role of what is a rank's."""
    return f"rank{rank % len(RANK_COLOURS)}"


def bucket_colour(bucket: int, buckets: int) -> tuple[str, str]:
    """Returns the CSS colour of a bucket (dark: launched first) and that of text on it."""
    at = (0.5 if buckets < 2 else bucket / (buckets - 1)) * (len(RAMP) - 1)
    low = min(int(at), len(RAMP) - 2)
    red, green, blue = (
        round(one + (other - one) * (at - low)) for one, other in zip(RAMP[low], RAMP[low + 1], strict=True)
    )
    light = 0.3 * red + 0.59 * green + 0.11 * blue > 120
    return f"rgb({red}, {green}, {blue})", "#000" if light else "#fff"


def plotly_text(text: str) -> str:
    """Text that plotly shows as it is: it takes some HTML (bold, links, line ends) in labels for markup."""
    return escape(text, quote=False)
