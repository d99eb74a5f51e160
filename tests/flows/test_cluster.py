"""What a cell may ask of a cluster."""

import pytest

from flows.cluster import Capacity, check_feasible


@pytest.mark.parametrize(
    ("cpus", "node_cpus", "slots", "expected"),
    [(2, 2, 1, 2), (2, 2, 2, 1), (24, 12, 1, 12), (24, 12, 2, 12), (24, 12, 3, 6), (24, 12, 100, 1), (1, 1, 4, 1)],
)
def test_a_cell_asks_for_no_more_cpus_than_one_node_has(cpus, node_cpus, slots, expected):
    assert Capacity(gpus=0, cpus=cpus, nodes=2, node_cpus=node_cpus).cpus_of_a_cell(slots) == expected


def test_more_gpus_than_there_are_is_refused():
    with pytest.raises(ValueError, match=r"gpus=4 .* 2 are available"):
        check_feasible(4, 2)
