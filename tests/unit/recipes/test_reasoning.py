# SPDX-License-Identifier: Apache-2.0
"""The reasoning recipe's problems, demonstrations, batches and reward."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

from recipes.quickstart.model import build_tokenizer
from recipes.reasoning import problems, reward, supervise
from recipes.reasoning.demonstrations import PERFECT, Demonstration, FlawRates, demonstrate
from recipes.reasoning.families import FAMILIES, Hand, solve_simple_equations
from recipes.reasoning.pretrained import without_quantization
from tests.paths import RECIPES, REPO

SUM = {"question": "57 + 87 - 70 =", "answer": "74", "metadata": {"expression": "57 + 87 - 70"}}
WORDS = {"question": "Reverse", "answer": "c, b, a", "metadata": {"words": ["a", "b", "c"]}}


def equation(text: str, variable: str = "h") -> dict[str, Any]:
    return {"question": text, "answer": "", "metadata": {"equation": text, "variable": variable}}


def exact() -> Hand:
    return Hand(random.Random(0), 0.0)


@pytest.mark.parametrize(
    ("text", "lines", "answer"),
    [
        ("20*h + 65 = 1485", ["20*h = 1485 - 65 = 1420", "h = 1420 / 20 = 71"], "71"),
        ("65 - 20*h = 25", ["-20*h = 25 - 65 = -40", "h = -40 / -20 = 2"], "2"),
        ("h - 5 = 7", ["h = 7 + 5 = 12"], "12"),
        ("4 - h = 1", ["-h = 1 - 4 = -3", "h = -3 / -1 = 3"], "3"),
        ("4*h = 24", ["h = 24 / 4 = 6"], "6"),
        ("h = 3", ["h = 3"], "3"),
    ],
)
def test_equations_are_solved_in_writing(text: str, lines: list[str], answer: str) -> None:
    found = solve_simple_equations(equation(text), exact())
    assert [line.text for line in found] == lines and found[-1].result == answer


@pytest.mark.parametrize(("family", "entry"), [("chain_sum", SUM), ("word_sequence_reversal", WORDS)])
def test_perfect_demonstration_is_right_and_one_that_slips_always_is_not(family: str, entry: dict[str, Any]) -> None:
    assert demonstrate(family, entry, random.Random(0), PERFECT).answer == entry["answer"]
    slipped = demonstrate(family, entry, random.Random(0), FlawRates(1.0, 0.0, 0.0, 0.0))
    assert slipped.answer != entry["answer"]


def test_skipped_work_is_a_wrong_guess() -> None:
    shown = demonstrate("chain_sum", SUM, random.Random(0), FlawRates(0.0, 1.0, 0.0, 0.0))
    assert shown.answer != SUM["answer"] and "57" not in shown.thinking


def test_doubt_repeats_a_step_and_a_cut_knows_what_was_found_before() -> None:
    shown = demonstrate("chain_sum", SUM, random.Random(1), FlawRates(0.0, 0.0, 1.0, 0.9))
    assert shown.answer == "74" and shown.answer_if_cut in ("144", "74")
    steps = re.findall(r"= (\d+)$", shown.thinking, re.MULTILINE)
    assert steps.count(shown.answer_if_cut) > 1


def test_flaw_rates_are_probabilities() -> None:
    with pytest.raises(ValueError, match="slip=2"):
        FlawRates(slip=2)
    with pytest.raises(ValueError, match="never stop"):
        FlawRates(keep_doubting=1)


def row(thinking: str, flawed: bool = True) -> dict[str, Any]:
    return {"question": "57+87-70", "flawed": flawed, **asdict(Demonstration(thinking, "74", "144"))}


def trained_text(tokenizer: Any, labels: list[int]) -> str:
    return tokenizer.decode([label for label in labels if label != supervise.IGNORED])


def test_demonstration_within_the_budget_is_trained_on_whole() -> None:
    tokenizer = build_tokenizer()
    tokens, labels = supervise.encode(tokenizer, row("<think>\n57+87=144"), budget=100)
    assert trained_text(tokenizer, labels) == "<think>\n57+87=144\n</think>\n<answer>74</answer><|im_end|>"
    assert len(tokens) == len(labels) and tokenizer.decode(tokens).startswith("<|user|>57+87-70<|assistant|>")


def test_demonstration_beyond_the_budget_is_interrupted_and_the_phrase_is_not_trained_on() -> None:
    tokenizer = build_tokenizer()
    tokens, labels = supervise.encode(tokenizer, row("<think>\n57+87=144\nWait"), budget=8)
    assert supervise.PHRASE in tokenizer.decode(tokens)
    assert trained_text(tokenizer, labels) == "<think>\n57+87=144</answer><|im_end|>"


def test_perfect_demonstrations_come_first_and_are_repeated_with_their_share() -> None:
    rows = [row(str(number), flawed=number >= 3) for number in range(4)]
    ordered = supervise.order_rows(rows, 16, random.Random(0))
    assert [shown["flawed"] for shown in ordered] == [False] * 12 + [True] * 4
    assert sorted(shown["thinking"] for shown in ordered[:12]) == sorted("012" * 4)
    assert not any(shown["flawed"] for shown in supervise.order_rows(rows[:3], 5, random.Random(0)))


def test_batches_are_padded_at_the_end_and_make_up_all_steps() -> None:
    tokenizer = build_tokenizer()
    rows = [row("<think>\n" + "9" * length) for length in range(12)]
    batches = list(supervise.make_batches(tokenizer, rows, supervise.Settings(steps=7, batch=5), pool=2))
    assert len(batches) == 7
    for tokens_BT, labels_BT in batches:
        assert tokens_BT.shape == labels_BT.shape and len(tokens_BT) == 5
        lengths_B = (labels_BT != supervise.IGNORED).int().flip(1).argmax(1)
        assert lengths_B.min() == 0, "the longest row has no padding"
        assert (tokens_BT[labels_BT != supervise.IGNORED] == labels_BT[labels_BT != supervise.IGNORED]).all()


def test_config_interrupts_with_the_phrase_and_budget_of_the_supervised_phase() -> None:
    thinking = yaml.safe_load((RECIPES / "smollm2-reasoning" / "thinking.yaml").read_text())
    section = thinking["algorithm"]["scalerl"]["interruption"]
    assert section["phrase"] == supervise.PHRASE
    assert tuple(section["thinking_budget"]) == supervise.Settings().thinking_budget


def test_held_out_share_is_one_in_eight() -> None:
    share = sum(problems.is_held_out(f"problem {number}") for number in range(4000)) / 4000
    assert 0.1 < share < 0.15


def test_another_data_source_is_refused() -> None:
    with pytest.raises(ValueError, match=r"problems\.py"):
        reward.compute_score("gsm8k", "", "{}")


def test_a_response_graded_while_the_library_is_being_imported_waits_for_it(tmp_path: Path) -> None:
    """The library knows its families only at the end of its import, and verl grades the first responses in threads."""
    library = tmp_path / "reasoning_gym"
    library.mkdir()
    (library / "__init__.py").write_text(
        "import time\nfrom .factory import KNOWN, get_score_answer_fn\ntime.sleep(0.5)\nKNOWN['chain_sum'] = len\n"
    )
    (library / "factory.py").write_text("KNOWN = {}\ndef get_score_answer_fn(name):\n    return KNOWN[name]\n")
    program = (
        "import sys, threading\n"
        "from recipes.reasoning.reward import verifier_of\n"
        "first = threading.Thread(target=verifier_of, args=('chain_sum',))\n"
        "first.start()\n"
        "while 'reasoning_gym.factory' not in sys.modules: pass\n"
        "assert verifier_of('chain_sum') is len\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(REPO)])}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_problems_of_the_splits_differ_and_the_verifier_takes_their_answers(tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym")
    assert problems.main(["--out", str(tmp_path), "--train", "40", "--test", "24", "--demonstrations", "80"]) == 0
    train, test, shown = (
        supervise.read_rows(tmp_path / f"{split}.parquet") for split in ("train", "test", "demonstrations")
    )
    held_out = {entry["prompt"][0]["content"] for entry in test}
    assert len(held_out) == 24
    assert not held_out & {entry["prompt"][0]["content"] for entry in train}
    assert not held_out & {entry["question"] for entry in shown}
    assert {entry["data_source"] for entry in test} == {problems.SOURCE_PREFIX + family for family in FAMILIES}
    for entry in test:
        truth = entry["reward_model"]["ground_truth"]
        answer = re.search(r'"answer": "(.*?)"', truth)[1]
        for response, right in (
            (f"<think>\n3\n</think>\n<answer>{answer}</answer>", 1.0),
            (f"<think>\n<answer>{answer}</answer>", 0.0),
            (f"<think>\n3\n</think>\n<answer>{answer}7</answer>", 0.0),
        ):
            assert reward.compute_score(entry["data_source"], response, truth) == {"score": 2 * right - 1, "acc": right}


def test_model_that_calls_itself_quantised_can_be_saved(tmp_path: Path) -> None:
    shape = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=16, intermediate_size=8, tie_word_embeddings=True, **shape))
    assert without_quantization(model) is model
    model.config.quantization_config = {"quant_method": "gguf"}
    plain = without_quantization(model)
    assert not hasattr(plain.config, "quantization_config") and plain.lm_head.weight is plain.model.embed_tokens.weight
    for name, weight in model.state_dict().items():
        assert torch.equal(plain.state_dict()[name], weight), name
    plain.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").exists()
