"""Write style-*.svg: tasks, processes and GPUs of each launch style.  python
docs/pictures/launch_styles.py [FOLDER]

Each picture has a light panel of its own, so that it can be read on light and on dark pages.
"""

from __future__ import annotations

import sys
from html import escape
from pathlib import Path

HERE = Path(__file__).parent
NODES, GPUS = 2, 2
NODE_WIDTH, GAP, LEFT = 340, 24, 16
COLORS = {
    "task": "#e8edf7",
    "agent": "#c7d7f5",
    "starter": "#fde3b0",
    "rank": "#bfe8cf",
    "gpu": "#d9d9e3",
}
# What each style has on a node: tasks of Slurm, and in each of them a chain of processes down to
# its ranks.
STYLES = {
    "fork": ("fork: one task per node", "one", ["agent", "zygote (torch imported)"], "fork"),
    "torchrun": ("torchrun: one task per node", "one", ["agent", "torchrun"], "exec"),
    "spawn": ("spawn: one task per node", "one", ["agent", "train.py"], "spawn"),
    "srun": ("srun: one task per rank", "each", ["agent"], "exec"),
    "mpirun": ("mpirun: one process of mpirun per rank", "each", ["agent"], "exec"),
}


class Drawing:
    def __init__(self, height: int) -> None:
        self.width = 2 * LEFT + NODES * NODE_WIDTH + (NODES - 1) * GAP
        self.height = height
        self.parts: list[str] = []

    def box(
        self, x: float, y: float, width: float, text: str, *, kind: str, height: float = 30
    ) -> None:
        dash = ' stroke-dasharray="5 4"' if kind == "task" else ""
        place = f'x="{x}" y="{y}" width="{width}" height="{height}"'
        self.parts.append(f'<rect {place} rx="6" fill="{COLORS[kind]}" stroke="#44506b"{dash}/>')
        self.text(x + width / 2, y + (17 if kind == "task" else height / 2 + 5), text)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: int = 13,
        left: bool = False,
        bold: bool = False,
    ) -> None:
        anchor, weight = "start" if left else "middle", "bold" if bold else "normal"
        look = f'font-size="{size}" text-anchor="{anchor}" font-weight="{weight}"'
        self.parts.append(f'<text x="{x}" y="{y}" {look}>{escape(text)}</text>')

    def arrow(self, x1: float, y1: float, x2: float, y2: float) -> None:
        self.parts.append(
            f'<path d="M{x1} {y1}L{x2} {y2}" stroke="#44506b" fill="none" marker-end="url(#tip)"/>'
        )

    def to_svg(self, title: str) -> str:
        style = "font-family:system-ui,-apple-system,'Segoe UI',sans-serif;fill:#1c2433"
        tip = (
            '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            'markerHeight="7" orient="auto">'
            '<path d="M0 0L8 4L0 8z" fill="#44506b"/></marker>'
        )
        body = "\n".join(self.parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" '
            f'height="{self.height}" role="img"><title>{escape(title)}</title><defs>{tip}</defs>'
            f'<rect width="{self.width}" height="{self.height}" rx="10" fill="#ffffff"/>'
            f'<g style="{style}">\n{body}\n</g></svg>\n'
        )


def draw(style: str) -> str:
    title, tasks, chain, way = STYLES[style]
    levels = len(chain)
    height = 88 + 52 * (levels + 2)
    drawing = Drawing(height + 22)
    drawing.text(LEFT, 26, title, size=16, left=True, bold=True)
    for node in range(NODES):
        x = LEFT + node * (NODE_WIDTH + GAP)
        drawing.text(x + 4, 52, f"node {node}", left=True, bold=True)
        _node(drawing, node, x, tasks=tasks, chain=chain, way=way)
    legend = "solid: processes on the node · dashed: a task of Slurm" + (
        " (or of mpirun)" if style == "mpirun" else ""
    )
    drawing.text(LEFT, height + 8, legend, size=12, left=True)
    return drawing.to_svg(title)


def _node(drawing: Drawing, node: int, x: float, *, tasks: str, chain: list[str], way: str) -> None:
    width = NODE_WIDTH / GPUS - 8
    task_height = 52 * (len(chain) + 1) + 22
    if tasks == "one":
        drawing.box(x, 60, NODE_WIDTH, f"task {node}", kind="task", height=task_height)
        for level, name in enumerate(chain):
            y = 88 + 52 * level
            drawing.box(
                x + 60, y, NODE_WIDTH - 120, name, kind="agent" if name == "agent" else "starter"
            )
            if level:
                drawing.arrow(x + NODE_WIDTH / 2, y - 22, x + NODE_WIDTH / 2, y)
    for local in range(GPUS):
        left, rank = x + 4 + local * (width + 8), node * GPUS + local
        middle, y = left + width / 2, 88 + 52 * len(chain)
        if tasks == "each":
            drawing.box(left - 2, 60, width + 4, f"task {rank}", kind="task", height=task_height)
            drawing.box(left + 20, 88, width - 40, chain[0], kind="agent")
            drawing.arrow(middle, 118, middle, y)
        else:
            drawing.arrow(x + NODE_WIDTH / 2 + (local - 0.5) * 60, y - 22, middle, y)
        drawing.box(left + 10, y, width - 20, f"rank {rank} ({way})", kind="rank")
        drawing.arrow(middle, y + 30, middle, y + 60)
        drawing.box(left + 10, y + 60, width - 20, f"GPU {local}", kind="gpu")


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    for each in STYLES:
        (folder / f"style-{each}.svg").write_text(draw(each), encoding="utf-8")
