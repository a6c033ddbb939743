// Products with packed bfloat16 weights. Each output is one running sum over k, in the same order whatever the number
// of rows: that is what makes a row's bits independent of the batch.
//
// Packed layout: [tile column of 16][k block of 32][16 pairs of k][16 columns][2]. A k block of a tile column is what an
// AMX tile wants; a row of it is what a bfloat16 dot product of AVX-512 wants. Tile columns are apart in memory, so that
// a few rows, which only wait for memory, read several streams at once.
#pragma once
#include "vector.h"

#define TILE_N 16
#define BLOCK_N 32
#define BLOCK_K 32
#define BLOCK_M 32
#define TILE_ELEMENTS (TILE_N * BLOCK_K)
#define FEW_ROWS 16      // up to here a task takes WIDE_TILES tile columns at once
#define WIDE_TILES 4
#define CHUNK_ROWS 256   // rows whose sums wait in cache between chunks of k
#define CHUNK_K 9       // k blocks whose weights and rows stay in the first-level cache together

typedef struct {
    const bf16 *data;
    const float *bias;   // [n] or NULL
    int32_t n, k;        // as the model has them
    int32_t n_blocks, k_blocks;
} Packed;

INLINE const bf16 *tile_column(const Packed *w, int column) { return w->data + (long)column * w->k_blocks * TILE_ELEMENTS; }

#if defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>

typedef struct __attribute__((packed)) {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes_per_row[16];
    uint8_t rows[16];
} TileConfig;

static int amx_allow(void) { return (int)syscall(SYS_arch_prctl, 0x1023, 18) == 0; }  // ARCH_REQ_XCOMP_PERM, tile data

static void amx_configure(void) {
    TileConfig config;
    memset(&config, 0, sizeof config);
    config.palette = 1;
    for (int i = 0; i < 8; i++) config.bytes_per_row[i] = 64, config.rows[i] = 16;
    _tile_loadconfig(&config);
}
static void amx_release(void) { _tile_release(); }

