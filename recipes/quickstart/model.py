# SPDX-License-Identifier: Apache-2.0
"""The quickstart's model: a character tokenizer and a Qwen3-shaped network of 0.34 million parameters, or a larger one.

Both are ordinary Hugging Face objects: saved with `save_pretrained`, they load in verl, vLLM and transformers by path.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

# verl selects its chat format by the model type (qwen3), and that format ends a turn with this very token.
PAD, END, UNKNOWN = "<pad>", "<|im_end|>", "<unk>"
USER, ASSISTANT = "<|user|>", "<|assistant|>"
THINK_START, THINK_END = "<think>", "</think>"
MARKERS = (USER, ASSISTANT, THINK_START, THINK_END)
# Printable ASCII and the line feed: more than sums need, so that a phrase injected into a response can be written too.
CHARACTERS = "\n" + "".join(chr(code) for code in range(32, 127))
MAX_POSITIONS = 512


@dataclass(frozen=True)
class Size:
    """Width of the network, of its feed-forward part, its layers, and heads of a width."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    head_dim: int


SIZES = {
    "0.3M": Size(96, 256, 3, 3, 32),
    "3M": Size(256, 768, 4, 4, 64),
    "11M": Size(384, 1152, 6, 6, 64),
    "27M": Size(512, 1536, 8, 8, 64),
}
"""By the number of their parameters."""

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    f"{{%- if message['role'] == 'user' -%}}{{{{- '{USER}' + message['content'] -}}}}"
    f"{{%- elif message['role'] == 'assistant' -%}}{{{{- '{ASSISTANT}' + message['content'] + '{END}' -}}}}"
    "{%- else -%}{{- raise_exception('This model knows the roles user and assistant, not ' + message['role']) -}}"
    "{%- endif -%}"
    "{%- endfor -%}"
    f"{{%- if add_generation_prompt -%}}{{{{- '{ASSISTANT}' -}}}}{{%- endif -%}}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer: one token a character, one token a marker.

    Only the padding and the end token are special. The think markers must not be: responses are decoded with
    `skip_special_tokens=True` before they are graded, and a special `</think>` would be gone by then. Role markers stay
    visible too, so that a response that contains one is not mistaken for a clean answer.
    """
    vocab = {token: index for index, token in enumerate((PAD, END, UNKNOWN, *MARKERS, *CHARACTERS))}
    backend = Tokenizer(models.WordLevel(vocab, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()  # joins tokens without a space between them
    backend.add_tokens([AddedToken(marker, special=False, normalized=False) for marker in MARKERS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=END,
        padding_side="left",
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build_model(tokenizer: PreTrainedTokenizerFast, size: str = "0.3M") -> Qwen3ForCausalLM:
    """Return a freshly initialised model of one of `SIZES` in float32; seed torch beforehand."""
    shape = SIZES[size]
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        intermediate_size=shape.intermediate,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        head_dim=shape.head_dim,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        # The usual .02 suits thousands of hidden units; with 96 of them it leaves the model untrainably flat.
        initializer_range=0.1 * (96 / shape.hidden) ** 0.5,
        attn_implementation="sdpa",
        dtype="float32",
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config).float()
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None
    )
    return model


def build_optimizers(model: Qwen3ForCausalLM, learning_rate: float) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices and AdamW for the rest; AdamW alone needs about twice the supervised steps."""
    if not hasattr(torch.optim, "Muon"):
        raise ValueError(f"torch {torch.__version__} has no torch.optim.Muon; install torch 2.9 or newer.")
    is_matrix = {name: weight.ndim == 2 and "embed" not in name for name, weight in model.named_parameters()}
    matrices = [weight for name, weight in model.named_parameters() if is_matrix[name]]
    others = [weight for name, weight in model.named_parameters() if not is_matrix[name]]
    return [
        torch.optim.Muon(matrices, lr=learning_rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.01),
    ]


def format_prompt(tokenizer: PreTrainedTokenizerFast, problem_text: str) -> str:
    """Return the text that the model continues, exactly as training with verl builds it from the data file."""
    messages = [{"role": "user", "content": problem_text}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)


@torch.no_grad()
def sample_responses(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    prompts: Sequence[str],
    max_new_tokens: int,
    seed: int,
) -> list[str]:
    """Sample one response a prompt at temperature 1 with a key-value cache.

    Args:
        prompts: N texts from `format_prompt`; repeat a prompt to get several samples.
        max_new_tokens: responses are cut here, as the response limit of the RL run cuts them.
        seed: of the sampling; torch's global random state is left as it was.

    Returns:
        N response texts without the special tokens.
    """
    device = next(model.parameters()).device
    batch = tokenizer(list(prompts), return_tensors="pt", padding=True, add_special_tokens=False).to(device)
    mask_NT = batch["attention_mask"]
    positions_NT = (mask_NT.cumsum(1) - 1).clamp(min=0)
    tokens_NT = batch["input_ids"]
    num_prompts = len(prompts)
    responses_NR = torch.full((num_prompts, max_new_tokens), tokenizer.pad_token_id, device=device)
    rows_N = torch.arange(num_prompts, device=device)  # which prompts the rows still in flight belong to
    generator = torch.Generator(device).manual_seed(seed)
    was_training = model.training
    model.eval()
    cache = None
    for step in range(max_new_tokens):
        output = model(
            input_ids=tokens_NT,
            attention_mask=mask_NT,
            position_ids=positions_NT,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        cache = output.past_key_values
        next_N = torch.multinomial(output.logits[:, -1].softmax(-1), 1, generator=generator)[:, 0]
        alive_N = ~(responses_NR[rows_N, :step] == tokenizer.eos_token_id).any(1)
        responses_NR[rows_N[alive_N], step] = next_N[alive_N]
        unfinished_N = alive_N & (next_N != tokenizer.eos_token_id)
        if not unfinished_N.any():
            break
        mask_NT = torch.cat([mask_NT, mask_NT.new_ones(len(mask_NT), 1)], dim=1)
        tokens_NT, positions_NT = next_N[:, None], positions_NT[:, -1:] + 1
        # Shrinking copies the whole cache, so it waits until a good part of the rows is done.
        if unfinished_N.float().mean() < 0.75:
            keep = unfinished_N.nonzero()[:, 0]
            cache.batch_select_indices(keep)
            rows_N, mask_NT, tokens_NT, positions_NT = (x[keep] for x in (rows_N, mask_NT, tokens_NT, positions_NT))
    model.train(was_training)
    return tokenizer.batch_decode(responses_NR, skip_special_tokens=True)
