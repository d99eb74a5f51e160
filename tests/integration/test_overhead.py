"""golinear bench orchestration: a sweep through the real thing whose stages do nothing."""

from __future__ import annotations

import pytest

from sweeps.tracking import prepare

pytestmark = [pytest.mark.usefixtures("services_up", "ray_here"), pytest.mark.timeout(300)]


def test_the_overhead_of_a_cell_is_measured_on_real_services(world, capsys):
    from flows.overhead import main, measure, summary, sweep_of  # which imports Ray: not before its settings are made

    walls, cpus = measure(3)
    assert len(walls) == len(cpus) == 3 and all(0 < wall < 60 for wall in walls) and all(0 < cpu < 60 for cpu in cpus)
    keys = [cell.train_key for cell in sweep_of(3).cells]
    tracked = [run for key in keys for run in prepare("orchestration").search(f"tags.train_key = '{key}'")]
    assert [run.info.status for run in tracked] == ["FINISHED"] * 3
    assert 1.0 in tracked[0].data.metrics.values() and tracked[0].outputs.model_outputs
    assert summary([0.1] * 49 + [3.0], [0.1])["p99_s"] == 3.0
    assert main(["--cells", "3"], run=lambda cells: ([3.0] * cells, [0.1])) == 1, "too slow is a failure"
    assert "median" in capsys.readouterr().out
