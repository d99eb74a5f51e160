"""The first worker of a kind compiles, the others wait for its first steps, fetch and go on."""

import threading
from threading import Event

from flows.warmth import Warmth


class Slot:
    """Stands in for a slot on a GPU: notes what is called."""

    def __init__(self, journal, name, kind="a gpu", fetched=0):
        self.journal, self.name, self.kind, self.fetched, self.node = journal, name, kind, fetched, "node"

    def call(self, method, *arguments):
        self.journal.append(f"{self.name} {method}")
        return {"kernels": self.kind, "fetch_kernels": self.fetched, "publish_kernels": 3}[method]


def train(warmth, slot, stop=None, fails=False):
    with warmth.around_training(slot, stop or Event()) as watch:
        slot.journal.append(f"{slot.name} starts")
        if fails:
            raise RuntimeError("out of memory")
        watch({"stage": "train", "rows": []})
        watch({"stage": "train", "rows": [{"step": 0}]})
        watch({"stage": "train", "rows": [{"step": 1}]})
        slot.journal.append(f"{slot.name} ends")


def test_the_others_wait_for_the_first(monkeypatch):
    monkeypatch.setenv("GOLINEAR_KERNELS", "memory://kernels")
    journal, said = [], []
    warmth = Warmth(said.append)
    with warmth.around_training(Slot(journal, "one"), Event()) as watch:
        other = threading.Thread(target=train, args=(warmth, Slot(journal, "two", fetched=3)))
        other.start()
        train(warmth, Slot(journal, "three", kind="another gpu"))  # has no reason to wait
        other.join(0.1)
        assert "two starts" not in journal and "three ends" in journal
        watch({"stage": "train", "rows": [{"step": 0}]})
        other.join(5)
    assert journal.index("one publish_kernels") < journal.index("two fetch_kernels") < journal.index("two starts")
    assert "two publish_kernels" in journal and said[-1].startswith("compiled kernels of a gpu: 3 files at memory")


def test_nobody_waits_for_a_worker_that_failed_or_was_stopped_or_without_a_gpu(monkeypatch):
    monkeypatch.delenv("GOLINEAR_KERNELS", raising=False)
    journal, warmth = [], Warmth()
    try:
        train(warmth, Slot(journal, "one"), fails=True)
    except RuntimeError:
        train(warmth, Slot(journal, "two"))
    assert "two ends" in journal and not any("fetch" in line or "publish" in line for line in journal)
    train(warmth, Slot(journal, "cpu", kind=""))
    assert journal[-1] == "cpu ends"
    stop = Event()
    with Warmth().around_training(Slot(journal, "three"), stop):
        stop.set()
        train(warmth, Slot(journal, "four"), stop)
    assert journal[-1] == "four ends"


def test_kernels_of_an_earlier_sweep_let_all_start(monkeypatch):
    monkeypatch.setenv("GOLINEAR_KERNELS", "memory://kernels")
    journal, warmth = [], Warmth()
    with warmth.around_training(Slot(journal, "one", fetched=9), Event()):
        train(warmth, Slot(journal, "two"))
    assert "two ends" in journal
