"""A linearized model as a folder: for anyone (``AutoModelForCausalLM``), or just the new parameters beside a pointer.

The full export carries the modelling code it needs: the modules of this package that ``linear_core.convert`` reaches,
flattened side by side (``golinear_*.py``), since transformers loads code from one folder only.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

from linear_core.card import model_card
from linear_core.mechanisms import MECHANISMS
from linear_core.models import BaseModel, load, load_tokenizer, resolve
from linear_core.recipe import Recipe

PACKAGE = Path(__file__).parent
DELTA_FILE = "new_parameters.safetensors"
POINTER_FILE = "golinear.json"
ENTRY = "modeling_golinear"


def export(
    model: Any,
    tokenizer: Any,
    base: BaseModel,
    out: Path | str,
    *,
    card: str = "",
    trained_with: dict[str, Any] | None = None,
) -> Path:
    """Write a folder that ``AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)`` loads where golinear is
    not installed: safetensors, config with ``auto_map``, code, generation config, tokenizer, model card.

    LoRA is merged into the projections: the given model is changed. Raises ValueError when ``out`` holds other files.
    """
    from linear_core.adaptation import remove_lora
    from linear_core.convert import LinearizedAttention, attention_modules

    out = _fresh(out)
    recipe: Recipe = model.recipe
    if recipe.adaptation == "lora":
        for attention in attention_modules(model):
            if isinstance(attention, LinearizedAttention):
                remove_lora(attention, merge=True)
        model.recipe = dataclasses.replace(recipe, adaptation="none")
    _save_weights_and_config(
        model, out, trained_with={"recipe": recipe.to_dict(), "base": base.name, **(trained_with or {})}
    )
    copy_code(recipe.mechanism, type(model).__name__, out)
    if tokenizer is not None:
        tokenizer.save_pretrained(out)
    (out / "README.md").write_text(card or model_card(base, recipe))
    return out


def export_delta(model: Any, base: BaseModel, revision: str, out: Path | str, *, card: str = "") -> Path:
    """Write just the new parameters and a pointer to the base (a few MB); loads through ``load_linearized``."""
    from linear_core.convert import save_new_parameters

    out = _fresh(out)
    save_new_parameters(model, out / DELTA_FILE)
    pointer = {"base": base.name, "source": base.source, "revision": revision, "recipe": model.recipe.to_dict()}
    (out / POINTER_FILE).write_text(json.dumps(pointer, indent=2) + "\n")
    (out / "README.md").write_text(card or model_card(base, model.recipe, delta=True))
    return out


def _fresh(out: Path | str) -> Path:
    out = Path(out)
    if out.is_dir() and any(out.iterdir()):
        ours = (out / f"{ENTRY}.py").exists() or (out / POINTER_FILE).exists()
        if not ours:
            raise ValueError(f"{out} is not empty and was not written by golinear export; give an empty or new folder")
        shutil.rmtree(out)
    out.mkdir(parents=True, exist_ok=True)
    return out


def _save_weights_and_config(model: Any, out: Path, trained_with: dict[str, Any]) -> None:
    model.save_pretrained(out)
    config = json.loads((out / "config.json").read_text())
    name = type(model).__name__
    config_name = name.replace("ForCausalLM", "Config")
    config.update(
        model_type="linearized_" + config["model_type"].removeprefix("linearized_"),
        architectures=[name],
        auto_map={"AutoConfig": f"{ENTRY}.{config_name}", "AutoModelForCausalLM": f"{ENTRY}.{name}"},
        golinear=model.recipe.to_dict(),
        golinear_trained_with=trained_with,
    )
    if "rope_parameters" in config:  # readers of transformers 4 look for it at the top, else take 10000
        config["rope_theta"] = config["rope_parameters"]["rope_theta"]
    (out / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


IMPORT = re.compile(r"^([ \t]*)from (linear_core(?:\.\w+)*) import (\([^)]*\)|[\w, ]+)", re.MULTILINE)


def copy_code(mechanism: str, model_class: str, out: Path) -> None:
    """Write every module that a model with this mechanism needs, flattened, and the entry module."""
    wanted, done = {"linear_core.convert"}, {}
    if MECHANISMS[mechanism]:  # found by name at run time
        wanted.add(MECHANISMS[mechanism].partition(":")[0])
    while wanted:
        source = _source_file(module := wanted.pop()).read_text()
        done[module] = _flatten(source)
        for _, package, names in IMPORT.findall(source):
            wanted |= {package, *(f"{package}.{name}" for name in _submodules(package, names))} - done.keys()
    for module, source in done.items():
        (out / f"{_flat_name(module)}.py").write_text(source)
    config_class = model_class.replace("ForCausalLM", "Config")
    (out / f"{ENTRY}.py").write_text(
        ENTRY_SOURCE.format(
            files="\n".join(f"    from .{_flat_name(module)} import *" for module in sorted(done)),
            convert=_flat_name("linear_core.convert"),
            config_class=config_class,
            model_class=model_class,
        )
    )


ENTRY_SOURCE = '''"""Made by golinear export: a linearized model. transformers copies the files that lines of this form name:

