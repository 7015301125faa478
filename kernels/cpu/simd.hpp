// Sixteen-lane vectors, number formats, and the few functions of them that the kernels need.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#if defined(__AVX512F__) || defined(__F16C__)
#include <immintrin.h>
#endif

namespace kvt {

constexpr int LANES = 16;
typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef uint32_t vu __attribute__((vector_size(64)));
typedef uint16_t vh __attribute__((vector_size(32)));
typedef uint8_t vb __attribute__((vector_size(16)));

template <class V, class P>
inline V load(const P* p) {
    V v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
template <class V, class P>
inline void store(P* p, V v) {
    std::memcpy(p, &v, sizeof v);
}
inline vf splat(float x) { return vf{} + x; }
inline vf as_float(vu v) { return (vf)v; }
inline vu as_bits(vf v) { return (vu)v; }
inline vf max(vf a, vf b) { return a > b ? a : b; }

// Sums and maxima over lanes in one fixed order: halves onto each other.
#if defined(__AVX512F__)
inline float sum(vf v) { return _mm512_reduce_add_ps((__m512)v); }
inline float top(vf v) { return _mm512_reduce_max_ps((__m512)v); }
#else
inline float sum(vf v) {
    alignas(64) float a[LANES];
    store(a, v);
    for (int w = LANES / 2; w; w /= 2)
        for (int i = 0; i < w; i++) a[i] += a[i + w];
    return a[0];
}
inline float top(vf v) {
    alignas(64) float a[LANES];
    store(a, v);
    for (int w = LANES / 2; w; w /= 2)
        for (int i = 0; i < w; i++) a[i] = a[i] > a[i + w] ? a[i] : a[i + w];
    return a[0];
}
#endif

// e^x to about an ulp; 0 below -87, capped at 88.
inline vf exp(vf x) {
    const vf low = splat(-87.0f), high = splat(88.0f);
    const vi in_range = x >= low;
    x = x > high ? high : x;
    x = x < low ? low : x;
    const vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    const vf n = (x * 1.44269504f + magic) - magic;
    const vf r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    vf p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    const vi exponent = (__builtin_convertvector(n, vi) + 127) << 23;
    return (vf)((vi)(p * (vf)exponent) & in_range);
}
inline float exp(float x) { return exp(splat(x))[0]; }

// tanh to a few ulps.
inline vf tanh(vf x) {
    const vf square = x * x;
    vf p = splat(2.1869488e-2f);  // of x - x^3/3 + ..., for small x, where the other form cancels
    p = p * square - 5.3968254e-2f;
    p = p * square + 1.3333333e-1f;
    p = p * square - 3.3333333e-1f;
    const vf magnitude = x < 0.0f ? -x : x;
    const vf large = 1.0f - 2.0f / (exp(magnitude * 2.0f) + 1.0f);
    return magnitude < 0.3f ? p * square * x + x : (x < 0.0f ? -large : large);
}

// 2^x for x <= 0 with a relative error of 4e-6, at least 2^-126: enough where the result is rounded to bfloat16.
inline vf exp2_rough(vf x) {
    x = max(x, splat(-126.0f));
    const vf magic = splat(12582912.0f);
    const vf n = (x + magic) - magic;
    const vf r = x - n;
    vf p = splat(9.66636851e-3f);  // through 2^r at the five Chebyshev nodes of [-1/2, 1/2]
    p = p * r + 5.59219758e-2f;
    p = p * r + 2.40223490e-1f;
    p = p * r + 6.93121045e-1f;
    p = p * r + 1.0f;
    return (vf)((vi)p + (__builtin_convertvector(n, vi) << 23));
}

// bfloat16 is the upper half of a float; round to nearest even, NaN stays NaN.
inline vu round_bf16(vf v) {  // [lanes] in the low halves
    const vu u = as_bits(v);
    const vu rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    return v == v ? rounded : (u >> 16) | 0x40u;
}
inline void store_bf16(uint16_t* p, vf v) {
#if defined(__AVX512BF16__)
    store(p, _mm512_cvtneps_pbh((__m512)v));
#else
    store(p, __builtin_convertvector(round_bf16(v), vh));
#endif
}
inline vf load_bf16(const uint16_t* p) { return as_float(__builtin_convertvector(load<vh>(p), vu) << 16); }
inline float from_bf16(uint16_t h) {
    const uint32_t u = uint32_t(h) << 16;
    float f;
    std::memcpy(&f, &u, 4);
    return f;
}

inline float from_f16(uint16_t h) {
#if defined(__F16C__)
    return _cvtsh_ss(h);
#else
    _Float16 x;
    std::memcpy(&x, &h, 2);
    return float(x);
#endif
}
inline uint16_t to_f16(float f) {
#if defined(__F16C__)
    return uint16_t(_cvtss_sh(f, 0));
#else
    const _Float16 x = _Float16(f);
    uint16_t h;
    std::memcpy(&h, &x, 2);
    return h;
#endif
}
inline vf load_f16(const uint16_t* p) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#else
    vf v;
    for (int i = 0; i < LANES; i++) v[i] = from_f16(p[i]);
    return v;
#endif
}

inline vf from_f16(vu halves) {  // in the low halves of the lanes
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i)halves));
#else
    vf v;
    for (int i = 0; i < LANES; i++) v[i] = from_f16(uint16_t(halves[i]));
    return v;
#endif
}

inline void store_f16(uint16_t* p, vf v) {
#if defined(__AVX512F__)
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)v, 0));
#else
    for (int i = 0; i < LANES; i++) p[i] = to_f16(v[i]);
#endif
}

inline vu widen(vb bytes) {  // by way of 16 bits: compilers take a conversion in one step apart
#if defined(__AVX512F__)
    return (vu)_mm512_cvtepu8_epi32((__m128i)bytes);
#else
    return __builtin_convertvector(__builtin_convertvector(bytes, vh), vu);
#endif
}

// The numbers of codes; see kernels/reference.py.
inline vf e4m3(vu top) {  // in the highest byte of the lanes
    return as_float((vu)((vi)top >> 4) & 0x87f00000u) * 0x1p120f;
}
// A nibble in the lowest four bits of the lanes, less NIBBLE_CENTRE: with the centre in the zero instead, sums of
// numbers around zero don't come out of the difference of two large ones.
constexpr float NIBBLE_CENTRE = 8.0f;
inline vf nibble(vu x) {
#if defined(__AVX512F__)
    const __m512 numbers = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
    return (vf)_mm512_permutexvar_ps((__m512i)x, numbers);
#else
    return __builtin_convertvector((vi)(x & 15u) - 8, vf);
#endif
}

// acc + w.low * x.low + w.high * x.high over pairs of bfloat16 in 32-bit lanes.
inline vf dot_pairs(vf acc, vu w, vu x) {
#if defined(__AVX512BF16__)
    return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)w, (__m512bh)x);
#else
    acc = as_float(w << 16) * as_float(x << 16) + acc;
    return as_float(w & 0xffff0000u) * as_float(x & 0xffff0000u) + acc;
#endif
}

}  // namespace kvt
