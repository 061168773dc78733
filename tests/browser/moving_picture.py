"""`make picture`: the moving picture of README, from a real training on two ranks, light and dark.

While a cell trains, the timeline fills. After its first 61 steps rank 1 takes half a step longer in one layer, so that
rank 0 waits for the bucket of that layer, and the findings name it.
"""

from __future__ import annotations

import io
import time
from pathlib import Path

from PIL import Image

from ddp_lab import Cluster
from ddp_lab.output.board import SilentBoard
from tests.benchmarks.browser import chromium_browser
from tests.browser.bare_page import DARK, BarePage

FOLDER = Path(__file__).resolve().parents[2] / "notebooks" / "images"
WIDTH, HEIGHT, FRAME_MS = 860, 500, 125
SCENES = (("Timeline", 6.0), ("Findings", 4.0))  # tab, seconds
MODEL = """
import statistics, time
torch.manual_seed(rank)
torch.set_num_threads(1)
def slow(gradient):
    if len(steps) > 60 and rank == 1: time.sleep(0.5 * statistics.median(steps[10:60]))
layers = [torch.nn.Linear(512, 512) for _ in range(8)]
layers[3].weight.register_hook(slow)
model = ddp_lab.DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=1.0)
steps = []
while len(steps) < 400:
    began = time.perf_counter()
    model.zero_grad()
    model(torch.randn(64, 512)).square().mean().backward()
    steps.append(time.perf_counter() - began)
"""


def frames(page: BarePage) -> list[Image.Image]:
    """What the page shows, from tab to tab."""
    made = []
    for tab, seconds in SCENES:
        page.open(tab)
        due = time.monotonic()
        for _ in range(round(seconds * 1e3 / FRAME_MS)):
            page.pump()
            made.append(Image.open(io.BytesIO(page.page.screenshot())).convert("RGB"))
            due += FRAME_MS / 1e3
            page.until(lambda due=due: time.monotonic() >= due, "the next frame")
    return made


def write(path: Path, pictures: list[Image.Image]) -> None:
    """A GIF of one palette, which repeats; its size in bytes is printed."""
    palette = pictures[len(pictures) // 2].quantize(64, dither=Image.Dither.NONE)
    shown = [one.quantize(palette=palette, dither=Image.Dither.NONE) for one in pictures]
    shown[0].save(path, save_all=True, append_images=shown[1:], duration=FRAME_MS, loop=0, optimize=True)
    print(f"{path}: {path.stat().st_size:,} bytes, {len(shown) * FRAME_MS / 1e3:g} s")


def main() -> None:
    """Trains once for each theme and writes both pictures."""
    for theme, style in (("light", ""), ("dark", DARK)):
        with Cluster(2) as lab, chromium_browser() as browser:
            running = lab.run(MODEL, wait=False, board=SilentBoard())
            context = browser.new_context(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme=theme)
            page = BarePage(context.new_page(), lab.timeline, theme=style, **lab.dashboard_means())
            page.until(lambda: any(one.last_step > 0 for one in lab.timeline.reducers()), "the first steps")
            write(FOLDER / f"dashboard-{theme}.gif", frames(page))
            page.close()
            context.close()
            running.wait()


if __name__ == "__main__":
    main()
