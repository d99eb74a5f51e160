"""Compiled kernels travel: Triton's own cache manager finds what another folder compiled."""

import io
import json
import tarfile
import threading

import pytest

from linear_core import kernel_archive
from sweeps import kernels


@pytest.fixture
def node(tmp_path, monkeypatch):
    """A function that makes this process the node of a name: its own folders of compiled kernels."""

    def become(name):
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / name / "triton"))
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / name / "inductor"))
        return tmp_path / name

    return become


def compile_some(name="kernel", folder="ab12"):
    """What Triton and inductor leave behind when they compile: files of a kernel, their list, a choice, a graph."""
    from triton.runtime.cache import FileCacheManager

    manager = FileCacheManager(folder)
    group = {
        f"{name}.{kind}": manager.put(f"{kind} of {name}", f"{name}.{kind}", binary=False) for kind in ("cubin", "json")
    }
    manager.put_group(name, group)
    inductor = kernel_archive.folders()["inductor"]
    (inductor / "xy").mkdir(parents=True, exist_ok=True)
    (inductor / "xy" / "reduce.best_config").write_text("{}")
    (inductor / "xy" / "graph.pkl").write_text("a pickle")
    (kernel_archive.folders()["triton"] / folder / "tmp.pid_1").mkdir(exist_ok=True)
    (kernel_archive.folders()["triton"] / folder / "tmp.pid_1" / "half").write_text("unfinished")


def test_another_node_has_the_kernels(node, tmp_path):
    from triton.runtime.cache import FileCacheManager

    node("first")
    compile_some()
    assert kernel_archive.pack(tmp_path / "kernels.tar.gz") == 4
    here = node("second")
    assert kernel_archive.unpack(tmp_path / "kernels.tar.gz") == 4
    group = FileCacheManager("ab12").get_group("kernel")
    assert group == {f"kernel.{kind}": str(here / "triton" / "ab12" / f"kernel.{kind}") for kind in ("cubin", "json")}
    assert (here / "triton" / "ab12" / "kernel.cubin").read_text() == "cubin of kernel"
    assert not list(here.rglob("*.pkl")) and not list(here.rglob("half")), "no pickle and nothing unfinished travels"
    (here / "triton" / "ab12" / "kernel.cubin").write_text("its own")
    assert kernel_archive.unpack(tmp_path / "kernels.tar.gz") == 0
    assert (here / "triton" / "ab12" / "kernel.cubin").read_text() == "its own"


def test_what_is_of_another_kind_or_leaves_its_folder_is_refused(node, tmp_path, monkeypatch):
    node("first")
    compile_some()
    file = tmp_path / "kernels.tar.gz"
    kernel_archive.pack(file)
    with monkeypatch.context() as patch:
        patch.setattr(kernel_archive, "key", lambda: "another-gpu")
        with pytest.raises(ValueError, match=r"has kernels of cpu-torch.*; this machine is another-gpu"):
            kernel_archive.unpack(file)
    (tmp_path / "text").write_text("no archive")
    with pytest.raises(ValueError, match="is no archive of kernels"):
        kernel_archive.unpack(tmp_path / "text")
    file.write_bytes(file.read_bytes()[:-200])
    with pytest.raises(ValueError, match="is no archive of kernels"):
        kernel_archive.unpack(file)
    for name in ("triton/../../outside", "elsewhere/file", "triton//etc/outside"):
        with tarfile.open(file, "w:gz") as archive:
            for member, text in (("about.json", json.dumps({"key": kernel_archive.key()})), (name, "x")):
                entry = tarfile.TarInfo(member)
                entry.size = len(text)
                archive.addfile(entry, io.BytesIO(text.encode()))
        with pytest.raises(ValueError, match="may not be unpacked"):
            kernel_archive.unpack(file)


@pytest.mark.parametrize("where", ["file", "memory"])
def test_two_writers_leave_one_whole_archive(node, tmp_path, where):
    """Both write at once, again and again, while a reader reads: it sees nothing or a whole one."""
    url = f"{tmp_path}/shared" if where == "file" else "memory://nodes/kernels"
    node("writers")
    for i in range(20):
        compile_some(f"kernel{i}", f"folder{i}")
    writers = [threading.Thread(target=lambda: [kernels.publish(url) for _ in range(5)]) for _ in range(2)]
    for writer in writers:
        writer.start()
    found = []
    while any(writer.is_alive() for writer in writers):
        found.append(kernels.fetch(url))
    for writer in writers:
        writer.join()
    assert set(found) <= {0}, "what is there is what was compiled here"
    node("reader")
    assert kernels.fetch(url) == 61
    assert where == "memory" or [path.name for path in (tmp_path / "shared").iterdir()] == [
        f"{kernel_archive.key()}.tar.gz"
    ]


def test_an_archive_grows_and_a_broken_place_costs_a_warning(node, tmp_path, caplog):
    node("first")
    compile_some("a", "a")
    assert kernels.publish(str(tmp_path / "shared")) == 4
    node("second")
    compile_some("b", "b")
    assert kernels.publish(str(tmp_path / "shared")) == 7, "with those of the first"
    (tmp_path / "file").write_text("")
    assert kernels.publish(f"{tmp_path}/file/x") == 0 and kernels.fetch("nosuch://x") == 0
    assert "not put" in caplog.text and "not fetched" in caplog.text
