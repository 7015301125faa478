// Numbers in the compute types, and keys and values of a split as panels for gemm.hpp.
#pragma once
#include <algorithm>

#include "gemm.hpp"
#include "pages.hpp"

namespace kvt {

static_assert(SPLIT % NR == 0);

enum DType { F32 = 0, BF16 = 1, F16 = 2 };

// How numbers of each format lie in pages and weights (Stored), and as what they are multiplied (Weights::Act).
struct FormatBF16 {
    using Stored = uint16_t;
    using Weights = PanelBF16;
    using Keys = PanelBF16;
    static float read(Stored s) { return from_bf16(s); }
    static void write(Stored* p, vf v) { store_bf16(p, v); }
    static void act(uint16_t* p, vf v) { store_bf16(p, v); }
    static uint16_t act_of(Stored s) { return s; }
    static Stored stored_of(uint16_t a) { return a; }
};
struct FormatF32 {
    using Stored = float;
    using Weights = PanelF32;
    using Keys = PanelF32;
    static float read(Stored s) { return s; }
    static void write(Stored* p, vf v) { store(p, v); }
    static void act(float* p, vf v) { store(p, v); }
    static float act_of(Stored s) { return s; }
    static Stored stored_of(float a) { return a; }
};
struct FormatF16 {  // stored as halves, computed as floats
    using Stored = uint16_t;
    using Weights = PanelF16;
    using Keys = PanelF32;
    static float read(Stored s) { return from_f16(s); }
    static void write(Stored* p, vf v) { store_f16(p, v); }
    static void act(float* p, vf v) { store(p, v); }
    static float act_of(Stored s) { return from_f16(s); }
    static Stored stored_of(float a) { return to_f16(a); }
};

// put(to, sixteen numbers) for n numbers, the last ones through a buffer of their own.
template <class T, class P>
inline void convert(const float* from, T* to, int n, const P& put) {
    int i = 0;
    for (; i + LANES <= n; i += LANES) put(to + i, load<vf>(from + i));
    if (i == n) return;
    float in[LANES] = {};
    T out[LANES];
    std::memcpy(in, from + i, (n - i) * sizeof(float));
    put(out, load<vf>(in));
    std::memcpy(to + i, out, (n - i) * sizeof(T));
}

// out[c * STRIDE + r] = rows[r][c]: 16 rows of 32-bit words become 16 lanes.
template <int STRIDE>
inline void transpose_words(const uint32_t* const* rows, int words, uint32_t* out) {
    int c = 0;
#if defined(__AVX512F__)
    for (; c + 16 <= words; c += 16) {
        __m512i a[16], b[16];
        for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_si512(rows[i] + c);
        for (int i = 0; i < 16; i += 2) {
            b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
            b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
        }
        for (int i = 0; i < 16; i += 4) {
            a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
            a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
            a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
            a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
        }
        for (int i = 0; i < 4; i++) {
            b[i] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0x88);
            b[i + 4] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0xdd);
            b[i + 8] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0x88);
            b[i + 12] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0xdd);
        }
        for (int i = 0; i < 8; i++) {
            _mm512_storeu_si512(out + (c + i) * STRIDE, _mm512_shuffle_i32x4(b[i], b[i + 8], 0x88));
            _mm512_storeu_si512(out + (c + i + 8) * STRIDE, _mm512_shuffle_i32x4(b[i], b[i + 8], 0xdd));
        }
    }
    for (; c + 8 <= words; c += 8) {
        __m512i a[8], b[8];
        for (int i = 0; i < 8; i++) {
            const int r = i < 4 ? i : i + 4;
            a[i] = _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)(rows[r] + c))),
                                      _mm256_loadu_si256((const __m256i*)(rows[r + 4] + c)), 1);
        }
        for (int i = 0; i < 8; i += 2) {
            b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
            b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
        }
        for (int i = 0; i < 8; i += 4) {
            a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
            a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
            a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
            a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
        }
        for (int i = 0; i < 4; i++) {
            _mm512_storeu_si512(out + (c + i) * STRIDE, _mm512_shuffle_i32x4(a[i], a[i + 4], 0x88));
            _mm512_storeu_si512(out + (c + i + 4) * STRIDE, _mm512_shuffle_i32x4(a[i], a[i + 4], 0xdd));
        }
    }
