import os
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("RAY_AUTH_MODE", "token")  # as sweeps.services sets it; Ray reads it once, when it is imported

import pytest
import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)  # tiny sizes: threads cost more than they bring
settings.register_profile(
    "golinear", max_examples=10, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
settings.load_profile("golinear")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With pytest -n 2: a file's tests in one process, and all that share the services of tests/integration in one."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduler(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "tests/integration" if file.startswith("tests/integration/") else file

    return Scheduler(config, log)
