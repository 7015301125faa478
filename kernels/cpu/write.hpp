// Writes keys and values into pages in their format, and pages again in another. Codes and scales are those of
// kernels/reference.py, bit for bit: divisions stay divisions, and halves round to even.
#pragma once
#include "quant.hpp"

namespace kvt {

constexpr float SMALLEST_RANGE = 1e-4f, LARGEST_HALF = 65504.0f;

inline float round_even(float x) { return x + 12582912.0f - 12582912.0f; }  // 1.5 * 2^23; for |x| < 2^22
inline float min_of(const float* x, int n) { return *std::min_element(x, x + n); }
inline float max_of(const float* x, int n) { return *std::max_element(x, x + n); }

// The e4m3fn code nearest to |x| <= 448.
inline uint8_t to_e4m3(float x) {
    uint32_t u;
    std::memcpy(&u, &x, 4);
    const float size = std::fabs(x);
    const uint32_t subnormal = uint32_t(round_even(size * 512.0f));
    const uint32_t bits = u & 0x7fffffffu, normal = ((bits + 0x7ffffu + (bits >> 20 & 1u)) >> 20) - (120u << 3);
    return uint8_t((u >> 24 & 0x80u) | (size < 0x1p-6f ? subnormal : normal));
}

// Codes of n numbers as FP8 or biased INT8; returns their scale.
inline uint16_t encode_bytes(const float* x, int n, bool fp8, uint8_t* codes) {
    const float largest = fp8 ? 448.0f : 127.0f;
    const float reach = std::max({max_of(x, n), -min_of(x, n), SMALLEST_RANGE});
    const uint16_t half = to_f16(std::min(reach / largest, LARGEST_HALF));
    const float scale = from_f16(half);
    for (int i = 0; i < n; i++) {
        const float y = std::clamp(x[i] / scale, -largest, largest);
        codes[i] = fp8 ? to_e4m3(y) : uint8_t(int(round_even(y)) + 128);
    }
    return half;
}

struct Asymmetric {
    uint16_t scale, zero;  // halves

