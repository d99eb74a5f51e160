"""Failure by cause: what is tried again, and how often. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping

# cause → how many failures of it are followed by another try
RETRIES = {
    "preempted": 20,  # node gone, SIGTERM, flow killed, claim expired: nobody's fault
    "crash": 2,  # the worker process died though its node lives
    "oom": 3,  # out of memory: each further try has half the micro-batch
    "nonfinite": 0,  # a NaN comes again: never without ``golinear retry``
    "config": 0,  # a ValueError comes again until somebody changes something: the next run tries once more
    "error": 0,  # any other exception: likewise
    "cancelled": 0,  # by a person
}
CAUSES = tuple(RETRIES)
PERMANENT = ("nonfinite", "cancelled")


def cause_of(error: BaseException) -> str:
    """The cause an exception of a stage stands for: oom, nonfinite, preempted, config or error."""
    kinds = {cls.__name__ for cls in type(error).__mro__}
    if kinds & {"OutOfMemoryError", "MemoryError"} or "out of memory" in str(error).lower():
        return "oom"
    if kinds & {"FloatingPointError", "NonFiniteError"}:
        return "nonfinite"
    if "Interrupted" in kinds:  # linear_core.train: told to stop, saved
        return "preempted"
    return "config" if isinstance(error, ValueError) else "error"


def may_retry(failures: Mapping[str, int], cause: str) -> bool:
    """Whether the same run may try a cell again after it failed of ``cause``; ``failures`` counts this failure too."""
    return failures.get(cause, 0) <= RETRIES[cause]


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
