import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("RAY_AUTH_MODE", "token")  # as sweeps.services sets it; Ray reads it once, when it is imported

import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)  # tiny sizes: threads cost more than they bring
settings.register_profile(
    "golinear", max_examples=10, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
settings.load_profile("golinear")
