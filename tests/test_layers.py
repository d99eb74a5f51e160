"""linear_core knows nobody, sweeps knows linear_core, flows knows both; and what must start without torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FORBIDDEN = {
    "linear_core": {"sweeps", "flows", "prefect", "ray", "mlflow"},
    "sweeps": {"flows"},
}


def imported(path: Path) -> set[str]:
    """Top-level names of every import in a file, lazy ones included."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("package", FORBIDDEN)
def test_imports_go_down_the_stairs(package):
    files = list((ROOT / package).rglob("*.py"))
    assert files
    upward = {str(path.relative_to(ROOT)): imported(path) & FORBIDDEN[package] for path in files}
    assert {path: names for path, names in upward.items() if names} == {}


LIGHT = """
linear_core.recipe linear_core.models linear_core.settings linear_core.mechanisms linear_core.evaluate.scores
linear_core.evaluate.run sweeps.cell sweeps.grids sweeps.plan sweeps.store sweeps.tables sweeps.stages sweeps.tracking
sweeps.cli sweeps.candidates sweeps.services sweeps.doctor sweeps.kernels linear_core.kernel_archive
"""


def test_light_modules_start_without_torch():
    heavy = "{'torch', 'transformers', 'prefect', 'ray', 'mlflow', 'lm_eval'}"
    code = f"import sys, {', '.join(LIGHT.split())}; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
