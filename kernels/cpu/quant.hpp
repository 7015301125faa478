// Attention over quantized pages straight from their codes: no number is ever unpacked to memory. Scores are computed
// for 16 keys at once, whose codes are transposed as 32-bit words; sums of values for 32 columns of a head at once.
// Per-channel scales go into the query, per-token ones into scores and probabilities. All arithmetic is in float32.
#pragma once
#include "panels.hpp"

namespace kvt {

#if defined(__AVX512F__)
constexpr int MQ = 8;  // queries at once: 16 accumulators of 32 registers
#else
constexpr int MQ = 2;
#endif

// Codes of a byte: a transposed key's word holds four; of a value's row 16 bytes are 16 numbers.
struct CodesInt8 {
    static constexpr bool NIBBLES = false;
    static vf number(vu word, int i) {
        return __builtin_convertvector((vi)((word ^ 0x80808080u) << (24 - 8 * i)) >> 24, vf);
    }
    static vf row(vu bytes) { return __builtin_convertvector((vi)bytes - 128, vf); }
};
struct CodesFp8 {
    static constexpr bool NIBBLES = false;
    static vf number(vu word, int i) { return e4m3(word << (24 - 8 * i)); }
    static vf row(vu bytes) { return e4m3(bytes << 24); }
};
struct CodesNibble {  // the high ones belong to columns dim / 2 further
    static constexpr bool NIBBLES = true;
};

// out[m * LANES + lane] = codes of key `lane` times query m [dim], for 16 keys in `words` [count][16].
template <class C, int M>
__attribute__((noinline)) void score_keys(const uint32_t* words, int count, const float* q, int dim, float* out) {
    vf acc[M][2];
    for (int m = 0; m < M; m++) acc[m][0] = acc[m][1] = vf{};
    for (int w = 0; w < count; w++, q += 4) {
        const vu word = load<vu>(words + w * LANES);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            if constexpr (C::NIBBLES) {
                const vf low = nibble(word >> (8 * i)), high = nibble(word >> (8 * i + 4));
                for (int m = 0; m < M; m++) {
                    acc[m][0] = low * q[m * dim + i] + acc[m][0];
                    acc[m][1] = high * q[m * dim + i + dim / 2] + acc[m][1];
                }
            } else {
                const vf number = C::number(word, i);
                for (int m = 0; m < M; m++) acc[m][i % 2] = number * q[m * dim + i] + acc[m][i % 2];
            }
        }
    }
    for (int m = 0; m < M; m++) store(out + m * LANES, acc[m][0] + acc[m][1]);
}

inline vu load_bytes(const uint8_t* p, int n) {  // at most 16, zeros behind them
    if (n >= LANES) return widen(load<vb>(p));
    uint8_t bytes[LANES] = {};
    if (n > 0) std::memcpy(bytes, p, n);
    return widen(load<vb>(bytes));
}
inline void store_first(float* p, vf v, int n) {
    if (n >= LANES) return store(p, v);
    if (n > 0) std::memcpy(p, &v, n * sizeof(float));
}

// 32 columns, or those that a row still has: to[m] += p[m][t] * values[t], summed over `count` tokens.
// `a` and `b` are how many bytes of two runs of 16 there are; nibbles have one run.
template <class C, int M>
__attribute__((always_inline)) inline void mix_columns(const uint8_t* values, int row_bytes, int count, const float* p,
                                                       float* low, float* high, int width, int a, int b) {
    vf acc[M][2];
    for (int m = 0; m < M; m++) {
        acc[m][0] = load<vf>(low + m * width);
        acc[m][1] = load<vf>(high + m * width);
    }
    for (int t = 0; t < count; t++, values += row_bytes) {
        vf x, y;
        if constexpr (C::NIBBLES) {
            const vu bytes = load_bytes(values, a);
            x = nibble(bytes);
            y = nibble(bytes >> 4);
        } else {
            x = C::row(load_bytes(values, a));
            y = C::row(load_bytes(values + LANES, b));
        }
        for (int m = 0; m < M; m++) {
            acc[m][0] = x * p[m * SPLIT + t] + acc[m][0];
            acc[m][1] = y * p[m * SPLIT + t] + acc[m][1];
        }
    }
    for (int m = 0; m < M; m++) {
        store_first(low + m * width, acc[m][0], a);
        store_first(high + m * width, acc[m][1], b);
    }
}

