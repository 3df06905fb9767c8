"""A picture of who gets which samples: for each epoch, sample against step."""

from __future__ import annotations

from html import escape

from paceline.contract.sample_records import CONTENT
from paceline.tools.inspect.samples import Epoch, Key, Samples

COLOURS = ("#3b7dd8", "#e8590c", "#2f9e5b", "#a64ac9", "#c99a1d", "#d1383d", "#159a9c", "#6b7280")
MAX_DOTS = 6000  # in one plot
LEFT, PLOT_WIDTH, PLOT_HEIGHT = 76, 800, 260
EPOCH_HEIGHT = PLOT_HEIGHT + 80
STYLE = (
    "text{font:12px "
    "system-ui,sans-serif;fill:#667080}.title{font-size:15px;font-weight:600;fill:#1b1f24}"
    ".frame{fill:none;stroke:#c4cad3}.paper{fill:#fff}.several{fill:#1b1f24}"
    "@media(prefers-color-scheme:dark){.paper{fill:#14171b}.title,.several{fill:#e6e9ee}"
    "text{fill:#97a1af}.frame{stroke:#343b45}}"
)


def draw_samples(samples: Samples, title: str) -> str:
    """Return the picture as SVG."""
    epochs = samples.epochs[:2]
    positions = _positions(samples)
    width, height = LEFT + PLOT_WIDTH + 24, 74 + EPOCH_HEIGHT * len(epochs)
    parts = [
        f'<rect class="paper" width="{width}" height="{height}"/>',
        _text(LEFT, 28, title, kind="title"),
    ]
    x = LEFT
    for rank in range(min(samples.facts.world_size, len(COLOURS))):
        parts.append(
            f'<circle cx="{x + 5}" cy="48" r="5" fill="{colour(rank)}"/>'
            + _text(x + 14, 52, f"rank {rank}")
        )
        x += 76
    if any(len(ranks) > 1 for epoch in epochs for ranks in _ranks(epoch, positions).values()):
        parts.append(
            f'<circle class="several" cx="{x + 5}" cy="48" r="5"/>'
            + _text(x + 14, 52, "several ranks")
        )
    for index, epoch in enumerate(epochs):
        parts += _draw_epoch(samples, epoch, positions, 84 + index * EPOCH_HEIGHT)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" '
        'style="max-width:100%;height:auto">'
        f"<style>{STYLE}</style>{''.join(parts)}</svg>\n"
    )


def colour(rank: int) -> str:
    return COLOURS[rank % len(COLOURS)]


def _positions(samples: Samples) -> dict[Key, int]:
    """Return where each sample is on the axis: its index, or its place in the first epoch."""
    order = samples.epochs[0].order
    if all(isinstance(key, int) for epoch in samples.epochs for key in epoch.counts):
        return {key: int(key) for epoch in samples.epochs for key in epoch.counts}
    known = list(dict.fromkeys([*order, *(key for epoch in samples.epochs for key in epoch.order)]))
    return {key: index for index, key in enumerate(known)}


def _ranks(epoch: Epoch, positions: dict[Key, int]) -> dict[tuple[int, int], set[int]]:
    """Return which ranks get a sample in a step: dots on top of each other would look like those
    of one rank.
    """
    found: dict[tuple[int, int], set[int]] = {}
    for rank, batch in epoch.batches():
        for key in batch.keys:
            found.setdefault((positions[key], batch.step), set()).add(rank)
    return found


def _draw_epoch(samples: Samples, epoch: Epoch, positions: dict[Key, int], top: float) -> list[str]:
    total = max(samples.facts.samples or 0, 1 + max(positions.values(), default=0))
    steps = max(1, *epoch.steps.values())
    dots = list(_ranks(epoch, positions).items())
    every = max(1, len(dots) // MAX_DOTS)
    radius = 1.6 if len(dots) > 2000 else 2.4
    part = "" if epoch.is_whole else f", first {steps} steps"
    count = f"{len(epoch.counts):,} samples"
    if len(epoch.order) > len(epoch.counts):
        count += f", read {len(epoch.order):,} times in all,"
    parts = [
        _text(LEFT, top, f"epoch {epoch.number}{part}: {count} in {steps:,} steps", kind="title"),
        _frame(top + 10, PLOT_HEIGHT),
        _text(LEFT - 8, top + 22, "step 0", "end"),
        _text(LEFT - 8, top + 8 + PLOT_HEIGHT, str(steps - 1), "end"),
    ]
    for (position, step), ranks in dots[::every]:
        x = LEFT + (position + 0.5) / total * PLOT_WIDTH
        y = top + 10 + (step + 0.5) / steps * PLOT_HEIGHT
        paint = 'class="several"' if len(ranks) > 1 else f'fill="{colour(min(ranks))}"'
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" {paint} fill-opacity=".75"/>')
    base = top + PLOT_HEIGHT + 28
    what = "sample, by its contents" if samples.facts.keys == CONTENT else "sample"
    return [
        *parts,
        _text(LEFT, base, "0"),
        _text(LEFT + PLOT_WIDTH / 2, base, what, "middle"),
        _text(LEFT + PLOT_WIDTH, base, f"{total - 1:,}", "end"),
    ]


def _frame(y: float, height: float) -> str:
    return f'<rect class="frame" x="{LEFT}" y="{y}" width="{PLOT_WIDTH}" height="{height}"/>'


def _text(x: float, y: float, text: str, anchor: str = "start", kind: str = "") -> str:
    style = f' class="{kind}"' if kind else ""
    return f'<text{style} x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}">{escape(text)}</text>'
