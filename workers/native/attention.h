// Attention of a few query rows over the paged blocks of their sequence, read in place (see attention_state.h).
#pragma once
#include "attention_amx.h"

#define PLAIN_ROWS 6  // 6 rows · 4 groups of tokens = 24 sums: what the vector registers hold

INLINE void scores_of(const int rows, const int groups, const AttentionState *st, const bf16 *const *k, int pairs,
                      float (*scores)[MAX_TILE]) {
    F16 sums[PLAIN_ROWS][4];
    for (int r = 0; r < rows; r++)
        for (int g = 0; g < groups; g++) sums[r][g] = f16_set(0.0f);
    for (int i = 0; i < pairs; i++) {
        I16 keys[4];
        for (int g = 0; g < groups; g++) keys[g] = i16_load(k[g] + 32 * i);
        for (int r = 0; r < rows; r++) {
            int32_t pair;
            memcpy(&pair, st->q[r] + 2 * i, 4);
            for (int g = 0; g < groups; g++) sums[r][g] = dot_pairs(sums[r][g], i16_set(pair), keys[g]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int g = 0; g < groups; g++) f16_store(scores[r] + 16 * g, sums[r][g]);
}

// total[row][width · 16 at `at`] = total · shrink + shares · V.
INLINE void values_of(const int rows, const int width, AttentionState *st, const bf16 *const *v, int dims, int first_pair,
                      int num_pairs, I16 first_mask, I16 last_mask, int at) {
    F16 sums[PLAIN_ROWS][4];
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < width; c++) sums[r][c] = f16_load(st->total[r] + at + 16 * c) * st->shrink[r];
    for (int p = first_pair; p < num_pairs; p++) {
        const bf16 *pair = v[p / 8] + (p % 8) * 2L * dims + 2 * at;
        I16 values[4], mask = i16_set(-1);
        if (p == first_pair) mask &= first_mask;
        if (p == num_pairs - 1) mask &= last_mask;
        for (int c = 0; c < width; c++) values[c] = i16_load(pair + 32 * c) & mask;
        for (int r = 0; r < rows; r++) {
            int32_t share;
            memcpy(&share, st->shares[r] + 2 * p, 4);
            for (int c = 0; c < width; c++) sums[r][c] = dot_pairs(sums[r][c], i16_set(share), values[c]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < width; c++) f16_store(st->total[r] + at + 16 * c, sums[r][c]);
}

INLINE void attend_tile(AttentionState *st, const int rows, const bf16 *const *k, const bf16 *const *v, const Model *m,
                        int base, int from, int to) {
    int groups = (to - base) / 16 + 1, pairs = m->head_dim / 2;
    switch (groups) {
        case 1: scores_of(rows, 1, st, k, pairs, st->scores); break;
        case 2: scores_of(rows, 2, st, k, pairs, st->scores); break;
        case 3: scores_of(rows, 3, st, k, pairs, st->scores); break;
        default: scores_of(rows, 4, st, k, pairs, st->scores); break;
    }
    tile_softmax(st, rows, base, groups, m->attention_scale * LOG2_E);
    // The half of a pair that nobody sees may hold anything, even NaN: cleared, never multiplied by zero.
    int first_pair = (from - base) / 2, num_pairs = (to - base) / 2 + 1, at = 0;
    I16 first_mask = i16_set((from - base) % 2 ? (int32_t)0xffff0000 : -1);
    I16 last_mask = i16_set((to - base) % 2 ? -1 : 0xffff);
    for (; at + 64 <= m->head_dim; at += 64)
        values_of(rows, 4, st, v, m->head_dim, first_pair, num_pairs, first_mask, last_mask, at);
    for (; at < m->head_dim; at += 16)
        values_of(rows, 1, st, v, m->head_dim, first_pair, num_pairs, first_mask, last_mask, at);
}

INLINE int uses_tiles(const Model *m) {
#if defined(__AMX_BF16__)
    return m->head_dim % 32 == 0;
#else
    (void)m;
    return 0;
#endif
}

INLINE int most_query_rows(const Model *m) { return uses_tiles(m) ? MAX_QUERY_ROWS : PLAIN_ROWS; }

INLINE void walk_tile(AttentionState *st, int rows, const bf16 *const *k, const bf16 **v, const Model *m, int base, int from,
                      int to) {
#if defined(__AMX_BF16__)
    if (uses_tiles(m)) {
        attend_tile_amx(st, rows, k, v, m, base, from, to);
        return;
    }
#endif
    switch (rows) {
#define CASE(count) case count: attend_tile(st, count, k, v, m, base, from, to); break;
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#undef CASE
    }
}

static void attend_rows(const Step *s, int layer, int head, Group group, int first_head, int heads) {
    const Model *m = s->model;
    const Batch *b = s->batch;
    AttentionState st;
    int window = m->layers[layer].window, rows = heads * group.count;
    for (int r = 0; r < MAX_QUERY_ROWS; r++) st.highest[r] = NO_SCORE;
    for (int r = 0; r < rows; r++) {
        int token = group.first + r / heads, position = b->positions[token];
        memcpy(st.q[r], s->buffers.query + token * s->buffers.query_stride + (first_head + r % heads) * m->head_dim,
               (size_t)m->head_dim * sizeof(bf16));
        st.last[r] = position;
        st.first[r] = window && position >= window ? position - window + 1 : 0;
        st.weight[r] = f16_set(0.0f);
        for (int at = 0; at < m->head_dim; at += 16) f16_store(st.total[r] + at, f16_set(0.0f));
    }
    int lowest = st.first[0], highest = st.last[rows - 1];
    const int32_t *table = (window ? b->window_tables : b->tables) + (long)b->row_of[group.first] * b->table_stride;
    for (int base = lowest / m->tile_tokens * m->tile_tokens; base <= highest; base += m->tile_tokens) {
        int end = base + m->tile_tokens - 1, to = highest < end ? highest : end, from = lowest > base ? lowest : base;
        const bf16 *k[4], *v[4];
        for (int g = 0; g <= (to - base) / 16; g++) {
            int token = base + 16 * g, inside = token % m->block_size;
            const bf16 *start = kv_head(s, layer, table[token / m->block_size], head);
            k[g] = start + (long)inside * m->head_dim;
            v[g] = start + (long)(m->block_size + inside) * m->head_dim;
        }
        walk_tile(&st, rows, k, v, m, base, from, to);
    }
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
    int head = task % m->num_kv_heads, share = m->num_heads / m->num_kv_heads, most = most_query_rows(m);
    Group group = s->buffers.groups[task / m->num_kv_heads];
    for (int done = 0; done < share; done += most)
        attend_rows(s, layer, head, group, head * share + done, share - done < most ? share - done : most);
}
