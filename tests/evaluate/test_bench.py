"""The benchmarks run dry on the CPU, count what they say they count, and step as the model steps."""

import json

import pytest
import torch

from linear_core.bench import decode, prefill
from linear_core.bench.train import TINY
from linear_core.convert import convert
from linear_core.models import build
from linear_core.recipe import Recipe


@pytest.mark.parametrize("bench", [decode, prefill])
def test_a_dry_run_measures_both_models(bench, tmp_path, capsys):
    assert bench.main(["--tiny", "--device", "cpu", "--batch-size", "2", "--output", str(tmp_path / "rows.json")]) == 0
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    ours = [row for row in rows if row["what"] == "gdn 56+8" and "cache_mib" in row]
    full = [row for row in rows if row["what"] == "full attention" and "cache_mib" in row]
    assert {row["length"] for row in ours} == {row["length"] for row in full} == {64, 128}
    assert len({row["cache_mib"] / row["sequences"] for row in ours}) == 1
    assert all(row["times_full"] > 0 for row in ours) and "gdn 56+8" in capsys.readouterr().out


def test_the_decoding_step_is_the_models_own():
    """Three steps with tensors held in place, as a CUDA graph replays them, write what generate writes."""
    model = convert(build(TINY, device="cpu", seed=1), Recipe.parse("gdn 4+2"))
    start = torch.zeros(2, 12, dtype=torch.long)
    step, size = decode.linear_step(model, 2, 12)
    with torch.inference_mode():
        for _ in range(3):
            step()
    written = next(c.cell_contents for c in step.__closure__ if getattr(c.cell_contents, "shape", None) == (2, 1))
    cache = model.new_cache(2)
    assert cache.nbytes == size
    with torch.no_grad():
        model(input_ids=start, cache=cache)
        token = torch.zeros(2, 1, dtype=torch.long)
        for _ in range(3):
            token = model(input_ids=token, cache=cache).logits[:, -1:].argmax(-1)
    assert torch.equal(written, token)


def test_full_attention_attends_to_its_slots():
    model = build(TINY, device="cpu", seed=1)
    step, size = decode.full_step(model, TINY, 2, 20)
    with torch.inference_mode():
        step()
    assert size == 2 * TINY.layers * 2 * TINY.kv_heads * (20 + decode.NEW_TOKENS) * TINY.head_dim * 4


def test_prefill_in_pieces_is_prefill_at_once(monkeypatch):
    model = build(TINY, device="cpu", seed=1)
    tokens = torch.randint(0, 512, (2, 50), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(tokens).logits[:, -1:].argmax(-1)
        assert torch.equal(prefill.full_prefill(model, tokens)[1], expected)
        model = convert(model, Recipe.parse("gdn 4+2"))
        expected = model(tokens).logits[:, -1:].argmax(-1)
        monkeypatch.setattr(prefill, "PIECE", 14)
        assert torch.equal(prefill.linear_prefill(model, tokens)[1], expected)
