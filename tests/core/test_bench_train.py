import json

import torch

from linear_core.bench import train
from linear_core.models import build
from linear_core.recipe import Recipe


def test_a_dry_run_shows_every_row(tmp_path, capsys):
    """Several recipes together, one table, the same rows as JSON with the command and versions."""
    output = tmp_path / "bench.json"
    arguments = ["--tiny", "--recipe", "gdn 6+2,gla 6+2", "--objective", "layerwise", "--output", str(output)]
    arguments.append("--checkpoint-activations")
    assert train.main([*arguments, "--device", "cpu"]) == 0
    found = json.loads(output.read_text())
    limit, weights, full, ours = found["rows"]
    assert weights["peak_gib"] == train.TINY.num_parameters * 4 / 2**30
    assert "TFLOP/s" in limit["what"] and full["times_full"] == 1.0 and found["versions"]["torch"]
    assert ours["what"] == "gdn 6+2, gla 6+2 (layerwise, 100% recomputed)" and ours["tokens_per_second"] > 0
    assert ours["times_full"] == ours["tokens_per_second"] / full["tokens_per_second"]
    assert "full attention" in capsys.readouterr().out


def test_what_does_not_fit_is_a_row_that_says_so(monkeypatch):
    def too_long(model, batch, whole=train.full_attention_step):
        if batch.labels.shape[1] > 64:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB. (of this test)")
        return whole(model, batch)

    monkeypatch.setattr(train, "full_attention_step", too_long)
    rows = list(
        train.run(
            train.TINY, [Recipe.parse("none 6+2 lora")], device="cpu", lengths=[64, 128], steps=1, ceiling_size=64
        )
    )
    assert [row.get("note") for row in rows[2:]] == [None, "does not fit: CUDA out of memory", None, None]
    assert rows[4]["times_full"] > 0 and rows[5]["times_full"] is None and rows[5]["tokens_per_second"] > 0


def test_full_attention_has_the_loss_of_training():
    """Both sides of the comparison do the same loss; the base's step reaches the embeddings and no parameter."""
    model = build(train.TINY, device="cpu")
    batch = train.random_batch(train.TINY, 2, 32, "cpu")
    loss = train.full_attention_step(model, batch)
    torch.testing.assert_close(loss, model(input_ids=batch.input_ids, labels=batch.input_ids).loss)
    assert all(p.grad is None for p in model.parameters())


def test_an_8_bit_backbone_is_smaller_and_trains():
    recipe = Recipe.parse("none 6+2 lora")
    _, weights, _, ours = train.run(
        train.TINY, [recipe], device="cpu", lengths=[64], steps=1, ceiling_size=64, backbone="int8"
    )
    in_layers = train.TINY.layers * train.TINY.layer_parameters
    saved = train.TINY.num_parameters * 4 - weights["peak_gib"] * 2**30
    assert 2.8 * in_layers < saved < 3 * in_layers, "three bytes of four, less the scales"
    assert ours["what"] == "none 6+2 lora (ce, int8)" and ours["tokens_per_second"] > 0
