"""The report of a study: one HTML file that needs nothing else, for a screen, a phone and paper. Imports no torch.

The words are computed from the numbers (``sweeps.findings``), the tables are those of ``sweeps.render``, the figures
those of ``sweeps.figures``. The same study gives the same bytes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linear_core import style
from sweeps import figures, findings, published, study, tables
from sweeps.render import breakable, render
from sweeps.views import DASH, column_text, number, signed, source_text

if TYPE_CHECKING:
    from sweeps.study import Study
    from sweeps.tables import Table

MOST_REASONS = 40
SETTINGS = (*tables.TRAIN_FIELDS, "mechanism", "budget", "adaptation", "merge", "softmax_layers", "gate_bias",
            "learned_read_scale", "lora_rank", "lora_alpha", "conv_kernel", "seed")  # fmt: skip
SECTIONS = {
    "summary": "Summary", "scores": "Scores", "choices": "Choices", "figures": "Figures", "cost": "Cost",
    "published": "Published", "seeds": "Seeds", "missing": "Missing", "settings": "Settings", "provenance": "Provenance",
}  # fmt: skip


def write(found: Study, folder: Path) -> Path:
    """``index.html`` and ``study.json`` (what it is made from) in a folder; returns the page."""
    folder.mkdir(parents=True, exist_ok=True)
    page = folder / "index.html"
    page.write_text(html(found), encoding="utf-8")
    (folder / "study.json").write_text(study.to_json(found), encoding="utf-8")
    return page


def html(found: Study) -> str:
    """The whole page."""
    from jinja2 import Environment
    from markupsafe import Markup, escape

    environment = Environment(autoescape=True, trim_blocks=False)
    environment.filters["strong"] = lambda text: Markup(re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", str(escape(text))))
    environment.filters["breakable"] = lambda text: Markup(breakable(text))
    template = environment.from_string(files("sweeps").joinpath("data/report.html").read_text(encoding="utf-8"))
    content = _content(found)
    content["tables"] = {name: Markup(text) for name, text in content["tables"].items()}
    content["figures"] = [{**figure, "svg": Markup(figure["svg"])} for figure in content["figures"]]
    there = {"choices": content["effects"], "published": content["tables"]["published"], "seeds": content["tables"]["seeds"]}
    sections = [(name, title) for name, title in SECTIONS.items() if there.get(name, True)]
    return template.render(sections=sections, **content)


def markdown(found: Study) -> str:
    """The summary in words and the scores as Markdown: for a Prefect artifact or an MLflow note."""
    table = found.table()
    lines = [f"# {found.name}", "", *findings.headline(table), ""]
    lines += [f"- {column_text(v.column)}: {findings.sentence(v)}" for v in findings.verdicts(table)]
    return "\n".join([*lines, "", render(table, "markdown", show="scores")])


def _content(found: Study) -> dict[str, Any]:
    table = found.table()
    verdicts: dict[str, list[tuple[str, str]]] = {}
    for verdict in findings.verdicts(table):
        verdicts.setdefault(verdict.base, []).append((column_text(verdict.column), findings.sentence(verdict)))
    drawings, drawn = _drawings(found)
    untitled = tables.Table(title="", columns=table.columns, rows=table.rows)
    shown = {name: _table(untitled, name) for name in ("scores", "kept", "cost", "published")}
    several = any(row.facts["seeds"] > 1 for row in table.rows)
    return {
        "title": f"{found.name}: linearized models against their base",
        "subtitle": ", ".join(filter(None, [*found.sweeps, f"golinear {found.made}"])), "made": found.made,
        "one_base": len({row.base for row in table.rows}) < 2,
        "headline": findings.headline(table) or ["Nothing has been asked for."], "facts": _facts(found, table),
        "verdicts": list(verdicts.items()), "cautions": findings.cautions(table),
        "tables": {**shown, "seeds": _table(untitled, "seeds") if several else ""},
        "measures": [column_text(c) for c in findings.measures(table)], "effects": _effects(table),
        "figures": drawn, "undrawn": [{"title": d.title, "lacks": _listed(d.lacks)} for d in drawings if d.figure is None],
        "failures": found.failures, "missing": _missing(table), "left_out": found.left_out,
        "settings": _settings(found), "provenance": _provenance(found), "sources": list(map(source_text, table.columns)),
        "published_source": published.SOURCE,
    }  # fmt: skip


def _table(table: Table, name: str) -> str:
    """A view as HTML; "" when it has no rows. Where numbers come from is said once, under provenance."""
    text = render(table, "html", show=name)
    sources = {source_text(column) for column in table.columns}
    text = re.sub(r"<li>(.*?)</li>", lambda m: "" if _plain(m[1]) in sources else m[0], text)
    text = text.replace('<ul class="notes"></ul>\n', "")
    if "<td>" not in text:
        return ""
    return re.sub(r"<tr>(<td>[^<]*</td><td>base)", r'<tr class="base">\1', text)


def _plain(text: str) -> str:
    from html import unescape

    return unescape(text)


def _drawings(found: Study) -> tuple[list[figures.Drawing], list[dict[str, str]]]:
    with style.drawing():
        drawings = figures.draw(found)
        drawn = [
            {"name": d.name, "title": d.title, "caption": d.caption, "lacks": _listed(d.lacks),
             "svg": _inline(style.svg_text(d.figure), d.name, d.title)}
            for d in drawings if d.figure is not None
        ]  # fmt: skip
    return drawings, drawn


def _inline(svg: str, name: str, title: str) -> str:
    """An SVG for a page: ids of its own, no fixed size, and words for who cannot see it."""
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r"url\(#", f"url(#{name}-", svg)
    svg = re.sub(r'href="#', f'href="#{name}-', svg)
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    head, rest = svg.split(">", 1)
    return re.sub(r' (width|height)="[^"]*"', "", head) + f' role="img" aria-label="{title}">' + rest


def _listed(lacks: Sequence[str]) -> str:
    shown = "; ".join(lacks[:4])
    return shown + (f"; and {len(lacks) - 4} more (see Missing)" if len(lacks) > 4 else "")


def _facts(found: Study, table: Table) -> list[tuple[str, str]]:
    cells = [cell for cell in found.cells if not cell["is_base"]]
    trained = [cell for cell in cells if cell["minutes"] is not None]
    minutes = sum(cell["minutes"] * (cell["gpus"] or 1) for cell in trained)
    unit = "GPU-minutes of training" if any(cell["gpus"] for cell in trained) else "minutes of training (CPU)"
    tokens = sorted({cell["tokens"] for cell in cells})
    facts = {
        "base models": ", ".join(dict.fromkeys(row.base for row in table.rows)),
        "cells trained": f"{len(trained)} of {len(cells)}",
        "settings × seeds": f"{len({c['setting'] for c in cells})} × {len({c['seed'] for c in cells})}",
        "training tokens a cell": " to ".join(f"{n:,}" for n in (tokens if len(tokens) < 3 else [tokens[0], tokens[-1]])),
        unit: f"{minutes:,.1f}" if trained else "",
        "hardware": ", ".join(dict.fromkeys(cell["hardware"] for cell in trained if cell["hardware"])),
    }
    return [(name, value) for name, value in facts.items() if value]


def _effects(table: Table) -> list[dict[str, Any]]:
    columns = findings.measures(table)
    rows = []
    for effect in findings.effects(table):
        places = []
        for column in columns:
            if column not in effect.means:
                places.append((DASH, ""))
                continue
            counts = [f"▲{effect.better[column]}" * bool(effect.better[column]), f"▼{effect.worse[column]}" * bool(effect.worse[column])]
            places.append((signed(effect.means[column]), " ".join(filter(None, counts))))
        change = f"{effect.first} → {effect.second}"
        rows.append({"axis": effect.axis.replace("_", " "), "change": change, "pairs": effect.pairs, "places": places})
    return rows


def _missing(table: Table) -> list[tuple[str, str]]:
    """Reasons with all the scores that they keep away."""
    found: dict[str, list[str]] = {}
    for row in table.rows:
        for column, entry in row.entries.items():
            if entry.note:
                word = f" ({entry.num_seeds} of {len(row.samples[column])} seeds are there)" if entry.partial else ""
                found.setdefault(entry.note, []).append(f"{row.base} {row.recipe}, {column.title}{word}")
    return [
        (why, "; ".join(what[:MOST_REASONS]) + (f"; and {len(what) - MOST_REASONS} more" if len(what) > MOST_REASONS else ""))
        for why, what in found.items()
    ]


def _settings(found: Study) -> list[tuple[str, str]]:
    """Base models, then every setting: its value where all cells share it, else all its values."""
    cells = [cell for cell in found.cells if not cell["is_base"]]
    bases = {f"{c['base']} ({c['base_parameters'] / 1e6:,.1f}M parameters, revision {c['revision']})": None for c in found.cells}
    rows = [("base models", "; ".join(bases))]
    for name in SETTINGS:
        values = list(dict.fromkeys(_value(cell[name]) for cell in cells if cell[name] is not None))
        if values:
            varied = len(values) > 1
            rows.append((name.replace("_", " ") + (" (varied)" if varied else ""), ", ".join(values)))
    texts = list(dict.fromkeys(cell["data"] for cell in cells if cell["data"]))
    return [*rows, *([("training text", "; ".join(texts))] if texts else [])]


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else f"{value:g}" if isinstance(value, float) else str(value)


def _provenance(found: Study) -> list[tuple[str, str]]:
    """Commit, hardware and versions of every group of cells that share them."""
    groups: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for cell in found.cells:
        if cell["commit"]:
            groups.setdefault((cell["commit"], str(cell["dirty"]), cell["hardware"], cell["environment"]), []).append(cell)
    rows = []
    for (commit, dirty, hardware, environment), cells in groups.items():
        dates = sorted(cell["at"] for cell in cells)
        when = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
        changed = " with uncommitted changes" if dirty == "True" else ""
        rates = [cell["tokens_per_second"] for cell in cells if cell["tokens_per_second"]]
        speed = f"; {min(rates):,.0f} to {max(rates):,.0f} training tokens/s" if rates else ""
        rows.append((f"{len(cells)} trained cells", f"{hardware}; commit {commit}{changed}; {when}{speed}"))
        versions = found.versions.get(environment, {})
        rows.append(("versions", ", ".join(f"{name} {text}" for name, text in versions.items()) or "not recorded"))
    seconds = tables.records(found.data)
    spent = sum({(r["key"], r["task"], r["limit"]): r["eval_seconds"] or 0.0 for r in seconds}.values())
    rows.append(("evaluation", f"{number(spent / 60)} minutes in all"))
    return rows
