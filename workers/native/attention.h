// Attention of a few query rows over the paged blocks of their sequence, read in place.
//
// K and V are reduced in tiles of fixed length counted from the sequence's start, each row by itself, so neither the
// chunk, the batch nor the placement of the blocks can change a bit.
//
// Inside a block, per KV head: K as [16 tokens][head_dim / 2][16 tokens][2], so that a pair of q meets 16 tokens at once;
// V as [token pairs][head_dim / 16][16][2], so that a pair of shares meets 16 numbers of two tokens at once.
#pragma once
#include "step.h"

#define MAX_QUERY_ROWS 6  // 6 rows · 4 groups of tokens = 24 sums: what the registers hold
#define MAX_TILE 64
#define MAX_HEAD_DIM 256
#define NO_SCORE (-INFINITY)

INLINE bf16 *kv_head(const Step *s, int layer, int block, int head) {
    const Model *m = s->model;
    long head_elements = 2L * m->block_size * m->head_dim;
    return s->batch->kv + (((long)layer * m->num_blocks + block) * m->num_kv_heads + head) * head_elements;
}

INLINE void scores_of(const int rows, const int groups, const int32_t *const *q, const bf16 *const *k, int pairs,
                      float scale, float (*scores)[MAX_TILE]) {
    F16 sums[MAX_QUERY_ROWS][4];
    for (int r = 0; r < rows; r++)
        for (int g = 0; g < groups; g++) sums[r][g] = f16_set(0.0f);
    for (int i = 0; i < pairs; i++) {
        I16 keys[4];
        for (int g = 0; g < groups; g++) keys[g] = i16_load(k[g] + 32 * i);
        for (int r = 0; r < rows; r++) {
            I16 pair = i16_set(q[r][i]);
            for (int g = 0; g < groups; g++) sums[r][g] = dot_pairs(sums[r][g], pair, keys[g]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int g = 0; g < groups; g++) f16_store(scores[r] + 16 * g, sums[r][g] * scale);
}

// total[row][dims] = total · shrink + shares · V, for one vector of 16 · width numbers of the head.
INLINE void values_of(const int rows, const int width, const int32_t *const *shares, const bf16 *const *v, int dims,
                      int first_pair, int num_pairs, I16 first_mask, I16 last_mask, const float *shrink,
                      float (*total)[MAX_HEAD_DIM], int at) {
    F16 sums[MAX_QUERY_ROWS][4];
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < width; c++) sums[r][c] = f16_load(total[r] + at + 16 * c) * shrink[r];
    for (int p = first_pair; p < num_pairs; p++) {
        const bf16 *pair = v[p / 8] + (p % 8) * 2L * dims + 2 * at;
        I16 values[4];
        for (int c = 0; c < width; c++) values[c] = i16_load(pair + 32 * c);
        if (p == first_pair)
            for (int c = 0; c < width; c++) values[c] &= first_mask;
        if (p == num_pairs - 1)
            for (int c = 0; c < width; c++) values[c] &= last_mask;
        for (int r = 0; r < rows; r++) {
            I16 share = i16_set(shares[r][p]);
            for (int c = 0; c < width; c++) sums[r][c] = dot_pairs(sums[r][c], share, values[c]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < width; c++) f16_store(total[r] + at + 16 * c, sums[r][c]);
}

typedef struct {
    float scores[MAX_QUERY_ROWS][MAX_TILE];
    bf16 shares[MAX_QUERY_ROWS][MAX_TILE];
    float total[MAX_QUERY_ROWS][MAX_HEAD_DIM];
    float highest[MAX_QUERY_ROWS], shrink[MAX_QUERY_ROWS];
    F16 weight[MAX_QUERY_ROWS];
    int last[MAX_QUERY_ROWS], first[MAX_QUERY_ROWS];  // positions that a row sees, both included
} AttentionState;

// Masks, the running maximum, and the tile's shares, rounded to bfloat16 as they will be multiplied.
INLINE void softmax_row(AttentionState *st, int r, int base, int groups) {
    const I16 lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    F16 score[MAX_TILE / 16], top = f16_set(NO_SCORE);
    for (int g = 0; g < groups; g++) {
        I16 at = lanes + (base + 16 * g);
        I16 seen = (at <= st->last[r]) & (at >= st->first[r]);
        score[g] = f16_select(seen, f16_load(st->scores[r] + 16 * g), f16_set(NO_SCORE));
        top = f16_max(top, score[g]);
    }
    float highest = f16_highest(top);
    highest = highest > st->highest[r] ? highest : st->highest[r];
    float shift = highest == NO_SCORE ? 0.0f : highest;
    float shrink = f16_exp2(f16_set(st->highest[r] - shift))[0];
    F16 weight = st->weight[r] * shrink;
    for (int g = 0; g < groups; g++) {
        F16 share = f16_exp2(score[g] - shift);
        bf16_store(st->shares[r] + 16 * g, share);
        weight += share;
    }
    st->weight[r] = weight, st->highest[r] = highest, st->shrink[r] = shrink;
}

INLINE void attend_tile(AttentionState *st, const int rows, const int32_t *const *q, const bf16 *const *k,
                        const bf16 *const *v, const Model *m, int base, int from, int to) {
    int groups = (to - base) / 16 + 1, pairs = m->head_dim / 2;
    float scale = m->attention_scale * LOG2_E;
    switch (groups) {
        case 1: scores_of(rows, 1, q, k, pairs, scale, st->scores); break;
        case 2: scores_of(rows, 2, q, k, pairs, scale, st->scores); break;
        case 3: scores_of(rows, 3, q, k, pairs, scale, st->scores); break;
        default: scores_of(rows, 4, q, k, pairs, scale, st->scores); break;
    }
    const int32_t *shares[MAX_QUERY_ROWS];
    for (int r = 0; r < rows; r++) {
        softmax_row(st, r, base, groups);
        shares[r] = (const int32_t *)st->shares[r];
    }
    // The half of a pair that nobody sees may hold anything, even NaN: cleared, never multiplied by zero.
    int first_pair = (from - base) / 2, num_pairs = (to - base) / 2 + 1;
    I16 first_mask = i16_set((from - base) % 2 ? (int32_t)0xffff0000 : -1), last_mask = i16_set((to - base) % 2 ? -1 : 0xffff);
    int at = 0;
    for (; at + 64 <= m->head_dim; at += 64)
        values_of(rows, 4, shares, v, m->head_dim, first_pair, num_pairs, first_mask, last_mask, st->shrink, st->total, at);
    for (; at < m->head_dim; at += 16)
        values_of(rows, 1, shares, v, m->head_dim, first_pair, num_pairs, first_mask, last_mask, st->shrink, st->total, at);
}

INLINE void attend_rows(const Step *s, const int rows, int layer, int kv, int head, Group group, int first_head,
                        int heads) {
    const Model *m = s->model;
    const Batch *b = s->batch;
    AttentionState st;
    const int32_t *q[MAX_QUERY_ROWS];
    int window = m->layers[layer].window, lowest = 0, highest = b->positions[group.first + group.count - 1];
    for (int r = 0; r < rows; r++) {
        int token = group.first + r / heads, position = b->positions[token];
        q[r] = (const int32_t *)(s->buffers.query + token * s->buffers.query_stride + (first_head + r % heads) * m->head_dim);
        st.last[r] = position;
        st.first[r] = window && position >= window ? position - window + 1 : 0;
        st.highest[r] = NO_SCORE, st.weight[r] = f16_set(0.0f);
        for (int at = 0; at < m->head_dim; at += 16) f16_store(st.total[r] + at, f16_set(0.0f));
    }
    lowest = st.first[0];
    const int32_t *table = b->tables + (long)b->row_of[group.first] * b->table_stride;
    for (int base = lowest / m->tile_tokens * m->tile_tokens; base <= highest; base += m->tile_tokens) {
        int to = highest < base + m->tile_tokens ? highest : base + m->tile_tokens - 1, from = lowest > base ? lowest : base;
        const bf16 *k[4], *v[4];
        for (int g = 0; g <= (to - base) / 16; g++) {
            int token = base + 16 * g, inside = token % m->block_size;
            const bf16 *start = kv_head(s, layer, table[token / m->block_size], head);
            k[g] = start + (long)inside * m->head_dim;
            v[g] = start + (long)(m->block_size + inside) * m->head_dim;
        }
        attend_tile(&st, rows, q, k, v, m, base, from, to);
    }
    (void)kv;
    for (int r = 0; r < rows; r++) {
        int token = group.first + r / heads;
        bf16 *out = s->buffers.attended + token * s->buffers.query_stride + (first_head + r % heads) * m->head_dim;
        float inverse = 1.0f / f16_sum(st.weight[r]);
        for (int at = 0; at < m->head_dim; at += 16) bf16_store(out + at, f16_load(st.total[r] + at) * inverse);
    }
}

// One task: a group of query tokens and one KV head with all query heads that share it.
static void attend(const Step *s, int layer, int task) {
    const Model *m = s->model;
    int head = task % m->num_kv_heads, share = m->num_heads / m->num_kv_heads;
    Group group = s->buffers.groups[task / m->num_kv_heads];
    for (int done = 0; done < share;) {
        int heads = share - done < MAX_QUERY_ROWS ? share - done : MAX_QUERY_ROWS;
        switch (heads * group.count) {
#define CASE(count) case count: attend_rows(s, count, layer, 0, head, group, head * share + done, heads); break;
            CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#undef CASE
        }
        done += heads;
    }
}
