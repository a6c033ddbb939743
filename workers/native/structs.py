"""The records of step.h as ctypes structures. Field order and types must stay those of the header."""

from __future__ import annotations

from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_long, c_void_p

PHASE_NAMES = (
    "embed", "norm", "qkv", "rotate", "attention", "out", "gate_up", "down", "final_norm", "lm_head",
)  # fmt: skip


class PackedStruct(Structure):
    _fields_ = (
        ("data", c_void_p),
        ("bias", c_void_p),
        ("n", c_int32),
        ("k", c_int32),
        ("n_blocks", c_int32),
        ("k_blocks", c_int32),
    )


class LayerStruct(Structure):
    _fields_ = (
        ("qkv", PackedStruct),
        ("out", PackedStruct),
        ("gate_up", PackedStruct),
        ("down", PackedStruct),
        ("input_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("after_attention_norm", c_void_p),
        ("after_mlp_norm", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("window", c_int32),
        ("first_block", c_int32),
    )


class ModelStruct(Structure):
    _fields_ = (
        ("num_layers", c_int32),
        ("hidden", c_int32),
        ("intermediate", c_int32),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("vocab", c_int32),
        ("gelu", c_int32),
        ("eps", c_float),
        ("attention_scale", c_float),
        ("embedding_scale", c_float),
        ("block_size", c_int32),
        ("tile_tokens", c_int32),
        ("embedding", c_void_p),
        ("final_norm", c_void_p),
        ("layers", POINTER(LayerStruct)),
        ("lm_head", PackedStruct),
    )


class BatchStruct(Structure):
    _fields_ = (
        ("num_tokens", c_int32),
        ("num_samples", c_int32),
        ("table_stride", c_int32),
        ("logits_stride", c_int32),
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("row_of", c_void_p),
        ("slot_blocks", c_void_p),
        ("slot_offsets", c_void_p),
        ("tables", c_void_p),
        ("sample_tokens", c_void_p),
        ("kv", c_void_p),
        ("logits", c_void_p),
        ("window_tables", c_void_p),
        ("window_blocks", c_void_p),
    )


class StepStruct(Structure):
    _fields_ = (
        ("model", POINTER(ModelStruct)),
        ("batch", POINTER(BatchStruct)),
        ("hidden_stride", c_long),
        ("normed_stride", c_long),
        ("qkv_stride", c_long),
        ("query_stride", c_long),
        ("act_stride", c_long),
        ("hidden", c_void_p),
        ("normed", c_void_p),
        ("qkv", c_void_p),
        ("query", c_void_p),
        ("attended", c_void_p),
        ("act", c_void_p),
        ("groups", c_void_p),
        ("num_groups", c_int32),
        ("phase_ns", POINTER(c_int64)),
    )
