"""The mechanisms a softmax layer can be replaced by. One file each, one line here; imports no torch.

To add one, write ``linear_core/mechanisms/<name>.py`` with a class that follows ``base.Mechanism`` and add its line to
``MECHANISMS`` (or call ``register`` from outside). ``docs/add-a-mechanism.md`` goes through an example.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from linear_core.mechanisms.base import Mechanism

MECHANISMS: dict[str, str] = {
    "none": "linear_core.mechanisms.none:NoState",
    "hedgehog": "linear_core.mechanisms.hedgehog:Hedgehog",
    "gla": "linear_core.mechanisms.gla:GLA",
    "kgla": "linear_core.mechanisms.kgla:KGLA",
    "gdn": "linear_core.mechanisms.gdn:GDN",
    "gdn_scalar": "linear_core.mechanisms.gdn:GDNScalar",
    "softmax": "",  # the base model's own attention: the layer is left alone
}


def register(name: str, location: str) -> None:
    """Add a mechanism: ``location`` is ``"module:Class"``. Raises ValueError when the name is taken."""
    if name in MECHANISMS and MECHANISMS[name] != location:
        raise ValueError(f"mechanism {name!r} is taken by {MECHANISMS[name]!r}")
    MECHANISMS[name] = location


def mechanism_class(name: str) -> type[Mechanism]:
    """The class behind a name. Raises ValueError for an unknown name and for ``softmax``, which has none."""
    if not MECHANISMS.get(name):
        raise ValueError(
            f"mechanism {name!r} has no class; allowed: {', '.join(n for n, m in MECHANISMS.items() if m)}"
        )
    module, _, attribute = MECHANISMS[name].partition(":")
    return getattr(import_module(module, __package__), attribute)
