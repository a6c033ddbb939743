"""What a model is: the facts of its architecture, from a transformers config. Knows nothing of weights or tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

SUPPORTED_ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text")


class UnsupportedModelError(ValueError):
    """The model's architecture, rotary scaling or quantisation is not built; the message names it."""


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding of one kind of layer. `scaling` holds the numbers of the supported kinds."""

    theta: float
    kind: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position: int = 0


@dataclass(frozen=True)
class LayerSpec:
    """What may differ from layer to layer."""

    rope: RopeSpec
    window: int | None = None  # tokens that a row sees, itself included; None = all before it


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only transformer with grouped-query attention, rotary embedding and a gated MLP."""

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    rms_eps: float
    layers: tuple[LayerSpec, ...]
    activation: Literal["silu", "gelu_tanh"] = "silu"
    tied_embeddings: bool = False
    has_qk_norm: bool = False
    has_sandwich_norm: bool = False  # norms after attention and MLP too (Gemma)
    norm_offset: float = 0.0  # the norm multiplies by (offset + weight)
    embedding_scale: float = 1.0
    attention_scale: float = 1.0
    eos_token_ids: frozenset[int] = frozenset()

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    def kv_bytes_per_token(self, element_size: int) -> int:
        return 2 * self.num_layers * self.kv_size * element_size

    def flops_per_token(self) -> int:
        """Of all products but the lm_head and attention."""
        per_layer = self.hidden_size * (2 * self.q_size + 2 * self.kv_size + 3 * self.intermediate_size)
        return 2 * self.num_layers * per_layer


def spec_from_config(config: Any) -> ModelSpec:
    """Reads a transformers config. Raises UnsupportedModelError for what the forward pass does not compute."""
    config = getattr(config, "text_config", None) or config
    kind = config.model_type
    if kind not in SUPPORTED_ARCHITECTURES:
        raise UnsupportedModelError(f"architecture {kind!r} is not supported: {', '.join(SUPPORTED_ARCHITECTURES)} are")
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None:
        raise UnsupportedModelError(f"quantisation {_quantization_name(quantization)!r} is not supported")
    if getattr(config, "mlp_bias", False):
        raise UnsupportedModelError("mlp_bias is not supported")
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(config, name, None):
            raise UnsupportedModelError(f"{name} is not supported")
    is_gemma = kind == "gemma3_text"
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    scale_base = getattr(config, "query_pre_attn_scalar", None) or head_dim
    return ModelSpec(
        architecture=kind,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        vocab_size=config.vocab_size,
        max_position=config.max_position_embeddings,
        rms_eps=config.rms_norm_eps,
        layers=_layers(config),
        activation=_activation(config),
        tied_embeddings=bool(config.tie_word_embeddings),
        has_qk_norm=kind in ("qwen3", "gemma3_text"),
        has_sandwich_norm=is_gemma,
        norm_offset=1.0 if is_gemma else 0.0,
        embedding_scale=config.hidden_size**0.5 if is_gemma else 1.0,
        attention_scale=scale_base**-0.5,
        eos_token_ids=_ids(config.eos_token_id),
    )


def _activation(config: Any) -> Literal["silu", "gelu_tanh"]:
    name = getattr(config, "hidden_activation", None) or config.hidden_act
    if name == "silu":
        return "silu"
    if name in ("gelu_pytorch_tanh", "gelu_tanh"):
        return "gelu_tanh"
    raise UnsupportedModelError(f"activation {name!r} is not supported")


def _layers(config: Any) -> tuple[LayerSpec, ...]:
    kinds = getattr(config, "layer_types", None) or _default_layer_types(config)
    ropes = _ropes(config, frozenset(kinds))
    layers = []
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise UnsupportedModelError(f"layer type {kind!r} is not supported")
        window = config.sliding_window if kind == "sliding_attention" else None
        layers.append(LayerSpec(rope=ropes[kind], window=window))
    return tuple(layers)


def _default_layer_types(config: Any) -> list[str]:
    windowed = config.model_type == "mistral" and getattr(config, "sliding_window", None) is not None
    return ["sliding_attention" if windowed else "full_attention"] * config.num_hidden_layers


def _ropes(config: Any, kinds: frozenset[str]) -> dict[str, RopeSpec]:
    parameters = config.rope_parameters
    if "rope_theta" in parameters or "rope_type" in parameters:
        return dict.fromkeys(kinds, _rope(parameters))
    return {kind: _rope(parameters[kind]) for kind in kinds}


def _rope(parameters: dict[str, Any]) -> RopeSpec:
    kind = parameters.get("rope_type", "default")
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModelError("partial rotary embedding is not supported")
    theta = float(parameters["rope_theta"])
    if kind == "default":
        return RopeSpec(theta=theta)
    if kind == "linear":
        return RopeSpec(theta=theta, kind="linear", factor=float(parameters["factor"]))
    if kind == "llama3":
        return RopeSpec(
            theta=theta,
            kind="llama3",
            factor=float(parameters["factor"]),
            low_freq_factor=float(parameters["low_freq_factor"]),
            high_freq_factor=float(parameters["high_freq_factor"]),
            original_max_position=int(parameters["original_max_position_embeddings"]),
        )
    raise UnsupportedModelError(f"rope scaling {kind!r} is not supported: default, linear and llama3 are")


def _quantization_name(quantization: Any) -> str:
    if isinstance(quantization, dict):
        return str(quantization.get("quant_method", "unknown"))
    return str(getattr(quantization, "quant_method", "unknown"))


def _ids(value: int | list[int] | None) -> frozenset[int]:
    if value is None:
        return frozenset()
    return frozenset([value]) if isinstance(value, int) else frozenset(value)
