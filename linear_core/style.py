"""How every figure looks: colours that colour-blind readers tell apart, markers as a second cue, sizes that print.

``with drawing(): …`` around whatever makes and saves a figure. Imports matplotlib only inside functions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's palette without its yellow, which paper does not show; black is the base model's
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#7F7F7F")
BASE_COLOUR = "#000000"
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*")
SEQUENTIAL = "cividis"  # for maps: the same to all eyes, and monotone in grey
WIDTH = 7.0  # inches of a full-width figure: the text width of an A4 page
FONT = 9.0  # points at that width

SETTINGS: Any = {
    "font.size": FONT, "font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans", "Arial", "Helvetica"],
    "axes.titlesize": FONT, "axes.labelsize": FONT, "legend.fontsize": FONT - 1, "xtick.labelsize": FONT - 1,
    "ytick.labelsize": FONT - 1, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
    "grid.color": "#dddddd", "grid.linewidth": 0.6, "axes.axisbelow": True, "lines.linewidth": 1.6,
    "lines.markersize": 5.0, "legend.frameon": False, "figure.constrained_layout.use": True, "axes.unicode_minus": True,
    "svg.fonttype": "none", "svg.hashsalt": "golinear", "savefig.dpi": 200,
}  # fmt: skip


@contextmanager
def drawing() -> Iterator[None]:
    """Inside, matplotlib draws in this style. Figures are saved inside as well: text is laid out then."""
    import matplotlib

    with matplotlib.rc_context(SETTINGS):
        yield


def colour(position: int) -> str:
    """The colour of the n-th series; they repeat after seven, so a marker goes with each."""
    return COLOURS[position % len(COLOURS)]


def marker(position: int) -> str:
    return MARKERS[position % len(MARKERS)]


def new_figure(rows: int = 1, columns: int = 1, *, height: float = 2.8, width: float = WIDTH) -> tuple[Figure, Sequence[Any]]:
    """(figure, its axes in reading order); ``height``: inches of a row."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height * rows))
    return figure, figure.subplots(rows, columns, squeeze=False).flatten().tolist()


def save(figure: Figure, stem: Path) -> list[Path]:
    """``stem``.svg and ``stem``.png, the same bytes for the same figure. Call inside ``drawing``."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    made = [stem.with_name(f"{stem.name}.{kind}") for kind in ("svg", "png")]
    figure.savefig(made[0], metadata={"Date": None, "Creator": None})
    figure.savefig(made[1], metadata={"Software": None})
    return made


def svg_text(figure: Figure) -> str:
    """The figure as an ``<svg>`` element, to stand in a page. Call inside ``drawing``."""
    import io

    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    return text[text.index("<svg") :]
