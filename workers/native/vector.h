// Vectors of 16 lanes, bfloat16 and the few functions on them. Compiles for any processor; the fast ones get their own
// instructions. Every function works lane by lane or reduces in one fixed order, so no result depends on its neighbours.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

typedef uint16_t bf16;
typedef float F16 __attribute__((vector_size(64)));
typedef int32_t I16 __attribute__((vector_size(64)));
typedef uint32_t U16 __attribute__((vector_size(64)));
typedef uint16_t H16 __attribute__((vector_size(32)));
typedef F16 F16u __attribute__((aligned(4)));  // the same, wherever it lies
typedef I16 I16u __attribute__((aligned(2)));
typedef H16 H16u __attribute__((aligned(2)));

#define INLINE static inline __attribute__((always_inline))

INLINE F16 f16_load(const float *p) { return *(const F16u *)p; }
INLINE void f16_store(float *p, F16 v) { *(F16u *)p = v; }
INLINE I16 i16_load(const void *p) { return *(const I16u *)p; }
INLINE F16 f16_set(float v) { return (F16){v, v, v, v, v, v, v, v, v, v, v, v, v, v, v, v}; }
INLINE I16 i16_set(int32_t v) { return (I16){v, v, v, v, v, v, v, v, v, v, v, v, v, v, v, v}; }
INLINE F16 f16_fma(F16 a, F16 b, F16 c) { return __builtin_elementwise_fma(a, b, c); }
// The greater; b where either is NaN.
INLINE F16 f16_max(F16 a, F16 b) {
#if defined(__AVX512F__)
    return (F16)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return (F16)(((I16)a & (a > b)) | ((I16)b & ~(a > b)));
#endif
}
INLINE F16 f16_select(I16 mask, F16 yes, F16 no) { return (F16)(((I16)yes & mask) | ((I16)no & ~mask)); }

// Both halve again and again: the order is a property of the lane, not of the machine.
#define F16_FOLD(v, a, b, c, d, e, f, g, h) __builtin_shufflevector(v, v, a, b, c, d, e, f, g, h, a, b, c, d, e, f, g, h)
INLINE float f16_sum(F16 v) {
    v += F16_FOLD(v, 8, 9, 10, 11, 12, 13, 14, 15);
    v += F16_FOLD(v, 4, 5, 6, 7, 4, 5, 6, 7);
    v += F16_FOLD(v, 2, 3, 2, 3, 2, 3, 2, 3);
    return v[0] + v[1];
}
INLINE float f16_highest(F16 v) {
    v = f16_max(v, F16_FOLD(v, 8, 9, 10, 11, 12, 13, 14, 15));
    v = f16_max(v, F16_FOLD(v, 4, 5, 6, 7, 4, 5, 6, 7));
    v = f16_max(v, F16_FOLD(v, 2, 3, 2, 3, 2, 3, 2, 3));
    return v[0] > v[1] ? v[0] : v[1];
}

// Round to nearest, ties to even.
INLINE H16 bf16_round(F16 v) {
#if defined(__AVX512BF16__)
    return (H16)_mm512_cvtneps_pbh((__m512)v);
#else
    U16 bits = (U16)v;
    U16 rounded = bits + 0x7fff + ((bits >> 16) & 1);
    U16 is_nan = (U16)(v != v);
    return __builtin_convertvector(((rounded & ~is_nan) | (0x7fc00000u & is_nan)) >> 16, H16);
#endif
}
INLINE void bf16_store(bf16 *p, F16 v) { *(H16u *)p = bf16_round(v); }
INLINE F16 bf16_load(const bf16 *p) { return (F16)(__builtin_convertvector(*(const H16u *)p, U16) << 16); }

// acc += a.low · b.low + a.high · b.high, where a lane holds a pair of bfloat16.
INLINE F16 dot_pairs(F16 acc, I16 a, I16 b) {
#if defined(__AVX512BF16__)
    return (F16)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
#else
    acc = f16_fma((F16)(a << 16), (F16)(b << 16), acc);
    return f16_fma((F16)(a & (int32_t)0xffff0000), (F16)(b & (int32_t)0xffff0000), acc);
#endif
}

// 2^x to about 5 units in the last place, exact at 0; 0 far below 2^-126. NaN stays NaN, so that a read of what must not
// be read cannot hide.
INLINE F16 f16_exp2(F16 x) {
#if defined(__AVX512F__)
    F16 r = (F16)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // 0 at −∞
#else
    x = f16_max(f16_set(-200.0f), f16_select(x > 200.0f, f16_set(200.0f), x));
    F16 whole = __builtin_elementwise_floor(x), r = x - whole;
#endif
    F16 p = f16_set(1.789665041e-3f);
    p = f16_fma(p, r, f16_set(9.196802048e-3f));
    p = f16_fma(p, r, f16_set(5.565866422e-2f));
    p = f16_fma(p, r, f16_set(2.402068740e-1f));
    p = f16_fma(p, r, f16_set(6.931475775e-1f));
    p = f16_fma(p, r, f16_set(1.0f));
#if defined(__AVX512F__)
    return (F16)_mm512_scalef_ps((__m512)p, (__m512)x);
#else
    I16 exponent = __builtin_convertvector(f16_select(x != x, f16_set(0.0f), whole), I16);
    F16 scaled = (F16)((I16)p + (exponent << 23));
    scaled = f16_select(whole < -126.0f, f16_set(0.0f), f16_select(whole > 127.0f, f16_set(INFINITY), scaled));
    return f16_select(x != x, x, scaled);
#endif
}

// Numbers below 2^-126 become zero while a step runs: shares of what a row hardly sees would cost a trap each.
INLINE unsigned flush_tiny_numbers(void) {
#if defined(__x86_64__)
    unsigned control = _mm_getcsr();
    _mm_setcsr(control | 0x8040);
    return control;
#else
    return 0;
#endif
}
INLINE void restore_control(unsigned control) {
#if defined(__x86_64__)
    _mm_setcsr(control);
#else
    (void)control;
#endif
}

#define LOG2_E 1.44269504088896341f
INLINE F16 f16_exp(F16 x) { return f16_exp2(x * LOG2_E); }
INLINE F16 f16_silu(F16 x) { return x / (1.0f + f16_exp(-x)); }
INLINE F16 f16_gelu_tanh(F16 x) {
    F16 inner = 0.7978845608028654f * (x + 0.044715f * x * x * x);
    return x * (1.0f - 1.0f / (1.0f + f16_exp(2.0f * inner)));
}
