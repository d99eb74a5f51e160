"""What a cell may ask of a cluster."""

import pytest

from flows.cluster import Capacity, check_feasible


@pytest.mark.parametrize(("nodes", "gpus", "places", "workers", "cpus"), [
    ([(0, 2)], 0, 1, 1, 2), ([(0, 2)], 0, 1, 2, 1), ([(0, 12), (0, 12)], 0, 2, 3, 6), ([(0, 12), (0, 12)], 0, 2, 100, 1),
    ([(8, 128)], 1, 8, 8, 16), ([(8, 128)], 1, 8, 1, 128), ([(8, 128), (0, 4)], 1, 8, 8, 16), ([(8, 128)] * 2, 2, 8, 8, 32),
    ([(3, 30), (3, 30)], 2, 2, 2, 30), ([(1, 16)], 0.25, 4, 4, 4), ([(0, 1)], 0, 1, 4, 1),
])  # fmt: skip
def test_workers_find_a_place_each_on_one_node(nodes, gpus, places, workers, cpus):
    capacity = Capacity(nodes=tuple(nodes), num_hosts=len(nodes))
    assert capacity.places(gpus) == places and capacity.cpus_each(workers, gpus) == cpus


def test_more_gpus_than_there_are_is_refused():
    with pytest.raises(ValueError, match=r"gpus=4 .* 2 are available"):
        check_feasible(4, 2)
