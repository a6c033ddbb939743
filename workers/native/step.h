// What a step is made of: the model, the batch and the buffers, as Python fills them in (workers/native/structs.py).
#pragma once
#include "gemm.h"
#include "pool.h"

typedef struct {
    Packed qkv, out, gate_up, down;
    const float *input_norm, *mlp_norm;               // [hidden, padded with zeros to 16]
    const float *q_norm, *k_norm;                     // [head_dim] or NULL
    const float *after_attention_norm, *after_mlp_norm;  // as input_norm, or NULL
    const float *cos, *sin;                           // [positions][head_dim / 2]
    int32_t window;                                   // tokens a row sees, itself included; 0 = all
    int32_t first_block;                              // where its blocks begin in kv
} Layer;

typedef struct {
    int32_t num_layers, hidden, intermediate, num_heads, num_kv_heads, head_dim, vocab, gelu;
    float eps, attention_scale, embedding_scale;
    int32_t block_size, tile_tokens;
    const bf16 *embedding;  // [vocab][hidden]
    const float *final_norm;
    const Layer *layers;
    Packed lm_head;
} Model;

typedef struct {
    int32_t num_tokens, num_samples, table_stride, logits_stride;
    const int32_t *token_ids, *positions, *row_of, *slot_blocks, *slot_offsets, *tables, *sample_tokens;
    bf16 *kv;               // [blocks of all layers][kv_heads][K: block_size · head_dim | V: the same]
    float *logits;          // [samples][logits_stride]
    const int32_t *window_tables, *window_blocks;  // tables and slot_blocks of the layers with a window
} Batch;

typedef struct {
    int32_t first, count;  // query tokens of one sequence, one after the other
} Group;

typedef struct {
    long hidden_stride, normed_stride, qkv_stride, query_stride, act_stride;  // elements per token
    float *hidden;  // the residual stream
    bf16 *normed;
    float *qkv;     // also takes the outputs of `out` and `down` where a norm follows them
    bf16 *query, *attended, *act;
    Group *groups;
    int32_t num_groups;
} Buffers;

typedef struct {
    const Model *model;
    const Batch *batch;
    Buffers buffers;
    int64_t *phase_ns;  // [phase kinds] time on thread 0, or NULL
} Step;
