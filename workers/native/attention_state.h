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
    return s->batch->kv + (((long)layer * m->num_blocks + block) * m->num_kv_heads + head) * head_elements;
}

// Masks, the running maximum, and the tile's shares, rounded to bfloat16 as they will be multiplied.
INLINE void softmax_row(AttentionState *st, int r, int base, int groups, float scale) {
    const I16 lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    F16 score[MAX_TILE / 16], top = f16_set(NO_SCORE);
    int whole = st->first[r] <= base && st->last[r] >= base + 16 * groups - 1;
    for (int g = 0; g < groups; g++) {
        score[g] = f16_load(st->scores[r] + 16 * g) * scale;
        if (!whole) {
            I16 at = lanes + (base + 16 * g);
            score[g] = f16_select((at <= st->last[r]) & (at >= st->first[r]), score[g], f16_set(NO_SCORE));
        }
        top = f16_max(top, score[g]);
    }
    float highest = f16_highest(top);
    highest = highest > st->highest[r] ? highest : st->highest[r];
    float shift = highest == NO_SCORE ? 0.0f : highest;
    st->shrink[r] = highest == st->highest[r] ? 1.0f : f16_exp2(f16_set(st->highest[r] - shift))[0];
    F16 weight = st->weight[r] * st->shrink[r];
    for (int g = 0; g < groups; g++) {
        F16 share = f16_exp2(score[g] - shift);
        bf16_store(st->shares[r] + 16 * g, share);
        weight += share;
    }
    st->weight[r] = weight, st->highest[r] = highest;
}