// out[rows][32] += 32 rows of a times two tile columns, over `count` k blocks; out is taken as zero at the first.
static void product_block(const bf16 *b, const bf16 *b_right, const bf16 *a, long stride, int rows, int count, int first,
                          float *out) {
    (void)rows;  // whole tiles: rows beyond are computed from what lies there and never read
    const long bytes = stride * (long)sizeof(bf16);
    const bf16 *lower = a + 16 * stride;
    if (first) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    } else {
        _tile_loadd(0, out, 128);
        _tile_loadd(1, out + 16, 128);
        _tile_loadd(2, out + 16 * BLOCK_N, 128);
        _tile_loadd(3, out + 16 * BLOCK_N + 16, 128);
    }
    for (int k = 0; k < count; k++, a += BLOCK_K, lower += BLOCK_K, b += TILE_ELEMENTS, b_right += TILE_ELEMENTS) {
        _tile_loadd(6, b, 64);
        _tile_loadd(4, a, bytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(5, lower, bytes);
        _tile_dpbf16ps(2, 5, 6);
        _tile_loadd(7, b_right, 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, out, 128);
    _tile_stored(1, out + 16, 128);
    _tile_stored(2, out + 16 * BLOCK_N, 128);
    _tile_stored(3, out + 16 * BLOCK_N + 16, 128);
}

// out[rows][64] for up to 16 rows and four tile columns.
static void product_wide(const Packed *w, int column, const bf16 *a, long stride, int rows, float *out) {
    (void)rows;
    const long bytes = stride * (long)sizeof(bf16);
    const bf16 *b[WIDE_TILES];
    for (int t = 0; t < WIDE_TILES; t++) b[t] = tile_column(w, column + t);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (long k = 0, at = 0; k < w->k_blocks; k++, a += BLOCK_K, at += TILE_ELEMENTS) {
        _tile_loadd(4, a, bytes);
        _tile_loadd(5, b[0] + at, 64);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(6, b[1] + at, 64);
        _tile_dpbf16ps(1, 4, 6);
        _tile_loadd(7, b[2] + at, 64);
        _tile_dpbf16ps(2, 4, 7);
        _tile_loadd(5, b[3] + at, 64);
        _tile_dpbf16ps(3, 4, 5);
    }
    _tile_stored(0, out, 256);
    _tile_stored(1, out + 16, 256);
    _tile_stored(2, out + 32, 256);
    _tile_stored(3, out + 48, 256);
}
#else
static int amx_allow(void) { return 1; }
static void amx_configure(void) {}
static void amx_release(void) {}

#if defined(__AVX512F__)
#define MAX_ROWS 12  // 24 sums, 2 columns and a broadcast fit 32 registers
#else
#define MAX_ROWS 3
#endif

INLINE void product_rows(const bf16 *b, const bf16 *b_right, const bf16 *a, long stride, const int rows, int count,
                         int first, float *out, int out_stride) {
    F16 sums[MAX_ROWS][2];
    for (int r = 0; r < rows; r++) {
        sums[r][0] = first ? f16_set(0.0f) : f16_load(out + r * out_stride);
        sums[r][1] = first ? f16_set(0.0f) : f16_load(out + r * out_stride + 16);
    }
    for (int k = 0; k < count; k++, a += BLOCK_K, b += TILE_ELEMENTS, b_right += TILE_ELEMENTS) {
        for (int pair = 0; pair < 16; pair++) {
            I16 left = i16_load(b + 32 * pair), right = i16_load(b_right + 32 * pair);
#pragma clang loop unroll(full)
            for (int r = 0; r < rows; r++) {
                int32_t both;
                memcpy(&both, a + r * stride + 2 * pair, 4);
                sums[r][0] = dot_pairs(sums[r][0], i16_set(both), left);
                sums[r][1] = dot_pairs(sums[r][1], i16_set(both), right);
            }
        }
    }
    for (int r = 0; r < rows; r++) {
        f16_store(out + r * out_stride, sums[r][0]);
        f16_store(out + r * out_stride + 16, sums[r][1]);
    }
}

static void product_any(const bf16 *b, const bf16 *b_right, const bf16 *a, long stride, int rows, int count, int first,
                        float *out, int out_stride) {
    for (; rows > 0; rows -= MAX_ROWS, a += MAX_ROWS * stride, out += MAX_ROWS * out_stride) {
        switch (rows < MAX_ROWS ? rows : MAX_ROWS) {
#define CASE(n) case n: product_rows(b, b_right, a, stride, n, count, first, out, out_stride); break;
            CASE(1) CASE(2) CASE(3)
#if MAX_ROWS == 12
            CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
#undef CASE
        }
    }
}

static void product_block(const bf16 *b, const bf16 *b_right, const bf16 *a, long stride, int rows, int count, int first,
                          float *out) {
    product_any(b, b_right, a, stride, rows, count, first, out, BLOCK_N);
}

static void product_wide(const Packed *w, int column, const bf16 *a, long stride, int rows, float *out) {
    for (int t = 0; t < WIDE_TILES; t += 2)
        product_any(tile_column(w, column + t), tile_column(w, column + t + 1), a, stride, rows, w->k_blocks, 1,
                    out + 16 * t, 16 * WIDE_TILES);
}
#endif

// out[rows][32] for up to CHUNK_ROWS rows, chunk of k by chunk of k.
static void product_chunked(const Packed *w, int n_block, const bf16 *a, long stride, int rows, float *out) {
    const bf16 *b = tile_column(w, 2 * n_block), *b_right = tile_column(w, 2 * n_block + 1);
    int chunks = (w->k_blocks + CHUNK_K - 1) / CHUNK_K, size = (w->k_blocks + chunks - 1) / chunks;
    for (int k = 0; k < w->k_blocks; k += size) {
        int count = w->k_blocks - k < size ? w->k_blocks - k : size;
        for (int at = 0; at < rows; at += BLOCK_M)
            product_block(b + (long)k * TILE_ELEMENTS, b_right + (long)k * TILE_ELEMENTS,
                          a + at * stride + (long)k * BLOCK_K, stride, rows - at < BLOCK_M ? rows - at : BLOCK_M, count,
                          k == 0, out + at * BLOCK_N);
    }
}

// source: [n][k] bfloat16; column c of the packed matrix is row order[c] of the source, or zeros where order[c] < 0.
static void pack_weights(const bf16 *source, int k, const int32_t *order, int n_blocks, int k_blocks, bf16 *target) {
    for (int column = 0; column < 2 * n_blocks; column++)
        for (int kb = 0; kb < k_blocks; kb++)
            for (int pair = 0; pair < 16; pair++)
                for (int c = 0; c < TILE_N; c++, target += 2) {
                    int row = order[column * TILE_N + c], at = kb * BLOCK_K + 2 * pair;
                    target[0] = row >= 0 && at < k ? source[(long)row * k + at] : 0;
                    target[1] = row >= 0 && at + 1 < k ? source[(long)row * k + at + 1] : 0;
                }
}
