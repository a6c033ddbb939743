// The tile-register form of attend_rows: up to 16 query rows at once. Rows of a tile do not meet, so a row's bits do not
// depend on the rows beside it. Which form serves a model depends on its head size alone, never on the batch.
#pragma once
#include "attention_state.h"

#if defined(__AMX_BF16__)
enum { SUM_0, SUM_1, SUM_2, SUM_3, QUERY_TILE, SHARE_TILE, KEY_TILE, VALUE_TILE };

static void attention_configure(void) {
    TileConfig config;
    memset(&config, 0, sizeof config);
    config.palette = 1;
    for (int i = 0; i < 8; i++) config.bytes_per_row[i] = 64, config.rows[i] = 16;
    config.bytes_per_row[SHARE_TILE] = 32;  // shares of one group of 16 tokens
    config.rows[VALUE_TILE] = 8;            // its pairs
    _tile_loadconfig(&config);
}

// scores[16][64] of up to four groups of 16 tokens, unscaled.
INLINE void amx_scores(const int groups, const bf16 *q, const bf16 *const *k, int head_dim, float (*scores)[MAX_TILE]) {
    _tile_zero(SUM_0);
    if (groups > 1) _tile_zero(SUM_1);
    if (groups > 2) _tile_zero(SUM_2);
    if (groups > 3) _tile_zero(SUM_3);
    for (int at = 0; at < head_dim; at += 32) {
        _tile_loadd(QUERY_TILE, q + at, MAX_HEAD_DIM * 2);
        _tile_loadd(KEY_TILE, k[0] + 16 * at, 64);
        _tile_dpbf16ps(SUM_0, QUERY_TILE, KEY_TILE);
        if (groups > 1) {
            _tile_loadd(KEY_TILE, k[1] + 16 * at, 64);
            _tile_dpbf16ps(SUM_1, QUERY_TILE, KEY_TILE);
        }
        if (groups > 2) {
            _tile_loadd(KEY_TILE, k[2] + 16 * at, 64);
            _tile_dpbf16ps(SUM_2, QUERY_TILE, KEY_TILE);
        }
        if (groups > 3) {
            _tile_loadd(KEY_TILE, k[3] + 16 * at, 64);
            _tile_dpbf16ps(SUM_3, QUERY_TILE, KEY_TILE);
        }
    }
    _tile_stored(SUM_0, scores[0], MAX_TILE * 4);
    if (groups > 1) _tile_stored(SUM_1, scores[0] + 16, MAX_TILE * 4);
    if (groups > 2) _tile_stored(SUM_2, scores[0] + 32, MAX_TILE * 4);
    if (groups > 3) _tile_stored(SUM_3, scores[0] + 48, MAX_TILE * 4);
}

// total[16][width · 16 at `at`] += shares · V.
INLINE void amx_values(const int width, int groups, bf16 (*shares)[MAX_TILE], const bf16 *const *v, int head_dim, int at,
                       float (*total)[MAX_HEAD_DIM]) {
    const long stride = 4L * head_dim;
    _tile_loadd(SUM_0, total[0] + at, MAX_HEAD_DIM * 4);
    if (width > 1) _tile_loadd(SUM_1, total[0] + at + 16, MAX_HEAD_DIM * 4);
    if (width > 2) _tile_loadd(SUM_2, total[0] + at + 32, MAX_HEAD_DIM * 4);
    if (width > 3) _tile_loadd(SUM_3, total[0] + at + 48, MAX_HEAD_DIM * 4);
    for (int g = 0; g < groups; g++) {
        const bf16 *values = v[g] + 2 * at;
        _tile_loadd(SHARE_TILE, shares[0] + 16 * g, MAX_TILE * 2);
        _tile_loadd(VALUE_TILE, values, stride);
        _tile_dpbf16ps(SUM_0, SHARE_TILE, VALUE_TILE);
        if (width > 1) {
            _tile_loadd(VALUE_TILE, values + 32, stride);
            _tile_dpbf16ps(SUM_1, SHARE_TILE, VALUE_TILE);
        }
        if (width > 2) {
            _tile_loadd(VALUE_TILE, values + 64, stride);
            _tile_dpbf16ps(SUM_2, SHARE_TILE, VALUE_TILE);
        }
        if (width > 3) {
            _tile_loadd(VALUE_TILE, values + 96, stride);
            _tile_dpbf16ps(SUM_3, SHARE_TILE, VALUE_TILE);
        }
    }
    _tile_stored(SUM_0, total[0] + at, MAX_HEAD_DIM * 4);
    if (width > 1) _tile_stored(SUM_1, total[0] + at + 16, MAX_HEAD_DIM * 4);
    if (width > 2) _tile_stored(SUM_2, total[0] + at + 32, MAX_HEAD_DIM * 4);
    if (width > 3) _tile_stored(SUM_3, total[0] + at + 48, MAX_HEAD_DIM * 4);
}

// A copy of a group's V with the tokens that no row may see set to zero.
INLINE void clear_unseen(const bf16 *v, int head_dim, int first, int last, bf16 *copy) {
    for (int pair = 0; pair < 8; pair++) {
        int low_seen = 2 * pair >= first && 2 * pair <= last, high_seen = 2 * pair + 1 >= first && 2 * pair + 1 <= last;
        I16 mask = i16_set((low_seen ? 0xffff : 0) | (high_seen ? (int32_t)0xffff0000 : 0));
        for (int at = 0; at < 2 * head_dim; at += 32)
            *(I16u *)(copy + 2L * pair * head_dim + at) = i16_load(v + 2L * pair * head_dim + at) & mask;
    }
}

static void attend_tile_amx(AttentionState *st, int rows, const bf16 *const *k, const bf16 **v, const Model *m, int base,
                            int from, int to) {
    int groups = (to - base) / 16 + 1, first_group = (from - base) / 16, last_group = groups - 1;
    switch (groups) {
        case 1: amx_scores(1, st->q[0], k, m->head_dim, st->scores); break;
        case 2: amx_scores(2, st->q[0], k, m->head_dim, st->scores); break;
        case 3: amx_scores(3, st->q[0], k, m->head_dim, st->scores); break;
        default: amx_scores(4, st->q[0], k, m->head_dim, st->scores); break;
    }
    if (tile_softmax(st, rows, base, groups, m->attention_scale * LOG2_E))
        for (int r = 0; r < rows; r++)
            for (int at = 0; at < m->head_dim; at += 16)
                f16_store(st->total[r] + at, f16_load(st->total[r] + at) * st->shrink[r]);
    bf16 edges[2][16 * MAX_HEAD_DIM];
    for (int g = first_group; g <= last_group; g += last_group > first_group ? last_group - first_group : 1) {
        int first = from - base - 16 * g, last = to - base - 16 * g;
        if (first <= 0 && last >= 15) continue;
        bf16 *copy = edges[g != first_group];
        clear_unseen(v[g], m->head_dim, first, last, copy);
        v[g] = copy;
    }
    int used = last_group - first_group + 1, at = 0;
    bf16(*shares)[MAX_TILE] = (bf16(*)[MAX_TILE])(st->shares[0] + 16 * first_group);
    for (; at + 64 <= m->head_dim; at += 64) amx_values(4, used, shares, v + first_group, m->head_dim, at, st->total);
    for (; at + 32 <= m->head_dim; at += 32) amx_values(2, used, shares, v + first_group, m->head_dim, at, st->total);
}
#else
static void attention_configure(void) {}
#endif
