"""Failure by cause: what is tried again, and how often. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping

# cause → how many failures of it are followed by another try
RETRIES = {
    "preempted": 20,  # node gone, SIGTERM, flow killed, claim expired: nobody's fault
    "crash": 2,  # the worker process died though its node lives
    "oom": 3,  # out of memory: each further try has half the micro-batch
    "network": 5,  # the hub is busy (429, 5xx) or does not answer, or the database: tried again after a wait
    "disk": 0,  # no space left: no further cell is started; the next run goes on once there is room
    "nonfinite": 0,  # a NaN comes again: never without ``golinear retry``
    "config": 0,  # a ValueError comes again until somebody changes something: the next run tries once more
    "error": 0,  # any other exception: likewise
    "cancelled": 0,  # by a person
    "pruned": 0,  # diverged, where a person asked to end such cells: neither failed nor done
}
CAUSES = tuple(RETRIES)
PERMANENT = ("nonfinite", "cancelled", "pruned")


BUSY = (408, 425, 429, 500, 502, 503, 504)  # HTTP: not now
NO_SPACE = ("no space left on device", "disk is full", "disk quota exceeded")
NO_MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory", "not enough memory")
UNREACHABLE = {"ConnectionError", "TimeoutError", "TransportError", "Timeout", "LocalEntryNotFoundError", "OperationalError"}


def cause_of(error: BaseException) -> str:
    """The cause an exception of a stage stands for: oom, nonfinite, preempted, disk, network, config or error.

    By class names, so that nothing is imported; what an exception was raised from is looked at too. Call it where the
    exception was raised: a pickled one has lost that.
    """
    chain = _chain(error)
    if any(phrase in str(one).lower() for one in chain for phrase in NO_SPACE):
        return "disk"
    if any(getattr(getattr(one, "response", None), "status_code", None) in BUSY for one in chain):
        return "network"
    if any(cls.__name__ in UNREACHABLE for one in chain for cls in type(one).__mro__):
        return "network"
    kinds = {cls.__name__ for cls in type(error).__mro__}
    if kinds & {"OutOfMemoryError", "MemoryError"} or any(phrase in str(error).lower() for phrase in NO_MEMORY):
        return "oom"
    if kinds & {"FloatingPointError", "NonFiniteError"}:
        return "nonfinite"
    if "Interrupted" in kinds:  # linear_core.train: told to stop, saved
        return "preempted"
    return "config" if isinstance(error, ValueError) else "error"


def _chain(error: BaseException | None) -> list[BaseException]:
    """An exception and what it was raised from."""
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return found


def wait_seconds(failures: Mapping[str, int], cause: str) -> float:
    """How long to wait before the next try: a busy hub is given time, twice as much after each failure."""
    return min(60.0, 2.5 * 2 ** failures.get(cause, 0)) if cause == "network" else 0.0


def may_retry(failures: Mapping[str, int], cause: str) -> bool:
    """Whether the same run may try a cell again after it failed of ``cause``; ``failures`` counts this failure too."""
    return failures.get(cause, 0) <= RETRIES[cause]


def must_be_alone(failures: Mapping[str, int]) -> bool:
    """Whether a cell trains in a pass of its own: memory ran out, or its last try but for a process that may have died of
    another cell of the pass."""
    return bool(failures.get("oom", 0)) or failures.get("crash", 0) >= RETRIES["crash"]


def exhausted(failures: Mapping[str, int], last_reason: str = "") -> str:
    """Why a cell must not run again without ``golinear retry``: "" when it may."""
    for cause, count in failures.items():
        if cause in PERMANENT or (RETRIES[cause] and count > RETRIES[cause]):
            times = "once" if count == 1 else f"{count} times"
            return f"failed {times} ({cause}): {last_reason}"
    return ""


def micro_batch(batch_size: int, failures: Mapping[str, int]) -> int:
    """Sequences in one forward after so many out-of-memory failures: halved each time, at least 1."""
    return max(1, batch_size >> failures.get("oom", 0))