template <class C, int M>
__attribute__((noinline)) void mix_values(const uint8_t* values, int row_bytes, int count, const float* p,
                                          float* to, int width, int dim) {
    const int run = C::NIBBLES ? LANES : 2 * LANES;  // bytes of a pass
    const int high = C::NIBBLES ? dim / 2 : LANES;   // columns between its two halves
    int at = 0;
    for (; at + run <= row_bytes; at += run)
        mix_columns<C, M>(values + at, row_bytes, count, p, to + at, to + at + high, width, LANES, LANES);
    if (at == row_bytes) return;
    const int a = std::min(LANES, row_bytes - at), b = C::NIBBLES ? a : row_bytes - at - a;
    mix_columns<C, M>(values + at, row_bytes, count, p, to + at, to + at + high, width, a, b);
}

// f(number of queries, as a constant; the first), for n queries in even groups of at most MQ.
template <int M = MQ, class F>
inline void with_constant(int n, const F& f) {
    if (n == M) return f(std::integral_constant<int, M>());
    if constexpr (M > 1) with_constant<M - 1>(n, f);
}
template <class F>
inline void query_groups(int queries, const F& f) {
    const int groups = (queries + MQ - 1) / MQ;
    for (int g = 0, at = 0; g < groups; g++) {
        const int n = (queries - at + groups - g - 1) / (groups - g);
        with_constant(n, [&](auto m) { f(m, at); });
        at += n;
    }
}
template <class F>
inline void with_key_codes(int format, const F& f) {
    if (has_key_nibbles(format)) return f(CodesNibble());
    if (format == FP8) return f(CodesFp8());
    f(CodesInt8());
}
template <class F>
inline void with_value_codes(int format, const F& f) {
    if (has_value_nibbles(format)) return f(CodesNibble());
    if (format == FP8) return f(CodesFp8());
    f(CodesInt8());
}

// x H for the orthonormal H of kernels/reference.py's hadamard.
inline void hadamard(float* x, int dim) {
    const int block = dim & -dim;
    for (int half = 1; half < block; half *= 2)
        for (int at = 0; at < dim; at += 2 * half)
            for (int i = at; i < at + half; i++) {
                const float a = x[i], b = x[i + half];
                x[i] = a + b;
                x[i + half] = a - b;
            }
    const float norm = 1.0f / std::sqrt(float(block));
    for (int i = 0; i < dim; i++) x[i] *= norm;
}

// The quantized tokens of one split and one KV head.
class QuantSplit {
   public:
    QuantSplit(const KVLayout& layout, int head, char*& scratch) : kv_(layout), head_(head) {
        words_ = take<uint32_t>(scratch, size_t(MOST) * tile_words());
        for (float** x : {&key_scale_, &key_zero_, &value_scale_, &value_zero_}) *x = take<float>(scratch, SPLIT);
        for (float** x : {&plain_, &turned_, &scaled_}) *x = take<float>(scratch, size_t(MR) * layout.dim);
        for (float** x : {&turned_sum_, &scaled_sum_, &added_}) *x = take<float>(scratch, MR);
        weights_ = take<float>(scratch, MR * SPLIT);
    }
    static size_t bytes(const KVLayout& kv) {
        return lines(size_t(MOST) * LANES * kv.dim) + 4 * lines(SPLIT * 4) + 3 * lines(size_t(MR) * kv.dim * 4) +
               3 * lines(MR * 4) + lines(MR * SPLIT * 4);
    }
    bool empty() const { return !count_; }

