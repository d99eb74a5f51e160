import json
import subprocess
import sys

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from linear_core import data, packing, self_samples, sources
from linear_core.settings import TrainSettings
from tests.core import tiny
from tests.core.hub_stand_in import hub
from tests.core.texts import byte_tokenizer, texts, write_jsonl

TOKENIZER = byte_tokenizer()
END = TOKENIZER.eos_token_id
SETTINGS = TrainSettings(tokens=4096, sequence_length=64, batch_size=4)


def rows_of(tokens: data.TokenData, settings: TrainSettings, seed: int = 1) -> np.ndarray:
    return np.concatenate([tokens.batch(step, settings, seed).input_ids for step in range(settings.num_steps)])


@pytest.fixture
def source(tmp_path):
    return f"local:{write_jsonl(tmp_path / 'text.jsonl.gz', texts(300))}"


def test_order_is_a_function_of_seed_and_step_alone(source, tmp_path):
    straight = data.open_tokens(source, TOKENIZER, cache_folder=tmp_path / "a")
    all_steps = [straight.batch(step, SETTINGS, seed=1).input_ids for step in range(SETTINGS.num_steps)]
    again = data.open_tokens(source, TOKENIZER, cache_folder=tmp_path / "b")
    for step in (7, 3, 15):
        assert np.array_equal(again.batch(step, SETTINGS, seed=1).input_ids, all_steps[step])
    assert not np.array_equal(again.batch(3, SETTINGS, seed=2).input_ids, all_steps[3])
    rows = np.concatenate(all_steps)
    assert rows.shape == (64, 64) and len(np.unique(rows, axis=0)) == 64  # nothing twice within one pass


def test_a_known_order_never_moves():
    """Results depend on it: a change of the order needs a new SCIENCE_VERSION of the trainer."""
    assert data._order(1, 0, 8).tolist() == [3, 2, 0, 7, 1, 5, 6, 4]


def test_packing_keeps_documents_whole_with_one_separator(tmp_path, monkeypatch):
    documents = texts(300)
    source = f"local:{write_jsonl(tmp_path / 'text.jsonl', documents)}"
    kept = [text for text in documents if not sources.is_heldout(text)]
    monkeypatch.setattr(packing, "LARGEST_SHARD", 3000)  # several shards
    packed = data.open_tokens(source, TOKENIZER, cache_folder=tmp_path / "cache")._train
    total = packed.extend(10**9)
    assert len(packed._shards) > 3
    assert TOKENIZER.decode(packed.tokens(0, total)).split("<end>")[:-1] == kept
    ids = packed.document_ids(0, total)
    assert np.array_equal(np.diff(ids), (packed.tokens(0, total)[:-1] == END).astype(int))


def test_labels_and_isolated_documents(source, tmp_path):
    tokens = data.open_tokens(source, TOKENIZER, cache_folder=tmp_path / "c")
    settings = TrainSettings(tokens=4096, sequence_length=256, batch_size=4)
    plain = tokens.batch(0, settings, seed=1)
    assert np.array_equal(plain.labels[:, :-1], plain.input_ids[:, 1:]) and (plain.labels[:, -1] == data.IGNORE).all()
    assert plain.document_ids is None and plain.num_targets == 4 * 255
    isolated = tokens.batch(0, TrainSettings(**settings.to_dict() | {"isolate_documents": True}), seed=1)
    borders = isolated.input_ids[:, :-1] == END
    assert borders.any() and (isolated.document_ids[:, 0] == 0).all()
    assert np.array_equal(np.diff(isolated.document_ids, axis=1), borders.astype(int))
    assert ((isolated.labels[:, :-1] == data.IGNORE) == borders).all()
    assert isolated.num_targets == 4 * 255 - borders.sum()


def test_heldout_text_is_never_trained_on(tmp_path):
    documents = texts(400)
    source = f"local:{write_jsonl(tmp_path / 'text.jsonl', documents)}"
    tokens = data.open_tokens(source, TOKENIZER, cache_folder=tmp_path / "cache")
    heldout = TOKENIZER.decode(tokens.heldout(1024, 32).flatten())
    everything = TrainSettings(tokens=10**5, sequence_length=64, batch_size=64)
    trained = {TOKENIZER.decode(row) for row in rows_of(tokens, everything)}
    pieces = [piece[:16] for piece in heldout.replace("<end>", " ").split() if len(piece) >= 16]
    assert pieces and not any(piece in row for row in trained for piece in pieces)


