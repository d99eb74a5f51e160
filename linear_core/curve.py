"""The training curve of a run: ``curve.jsonl``, one row an optimiser step."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from linear_core.packing import replace_file


class Curve:
    """Rows of step, tokens_seen, loss, learning_rate, grad_norm, tokens_per_second, in the order of steps."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "curve.jsonl"

    def keep(self, num_steps: int) -> None:
        """Drop rows after the first ``num_steps`` steps, and what a killed process left of a last line."""
        if self.path.exists():
            replace_file(
                self.path, "".join(json.dumps(r) + "\n" for r in self.rows() if r["step"] < num_steps).encode()
            )

    def append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows))

    def rows(self) -> list[dict[str, Any]]:
        """All whole rows."""
        if not self.path.exists():
            return []
        lines = self.path.read_text(encoding="utf-8").split("\n")
        return [json.loads(line) for line in lines[:-1] if line]
