"""The palette and the words of pictures, figures and the browser's views: Okabe-Ito, and Cividis for ordered values.

`bundle` hands them to the browser as `generated.js`, and as properties of its style sheets (``--ddp-role-waiting``).
"""

from __future__ import annotations

from html import escape

__all__ = [
    "COLOURS",
    "LABELS",
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

# The parts of a step in the order in which they are stacked: field of `Breakdown` -> colour and name.
PHASES: dict[str, tuple[str, str]] = {
    "other": ("#9aa1a9", "other"),
    "data": ("#e69f00", "data loading"),
    "optimizer": ("#cc79a7", "optimizer"),
    "accumulation": ("#a5b8d0", "gradient accumulation"),
    "forward": ("#0072b2", "forward"),
    "alone": ("#56b4e9", "backward without communication"),
    "hidden": ("#009e73", "overlapped communication"),
    "exposed": ("#d55e00", "exposed communication"),
}
# Of contributions and ranks; beyond eight they repeat, and only the position differs.
RANK_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#9aa1a9")
# The parts of a bucket's row in a timeline, in order, and how they are called there.
PARTS = ("filling", "queued", "waiting", "reducing", "exposed")
LABELS = {
    "filling": "filling",
    "queued": "ready (queued)",
    "waiting": "waiting for peers",
    "reducing": "all-reduce",
    "exposed": "exposed",
}
# Colours by role.
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
    "line": "#808080",  # legible on light and dark pages
    "band": "#b8bdc4",
}
PATTERNS = {"queued": "dots", "waiting": "hatch", "exposed": "line"}
LETTERS = {"waiting": "w"}
TITLES = {
    "filling": "first gradient ready → bucket ready",
    "queued": "ready → launched: the order of launches is fixed",
    "waiting": "launched → launched on the last rank",
    "reducing": "launched on the last rank → reduced",
    "other": "everything else since the end of the previous step; the table of parts names it",
    "data": "waiting for the data loader's next batch",
    "optimizer": "the optimizer's step",
    "accumulation": "gradient accumulation: forwards before the last one, and their backwards",
    "forward": "the last forward before the backward",
    "alone": "backward compute with no communication in flight",
    "hidden": "backward compute with communication in flight",
    "exposed": "communication after the backward's computation: it adds to the step time",
}
# The same as rules of a style sheet: selector -> declarations.
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
# For dark pages, where the dark end of the ramp would be invisible: this one starts brighter, in the same order.
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
    """Returns the role of a rank."""
    return f"rank{rank % len(RANK_COLOURS)}"


def bucket_colour(bucket: float, buckets: int) -> tuple[str, str]:
    """Returns the CSS colour of a bucket (dark: launched first) and that of text on it."""
    at = (0.5 if buckets < 2 else bucket / (buckets - 1)) * (len(RAMP) - 1)
    low = min(int(at), len(RAMP) - 2)
    red, green, blue = (
        round(one + (other - one) * (at - low)) for one, other in zip(RAMP[low], RAMP[low + 1], strict=True)
    )
    light = 0.3 * red + 0.59 * green + 0.11 * blue > 120
    return f"rgb({red}, {green}, {blue})", "#000" if light else "#fff"


def plotly_text(text: str) -> str:
    """Escapes a text for plotly, which treats some HTML in labels (bold, links, line breaks) as markup."""
    return escape(text, quote=False)
