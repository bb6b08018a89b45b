# SPDX-License-Identifier: Apache-2.0
"""The quickstart's tokenizer and model survive a round trip through Hugging Face's loaders, and preparing caches."""

import dataclasses
import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

RESPONSE = "<think>7+5=12-3=9</think>9"


@pytest.fixture(scope="module")
def model_module(quickstart):
    return quickstart("model")


@pytest.fixture(scope="module")
def saved(model_module, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    tokenizer = model_module.build_tokenizer()
    model = model_module.build_model(tokenizer)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    return tokenizer, model, folder


@pytest.fixture(scope="module", params=["fresh", "reloaded"])
def tokenizer(request, saved):
    return saved[0] if request.param == "fresh" else AutoTokenizer.from_pretrained(saved[2])


def test_sizes_are_what_they_are_called(model_module, saved):
    for name in model_module.SIZES:
        with torch.device("meta"):
            model = model_module.build_model(saved[0], name)
        millions = sum(weight.numel() for weight in model.parameters()) / 1e6
        assert millions == pytest.approx(float(name.removesuffix("M")), rel=0.2)


def test_every_character_is_one_token_and_comes_back(tokenizer, model_module):
    for character in model_module.CHARACTERS:
        ids = tokenizer.encode(character, add_special_tokens=False)
        assert len(ids) == 1
        assert tokenizer.decode(ids, skip_special_tokens=True) == character
    ids = tokenizer.encode(model_module.CHARACTERS, add_special_tokens=False)
    assert len(set(ids)) == len(ids) == len(model_module.CHARACTERS) == 96
    assert tokenizer.decode(ids, skip_special_tokens=True) == model_module.CHARACTERS


def test_unknown_characters_stay_visible(tokenizer, model_module):
    ids = tokenizer.encode("é", add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=True) == model_module.UNKNOWN


def test_chat_template_gives_one_token_for_each_marker_and_character(tokenizer, model_module):
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "7+5-3"}], add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert tokenizer.convert_ids_to_tokens(ids) == ["<|user|>", "7", "+", "5", "-", "3", "<|assistant|>"]
    conversation = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
    ids = tokenizer.apply_chat_template(conversation, tokenize=True, return_dict=False)
    assert tokenizer.convert_ids_to_tokens(ids) == ["<|user|>", *"1+1", "<|assistant|>", "2", model_module.END]
    assert ids[-1] == tokenizer.eos_token_id
    with pytest.raises(Exception, match="system"):
        tokenizer.apply_chat_template([{"role": "system", "content": "x"}], tokenize=False)


def test_think_markers_survive_the_decoding_that_precedes_grading(tokenizer, model_module):
    ids = tokenizer.encode(RESPONSE + model_module.END, add_special_tokens=False) + [tokenizer.pad_token_id] * 3
    assert len(ids) == 14 + 3
    assert tokenizer.decode(ids, skip_special_tokens=True) == RESPONSE
    assert set(tokenizer.all_special_tokens) == {model_module.PAD, model_module.END}


def test_model_reloads_with_the_same_weights_and_settings(saved):
    tokenizer, model, folder = saved
    reloaded = AutoModelForCausalLM.from_pretrained(folder)
    assert reloaded.dtype == torch.float32
    assert reloaded.config.vocab_size == len(tokenizer)
    assert reloaded.config.tie_word_embeddings and reloaded.config.model_type == "qwen3"
    assert reloaded.generation_config.eos_token_id == tokenizer.eos_token_id
    assert reloaded.generation_config.pad_token_id == tokenizer.pad_token_id
    ids = torch.tensor([tokenizer.encode(RESPONSE)])
    torch.testing.assert_close(reloaded(ids).logits, model(ids).logits, rtol=0, atol=0)
    assert 0.3e6 < sum(weight.numel() for weight in reloaded.parameters()) < 0.4e6


class Sharpened(torch.nn.Module):
    """A model whose samples are certain, and which ends every sequence at a position that is a multiple of 11."""

    def __init__(self, model, end):
        super().__init__()
        self.model, self.end = model, end

    def forward(self, position_ids, **kwargs):
        output = self.model(position_ids=position_ids, **kwargs)
        logits = output.logits * 1e4
        logits[:, -1, self.end] = torch.where(position_ids[:, -1] % 11 == 0, 1e9, -1e9)
        return output.__class__(logits=logits, past_key_values=output.past_key_values)


def test_sampler_agrees_with_an_uncached_unpadded_loop(model_module, saved):
    """Rows end at different steps, so padding, cache, the dropping of rows and the limit are all in play."""
    tokenizer, model, _ = saved
    sharpened = Sharpened(model, tokenizer.eos_token_id)
    texts = ["1+1", "2+10-3", "3+3+3+33", "9-8", "12-1+4+5+6", "7+7+7", "8+1+10"]
    prompts = [model_module.format_prompt(tokenizer, text) for text in texts]
    expected = []
    for prompt in prompts:
        ids = tokenizer.encode(prompt, add_special_tokens=False)
        length = len(ids)
        while len(ids) < length + 9 and ids[-1] != tokenizer.eos_token_id:
            with torch.no_grad():
                logits = sharpened(input_ids=torch.tensor([ids]), position_ids=torch.arange(len(ids))[None]).logits
            ids.append(int(logits[0, -1].argmax()))
        expected.append(tokenizer.decode(ids[length:], skip_special_tokens=True))
    assert len({len(tokenizer.encode(text)) for text in expected}) >= 4
    assert model_module.sample_responses(sharpened, tokenizer, prompts, max_new_tokens=9, seed=0) == expected