    // Before any scoring: the tokens' scales, and their keys' codes side by side.
    void add(const Piece& p, Fetcher& next) {
        if (empty()) {
            std::fill_n(value_scale_, SPLIT, 0.0f);
            std::fill_n(value_zero_, SPLIT, 0.0f);
        }
        const Codes from = Codes::of(p.record, p.format, kv_, head_);
        tiles_[count_] = count_ ? tiles_[count_ - 1] + tiles(pieces_[count_ - 1]) : 0;
        pieces_[count_++] = p;
        const int shift = p.at - p.slot;  // token of the split less token of the page; a multiple of 16
        for (int t = p.slot / LANES * LANES; t < p.slot + p.count; t += LANES) {
            const uint32_t* rows[LANES];
            for (int i = 0; i < LANES; i++) {
                const int token = std::clamp(t + i, p.slot, p.slot + p.count - 1);
                rows[i] = reinterpret_cast<const uint32_t*>(from.keys + int64_t(token) * from.key_bytes);
            }
            next.some();
            transpose_words<LANES>(rows, from.key_bytes / 4, words(count_ - 1, t + shift));
            const vf one = splat(1.0f);
            vf scale = one, zero = one;  // INT4C's are the query's: score = code * scaled query + its sum
            if (p.format == INT4) pair(from.key_scales + 2 * t, scale, zero);
            else if (p.format != INT4C) scale = load_f16(from.key_scales + t), zero = vf{};
            place(p, key_scale_, t + shift, scale);
            place(p, key_zero_, t + shift, zero);
            if (has_value_nibbles(p.format)) pair(from.value_scales + 2 * t, scale, zero);
            else scale = load_f16(from.value_scales + t), zero = vf{};
            place(p, value_scale_, t + shift, scale);
            place(p, value_zero_, t + shift, zero);
        }
    }

    // scores[m * SPLIT + t] of n queries [n, dim] over the tokens before `limit`.
    template <class Act>
    void score(const Act* q, int n, int limit, float* scores, Fetcher& next) {
        for (int i = 0; i < n * kv_.dim; i++) plain_[i] = number(q[i]);
        bool is_turned = false;
        for (int i = 0; i < count_; i++) {
            const Piece& p = pieces_[i];
            if (p.at >= limit) return;
            if (p.format == INT4 && !is_turned) turn(n), is_turned = true;
            if (p.format == INT4C) scale(Codes::of(p.record, p.format, kv_, head_).key_scales, n);
            const float* queries = p.format == INT4 ? turned_ : p.format == INT4C ? scaled_ : plain_;
            const float* sums = p.format == INT4 ? turned_sum_ : p.format == INT4C ? scaled_sum_ : NO_SUMS;
            for (int t = p.at / LANES * LANES; t < p.at + p.count; t += LANES) {
                next.some();
                score_tile(i, t, queries, sums, n, scores);
            }
        }
    }

    // to[m] += the sum of p[m * SPLIT + t] times the value of token t, over all tokens; to [n] is `width` apart. First
    // come the zeros of all tokens, so that each row sums in one order, whatever tokens the others see.
    void mix(const float* p, int n, float* to, int width, Fetcher& next) {
        weigh(p, n);
        for (int m = 0; m < n; m++)
            for (int d = 0; d < width; d += LANES) store(to + m * width + d, load<vf>(to + m * width + d) + added_[m]);
        for (int i = 0; i < count_; i++) {
            next.some();
            const Piece& piece = pieces_[i];
            const Codes from = Codes::of(piece.record, piece.format, kv_, head_);
            with_value_codes(piece.format, [&](auto codes) {
                query_groups(n, [&](auto m, int at) {
                    mix_values<decltype(codes), m>(from.values + int64_t(piece.slot) * from.value_bytes,
                                                   from.value_bytes, piece.count, weights_ + at * SPLIT + piece.at,
                                                   to + int64_t(at) * width, width, kv_.dim);
                });
            });
        }
    }

