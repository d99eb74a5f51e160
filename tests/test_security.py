"""What the code must not do: run what it was sent, load pickles, write secrets down, let a name leave its folder."""

from __future__ import annotations

import ast
import os
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = [path for package in ("linear_core", "sweeps", "flows", "scripts") for path in (ROOT / package).rglob("*.py")]
FORBIDDEN = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
CALLS = {"torch.load", "numpy.load", "np.load", "yaml.load", "eval", "exec", "os.system", "compile"}


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(path.read_text())))


def dotted(node: ast.expr) -> str:
    """``a.b.c`` of a name with its attributes; what it is called on is left out when it is no name."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def calls(path: Path) -> list[tuple[str, ast.Call]]:
    return [(dotted(node.func), node) for node in nodes(path) if isinstance(node, ast.Call)]


def keyword(call: ast.Call, name: str) -> object:
    found = next((k.value for k in call.keywords if k.arg == name), None)
    return found.value if isinstance(found, ast.Constant) else None


def test_nothing_unpickles_or_runs_text():
    found = []
    for path in SOURCES:
        for node in nodes(path):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
                found += [f"{path.name}: {name}" for name in names if name.split(".")[0] in FORBIDDEN]
        for name, call in calls(path):
            if (name in CALLS and keyword(call, "allow_pickle") is not False) or keyword(call, "shell") is True:
                found.append(f"{path.name}:{call.lineno}: {name}")
    own = {"ranks.py: pickle"}  # whether an exception of this very process can be sent to the other ranks
    assert set(found) - own == set()


def test_models_come_as_safetensors_and_without_their_code():
    found = [(path, name, call) for path in SOURCES for name, call in calls(path) if name.endswith(".from_pretrained")]
    assert found
    for path, name, call in found:
        assert keyword(call, "trust_remote_code") in (None, False), f"{path.name}:{call.lineno}"  # None: off, too
        if name.startswith("AutoModel"):
            gguf = path.name == "smollm2.py"  # reads the GGUF file of a package, which holds numbers and names alone
            assert gguf or keyword(call, "use_safetensors") is True, f"{path.name}:{call.lineno}"


@pytest.mark.parametrize("name", ["../../etc/1", "/etc/1", "a/../../b/1", "a/1/..", "A/1", "a/x", ".", "a\n/1"])
def test_a_blob_name_cannot_leave_its_root(name, tmp_path):
    from sweeps.blobs import Blobs

    for act in ("folder", "put", "fetch", "delete"):
        with pytest.raises(ValueError, match="key/attempt"):
            getattr(Blobs(str(tmp_path / "cells")), act)(name)
    assert list(tmp_path.iterdir()) == []


def test_files_of_a_store_cannot_leave_their_folder(tmp_path, monkeypatch):
    import fsspec

    from sweeps.blobs import Blobs

    monkeypatch.setenv("GOLINEAR_HOME", str(tmp_path / "home"))
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    memory.pipe_file("/cells/key/1/recipe.json", b"{}")
    memory.store["/cells/key/1/../../../../evil.txt"] = memory.store["/cells/key/1/recipe.json"]
    with pytest.raises(ValueError, match=r"evil\.txt"):
        Blobs("memory://cells").fetch("key/1")
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("word", ["../../../etc/passwd", "a/../../b", "..", "x\x00y", "ünïcode/…", "A" * 500])
def test_keys_and_file_names_made_of_words_stay_words(word):
    import re

    from linear_core.evaluate.scores import TaskSpec
    from sweeps.cell import Cell, key_of, slug
    from sweeps.tracking import _file

    cell = Cell.base_model(f"/models/{word}", revision="r1")
    for made in (key_of(word, {}), slug(word), cell.train_key, cell.score_key(TaskSpec(name=word))):
        assert re.fullmatch(r"[a-z0-9_-]*", made)
    assert "/" not in _file(word) and _file(word) not in ("", ".", "..")


def test_housekeeping_passes_over_rows_that_point_elsewhere(tmp_path, monkeypatch):
    import sqlalchemy as sa

    from sweeps import housekeeping, schema
    from sweeps.store import Store

    monkeypatch.setenv("GOLINEAR_HOME", str(tmp_path / "home"))
    store = Store(f"sqlite:///{tmp_path}/home/store.db")
    outside = tmp_path / "outside" / "1"
    outside.mkdir(parents=True)
    with store.engine.begin() as connection:
        row = {"key": "../../outside", "fence": 1, "holder": "x", "state": "forgotten", "started_at": 0.0}
        connection.execute(sa.insert(schema.attempts).values(row))
    housekeeping.remove(housekeeping.leftovers(store))
    assert outside.exists()


def test_a_dirty_checkout_gives_a_word_and_not_its_diff(tmp_path, monkeypatch):
    from sweeps import provenance

    (tmp_path / "sweeps").mkdir()
    (tmp_path / "settings.py").write_text("a = 1\n")
    for command in (
        ["init", "-q"],
        ["add", "."],
        ["-c", "user.name=x", "-c", "user.email=x@x", "commit", "-qm", "first"],
    ):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    (tmp_path / "settings.py").write_text("a = 'canary-diff-5f3c'\n")
    (tmp_path / "secret.env").write_text("canary-untracked-5f3c")
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "sweeps" / "provenance.py"))
    provenance.commit.cache_clear()
    try:
        found = provenance.provenance()
        assert found["dirty"] is True and len(found["commit"]) == 40 and "canary" not in str(found)
    finally:
        provenance.commit.cache_clear()


@pytest.mark.parametrize(
    "url", ["mysql://me:canary-5f3c@host/db", "postgresql://me:canary-5f3c@127.0.0.1:9/db", "oracle://me:canary-5f3c@h"]
)
def test_a_database_that_cannot_be_used_is_named_without_its_password(url, monkeypatch):
    from sweeps.store import Store

    with pytest.raises(Exception) as caught:
        Store(url)
    chain, text = caught.value, ""
    while chain is not None:
        text, chain = text + str(chain), chain.__cause__ or chain.__context__
    assert "canary" not in text and text


def test_an_mlflow_server_that_does_not_answer_is_named_without_its_password(tmp_path, monkeypatch):
    from sweeps.tracking import prepare

    with pytest.raises(ValueError, match=r"MLflow at http://127\.0\.0\.1:9") as caught:
        prepare("x", uri="http://me:canary-5f3c@127.0.0.1:9")
    assert "canary" not in str(caught.value)


def test_links_and_records_of_services_carry_no_password(tmp_path, monkeypatch):
    from sweeps import services

    monkeypatch.setenv("GOLINEAR_HOME", str(tmp_path))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:canary-5f3c@mlflow.example:5000")
    assert services._start_mlflow(print).url == "http://mlflow.example:5000"
    assert os.environ["MLFLOW_TRACKING_URI"] == services.environment()["MLFLOW_TRACKING_URI"]
