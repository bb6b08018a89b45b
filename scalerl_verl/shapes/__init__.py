# SPDX-License-Identifier: Apache-2.0
"""The shape of a decoder, read from the ``config.json`` that transformers saves, and what follows by counting.

Parameter counts are exact: tests compare them with models that transformers builds on the meta device.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scalerl_verl.errors import ScaleRLConfigError
from scalerl_verl.shapes.public import describe_public, read_public

DENSE = ("llama", "mistral", "qwen2", "qwen3")
MIXTURES = ("mixtral", "qwen3_moe")
_NEEDED = (
    "model_type",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "vocab_size",
)
_OTHERS = (
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "num_local_experts",
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "decoder_sparse_step",
)
"""Entries that may be missing or 0."""


@dataclass(frozen=True)
class ModelShape:
    """A decoder with grouped-query attention and gated (SwiGLU) feed-forward layers, some of them mixtures.

    Args:
        model_type: transformers' name of the architecture.
        hidden: width.
        num_layers: decoder layers.
        num_heads: query heads.
        num_kv_heads: key and value heads.
        head_dim: width of a head.
        intermediate: width of a dense feed-forward layer.
        vocab: rows of the embedding and of the output layer.
        tied: whether these two are one weight.
        max_positions: longest sequence the model was made for, tokens.
        num_experts: of a mixture layer; 0 for a dense model.
        experts_per_token: of these, those that one token goes through.
        expert_intermediate: width of an expert.
        num_mixture_layers: layers whose feed-forward part is a mixture.
        num_attention_biases: biases of a layer's projections, numbers.
        num_norm_weights: of query and key norms of a layer, numbers.
        num_mlp_biases: biases of a layer's feed-forward part, numbers.
    """

    model_type: str
    hidden: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool
    max_positions: int
    num_experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0
    num_mixture_layers: int = 0
    num_attention_biases: int = 0
    num_norm_weights: int = 0
    num_mlp_biases: int = 0

    @property
    def q_size(self) -> int:
        """Elements of one token's queries in a layer."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Elements of one token's keys in a layer; its values have as many."""
        return self.num_kv_heads * self.head_dim

    @property
    def attention_params(self) -> int:
        """Matrices of one layer's attention: q, k, v, o."""
        return 2 * self.hidden * (self.q_size + self.kv_size)

    @property
    def dense_mlp_params(self) -> int:
        """Gate, up and down of a dense feed-forward layer."""
        return 3 * self.hidden * self.intermediate

    @property
    def expert_params(self) -> int:
        """All experts of one mixture layer."""
        return 3 * self.hidden * self.expert_intermediate * self.num_experts

    @property
    def router_params(self) -> int:
        """The router of one mixture layer."""
        return self.hidden * self.num_experts

    def layer_params(self, mixture: bool) -> int:
        """All parameters of one decoder layer."""
        feed_forward = self.router_params + self.expert_params if mixture else self.dense_mlp_params
        small = 2 * self.hidden + self.num_attention_biases + self.num_norm_weights
        return self.attention_params + feed_forward + small + (0 if mixture else self.num_mlp_biases)

    @property
    def largest_layer_params(self) -> int:
        """Parameters of the largest decoder layer: what FSDP gathers at once."""
        kinds = {self.num_mixture_layers > 0, self.num_mixture_layers == self.num_layers}
        return max(self.layer_params(mixture) for mixture in kinds)

    @property
    def embedding_params(self) -> int:
        """Embedding and output layer, once if tied."""
        return self.vocab * self.hidden * (1 if self.tied else 2)

    @property
    def num_params(self) -> int:
        """All parameters of the model."""
        mixtures = self.num_mixture_layers
        layers = mixtures * self.layer_params(True) + (self.num_layers - mixtures) * self.layer_params(False)
        return layers + self.embedding_params + self.hidden

    @property
    def active_params(self) -> int:
        """Matrix elements that one token is multiplied with, the output layer included."""
        mixtures = self.num_mixture_layers
        routed = self.router_params + 3 * self.hidden * self.expert_intermediate * self.experts_per_token
        feed_forward = mixtures * routed + (self.num_layers - mixtures) * self.dense_mlp_params
        return self.num_layers * self.attention_params + feed_forward + self.vocab * self.hidden

    @property
    def active_intermediate(self) -> int:
        """Numbers between up and down projection that one token makes in the widest kind of layer."""
        routed = self.experts_per_token * self.expert_intermediate if self.num_mixture_layers else 0
        return max(routed, self.intermediate if self.num_mixture_layers < self.num_layers else 0)


