"""Whether a base model's weights can be had here, asked once per model. Imports no torch."""

from __future__ import annotations

import logging
import os
import socket
import threading
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

from linear_core import smollm2
from linear_core.models import BaseModel

log = logging.getLogger(__name__)


def revision_of(model: BaseModel) -> str:
    """A folder's digest; of a hub model the hub's newest, which loading takes too (asked within seconds), else the cached
    one; ``unresolved`` when neither is there."""
    from linear_core.models import revision

    found = revision(model)
    if model.is_folder or _offline() or not hub_reachable():
        return found
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return (HfApi().model_info(model.source, timeout=5).sha or found)[:16]
    except (HfHubHTTPError, OSError) as error:
        log.warning("the hub does not give the revision of %s: %s", model.source, error)
        return found


def why_not_at_hand(model: BaseModel, unresolved: bool = False) -> str:
    """Why the weights are neither here nor to be had from the hub, and what to do; "" when they are.

    A folder must hold safetensors; a hub model must be in the local cache, or the hub reachable (gated: with a token).
    ``unresolved``: the hub was asked for their revision and did not say.
    """
    if model.is_folder:
        if any(Path(model.source).glob("*.safetensors")):
            return ""
        return f"weights not available: {model.source} has no .safetensors file"
    from huggingface_hub import constants

    other = "golinear up obtains it from the package index" if model.name == smollm2.NAME else "give a folder"
    snapshots = Path(constants.HF_HUB_CACHE) / f"models--{model.source.replace('/', '--')}" / "snapshots"
    if any(snapshots.glob("*/*.safetensors")):
        return ""
    if model.gated and not has_token():
        return f"weights not available: {model.source} is gated; accept its licence on the hub and set HF_TOKEN"
    if _offline():
        return f"weights not available: {model.source} is not in the local cache and HF_HUB_OFFLINE is set; {other}"
    if not hub_reachable():
        here = "is not in the local cache and the hub cannot be reached"
        return f"weights not available: {model.source} {here}; {other}"
    if unresolved:
        return f"weights not available: the hub does not say now which revision {model.source} has; try again later"
    return ""


def _offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")


def has_token() -> bool:
    """Whether a token of the hub is there: HF_TOKEN, or what ``hf auth login`` keeps."""
    cache_root = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    return bool(os.environ.get("HF_TOKEN")) or (cache_root / "token").exists()


@cache
def hub_reachable(seconds: float = 1.5) -> bool:
    """Whether the hub's host takes a connection, name look-up included, within ``seconds``."""
    url = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    port = url.port or (443 if url.scheme == "https" else 80)
    reached = threading.Event()

    def connect() -> None:
        try:
            socket.create_connection((url.hostname or "", port), timeout=seconds).close()
        except OSError:
            return
        reached.set()

    thread = threading.Thread(target=connect, daemon=True)  # a name look-up cannot be given a time limit
    thread.start()
    thread.join(seconds)
    return reached.is_set()
