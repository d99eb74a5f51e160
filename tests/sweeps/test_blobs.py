"""Files of attempts on an object store: S3 as moto speaks it, with another machine's home on the other side."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sweeps.blobs import Blobs
from tests.servers import s3


@pytest.fixture
def bucket() -> Iterator[str]:
    with s3("cells"):
        yield "s3://cells/study"


def machine(name: str, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Blobs:
    monkeypatch.setenv("GOLINEAR_HOME", str(tmp_path / name))
    return Blobs(url)


def test_what_one_machine_puts_another_fetches(bucket, tmp_path, monkeypatch):
    here = machine("here", bucket, tmp_path, monkeypatch)
    folder = here.folder("key/1")
    (folder / "scores").mkdir()
    (folder / "scores" / "mmlu.json").write_text("[]")
    (folder / "new_parameters.safetensors").write_bytes(bytes(range(256)) * 40_000)  # 10 MB: in several parts
    for step in (1, 2):
        (checkpoint := folder / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
        (checkpoint / "state.json").write_text(f'{{"step": {step}}}')
        here.put_checkpoint("key/1", checkpoint)
    (folder / "checkpoints" / "step-00000003").mkdir()

    there = machine("there", bucket, tmp_path, monkeypatch)
    assert there.fetch_checkpoint("key/2") and not there.fetch_checkpoint("key/2", newer_than="step-00000002")
    assert (there.folder("key/2") / "checkpoints" / "step-00000002" / "state.json").read_text() == '{"step": 2}'
    with pytest.raises(FileNotFoundError, match="are not at s3://cells/study"):
        there.fetch("key/7")

    here.put("key/1")
    here.drop_checkpoints("key")
    fetched = there.fetch("key/1")
    names = {path.relative_to(fetched).as_posix() for path in fetched.rglob("*") if path.is_file()}
    assert names == {"scores/mmlu.json", "new_parameters.safetensors"}
    for name in names:
        assert (fetched / name).read_bytes() == (folder / name).read_bytes()
    assert there.fetch("key/1") == fetched  # at hand now

    there.delete("key/1")
    with pytest.raises(FileNotFoundError):
        there.fetch("key/1")
    assert not [path for path in tmp_path.rglob(".*") if path.is_dir()]  # no half of a download is left


def test_what_another_machine_put_a_moment_ago_is_seen(bucket, tmp_path, monkeypatch):
    import boto3

    there = machine("there", bucket, tmp_path, monkeypatch)
    assert not there.fetch_checkpoint("key/1")
    with pytest.raises(FileNotFoundError):
        there.fetch("key/9")
    for name in ("9/recipe.json", "9/checkpoints/step-00000001/state.json"):
        boto3.client("s3").put_object(Bucket="cells", Key=f"study/key/{name}", Body=b"{}")
    assert (there.fetch("key/9") / "recipe.json").exists() and there.fetch_checkpoint("key/1")
    newer = "study/key/10/checkpoints/step-00000002/state.json"
    boto3.client("s3").put_object(Bucket="cells", Key=newer, Body=b"{}")
    assert there.fetch_checkpoint("key/1", newer_than="step-00000001")