#endif
    for (; c < words; c++)
        for (int i = 0; i < 16; i++) out[c * STRIDE + i] = rows[i][c];
}

// Keys [n] of one split as panels of 32 keys along `dim`; keys behind n repeat key 0 (their scores are masked).
inline void pack_keys(const uint16_t* const* keys, int n, int dim, uint16_t* out, PanelBF16, Fetcher& next) {
    const uint32_t* rows[16];
    for (int at = 0; at < round_up(n, NR); at += 16) {
        for (int i = 0; i < 16; i++) rows[i] = reinterpret_cast<const uint32_t*>(keys[at + i < n ? at + i : 0]);
        next.some();
        uint32_t* panel = reinterpret_cast<uint32_t*>(out) + at / NR * (dim / 2 * NR) + at % NR;
        transpose_words<NR>(rows, dim / 2, panel);
    }
}
inline void pack_keys(const float* const* keys, int n, int dim, float* out, PanelF32, Fetcher& next) {
    const uint32_t* rows[16];
    for (int at = 0; at < round_up(n, NR); at += 16) {
        for (int i = 0; i < 16; i++) rows[i] = reinterpret_cast<const uint32_t*>(keys[at + i < n ? at + i : 0]);
        next.some();
        transpose_words<NR>(rows, dim, reinterpret_cast<uint32_t*>(out + at / NR * (dim * NR) + at % NR));
    }
}
inline void pack_keys(const uint16_t* const* keys, int n, int dim, float* out, PanelF32, Fetcher& next) {
    for (int at = 0; at < round_up(n, NR); at++) {
        if (at % 16 == 0) next.some();
        const uint16_t* row = keys[at < n ? at : 0];
        float* panel = out + at / NR * (dim * NR) + at % NR;
        for (int d = 0; d < dim; d++) panel[d * NR] = from_f16(row[d]);
    }
}

// Values [n] of one split as panels of 32 numbers of `dim` along the keys; n is padded to the panel's step with zeros.
inline void pack_values(const uint16_t* const* values, int n, int dim, uint16_t* out, PanelBF16, Fetcher& next) {
    for (int t = 0; t < n; t += 2) {
        if (t % 16 == 0) next.some();
        const uint16_t *a = values[t], *b = t + 1 < n ? values[t + 1] : nullptr;
        int d = 0;
        for (; d + LANES <= dim; d += LANES) {
            vu pair = __builtin_convertvector(load<vh>(a + d), vu);
            if (b) pair |= __builtin_convertvector(load<vh>(b + d), vu) << 16;
            store(out + d / NR * (SPLIT * NR) + t * NR + d % NR * 2, pair);
        }
        for (; d < dim; d++) {
            uint16_t* p = out + d / NR * (SPLIT * NR) + t * NR + d % NR * 2;
            p[0] = a[d];
            p[1] = b ? b[d] : 0;
        }
    }
}
inline void pack_values(const float* const* values, int n, int dim, float* out, PanelF32, Fetcher& next) {
    for (int t = 0; t < n; t++) {
        if (t % 16 == 0) next.some();
        for (int d = 0; d < dim; d += NR)
            std::memcpy(out + d * SPLIT + t * NR, values[t] + d, std::min(NR, dim - d) * sizeof(float));
    }
}
inline void pack_values(const uint16_t* const* values, int n, int dim, float* out, PanelF32, Fetcher& next) {
    for (int t = 0; t < n; t++) {
        if (t % 16 == 0) next.some();
        for (int d = 0; d < dim; d += NR)
            for (int i = 0; i < std::min(NR, dim - d); i++) out[d * SPLIT + t * NR + i] = from_f16(values[t][d + i]);
    }
}

}  // namespace kvt