def test_sampler_is_seeded_and_leaves_the_global_random_state(model_module, saved):
    tokenizer, model, _ = saved
    prompts = [model_module.format_prompt(tokenizer, "1+1")] * 8
    state = torch.get_rng_state()
    first = model_module.sample_responses(model, tokenizer, prompts, max_new_tokens=6, seed=5)
    assert torch.equal(torch.get_rng_state(), state)
    assert first == model_module.sample_responses(model, tokenizer, prompts, max_new_tokens=6, seed=5)
    assert first != model_module.sample_responses(model, tokenizer, prompts, max_new_tokens=6, seed=6)
    assert len(set(first)) > 1


@pytest.fixture
def tiny(quickstart, monkeypatch):
    """Return prepare.py and settings of three supervised steps, with the check of the start level out of the way."""
    prepare = quickstart("prepare")
    monkeypatch.setattr(prepare, "ALLOWED_START", (0.0, 1.0))
    return prepare, prepare.Settings(num_train_problems=20, num_eval_problems=8, sft_steps=3, sft_batch_tokens=64)


def test_preparing_writes_what_verl_reads_and_caches(tiny, tmp_path, capsys):
    parquet = pytest.importorskip("pyarrow.parquet")
    prepare, settings = tiny
    assert prepare.prepare(settings, tmp_path) is True
    assert {path.name for path in tmp_path.iterdir()} == {"manifest.json", "model", "test.parquet", "train.parquet"}
    rows = {split: parquet.read_table(tmp_path / f"{split}.parquet").to_pylist() for split in ("train", "test")}
    assert [len(rows[split]) for split in ("train", "test")] == [20, 8]
    for split, index in (("train", 3), ("test", 7)):
        row = rows[split][index]
        assert set(row) == {"data_source", "prompt", "ability", "reward_model", "extra_info"}
        assert row["data_source"] == "scalerl/chain_sum"
        assert row["extra_info"] == {"split": split, "index": index}
        [message] = row["prompt"]
        assert message["role"] == "user"
        assert row["reward_model"] == {"style": "rule", "ground_truth": str(eval(message["content"]))}
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["seed"] == 0 and manifest["start"]["num_problems"] == 8 and manifest["start"]["num_samples"] == 32

    weights = (tmp_path / "model" / "model.safetensors").read_bytes()
    assert prepare.prepare(settings, tmp_path) is False
    assert prepare.prepare(settings, tmp_path, force=True) is True
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == weights  # deterministic
    assert prepare.prepare(dataclasses.replace(settings, seed=1), tmp_path) is True
    assert (tmp_path / "model" / "model.safetensors").read_bytes() != weights
    (tmp_path / "test.parquet").unlink()
    assert prepare.prepare(dataclasses.replace(settings, seed=1), tmp_path) is True


def test_interrupted_preparation_leaves_nothing_that_looks_finished(tiny, tmp_path, monkeypatch):
    prepare, settings = tiny

    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(prepare, "write_problems", interrupt)
    with pytest.raises(KeyboardInterrupt):
        prepare.prepare(settings, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_foreign_files_are_not_replaced_without_force(tiny, tmp_path):
    prepare, settings = tiny
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "precious.bin").write_text("x")
    with pytest.raises(ValueError, match="--force"):
        prepare.prepare(settings, tmp_path)
    assert (tmp_path / "model" / "precious.bin").exists()


def test_unfit_start_level_is_an_error_of_the_command(quickstart, tmp_path, capsys):
    prepare = quickstart("prepare")
    arguments = ["--out", str(tmp_path), "--sft-steps", "1", "--train-problems", "4", "--eval-problems", "4"]
    assert prepare.main(arguments) == 1
    assert "more --sft-steps than 1" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("setting", [{"sft_steps": 0}, {"num_eval_problems": 1}, {"sft_perfect_fraction": 1.0}])
def test_settings_are_checked(quickstart, setting):
    with pytest.raises(ValueError, match=next(iter(setting))):
        quickstart("prepare").Settings(**setting)


def test_demonstrations_train_on_responses_only(quickstart, saved, model_module):
    prepare = quickstart("prepare")
    tokenizer = saved[0]
    tokens_BT, labels_BT = next(prepare.make_batches(prepare.Settings(sft_batch_tokens=128), tokenizer, flawed=False))
    assert tokens_BT.numel() <= 128
    for tokens, labels in zip(tokens_BT, labels_BT):
        trained = labels != -100
        text = tokenizer.decode(tokens[trained])
        assert text.startswith("<think>") and text.endswith(model_module.END)
        untrained = tokenizer.decode(tokens[~trained]).replace(model_module.PAD, "")
        assert untrained.startswith("<|user|>") and untrained.endswith("<|assistant|>")
        assert torch.equal(tokens[trained], labels[trained])