   private:
    static constexpr int MOST = SPLIT / LANES + 1;  // pieces: a page of at least 16 tokens each, one of them cut in two
    static constexpr float NO_SUMS[MR] = {};
    static float number(uint16_t bf16) { return from_bf16(bf16); }
    static float number(float x) { return x; }
    // Of 16 keys each, transposed: pieces that share 16 tokens have a tile each.
    static int tiles(const Piece& p) { return (p.at + p.count - 1) / LANES - p.at / LANES + 1; }
    int tile_words() const { return LANES * kv_.dim / 4; }
    uint32_t* words(int piece, int t) {
        return words_ + size_t(tiles_[piece] + t / LANES - pieces_[piece].at / LANES) * tile_words();
    }
    static void pair(const uint16_t* scales, vf& scale, vf& zero) {
        const vu both = load<vu>(scales);
        scale = from_f16(both & 0xffffu);
        zero = from_f16(both >> 16) + scale * NIBBLE_CENTRE;
    }
    static vi lanes(const Piece& p, int t) {
        const vi lane = vi{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} + t;
        return (lane >= p.at) & (lane < p.at + p.count);
    }
    static void place(const Piece& p, float* to, int t, vf v) {
        store(to + t, lanes(p, t) ? v : load<vf>(to + t));
    }

    void score_tile(int piece, int t, const float* queries, const float* sums, int n, float* scores) {
        alignas(64) float tile[MQ * LANES];
        const Piece& p = pieces_[piece];
        const vf scale = load<vf>(key_scale_ + t), zero = load<vf>(key_zero_ + t);
        with_key_codes(p.format, [&](auto codes) {
            query_groups(n, [&](auto m, int at) {
                score_keys<decltype(codes), m>(words(piece, t), has_key_nibbles(p.format) ? kv_.dim / 8 : kv_.dim / 4,
                                               queries + at * kv_.dim, kv_.dim, tile);
                for (int i = 0; i < m; i++)
                    place(p, scores + (at + i) * SPLIT, t,
                          load<vf>(tile + i * LANES) * scale + zero * sums[at + i]);
            });
        });
    }

    void turn(int n) {
        std::memcpy(turned_, plain_, size_t(n) * kv_.dim * sizeof(float));
        for (int m = 0; m < n; m++) {
            float* x = turned_ + m * kv_.dim;
            hadamard(x, kv_.dim);
            turned_sum_[m] = 0.0f;
            for (int d = 0; d < kv_.dim; d++) turned_sum_[m] += x[d];
        }
    }
    // Queries times a page's scales by channel, and their products with its zeros.
    void scale(const uint16_t* scales, int n) {
        const int dim = kv_.dim;
        vf sums[MR] = {};
        int d = 0;
        for (; d + LANES <= dim; d += LANES) {
            const vf s = load_f16(scales + d), z = load_f16(scales + dim + d) + s * NIBBLE_CENTRE;
            for (int m = 0; m < n; m++) {
                const vf x = load<vf>(plain_ + m * dim + d);
                store(scaled_ + m * dim + d, x * s);
                sums[m] = x * z + sums[m];
            }
        }
        for (int m = 0; m < n; m++) scaled_sum_[m] = sum(sums[m]);
        for (; d < dim; d++)
            for (int m = 0; m < n; m++) {
                const float x = plain_[m * dim + d], s = from_f16(scales[d]);
                scaled_[m * dim + d] = x * s;
                scaled_sum_[m] += x * (from_f16(scales[dim + d]) + s * NIBBLE_CENTRE);
            }
    }
    // Probabilities times values' scales, and their sums with values' zeros.
    void weigh(const float* p, int n) {
        const int end = pieces_[count_ - 1].at + pieces_[count_ - 1].count;
        for (int m = 0; m < n; m++) {
            vf sums = vf{};
            for (int t = 0; t < end; t += LANES) {
                const vf x = load<vf>(p + m * SPLIT + t);
                store(weights_ + m * SPLIT + t, x * load<vf>(value_scale_ + t));
                sums = x * load<vf>(value_zero_ + t) + sums;
            }
            added_[m] = sum(sums);
        }
    }

    const KVLayout& kv_;
    const int head_;
    uint32_t* words_;
    float *key_scale_, *key_zero_, *value_scale_, *value_zero_;          // [SPLIT]
    float *plain_, *turned_, *scaled_, *turned_sum_, *scaled_sum_;       // queries [MR, dim] and their sums
    float *weights_, *added_;                                            // [MR, SPLIT], [MR]
    Piece pieces_[MOST];
    int tiles_[MOST];  // the first of each piece
    int count_ = 0;
};

}  // namespace kvt
