"""New base models on the hub or in a folder, and the rules that say which of them a sweep may take. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from linear_core import models
from linear_core.settings import parse_count
from sweeps import parameters
from sweeps.weights import has_token

ANY = "any"
EXPAND = ["author", "cardData", "config", "createdAt", "gated", "safetensors", "sha", "tags"]


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A checkpoint that may be a base model. ``model``: hub id or absolute folder; ``parameters``: None when not told."""

    model: str
    revision: str
    family: str = ""
    parameters: int | None = None
    licence: str = ""
    gated: bool = False
    made: datetime | None = None
    unusable: str = ""  # what its listing already says against it: no safetensors, quantized, own code

    @property
    def name(self) -> str:
        return self.model.rsplit("/", 1)[-1]


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What a new base model must be. ``names``: shell patterns of the part after the organisation."""

    families: tuple[str, ...] = tuple(models.FAMILIES)
    names: tuple[str, ...] = ("*",)
    licences: tuple[str, ...] = ("apache-2.0", "mit")
    min_parameters: int = 0
    max_parameters: int = 10_000_000_000
    max_age_days: int = 90  # since it was made; 0: any age

    @classmethod
    def of(cls, **given: Any) -> Rules:
        """From a user's words. Raises ValueError, saying what is allowed, for a family that is not supported and for
        numbers that are none."""
        families = tuple(parameters.items(given["families"], "families"))
        if unknown := sorted(set(families) - set(models.FAMILIES)):
            raise ValueError(f"families {', '.join(unknown)} are not supported; allowed: {', '.join(models.FAMILIES)}")
        smallest, largest = (_size(given[name], name) for name in ("min_parameters", "max_parameters"))
        if smallest > largest:
            raise ValueError(f"min_parameters {smallest:,} is more than max_parameters {largest:,}")
        return cls(
            families=families,
            names=tuple(parameters.items(given["names"], "names")),
            licences=tuple(word.lower() for word in parameters.items(given["licences"], "licences")),
            min_parameters=smallest,
            max_parameters=largest,
            max_age_days=parameters.whole_numbers(given["max_age_days"], "max_age_days")[0],
        )

    def why_not(self, found: Candidate, now: datetime | None = None) -> str:
        """The first rule that a candidate breaks, in words; "" when it fits all."""
        size, licence = found.parameters, found.licence.lower()
        age = None if found.made is None else ((now or datetime.now(UTC)) - found.made).days
        checks = (
            (not any(fnmatch(found.name.lower(), name.lower()) for name in self.names),
             f"its name is none of {', '.join(self.names)}"),
            (found.family not in self.families,
             f"family {found.family or 'not stated'}; wanted: {', '.join(self.families)}"),
            (bool(found.unusable), found.unusable),
            (ANY not in self.licences and licence not in self.licences,
             f"licence {licence or 'not stated'}; allowed: {', '.join(self.licences)}"),
            (size is None, "its number of parameters is not stated"),
            (size is not None and size < self.min_parameters, f"{size or 0:,} parameters; at least {self.min_parameters:,}"),
            (size is not None and size > self.max_parameters, f"{size or 0:,} parameters; at most {self.max_parameters:,}"),
            (bool(self.max_age_days) and age is not None and age > self.max_age_days,
             f"made {age} days ago; at most {self.max_age_days}"),
            (found.gated and not has_token(), "gated: accept its licence on the hub and set HF_TOKEN"),
        )  # fmt: skip
        return next((reason for broken, reason in checks if broken), "")


def _size(value: Any, name: str) -> int:
    try:
        return 0 if str(value).strip() == "0" else parse_count(value)
    except ValueError:
        raise ValueError(f"{name}: {value!r} is not a number of parameters; write {name}=8B, 600M or 0") from None


def listed(source: str, organisations: Iterable[str]) -> list[Candidate]:
    """Candidates, newest first: all of the organisations on the hub (``source="hub"``), or the subfolders of a folder.

    Raises ValueError for a folder that is none, and when the hub cannot be read.
    """
    found = list(_in_folder(Path(source))) if source != "hub" else [c for o in organisations for c in _on_hub(o)]
    return sorted(found, key=lambda c: (c.made.timestamp() if c.made else 0.0, c.model), reverse=True)


def _on_hub(organisation: str) -> Iterator[Candidate]:
    from huggingface_hub import HfApi

    try:
        yield from map(_from_hub, HfApi().list_models(author=organisation, expand=EXPAND))  # type: ignore[arg-type]
    except Exception as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        told = f"HTTP {status}" if status else f"{type(error).__name__}: {error}"
        raise ValueError(f"the hub does not list the models of {organisation} ({told})") from error


def _from_hub(info: Any) -> Candidate:
    config = info.config or {}
    card = info.card_data.to_dict() if info.card_data else {}
    tags = info.tags or []
    licence = card.get("license") or next((t.removeprefix("license:") for t in tags if t.startswith("license:")), "")
    if licence == "other":
        licence = card.get("license_name") or licence
    total = info.safetensors.total if info.safetensors else None
    return Candidate(
        model=info.id, revision=(info.sha or "")[:16], family=str(config.get("model_type") or ""), parameters=total,
        licence=str(licence), gated=bool(info.gated), made=info.created_at,
        unusable=_unusable(config, has_weights=total is not None),
    )  # fmt: skip


def _in_folder(root: Path) -> Iterator[Candidate]:
    from huggingface_hub.repocard import metadata_load

    if not root.is_dir():
        raise ValueError(f"source {str(root)!r} is no folder; allowed: hub, or a folder of model folders")
    for path in sorted(root.glob("*/config.json")):
        folder = path.parent.resolve()
        config = json.loads(path.read_text())
        card = folder / "README.md"
        told = (metadata_load(card) or {}) if card.exists() else {}
        unusable = _unusable(config, has_weights=any(folder.glob("*.safetensors")))
        try:
            size = models.resolve(str(folder)).shape.num_parameters
        except ValueError as error:
            size, unusable = None, unusable or str(error)
        yield Candidate(
            model=str(folder), revision=models.folder_revision(str(folder)), family=str(config.get("model_type") or ""),
            parameters=size, licence=str(told.get("license") or config.get("license") or ""),
            made=datetime.fromtimestamp(path.stat().st_mtime, UTC), unusable=unusable,
        )  # fmt: skip


def _unusable(config: dict[str, Any], *, has_weights: bool) -> str:
    if method := (config.get("quantization_config") or {}).get("quant_method"):
        return f"its weights are quantized ({method})"
    if config.get("auto_map"):
        return "it wants to run its own code (auto_map); remote code is off"
    return "" if has_weights else "it has no safetensors weights"
