// What the forms of attention share: a few query rows on their way through the tiles of one sequence's K and V.
//
// K and V are reduced in tiles of fixed length counted from the sequence's start, each row by itself, so neither the
// chunk, the batch nor the placement of the blocks can change a bit.
//
// Inside a block, per KV head: K as [16 tokens][head_dim / 2][16 tokens][2], so that a pair of q meets 16 tokens at once;
// V as [token pairs][head_dim / 16][16][2], so that a pair of shares meets 16 numbers of two tokens at once.
#pragma once
#include "step.h"

#define MAX_QUERY_ROWS 16
#define MAX_TILE 64
#define MAX_HEAD_DIM 256
#define NO_SCORE (-INFINITY)

typedef struct {
    _Alignas(64) float scores[MAX_QUERY_ROWS][MAX_TILE];
    bf16 shares[MAX_QUERY_ROWS][MAX_TILE];
    float total[MAX_QUERY_ROWS][MAX_HEAD_DIM];
    bf16 q[MAX_QUERY_ROWS][MAX_HEAD_DIM];
    F16 weight[MAX_QUERY_ROWS];
    float highest[MAX_QUERY_ROWS], shrink[MAX_QUERY_ROWS];
    int first[MAX_QUERY_ROWS], last[MAX_QUERY_ROWS];  // positions that a row sees, both included
} AttentionState;

INLINE bf16 *kv_head(const Step *s, int layer, int block, int head) {
    const Model *m = s->model;
    long head_elements = 2L * m->block_size * m->head_dim;
    return s->batch->kv + ((m->layers[layer].first_block + (long)block) * m->num_kv_heads + head) * head_elements;
}

// The highest score of the tile in each row; what a row does not see is masked in place.
INLINE void tile_tops(AttentionState *st, int rows, int base, int groups, float *tops) {
    const I16 lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    int end = base + 16 * groups - 1;
    for (int r = 0; r < rows; r++) {
        F16 top = f16_set(NO_SCORE);
        if (st->first[r] > base || st->last[r] < end)
            for (int g = 0; g < groups; g++) {
                I16 at = lanes + (base + 16 * g), seen = (at <= st->last[r]) & (at >= st->first[r]);
                f16_store(st->scores[r] + 16 * g,
                          f16_select(seen, f16_load(st->scores[r] + 16 * g), f16_set(NO_SCORE)));
            }
        for (int g = 0; g < groups; g++) top = f16_max(top, f16_load(st->scores[r] + 16 * g));
        tops[r] = f16_highest(top);
    }
}

// The running maximum, and the tile's shares, rounded to bfloat16 as they will be multiplied. Returns whether any row's
// maximum rose, and with it its earlier shares must shrink. All rows go through the same steps without a branch on values.
INLINE int tile_softmax(AttentionState *st, int rows, int base, int groups, float scale) {
    float tops[MAX_QUERY_ROWS], shifts[MAX_QUERY_ROWS];
    for (int r = 0; r < MAX_QUERY_ROWS; r++) tops[r] = NO_SCORE;
    tile_tops(st, rows, base, groups, tops);
    F16 before = f16_load(st->highest), now = f16_max(f16_load(tops) * scale, before);
    F16 shift = f16_select(now == NO_SCORE, f16_set(0.0f), now);
    I16 same = now == before;
    f16_store(st->shrink, f16_select(same, f16_set(1.0f), f16_exp2(before - shift)));
    f16_store(st->highest, now);
    f16_store(shifts, shift);
    F16 factor = f16_set(scale);
    for (int r = 0; r < rows; r++) {
        F16 offset = f16_set(-shifts[r]), weight = st->weight[r] * st->shrink[r];
        for (int g = 0; g < groups; g++) {
            F16 share = f16_exp2(f16_fma(f16_load(st->scores[r] + 16 * g), factor, offset));
            bf16_store(st->shares[r] + 16 * g, share);
            weight += share;
        }
        st->weight[r] = weight;
    }
    int all_same = 1;
    for (int r = 0; r < MAX_QUERY_ROWS; r++) all_same &= same[r] != 0;
    return !all_same;
}