{files}
"""

from .{convert} import {config_class}, {model_class}

__all__ = ["{config_class}", "{model_class}"]
'''


def _source_file(module: str) -> Path:
    path = PACKAGE.joinpath(*module.split(".")[1:])
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _submodules(package: str, names: str) -> list[str]:
    """Those of the imported names that are modules themselves."""
    return [name for name in re.findall(r"\w+", names) if _source_file(f"{package}.{name}").exists()]


def _flat_name(module: str) -> str:
    return "_".join(["golinear", *module.split(".")[1:]])


def _flatten(source: str) -> str:
    def rewrite(found: re.Match[str]) -> str:
        indent, package, names = found.groups()
        if modules := _submodules(package, names):
            return "\n".join(f"{indent}from . import {_flat_name(f'{package}.{name}')} as {name}" for name in modules)
        return f"{indent}from .{_flat_name(package)} import {names}"

    return re.sub(r'"(linear_core[\w.]+):', lambda m: f'".{_flat_name(m[1])}:', IMPORT.sub(rewrite, source))


def is_linearized_folder(path: Path | str) -> bool:
    """Whether ``load_linearized`` can load this folder: a full export, a delta, or a cell's folder."""
    path = Path(path)
    if (path / POINTER_FILE).exists():
        return True
    config = path / "config.json"
    return config.exists() and "golinear" in json.loads(config.read_text())


def load_linearized(
    folder: Path | str, *, device: str = "cpu", dtype: Any = None, base: str | None = None
) -> tuple[Any, Any]:
    """(model, tokenizer) of an exported folder, full or delta, by this package's own code (never the folder's).

    base: where the base model is now, for a delta whose pointer no longer holds. Raises ValueError for other folders
    and when the base's weights are not the ones the delta was made with.
    """
    import torch

    from linear_core.convert import MODEL_CLASSES, convert, load_new_parameters
    from linear_core.models import freeze, revision

    folder = Path(folder)
    dtype = dtype or (torch.bfloat16 if str(device).startswith("cuda") else torch.float32)
    if (folder / POINTER_FILE).exists():
        pointer = json.loads((folder / POINTER_FILE).read_text())
        found = resolve(base or (pointer["source"] if Path(pointer["source"]).is_dir() else pointer["base"]))
        if pointer["revision"] != (now := revision(found)):
            raise ValueError(
                f"{folder} was trained on {pointer['base']} revision {pointer['revision']}, but {found.source} is {now}"
            )
        model = convert(load(found, device=device, dtype=dtype), Recipe(**pointer["recipe"]))
        load_new_parameters(model, folder / DELTA_FILE)
        return model, load_tokenizer(found)
    if not is_linearized_folder(folder):
        raise ValueError(
            f"{folder} holds no linearized model; allowed: a folder written by golinear export or golinear convert"
        )
    from transformers import AutoTokenizer

    family = json.loads((folder / "config.json").read_text())["model_type"].removeprefix("linearized_")
    model_class: Any = MODEL_CLASSES[family]
    model = model_class.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").to(device)
    return freeze(model), AutoTokenizer.from_pretrained(folder, config=model.config, trust_remote_code=False)
