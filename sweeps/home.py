"""Where this checkout keeps what it makes: one folder, one claims database, one MLflow store. Imports nothing heavy."""

from __future__ import annotations

import os
import re
from pathlib import Path


def home() -> Path:
    """The working folder, absolute: ``GOLINEAR_HOME``, else ``.golinear`` in the current folder. Not created here."""
    return Path(os.environ.get("GOLINEAR_HOME") or ".golinear").absolute()


def database_url() -> str:
    """SQLAlchemy URL of claims and published attempts: ``GOLINEAR_DATABASE_URL``, else SQLite under ``home()``."""
    return os.environ.get("GOLINEAR_DATABASE_URL") or f"sqlite:///{home() / 'golinear.db'}"


def tracking_uri() -> str:
    """MLflow store: ``MLFLOW_TRACKING_URI``, else SQLite under ``home()``."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{home() / 'mlflow.db'}"


def shown(url: str) -> str:
    """A URL for people and logs: without the user and password that it may carry."""
    return re.sub(r"(?<=://)[^/@]*@", "", url)