    static Asymmetric of(float low, float high) {
        return {to_f16(std::min(std::max(high - low, SMALLEST_RANGE) / 15.0f, LARGEST_HALF)),
                to_f16(std::clamp(low, -LARGEST_HALF, LARGEST_HALF))};
    }
    uint8_t code(float x) const {
        return uint8_t(round_even(std::clamp((x - from_f16(zero)) / from_f16(scale), 0.0f, 15.0f)));
    }
};

// n numbers as n / 2 bytes of nibbles and a pair of scale and zero.
inline void encode_nibbles(const float* x, int n, uint8_t* codes, uint16_t* pair) {
    const Asymmetric a = Asymmetric::of(min_of(x, n), max_of(x, n));
    for (int i = 0; i < n / 2; i++) codes[i] = a.code(x[i]) | a.code(x[i + n / 2]) << 4;
    pair[0] = a.scale;
    pair[1] = a.zero;
}

// The key and the value [dim] of one head of the token at to.slot, in the page's format, which is token-wise. `key` is
// changed.
template <class F>
void write_token(const Piece& to, const KVLayout& kv, int head, float* key, const float* value) {
    using Stored = typename F::Stored;
    const int dim = kv.dim, slot = to.slot;
    if (to.format == RAW) {
        Stored* k = reinterpret_cast<Stored*>(to.record) + (int64_t(head) * kv.page_tokens + slot) * dim;
        convert(key, k, dim, F::write);
        convert(value, k + kv.records[RAW].v / sizeof(Stored), dim, F::write);
        return;
    }
    const Codes c = Codes::of(to.record, to.format, kv, head);
    uint8_t *keys = c.keys + int64_t(slot) * c.key_bytes, *values = c.values + int64_t(slot) * c.value_bytes;
    if (to.format == INT4) {
        hadamard(key, dim);
        encode_nibbles(key, dim, keys, c.key_scales + 2 * slot);
    } else {
        c.key_scales[slot] = encode_bytes(key, dim, to.format == FP8, keys);
    }
    if (has_value_nibbles(to.format)) encode_nibbles(value, dim, values, c.value_scales + 2 * slot);
    else c.value_scales[slot] = encode_bytes(value, dim, to.format == FP8, values);
}

// Numbers of codes, for whole pages.
inline float decode_byte(uint8_t code, bool fp8) {
    return fp8 ? e4m3(vu{} + (uint32_t(code) << 24))[0] : float(code) - 128.0f;
}
inline float decode_nibble(const uint8_t* codes, int i, int n) {
    return float(i < n / 2 ? codes[i] & 15 : codes[i - n / 2] >> 4);
}
inline void decode_nibbles(const uint8_t* codes, int n, const uint16_t* pair, float* x) {
    const float scale = from_f16(pair[0]), zero = from_f16(pair[1]);
    for (int i = 0; i < n; i++) x[i] = decode_nibble(codes, i, n) * scale + zero;
}
inline void decode_bytes(const uint8_t* codes, int n, bool fp8, uint16_t half, float* x) {
    const float scale = from_f16(half);
    for (int i = 0; i < n; i++) x[i] = decode_byte(codes[i], fp8) * scale;
}

// Keys and values [page_tokens, dim] of one head of a record.
template <class F>
void read_head(uint8_t* record, int format, const KVLayout& kv, int head, float* keys, float* values) {
    using Stored = typename F::Stored;
    const int dim = kv.dim;
    if (format == RAW) {
        const int64_t run = int64_t(kv.page_tokens) * dim;
        const Stored* k = reinterpret_cast<const Stored*>(record) + head * run;
        const Stored* v = k + kv.records[RAW].v / sizeof(Stored);
        for (int64_t i = 0; i < run; i++) keys[i] = F::read(k[i]), values[i] = F::read(v[i]);
        return;
    }
    const Codes c = Codes::of(record, format, kv, head);
    for (int t = 0; t < kv.page_tokens; t++, keys += dim, values += dim) {
        const uint8_t *k = c.keys + t * c.key_bytes, *v = c.values + t * c.value_bytes;
        if (format == INT4C) {
            for (int d = 0; d < dim; d++)
                keys[d] = decode_nibble(k, d, dim) * from_f16(c.key_scales[d]) + from_f16(c.key_scales[dim + d]);
        } else if (format == INT4) {
            decode_nibbles(k, dim, c.key_scales + 2 * t, keys);
            hadamard(keys, dim);  // its own inverse
        } else {
            decode_bytes(k, dim, format == FP8, c.key_scales[t], keys);
        }
        if (has_value_nibbles(format)) decode_nibbles(v, dim, c.value_scales + 2 * t, values);
        else decode_bytes(v, dim, format == FP8, c.value_scales[t], values);
    }
}

// The other way round. `keys` are changed.
template <class F>
void write_head(uint8_t* record, int format, const KVLayout& kv, int head, float* keys, const float* values) {
    const int dim = kv.dim, tokens = kv.page_tokens;
    if (format != INT4C) {
        for (int t = 0; t < tokens; t++)
            write_token<F>({record, format, 0, 1, t}, kv, head, keys + t * dim, values + t * dim);
        return;
    }
    const Codes c = Codes::of(record, format, kv, head);
    std::vector<Asymmetric> channels(dim);
    for (int d = 0; d < dim; d++) {
        float low = keys[d], high = keys[d];
        for (int t = 1; t < tokens; t++) {
            low = std::min(low, keys[t * dim + d]);
            high = std::max(high, keys[t * dim + d]);
        }
        channels[d] = Asymmetric::of(low, high);
        c.key_scales[d] = channels[d].scale;
        c.key_scales[dim + d] = channels[d].zero;
    }
    for (int t = 0; t < tokens; t++) {
        const float* k = keys + t * dim;
        for (int i = 0; i < dim / 2; i++)
            c.keys[t * c.key_bytes + i] = channels[i].code(k[i]) | channels[i + dim / 2].code(k[i + dim / 2]) << 4;
        encode_nibbles(values + t * dim, dim, c.values + t * c.value_bytes, c.value_scales + 2 * t);
    }
}

// The rope key [rope_dim] and the latent [dim] of the token at p.slot.
template <class F>
typename F::Stored* rope_key(const Piece& p, const KVLayout& kv) {
    return reinterpret_cast<typename F::Stored*>(p.record + kv.records[p.format].v) + int64_t(p.slot) * kv.rope_dim;
}
template <class F>
void write_latent(const Piece& to, const KVLayout& kv, const float* latent) {
    if (to.format == RAW) {
        auto* raw = reinterpret_cast<typename F::Stored*>(to.record) + int64_t(to.slot) * kv.dim;
        return convert(latent, raw, kv.dim, F::write);
    }
    auto* scales = reinterpret_cast<uint16_t*>(to.record + kv.records[FP8].k_scales);
    scales[to.slot] = encode_bytes(latent, kv.dim, true, to.record + int64_t(to.slot) * kv.dim);
}
template <class F>
void read_latent(const Piece& from, const KVLayout& kv, float* latent) {
    if (from.format == RAW) {
        const auto* raw = reinterpret_cast<const typename F::Stored*>(from.record) + int64_t(from.slot) * kv.dim;
        for (int d = 0; d < kv.dim; d++) latent[d] = F::read(raw[d]);
        return;
    }
    const auto* scales = reinterpret_cast<const uint16_t*>(from.record + kv.records[FP8].k_scales);
    decode_bytes(from.record + int64_t(from.slot) * kv.dim, kv.dim, true, scales[from.slot], latent);
}
template <class F>
void convert_latents(uint8_t* from, int from_format, uint8_t* to, int to_format, const KVLayout& kv, float* latent) {
    for (int t = 0; t < kv.page_tokens; t++) {
        const Piece source{from, from_format, 0, 1, t}, target{to, to_format, 0, 1, t};
        read_latent<F>(source, kv, latent);
        write_latent<F>(target, kv, latent);
        std::memcpy(rope_key<F>(target, kv), rope_key<F>(source, kv), kv.rope_dim * sizeof(typename F::Stored));
    }
}

}  // namespace kvt
