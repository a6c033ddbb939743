// Products with packed bfloat16 weights. Each output is one running sum over k, in the same order whatever the number
// of rows: that is what makes a row's bits independent of the batch.
//
// Packed layout: [column block of 32][k block of 32][half: 16 columns][16 pairs of k][16 columns][2]. A half is what an
// AMX tile wants; a row of it is what a bfloat16 dot product of AVX-512 wants.
#pragma once
#include "vector.h"

#define BLOCK_N 32
#define BLOCK_K 32
#define BLOCK_M 32
#define BLOCK_ELEMENTS (BLOCK_N * BLOCK_K)

typedef struct {
    const bf16 *data;
    const float *bias;   // [n] or NULL
    int32_t n, k;        // as the model has them
    int32_t n_blocks, k_blocks;
} Packed;

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

// out[rows][32] for up to 32 rows of a; rows of a up to the next multiple of 16 must be readable.
static void block_product(const Packed *w, int n_block, const bf16 *a, long stride, int rows, float *out) {
    const bf16 *b = w->data + (long)n_block * w->k_blocks * BLOCK_ELEMENTS;
    const long bytes = stride * (long)sizeof(bf16);
    _tile_zero(0);
    _tile_zero(1);
    if (rows <= 16) {
        for (int k = 0; k < w->k_blocks; k++, a += BLOCK_K, b += BLOCK_ELEMENTS) {
            _tile_loadd(4, a, bytes);
            _tile_loadd(6, b, 64);
            _tile_loadd(7, b + 512, 64);
            for (int line = 0; line < 32; line++) _mm_prefetch((const char *)(b + 4 * BLOCK_ELEMENTS) + 64 * line, _MM_HINT_T0);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
        }
    } else {
        const bf16 *lower = a + 16 * stride;
        _tile_zero(2);
        _tile_zero(3);
        for (int k = 0; k < w->k_blocks; k++, a += BLOCK_K, lower += BLOCK_K, b += BLOCK_ELEMENTS) {
            _tile_loadd(4, a, bytes);
            _tile_loadd(6, b, 64);
            _tile_loadd(7, b + 512, 64);
            _tile_loadd(5, lower, bytes);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(2, out + 16 * BLOCK_N, 128);
        _tile_stored(3, out + 16 * BLOCK_N + 16, 128);
    }
    _tile_stored(0, out, 128);
    _tile_stored(1, out + 16, 128);
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

INLINE void product_rows(const Packed *w, const bf16 *b, const bf16 *a, long stride, const int rows, float *out) {
    F16 sums[MAX_ROWS][2];
    for (int r = 0; r < rows; r++) sums[r][0] = sums[r][1] = f16_set(0.0f);
    for (int k = 0; k < w->k_blocks; k++, a += BLOCK_K, b += BLOCK_ELEMENTS) {
        for (int pair = 0; pair < 16; pair++) {
            I16 left = i16_load(b + 32 * pair), right = i16_load(b + 512 + 32 * pair);
#if defined(__x86_64__)
            __builtin_prefetch(b + 2 * BLOCK_ELEMENTS + 32 * pair);
            __builtin_prefetch(b + 2 * BLOCK_ELEMENTS + 512 + 32 * pair);
#endif
#pragma clang loop unroll(full)
            for (int r = 0; r < rows; r++) {
                int32_t both;
                memcpy(&both, a + r * stride + 2 * pair, 4);
                sums[r][0] = dot_pairs(sums[r][0], i16_set(both), left);
                sums[r][1] = dot_pairs(sums[r][1], i16_set(both), right);
            }
        }
    }
    for (int r = 0; r < rows; r++) f16_store(out + r * BLOCK_N, sums[r][0]), f16_store(out + r * BLOCK_N + 16, sums[r][1]);
}

static void block_product(const Packed *w, int n_block, const bf16 *a, long stride, int rows, float *out) {
    const bf16 *b = w->data + (long)n_block * w->k_blocks * BLOCK_ELEMENTS;
    for (; rows > 0; rows -= MAX_ROWS, a += MAX_ROWS * stride, out += MAX_ROWS * BLOCK_N) {
        switch (rows < MAX_ROWS ? rows : MAX_ROWS) {
#define CASE(count) case count: product_rows(w, b, a, stride, count, out); break;
            CASE(1) CASE(2) CASE(3)
#if MAX_ROWS == 12
            CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
#undef CASE
        }
    }
}
#endif

// source: [n][k] bfloat16; column c of the packed matrix is row order[c] of the source, or zeros where order[c] < 0.
static void pack_weights(const bf16 *source, int k, const int32_t *order, int n_blocks, int k_blocks, bf16 *target) {
    for (int nb = 0; nb < n_blocks; nb++)
        for (int kb = 0; kb < k_blocks; kb++)
            for (int half = 0; half < 2; half++)
                for (int pair = 0; pair < 16; pair++)
                    for (int c = 0; c < 16; c++, target += 2) {
                        int row = order[nb * BLOCK_N + half * 16 + c], at = kb * BLOCK_K + 2 * pair;
                        target[0] = row >= 0 && at < k ? source[(long)row * k + at] : 0;
                        target[1] = row >= 0 && at + 1 < k ? source[(long)row * k + at + 1] : 0;
                    }
}