def test_a_folder_with_its_own_heldout_text(tmp_path, monkeypatch):
    write_jsonl(tmp_path / "train_text.jsonl.gz", texts(100))
    write_jsonl(tmp_path / "heldout_text.jsonl.gz", ["held" * 100])
    monkeypatch.setenv("GOLINEAR_DATA", str(tmp_path))
    tokens = data.open_tokens("auto", TOKENIZER, cache_folder=tmp_path / "cache")
    assert TOKENIZER.decode(tokens.heldout(64, 64)[0]).startswith("heldheld")
    assert rows_of(tokens, SETTINGS).shape == (64, 64)
    assert data.data_fingerprint("auto") == data.data_fingerprint(f"local:{tmp_path}")


def test_the_last_step_may_hold_fewer_sequences_and_a_short_source_is_read_again(tmp_path):
    source = f"local:{write_jsonl(tmp_path / 'text.jsonl', texts(8))}"
    tokens = data.open_tokens(source, TOKENIZER, cache_folder=tmp_path / "cache")
    settings = TrainSettings(tokens=64 * 101, sequence_length=64, batch_size=4)
    assert [len(tokens.batch(step, settings, 1).input_ids) for step in (0, 24, 25)] == [4, 4, 1]
    with pytest.raises(ValueError, match="less than one sequence of 4096"):
        tokens.batch(0, TrainSettings(), 1)


def test_fingerprints(tmp_path, monkeypatch):
    one, other = texts(20), texts(20, seed=1)
    here, there = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    assert data.data_fingerprint(f"local:{write_jsonl(here, one)}") == data.data_fingerprint(
        f"local:{write_jsonl(there, one)}"
    )
    assert data.data_fingerprint(f"local:{here}") != data.data_fingerprint(f"local:{write_jsonl(there, other)}")
    code = "import sys; from linear_core.data import data_fingerprint as f; f(sys.argv[1]); f('self'); "
    code += "assert not {'torch', 'datasets', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code, f"local:{here}"], check=True)


def test_parquet_and_folders_give_the_same_stream(tmp_path):
    documents = texts(60)
    write_jsonl(tmp_path / "all.jsonl", documents)
    folder = tmp_path / "parts"
    folder.mkdir()
    write_jsonl(folder / "0.jsonl.gz", documents[:30])
    pyarrow.parquet.write_table(pyarrow.table({"id": range(30), "text": documents[30:]}), folder / "1.parquet")
    streams = [
        list(sources.documents(sources.resolve(f"local:{path}"), False, skip=5))
        for path in (tmp_path / "all.jsonl", folder)
    ]
    assert streams[0] == streams[1] and streams[0][0][0] >= 5


def test_an_incomplete_shard_is_made_again(source, tmp_path):
    expected = rows_of(data.open_tokens(source, TOKENIZER, cache_folder=tmp_path / "c"), SETTINGS)
    (shard,) = (tmp_path / "c").glob("*/training/00000.tokens")
    shard.write_bytes(shard.read_bytes()[:-10])
    assert np.array_equal(rows_of(data.open_tokens(source, TOKENIZER, cache_folder=tmp_path / "c"), SETTINGS), expected)
    assert not list(shard.parent.glob(".*tokens*"))


def test_shards_made_by_another_process_are_continued(tmp_path, monkeypatch):
    monkeypatch.setitem(data.FIRST_SHARD, "local", 500)
    source = f"local:{write_jsonl(tmp_path / 'text.jsonl', texts(300))}"
    ours, theirs, alone = (
        data.open_tokens(source, TOKENIZER, cache_folder=tmp_path / name)._train
        for name in ("shared", "shared", "alone")
    )
    for packed, until in ((ours, 400), (theirs, 3000), (ours, 9000), (alone, 9000)):
        packed.extend(until)
    assert np.array_equal(ours.tokens(0, 9000), alone.tokens(0, 9000))


@pytest.mark.parametrize(
    "source, message",
    [
        ("web:x", "allowed: auto, local:PATH"),
        ("local:/no/such/folder", "does not exist"),
        ("hub:a b", "allowed: auto, local:PATH"),
        ("", "allowed: auto"),
    ],
)
def test_sources_that_are_refused(source, message):
    with pytest.raises(ValueError, match=message):
        data.data_fingerprint(source)


