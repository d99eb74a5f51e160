"""Who is told when a flow ends: a Prefect block or a URL in the environment. The URL is a secret and is never written."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

log = logging.getLogger(__name__)
TIMEOUT = 10.0  # seconds for one message
HELP = "a Prefect block: slack-webhook/NAME, webhook/NAME or secret/NAME (its value the URL)"


def check(block: str) -> None:
    """Raises ValueError for what is no block's name, without repeating it: it may be a URL, which is a secret."""
    _, slash, name = block.partition("/")
    if block and (not slash or not name or "/" in name or ":" in block):
        raise ValueError(f"notify must name {HELP}; a URL goes into such a block or into GOLINEAR_WEBHOOK_URL")


def on_end(flow: Any, flow_run: Any, state: Any) -> None:
    """Hook of a flow: one line with its name, state and message to the block that the parameter ``notify`` or
    GOLINEAR_NOTIFY names, else to GOLINEAR_WEBHOOK_URL. A message that cannot be sent costs a warning."""
    from prefect.utilities.urls import url_for

    block = (flow_run.parameters or {}).get("notify") or os.environ.get("GOLINEAR_NOTIFY", "")
    url = os.environ.get("GOLINEAR_WEBHOOK_URL", "")
    if not (block or url):
        return
    subject = f"golinear {flow.name} {flow_run.name}: {state.name}"
    text = "\n".join(filter(None, (state.message, url_for(flow_run))))
    try:
        check(block)
        with _quiet():
            _send(block, url, subject, text)
    except Exception as error:  # noqa: BLE001 - whatever a block does, the flow has ended and its result stands
        log.warning("nobody was told of the flow's end: %s", type(error).__name__)  # its text may have the URL


def _send(block: str, url: str, subject: str, text: str) -> None:
    import anyio
    from prefect.blocks import notifications, system, webhook

    if block:
        found: Any = _loaded(block)
        if isinstance(found, notifications.NotificationBlock):
            with found.raise_on_failure():
                anyio.run(found.anotify, text, subject)  # type: ignore[attr-defined]
            return
        if isinstance(found, webhook.Webhook):
            anyio.run(found.call, {"text": f"{subject}\n{text}"}).raise_for_status()
            return
        if not isinstance(found, system.Secret):
            raise TypeError(f"block {block} cannot be told anything; allowed: {HELP}")
        url = str(found.get())
    import httpx

    httpx.post(url, json={"text": f"{subject}\n{text}"}, timeout=TIMEOUT).raise_for_status()


def _loaded(block: str) -> Any:
    """The block, read in a thread of its own: hooks run where Prefect's event loop may be busy."""
    import anyio
    from prefect.blocks.core import Block

    return anyio.run(Block.aload, block)


@contextmanager
def _quiet() -> Iterator[None]:
    """HTTP libraries log the URLs that they ask."""
    loggers = [logging.getLogger(name) for name in ("httpx", "httpcore", "urllib3", "apprise")]
    before = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