def from_config(config: Mapping[str, Any], name: str) -> ModelShape:
    """Read the shape from the content of a ``config.json``.

    Args:
        config: as transformers writes it.
        name: of the model, for messages.

    Raises:
        ScaleRLConfigError: an architecture that is not counted here, or entries that are missing or no numbers.
    """
    kind = str(config.get("model_type"))
    if kind not in (*DENSE, *MIXTURES):
        raise ScaleRLConfigError(
            [f"{name} is a {kind}: plan counts the parameters of {', '.join((*DENSE, *MIXTURES))} only"]
        )
    missing = [key for key in _NEEDED if config.get(key) is None]
    if missing:
        raise ScaleRLConfigError(
            [f"the config of {name} lacks {', '.join(missing)}: give the model's whole config.json"]
        )
    wrong = [f"{key}={config[key]!r}" for key in (*_NEEDED[1:], *_OTHERS) if not _is_count(config, key)]
    if wrong:
        raise ScaleRLConfigError([f"the config of {name} has {', '.join(wrong)}: whole numbers are needed there"])
    heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    # transformers' default for Qwen3 does not follow from the other sizes.
    head_dim = int(config.get("head_dim") or (128 if kind == "qwen3" else hidden // heads))
    intermediate = int(config["intermediate_size"])
    q_size, kv_size = heads * head_dim, kv_heads * head_dim
    biases = 0
    if kind == "qwen2":
        biases = q_size + 2 * kv_size
    elif config.get("attention_bias"):
        biases = q_size + 2 * kv_size + hidden
    return ModelShape(
        model_type=kind,
        hidden=hidden,
        num_layers=int(config["num_hidden_layers"]),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=intermediate,
        vocab=int(config["vocab_size"]),
        tied=bool(config.get("tie_word_embeddings", False)),
        max_positions=int(config.get("max_position_embeddings") or 0),
        num_attention_biases=biases,
        num_norm_weights=2 * head_dim if kind in ("qwen3", "qwen3_moe") else 0,
        num_mlp_biases=2 * intermediate + hidden if kind == "llama" and config.get("mlp_bias") else 0,
        **_mixture(config, kind, name),
    )


def _is_count(config: Mapping[str, Any], key: str) -> bool:
    value = config.get(key)
    if value is None or isinstance(value, bool) or not isinstance(value, int | float):
        return value is None
    return value == value // 1 and value >= (key in _NEEDED)


def _mixture(config: Mapping[str, Any], kind: str, name: str) -> dict[str, int]:
    """The entries of a mixture of experts; none for a dense model."""
    if kind not in MIXTURES:
        return {}
    found: dict[str, Any] = {
        # transformers 5 saves both kinds with Mixtral's name of the number, older ones Qwen's with its own.
        "num_local_experts": config.get("num_local_experts", config.get("num_experts")),
        "num_experts_per_tok": config.get("num_experts_per_tok"),
        "moe_intermediate_size": config.get("intermediate_size" if kind == "mixtral" else "moe_intermediate_size"),
    }
    missing = ", ".join(key for key, value in found.items() if value is None)
    if missing:
        raise ScaleRLConfigError([f"the config of {name} lacks {missing}: give the model's whole config.json"])
    layers = int(config["num_hidden_layers"])
    dense = set(_layer_numbers(config.get("mlp_only_layers"), name)) if kind == "qwen3_moe" else set()
    step = int(config.get("decoder_sparse_step") or 1) if kind == "qwen3_moe" else 1
    return {
        "num_experts": int(found["num_local_experts"]),
        "experts_per_token": int(found["num_experts_per_tok"]),
        "expert_intermediate": int(found["moe_intermediate_size"]),
        "num_mixture_layers": sum(i not in dense and (i + 1) % step == 0 for i in range(layers)),
    }


def _layer_numbers(given: Any, name: str) -> list[int]:
    if given is not None and not isinstance(given, list):
        raise ScaleRLConfigError([f"the config of {name} has mlp_only_layers={given!r}: a list is needed there"])
    return given or []


def find_shape(model: str, config_file: str | None = None) -> ModelShape:
    """The shape of a model by folder, by id, or from a file.

    Args:
        model: ``actor_rollout_ref.model.path``: a local folder, or an id.
        config_file: a ``config.json`` to read instead.

    Raises:
        ScaleRLConfigError: the model's config is nowhere to be found on this machine, or not one that is counted.
    """
    content = find_config(model, config_file)
    if content is not None:
        return from_config(content, model)
    if config_file:
        raise ScaleRLConfigError([f"--model-config {config_file} does not exist: correct the path"])
    raise ScaleRLConfigError(
        [
            f"the shape of {model} is not known here: give its config.json with --model-config FILE "
            f"({describe_public(model)})"
        ]
    )


def find_config(model: str, config_file: str | None = None) -> dict[str, Any] | None:
    """The content of a model's ``config.json``, without a download; None if it is not on this machine.

    Args:
        model: a local folder, or an id.
        config_file: a file to read instead.

    Raises:
        ScaleRLConfigError: it is not JSON, or no object.
    """
    own = Path(model).expanduser() / "config.json"
    if config_file is None and not own.is_file() and model in read_public():
        return dict(read_public()[model])
    for path in [Path(config_file)] if config_file else [own, *_cached(model)]:
        if path.is_file():
            try:
                content = json.loads(path.read_text(encoding="utf-8"))
            except (ValueError, RecursionError, OSError) as error:
                raise ScaleRLConfigError([f"{path} is not JSON ({error}): give the config.json of a model"]) from error
            if not isinstance(content, dict):
                raise ScaleRLConfigError([f"{path} holds no object {{...}}: give the config.json of a model"])
            return content
    return None


def _cached(model: str) -> list[Path]:
    """The config in the local cache of a model that was downloaded before; never a download."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(model, "config.json")
    except HFValidationError:  # a path, not an id
        return []
    return [Path(found)] if isinstance(found, str) else []
