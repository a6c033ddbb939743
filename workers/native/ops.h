// The small operations between products, one token row at a time.
#pragma once
#include "attention.h"

INLINE float inverse_rms(const float *x, int size, int padded, float eps) {
    F16 sums[2] = {f16_set(0.0f), f16_set(0.0f)};
    for (int i = 0; i < padded; i += 16) {
        F16 v = f16_load(x + i);
        sums[(i / 16) & 1] = f16_fma(v, v, sums[(i / 16) & 1]);
    }
    return 1.0f / sqrtf(f16_sum(sums[0] + sums[1]) / (float)size + eps);
}

static void norm_to_bf16(const float *x, const float *weight, int size, int padded, float eps, bf16 *out) {
    float scale = inverse_rms(x, size, padded, eps);
    for (int i = 0; i < padded; i += 16) bf16_store(out + i, f16_load(x + i) * scale * f16_load(weight + i));
}

static void embed(const Step *s, int token) {
    const Model *m = s->model;
    const bf16 *source = m->embedding + (long)s->batch->token_ids[token] * m->hidden;
    float *target = s->buffers.hidden + token * s->buffers.hidden_stride;
    int i = 0;
    for (; i + 16 <= m->hidden; i += 16) f16_store(target + i, bf16_load(source + i) * m->embedding_scale);
    for (; i < m->hidden; i++) {
        uint32_t bits = (uint32_t)source[i] << 16;
        float value;
        memcpy(&value, &bits, 4);
        target[i] = value * m->embedding_scale;
    }
    for (; i < s->buffers.hidden_stride; i++) target[i] = 0.0f;
}

// hidden += norm(added) where the architecture norms what it adds; then the norm that the next product reads.
static void norm_row(const Step *s, int token, const float *after, const float *weight) {
    const Model *m = s->model;
    int padded = (int)s->buffers.hidden_stride;
    float *hidden = s->buffers.hidden + token * s->buffers.hidden_stride;
    if (after) {
        const float *added = s->buffers.qkv + token * s->buffers.qkv_stride;
        float scale = inverse_rms(added, m->hidden, padded, m->eps);
        for (int i = 0; i < padded; i += 16)
            f16_store(hidden + i, f16_load(hidden + i) + f16_load(added + i) * scale * f16_load(after + i));
    }
    if (weight)
        norm_to_bf16(hidden, weight, m->hidden, padded, m->eps, s->buffers.normed + token * s->buffers.normed_stride);
}

// Turns pairs (i, i + head_dim / 2) by the position's angle; norms the head first where the architecture does.
static void rotate_head(const Model *m, const float *x, const float *norm, const float *cos, const float *sin, bf16 *out) {
    int half = m->head_dim / 2, i = 0;
    float scale = norm ? inverse_rms(x, m->head_dim, m->head_dim, m->eps) : 1.0f;
    for (; i + 16 <= half; i += 16) {
        F16 low = f16_load(x + i), high = f16_load(x + half + i), c = f16_load(cos + i), s = f16_load(sin + i);
        if (norm) low *= scale * f16_load(norm + i), high *= scale * f16_load(norm + half + i);
        bf16_store(out + i, low * c - high * s);
        bf16_store(out + half + i, high * c + low * s);
    }
    for (; i < half; i++) {  // heads of 16 · odd numbers
        float low = x[i], high = x[i + half];
        if (norm) low *= scale * norm[i], high *= scale * norm[i + half];
        out[i] = bf16_round(f16_set(low * cos[i] - high * sin[i]))[0];
        out[i + half] = bf16_round(f16_set(high * cos[i] + low * sin[i]))[0];
    }
}

// Writes one token's K as column `offset` of its group, a pair at a time.
INLINE void store_key(bf16 *group, int column, const bf16 *row, int head_dim) {
    for (int i = 0; i < head_dim; i += 2) memcpy(group + 16 * i + 2 * column, row + i, 4);
}

// Writes one token's V into its half of each pair; the other half is another thread's to write, so no read and write back.
INLINE void store_value(bf16 *pairs, int odd, const float *v, int head_dim) {
    for (int at = 0; at < head_dim; at += 16) {
        H16 row = bf16_round(f16_load(v + at));
#if defined(__AVX512BW__)
        U16 wide = __builtin_convertvector(row, U16) << (odd ? 16 : 0);
        _mm512_mask_storeu_epi16(pairs + 2 * at, odd ? 0xaaaaaaaau : 0x55555555u, (__m512i)wide);
#else
        for (int i = 0; i < 16; i++) pairs[2 * (at + i) + odd] = row[i];
#endif
    }
}

// Rotates one token's heads and writes its K and V where attention will read them.
static void rotate_and_store(const Step *s, int layer, int token) {
    const Model *m = s->model;
    const Batch *b = s->batch;
    const Layer *l = m->layers + layer;
    int half = m->head_dim / 2, offset = b->slot_offsets[token];
    int block = (l->window ? b->window_blocks : b->slot_blocks)[token];
    if (block < 0) return;
    const float *x = s->buffers.qkv + token * s->buffers.qkv_stride;
    const float *cos = l->cos + (long)b->positions[token] * half, *sin = l->sin + (long)b->positions[token] * half;
    bf16 *query = s->buffers.query + token * s->buffers.query_stride;
    for (int h = 0; h < m->num_heads; h++, x += m->head_dim, query += m->head_dim)
        rotate_head(m, x, l->q_norm, cos, sin, query);
    for (int h = 0; h < m->num_kv_heads; h++, x += m->head_dim) {
        bf16 row[MAX_HEAD_DIM];
        bf16 *keys = kv_head(s, layer, block, h), *values = keys + (long)m->block_size * m->head_dim;
        rotate_head(m, x, l->k_norm, cos, sin, row);
        store_key(keys + (long)(offset / 16) * 16 * m->head_dim, offset % 16, row, m->head_dim);
        store_value(values + (long)(offset / 2) * 2 * m->head_dim, offset % 2,
                    x + (long)m->num_kv_heads * m->head_dim, m->head_dim);
    }
}
