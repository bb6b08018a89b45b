# SPDX-License-Identifier: Apache-2.0
"""Several Qwen3-shaped models of one shape, each with its own weights, computed at once.

Runs with different seeds then cost one run's kernel launches. The numbers are those of transformers' Qwen3ForCausalLM
(a test compares them). Shape legend: M models, N sequences a model, T tokens, H hidden, V vocabulary, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu
from transformers import Qwen3ForCausalLM

Cache = list[tuple[Tensor, Tensor]]
"""Keys and values of every layer, [M*N, heads, positions, D]."""


class StackedModels(nn.Module):
    """Models side by side; sequences begin at position 0 and are padded at their end.

    Args:
        models: of equal shape, with tied embeddings, in float32.
    """

    def __init__(self, models: Sequence[Qwen3ForCausalLM]) -> None:
        super().__init__()
        self.config = models[0].config
        states = [model.state_dict() for model in models]
        names = [name for name in states[0] if name != "lm_head.weight"]
        stacked = {name: torch.stack([state[name] for state in states]).float() for name in names}
        self.weights = nn.ParameterDict({_key(name): nn.Parameter(value.clone()) for name, value in stacked.items()})
        self.register_buffer("inverse_frequency", models[0].model.rotary_emb.inv_freq.detach().float().clone())
        self.num_models = len(models)

    def weight(self, name: str) -> Tensor:
        """Weight of all models by its name in transformers, [M, ...]."""
        return self.weights[_key(name)]

    def make_cache(self, num_sequences: int, num_positions: int) -> Cache:
        """An empty cache for ``num_sequences`` a model."""
        config = self.config
        shape = (self.num_models * num_sequences, config.num_key_value_heads, num_positions, config.head_dim)
        like = self.weight("model.norm.weight")
        return [(like.new_empty(shape), like.new_empty(shape)) for _ in range(config.num_hidden_layers)]

    def hidden(self, tokens_MNT: Tensor, start: int = 0, cache: Cache | None = None) -> Tensor:
        """Normalised last hidden states, [M, N, T, H].

        Args:
            tokens_MNT: token ids.
            start: position of the first of them; more than 0 only with a cache and one token.
            cache: written at these positions and read up to them.
        """
        M, N, T = tokens_MNT.shape
        embedding = self.weight("model.embed_tokens.weight")
        model_M11 = torch.arange(M, device=tokens_MNT.device)[:, None, None]
        x = embedding[model_M11, tokens_MNT].reshape(M, N * T, -1)
        angles = torch.arange(start, start + T, device=x.device)[:, None] * self.inverse_frequency
        rotation = torch.cat([angles, angles], -1)
        cos, sin = rotation.cos(), rotation.sin()
        for layer in range(self.config.num_hidden_layers):
            prefix = f"model.layers.{layer}."
            normed = self._norm(x, prefix + "input_layernorm.weight")
            mixed = self._attend(normed, prefix + "self_attn.", (M, N, T), (cos, sin), start, cache and cache[layer])
            x = x + mixed
            normed = self._norm(x, prefix + "post_attention_layernorm.weight")
            gate, up = (self._linear(normed, f"{prefix}mlp.{name}_proj.weight") for name in ("gate", "up"))
            x = x + self._linear(silu(gate) * up, prefix + "mlp.down_proj.weight")
        return self._norm(x, "model.norm.weight").view(M, N, T, -1)

    def logits(self, hidden_MRH: Tensor) -> Tensor:
        """[M, R, H] -> [M, R, V]."""
        return self._linear(hidden_MRH, "model.embed_tokens.weight")

    def _linear(self, x_MRI: Tensor, name: str) -> Tensor:
        return torch.bmm(x_MRI, self.weight(name).transpose(1, 2))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        """RMS norm over the last dimension; models are the first."""
        weight = self.weight(name)
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps)
        return x * scale * weight.view(weight.shape[0], *[1] * (x.dim() - 2), weight.shape[1])

    def _attend(
        self,
        x: Tensor,
        prefix: str,
        sizes: tuple[int, int, int],
        rotation: tuple[Tensor, Tensor],
        start: int,
        cache: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        M, N, T = sizes
        D = self.config.head_dim
        heads = []
        for name in ("q", "k", "v"):
            head = self._linear(x, f"{prefix}{name}_proj.weight").view(M, N * T, -1, D)
            if name != "v":
                head = self._norm(head, f"{prefix}{name}_norm.weight")
            heads.append(head.view(M * N, T, -1, D).transpose(1, 2))
        query, key, value = heads
        query, key = _rotate(query, *rotation), _rotate(key, *rotation)
        if cache is not None:
            for stored, new in zip(cache, (key, value), strict=True):
                stored[:, :, start : start + T] = new
            key, value = (stored[:, :, : start + T] for stored in cache)
        out = scaled_dot_product_attention(query, key, value, is_causal=T > 1, enable_gqa=True)
        return self._linear(out.transpose(1, 2).reshape(M, N * T, -1), f"{prefix}o_proj.weight")


def _key(name: str) -> str:
    return name.replace(".", "/")


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat([-high, low], -1) * sin
