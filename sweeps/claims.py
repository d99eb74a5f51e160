"""Holding a claim while work goes on: a thread renews it, and says when it is lost. Imports no torch."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy.exc import OperationalError

from sweeps.store import Claim, ClaimLost, Store

log = logging.getLogger(__name__)


class Heartbeat:
    """Renews a claim three times in its life (every 20 s) until stopped; ``lost`` is set when it is not ours any more.

    A database that cannot be reached for a while is not a loss by itself: the next publish checks the fence.
    """

    def __init__(self, store: Store, claim: Claim):
        self.store, self.claim, self.every = store, claim, store.expires_after / 3
        self.lost = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"claim {claim.key}", daemon=True)

    def _run(self) -> None:
        while not self._stop.wait(self.every):
            try:
                self.store.renew(self.claim)
            except ClaimLost as error:
                log.warning("%s", error)
                self.lost.set()
                return
            except OperationalError as error:
                log.warning("claim %s could not be renewed yet: %s", self.claim.key, error)

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


@contextmanager
def holding(store: Store, claim: Claim) -> Iterator[threading.Event]:
    """``with holding(store, claim) as lost:`` renews meanwhile; ``lost.is_set`` is a stage's ``should_stop``."""
    with Heartbeat(store, claim) as beat:
        yield beat.lost
