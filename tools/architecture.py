"""Draws docs/architecture.svg, the processes of a cluster and the two roads between them, and docs/program.svg.

    python -m waypath.tools.architecture [--out docs]

Owns the pictures alone; plain text in, plain text out, the same bytes every time. Called by hand, and by a test that the
committed pictures are these.
"""

import argparse
import sys
from dataclasses import dataclass
from html import escape
from pathlib import Path

WIDTH, HEIGHT = 920, 540
FONT = "ui-sans-serif, system-ui, 'Segoe UI', Helvetica, Arial, sans-serif"
INK, SOFT, PAPER = "#1f2933", "#52606d", "#ffffff"
CONTROL, DATA = "#7b8794", "#c2410c"
FILLS = {
    "client": "#f1f5f9",
    "controller": "#e0e7ff",
    "trainer": "#dcfce7",
    "inference": "#fef3c7",
    "reward": "#fce7f3",
    "launcher": "#f1f5f9",
}


@dataclass(frozen=True)
class Box:
    """A process (or a stack of equal ones): its top left corner and size in pixels, a title and lines below it."""

    kind: str
    x: int
    y: int
    width: int
    height: int
    title: str
    lines: tuple[str, ...] = ()
    copies: int = 1

    def svg(self) -> str:
        """The box, equal ones peeping out behind it."""
        parts = []
        for offset in range(6 * (self.copies - 1), -1, -6):
            parts.append(
                f'<rect x="{self.x + offset}" y="{self.y - offset}" width="{self.width}" height="{self.height}" rx="8" '
                f'fill="{FILLS[self.kind]}" stroke="{INK}" stroke-width="1.2"/>'
            )
        middle = self.x + self.width // 2
        parts.append(text(middle, self.y + 24, self.title, size=15, weight=600))
        parts += [text(middle, self.y + 44 + 17 * n, line, colour=SOFT) for n, line in enumerate(self.lines)]
        return "\n".join(parts)


def text(
    x: int, y: int, words: str, *, size: int = 12, weight: int = 400, colour: str = INK, anchor: str = "middle"
) -> str:
    """A line of text, centred on `x` by default."""
    return (
        f'<text x="{x}" y="{y}" font-size="{size}" font-weight="{weight}" fill="{colour}" '
        f'text-anchor="{anchor}">{escape(words)}</text>'
    )


def arrow(points: str, colour: str, *, both: bool = False, width: float = 1.6, dashed: bool = False) -> str:
    """A line along an SVG path, with a head at its end (and start)."""
    head = "data" if colour == DATA else "control"
    start = f' marker-start="url(#{head})"' if both else ""
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    return (
        f'<path d="{points}" fill="none" stroke="{colour}" stroke-width="{width}"{dash}{start} '
        f'marker-end="url(#{head})"/>'
    )


def marker(name: str, colour: str) -> str:
    """An arrow head."""
    return (
        f'<marker id="{name}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
        f'orient="auto-start-reverse"><path d="M0 0 L10 5 L0 10 z" fill="{colour}"/></marker>'
    )


BOXES = (
    Box("client", 40, 40, 190, 66, "client", ("Python API and command",)),
    Box(
        "controller",
        330,
        30,
        260,
        122,
        "controller",
        (
            "program graph, scheduler, placement",
            "reshard planner, pacing, journal",
            "free of jax; holds no tensor",
            "and no trajectory",
        ),
    ),
    Box("launcher", 690, 40, 190, 66, "launcher", ("starts, supervises, restarts",)),
    Box(
        "trainer",
        40,
        300,
        250,
        100,
        "trainer world",
        (
            "one JAX world, fsdp over its processes",
            "advantages, packing, train step",
            "checkpoints (Orbax)",
        ),
        copies=2,
    ),
    Box(
        "inference",
        345,
        300,
        230,
        100,
        "inference workers",
        (
            "a world and an engine each",
            "sample groups, keep trajectories",
            "stage, verify, commit policies",
        ),
        copies=2,
    ),
    Box(
        "reward",
        630,
        300,
        230,
        100,
        "reward workers",
        (
            "user code in processes",
            "of its own, with a timeout",
            "per sample",
        ),
    ),
)