def test_unreadable_text_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("GOLINEAR_DATA", str(tmp_path))
    with pytest.raises(ValueError, match=r"GOLINEAR_DATA is .* no readable train_text.jsonl.gz"):
        data.data_fingerprint("auto")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"body": "x"}) + "\n")
    with pytest.raises(ValueError, match="line 1 has no 'text' string \\(it has body\\)"):
        list(sources.documents(sources.resolve(f"local:{tmp_path}"), False))
    (tmp_path / "rows.jsonl.gz").write_bytes(b"not gzip")
    with pytest.raises(ValueError, match="not JSON lines"):
        list(sources.documents(sources.resolve(f"local:{tmp_path / 'rows.jsonl.gz'}"), False))


def test_the_models_own_samples_are_made_once(tmp_path, monkeypatch):
    tiny.base("qwen3").save_pretrained(tmp_path / "model")
    monkeypatch.setattr(self_samples, "LENGTH", 32)
    opened = [
        data.open_tokens("self", TOKENIZER, cache_folder=tmp_path / "tokens", base=str(tmp_path / "model"))
        for _ in range(2)
    ]
    settings = TrainSettings(tokens=2048, sequence_length=32)
    monkeypatch.setitem(data.FIRST_SHARD, "self", 512)
    rows = rows_of(opened[0], settings)
    heldout = opened[0].heldout(512, 32)
    monkeypatch.setattr("linear_core.models.load", lambda *_, **__: pytest.fail("sampled a second time"))
    assert np.array_equal(rows_of(opened[1], settings), rows)
    assert np.array_equal(opened[1].heldout(512, 32), heldout)
    assert not {row.tobytes() for row in rows} & {row.tobytes() for row in heldout}
    with pytest.raises(ValueError, match="needs the base model"):
        data.open_tokens("self", TOKENIZER)


def test_a_hub_data_set_is_streamed_and_an_unreachable_hub_costs_seconds(tmp_path):
    """A real ``datasets`` in a process of its own, against a loopback server that speaks the hub's HTTP interface."""
    documents = texts(200)
    script = tmp_path / "stream.py"
    script.write_text(
        "import sys, json, time\n"
        "from linear_core import data, packing\n"
        "from linear_core.settings import TrainSettings\n"
        "from tests.core.texts import byte_tokenizer\n"
        "settings = TrainSettings(tokens=2048, sequence_length=64)\n"
        "tokens = data.open_tokens('hub:tiny/texts', byte_tokenizer(), cache_folder=sys.argv[1])\n"
        "rows = [tokens.batch(step, settings, 1).input_ids.tolist() for step in range(settings.num_steps)]\n"
        "started = time.monotonic()\n"
        "try: data.data_fingerprint('hub:tiny/absent')\n"
        "except ValueError as error: reason = str(error)\n"
        "json.dump([data.data_fingerprint('hub:tiny/texts'), rows, reason, time.monotonic() - started], sys.stdout)\n"
    )
    with hub({"tiny/texts": documents}) as environment:
        environment |= {"GOLINEAR_CACHE": str(tmp_path), "HF_HOME": str(tmp_path / "hf")}
        run = [sys.executable, str(script), str(tmp_path / "tokens")]
        fingerprint, rows, reason, _ = json.loads(subprocess.run(run, env=environment, check=True, stdout=-1).stdout)
    local = f"local:{write_jsonl(tmp_path / 'same.jsonl', documents)}"
    packed = data.open_tokens(local, TOKENIZER, cache_folder=tmp_path / "local")
    stream = packed._train.tokens(0, packed._train.extend(1 << 15))
    streamed = {tuple(row[0]) for row in rows}
    assert streamed <= {tuple(stream[i : i + 64]) for i in range(0, len(stream) - 63, 64)}
    assert fingerprint.startswith("hub-") and "tiny/absent" in reason
    # the server is gone: what is cached serves, another data set is refused at once
    gone = json.loads(subprocess.run(run, env=environment, check=True, stdout=-1).stdout)
    assert gone[:2] == [fingerprint, rows] and gone[3] < 15
