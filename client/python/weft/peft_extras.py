"""What a PEFT folder needs besides the adapter, so that other programs load it alone:
the name of its base model, the tokenizer's files, and a model card."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from weft.errors import InvalidArgument

CONFIG = "adapter_config.json"
BASE = "base_model_name_or_path"
TEMPLATE = "chat_template.jinja"
TOOLS_TEMPLATE = "additional_chat_templates/tool_use.jinja"
# The tokenizer's files in a model folder. A folder has some of them.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    TEMPLATE,
    TOOLS_TEMPLATE,
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)
# The values of vLLM's --max-lora-rank.
VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
CARD_FILE = "README.md"
TOKENIZER = "tokenizer.json"
MADE = "Weft trained it."
CARD = """---
{header}library_name: peft
pipeline_tag: text-generation
tags:
- lora
- weft
---

# {name}

A LoRA adapter of `{base}`: rank {rank}, alpha {alpha:g}, on {modules}. {made}

{lines}
This folder is for {program}. Another program may load it without an error and compute
something else: export it again with `--for` of that program.
"""
# How each program loads the folder. "wrapped": PEFT, where the model has other parts,
# such as one for images, beside the decoder.
LINES = {
    "peft": """```python
from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer

model = AutoPeftModelForCausalLM.from_pretrained("{name}")
tokenizer = AutoTokenizer.from_pretrained("{name}")
```
""",
    "wrapped": """```python
from peft import PeftModel
from transformers import AutoModelForImageTextToText, AutoTokenizer

model = AutoModelForImageTextToText.from_pretrained("{base}")
model = PeftModel.from_pretrained(model, "{name}")
tokenizer = AutoTokenizer.from_pretrained("{name}")
```
""",
    "vllm": """```
vllm serve {base} --enable-lora --max-lora-rank {limit} --lora-modules {name}=./{name}
```
""",
    "llama.cpp": """```
python convert_lora_to_gguf.py {name} {option} {base} --outfile {name}.gguf
```
""",
}


def add(
    folder: Path,
    name: str,
    base_model: str | None,
    model_dir: str | os.PathLike[str] | None,
    loader: str = "peft",
) -> None:
    """Completes a PEFT folder.

    name: the folder's name, for the model card. base_model: the Hub's name of the base
    model, or its folder; None keeps the server's name. model_dir: the folder whose
    tokenizer files are copied; None copies none. loader: the program that the folder is
    for, of which the model card has the lines. Raises InvalidArgument if model_dir
    has none.
    """
    if base_model is not None and Path(base_model).is_dir():
        base_model = str(Path(base_model).resolve())
    path = folder / CONFIG
    config = json.loads(path.read_text("utf-8"))
    if base_model is not None:
        config[BASE] = base_model
        path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    if model_dir is not None:
        copy_tokenizer(Path(model_dir), folder)
    (folder / CARD_FILE).write_text(_card(config, name, loader), encoding="utf-8")


def copy_tokenizer(model_dir: Path, folder: Path) -> None:
    """Copies the files of a tokenizer. Raises InvalidArgument if there is none."""
    found = [name for name in TOKENIZER_FILES if (model_dir / name).is_file()]
    if not found:
        raise InvalidArgument(f"model_dir {model_dir}: no file of a tokenizer")
    for name in found:
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(model_dir / name, folder / name)


def prepare(folder: Path, scratch: Path) -> None:
    """Prepares the folder of an earlier export for the files in `scratch`. Keeps a
    model card that Weft did not write, and removes a chat template that does not belong
    to the new tokenizer."""
    card = folder / CARD_FILE
    if card.is_file() and MADE not in card.read_text("utf-8", "replace"):
        (scratch / CARD_FILE).unlink(missing_ok=True)
    if (scratch / TOKENIZER).is_file():
        for name in (TEMPLATE, TOOLS_TEMPLATE):
            if not (scratch / name).is_file():
                (folder / name).unlink(missing_ok=True)


def _card(config: dict[str, Any], name: str, loader: str) -> str:
    """Returns the model card. Its header names the base model only if that is a name of
    the Hub, because the Hub refuses others."""
    base = str(config[BASE])
    on_hub = base.count("/") == 1 and not base.startswith((".", "/"))
    paths = [*config["target_modules"], *config.get("target_parameters", ())]
    modules = {path.removesuffix(".weight").rpartition(".")[2]: None for path in paths}
    highest = max(config["r"], *config.get("rank_pattern", {}).values(), 0)
    wrapped = loader == "peft" and "exclude_modules" in config
    lines = LINES["wrapped" if wrapped else loader].format(
        name=name,
        base=base,
        option="--base-model-id" if on_hub else "--base",  # The other is a folder.
        limit=next((one for one in VLLM_RANKS if one >= highest), highest),
    )
    return CARD.format(
        header=f"base_model: {base}\n" if on_hub else "",
        name=name,
        made=MADE,
        base=base,
        rank=config["r"],
        alpha=config["lora_alpha"],
        modules=", ".join(modules),
        lines=lines,
        program={"peft": "PEFT", "vllm": "vLLM"}.get(loader, loader),
    )
