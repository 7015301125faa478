// y = x W^T for any number of rows, each output summed over k in order: a row's bits don't depend on the other rows.
//
// W lies in panels of 32 outputs: [panel][k / STEP][32][STEP], so that one pass over a panel streams it once.
#pragma once
#include "simd.hpp"

namespace kvt {

constexpr int NR = 32;  // outputs of a panel: two vectors
#if defined(__AVX512F__)
constexpr int MR = 12;  // rows at once: 24 accumulators of 32 registers
#else
constexpr int MR = 3;
#endif

constexpr int BLOCK_STEPS = 64;

struct PanelBF16 {  // pairs along k
    using Act = uint16_t;
    using Elem = uint16_t;
    using W = vu;
    static constexpr int STEP = 2;
    static W weights(const Elem* p) { return load<vu>(p); }
    static vu input(const Act* p) {
        uint32_t x;
        std::memcpy(&x, p, 4);
        return vu{} + x;
    }
    static vf fma(vf acc, W w, vu x) { return dot_pairs(acc, w, x); }
};
struct PanelF32 {
    using Act = float;
    using Elem = float;
    using W = vf;
    static constexpr int STEP = 1;
    static W weights(const Elem* p) { return load<vf>(p); }
    static vf input(const Act* p) { return splat(*p); }
    static vf fma(vf acc, W w, vf x) { return w * x + acc; }
};
struct PanelF16 {
    using Act = float;
    using Elem = uint16_t;
    using W = vf;
    static constexpr int STEP = 1;
    static W weights(const Elem* p) { return load_f16(p); }
    static vf input(const Act* p) { return splat(*p); }
    static vf fma(vf acc, W w, vf x) { return w * x + acc; }
};

// c [M, 32] = a [M, k] times one panel; k in steps of P::STEP, summed in blocks so that errors grow slowly with k. Not
// inlined: many callers, much code.
template <class P, int M>
__attribute__((noinline)) void micro(const typename P::Act* a, size_t lda, const typename P::Elem* w, int steps,
                                     float* c, size_t ldc) {
    for (int done = 0; done < steps; done += BLOCK_STEPS) {
        vf acc[M][2];
        for (int m = 0; m < M; m++) acc[m][0] = acc[m][1] = vf{};
        const int end = done + BLOCK_STEPS < steps ? done + BLOCK_STEPS : steps;
        for (int k = done; k < end; k++) {
            __builtin_prefetch((const char*)w + 2048);
            __builtin_prefetch((const char*)w + 2112);
            const typename P::W w0 = P::weights(w), w1 = P::weights(w + LANES * P::STEP);
#pragma GCC unroll 12
            for (int m = 0; m < M; m++) {
                const auto x = P::input(a + m * lda);
                acc[m][0] = P::fma(acc[m][0], w0, x);
                acc[m][1] = P::fma(acc[m][1], w1, x);
            }
            a += P::STEP;
            w += NR * P::STEP;
        }
        for (int m = 0; m < M; m++)
            for (int i = 0; i < 2; i++) {
                float* to = c + m * ldc + i * LANES;
                store(to, done ? load<vf>(to) + acc[m][i] : acc[m][i]);
            }
    }
}

template <class P, int M = MR>
inline void micro_rows(int rows, const typename P::Act* a, size_t lda, const typename P::Elem* w, int steps, float* c,
                       size_t ldc) {
    if (rows == M) return micro<P, M>(a, lda, w, steps, c, ldc);
    if constexpr (M > 1) micro_rows<P, M - 1>(rows, a, lda, w, steps, c, ldc);
}

// Cuts rows into even blocks of at most MR and calls f(first row, rows in the block).
template <class F>
inline void row_blocks(int rows, const F& f) {
    const int blocks = (rows + MR - 1) / MR;
    for (int b = 0, at = 0; b < blocks; b++) {
        const int n = (rows - at + blocks - b - 1) / (blocks - b);
        f(at, n);
        at += n;
    }
}

// One panel for all rows; done(first row, rows, tile [rows, 32]) takes each tile of results.
template <class P, class F>
inline void panel(const typename P::Act* a, size_t lda, int rows, const typename P::Elem* w, int steps, const F& done) {
    alignas(64) float tile[MR * NR];
    row_blocks(rows, [&](int at, int n) {
        micro_rows<P>(n, a + at * lda, lda, w, steps, tile, NR);
        done(at, n, tile);
    });
}

}  // namespace kvt