def draw() -> str:
    """The whole picture as SVG."""
    control = [
        arrow("M230 73 H328", CONTROL, both=True),
        arrow("M390 152 C380 220 200 220 180 290", CONTROL, both=True),
        arrow("M460 152 V290", CONTROL, both=True),
        arrow("M530 152 C540 220 720 220 740 298", CONTROL, both=True),
        arrow("M690 73 H592", CONTROL, dashed=True),
    ]
    data = [
        arrow("M180 400 C180 488 440 488 440 402", DATA, width=2.6),
        arrow("M400 402 C400 452 260 452 260 402", DATA, width=2.6),
        arrow("M583 350 H628", DATA, width=2.6),
        arrow("M745 400 C745 526 100 526 100 402", DATA, width=2.6),
    ]
    words = [
        text(279, 64, "Client service", colour=SOFT),
        text(641, 64, "processes", colour=SOFT),
        text(640, 182, "Worker service: one stream a worker;", colour=SOFT, anchor="start"),
        text(640, 199, "commands, events, refs, scalars", colour=SOFT, anchor="start"),
        text(310, 459, "policies", colour=DATA, weight=600),
        text(330, 431, "trajectories", colour=DATA, weight=600),
        text(604, 338, "texts", colour=DATA, weight=600),
        text(560, 486, "rewards", colour=DATA, weight=600),
        text(40, 528, "grey: control road", colour=SOFT, anchor="start"),
        text(
            160, 528, "orange: data road, worker to worker, never through the controller", colour=DATA, anchor="start"
        ),
    ]
    body = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'font-family="{FONT}" role="img" aria-label="The processes of a Waypath cluster and the roads between them">',
        f"<defs>{marker('control', CONTROL)}{marker('data', DATA)}</defs>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="{PAPER}"/>',
        *control,
        *data,
        *(box.svg() for box in BOXES),
        *words,
        "</svg>",
    ]
    return "\n".join(body) + "\n"


STEPS = (
    Box(
        "client",
        30,
        40,
        230,
        104,
        "traced in the client",
        ("generate → score → train", "→ transfer: 7 calls", "over refs, not values"),
    ),
    Box(
        "controller",
        345,
        30,
        250,
        122,
        "fused and placed",
        (
            "calls of a slice become sequences",
            "params bound to objects",
            "gang order per world",
            "one message a worker",
        ),
    ),
    Box(
        "inference",
        30,
        290,
        250,
        100,
        "slice actors",
        ("seq_0: sampler, scorer", "exports tokens, log-probs, rewards"),
        copies=2,
    ),
    Box(
        "trainer",
        420,
        290,
        250,
        100,
        "slice trainer",
        ("seq_1: train, state donated", "exports policy, optimizer, reward"),
        copies=2,
    ),
)


def draw_program() -> str:
    """The SVG text of one program on its way: traced, fused, run (examples/grpo_by_hand.py)."""
    width, height = 720, 470
    control = [
        arrow("M260 92 H345", CONTROL),
        arrow("M420 152 V205 H155 V284", CONTROL),
        arrow("M520 152 V284", CONTROL),
    ]
    data = [
        arrow("M280 330 H420", DATA, width=3.0),
        arrow("M545 390 V430 H155 V390", DATA, width=3.0),
        arrow("M30 350 H12 V120 H30", DATA, dashed=True),
    ]
    words = [
        text(303, 82, "install once", colour=SOFT),
        text(303, 108, "run by id", colour=SOFT),
        text(288, 198, "Execute: ids, places of inputs", colour=SOFT),
        text(350, 318, "transfers", colour=DATA, weight=600),
        text(350, 424, "the new policy", colour=DATA, weight=600),
        text(20, 228, "ref.result():", colour=DATA, anchor="start"),
        text(20, 245, "shards to the client", colour=DATA, anchor="start"),
    ]
    body = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="{FONT}" role="img" aria-label="A program from the client to the workers of two slices">',
        f"<defs>{marker('control', CONTROL)}{marker('data', DATA)}</defs>",
        f'<rect width="{width}" height="{height}" fill="{PAPER}"/>',
        *control,
        *data,
        *(box.svg() for box in STEPS),
        *words,
        "</svg>",
    ]
    return "\n".join(body) + "\n"


PICTURES = {"architecture.svg": draw, "program.svg": draw_program}


def main(argv: list[str] | None = None) -> int:
    """Write the pictures."""
    parser = argparse.ArgumentParser(description="Draw the pictures of docs/.")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent.parent / "docs", metavar="FOLDER")
    out: Path = parser.parse_args(argv).out
    for name, picture in PICTURES.items():
        (out / name).write_text(picture(), encoding="utf-8")
        print(f"wrote {out / name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
