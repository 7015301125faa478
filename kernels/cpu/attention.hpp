// Causal attention over pages of keys and values in any formats. Raw keys go through panels in the layout's dtype,
// quantized ones through quant.hpp; which way a key goes depends on its page alone.
#pragma once
#include "quant.hpp"
#include "softmax.hpp"

namespace kvt {

// Queries [rows, query heads, dim] and where their results go, one row after another.
template <class F>
struct Attention {
    using Act = typename F::Weights::Act;
    using Stored = typename F::Stored;
    using Keys = typename F::Keys;
    using KeyAct = typename Keys::Act;
    using Elem = typename Keys::Elem;

    Pages pages;
    Plan plan;
    int layer, group;
    float scale, softcap;
    const Act *q, *q_sinks;    // q_sinks: what sink keys see of rows with a window; or null
    const float* sink_logits;  // [query heads] or null
    Act* out;
    float* lse;  // [rows, query heads] or null

    int heads() const { return pages.layout.heads; }
    int width() const { return round_up(pages.layout.dim, NR); }
    int query_heads() const { return heads() * group; }
    Reach reach(int sequence, int position, int rows) const { return Reach::of(plan, sequence, position, rows); }

    const Stored* key(const Piece& p, int head) const {
        const KVLayout& kv = pages.layout;
        return reinterpret_cast<const Stored*>(p.record) + (int64_t(head) * kv.page_tokens + p.slot) * kv.dim;
    }
    const Stored* value(const Piece& p, int head) const {
        return key(p, head) + pages.layout.records[RAW].v / sizeof(Stored);
    }

    void fetch(Fetcher& next, const Block& b, int split) const {
        const KVLayout& kv = pages.layout;
        pages.each_piece(plan, b.sequence, layer, split, b.reach.wanted(split), [&](const Piece& p) {
            if (p.format == RAW) {
                next.add(key(p, b.head), int64_t(p.count) * kv.dim * sizeof(Stored));
                next.add(value(p, b.head), int64_t(p.count) * kv.dim * sizeof(Stored));
                return;
            }
            const Codes c = Codes::of(p.record, p.format, kv, b.head);
            const int key_halves = has_key_nibbles(p.format) + 1, value_halves = has_value_nibbles(p.format) + 1;
            next.add(c.keys + int64_t(p.slot) * c.key_bytes, int64_t(p.count) * c.key_bytes);
            next.add(c.values + int64_t(p.slot) * c.value_bytes, int64_t(p.count) * c.value_bytes);
            if (p.format == INT4C) next.add(c.key_scales, 4 * int64_t(kv.dim));
            else next.add(c.key_scales + p.slot * key_halves, 2 * p.count * key_halves);
            next.add(c.value_scales + p.slot * value_halves, 2 * p.count * value_halves);
        });
    }

    // A split's raw keys and values; zeros in the place of others. `at`: whether they are raw, by 16 keys.
    struct RawRows {
        const Stored *keys[SPLIT], *values[SPLIT];
        bool any = false, at[SPLIT / LANES] = {};
    };
    void find(const Block& b, int split, Wanted wanted, Stored* zeros, RawRows& raw, QuantSplit& quant,
              Fetcher& next) const {
        const int dim = pages.layout.dim;
        if (!wanted.all() || !pages.all_raw()) {
            std::memset(zeros, 0, dim * sizeof(Stored));
            std::fill(raw.keys, raw.keys + wanted.end, zeros);
            std::fill(raw.values, raw.values + wanted.end, zeros);
        }
        pages.each_piece(plan, b.sequence, layer, split, wanted, [&](const Piece& p) {
            if (p.format != RAW) return quant.add(p, next);
            raw.any = true;
            std::fill(raw.at + p.at / LANES, raw.at + (p.at + p.count + LANES - 1) / LANES, true);
            for (int i = 0; i < p.count; i++) {
                raw.keys[p.at + i] = key(p, b.head) + i * dim;
                raw.values[p.at + i] = value(p, b.head) + i * dim;
            }
        });
    }

    // Its softmax sums: scores, probabilities, sums of values, for a few queries after another.
    void split(const Block& b, int split, const Partial& to, char* at, Fetcher& next) const {
        const int dim = pages.layout.dim, queries = b.rows * group, first = split * SPLIT;
        const Wanted wanted = b.reach.wanted(split);
        const int keys = wanted.end, padded = round_up(keys, LANES), steps = (keys + Keys::STEP - 1) / Keys::STEP;
        const bool sinks = q_sinks && plan.windows[b.sequence] && plan.sinks[b.sequence] > first;
        Elem* kp = take<Elem>(at, size_t(SPLIT) * dim);
        Elem* vp = take<Elem>(at, size_t(SPLIT) * width());
        Stored* zeros = take<Stored>(at, dim);
        KeyAct* qs = take<KeyAct>(at, size_t(queries) * dim);
        KeyAct* qs_sinks = take<KeyAct>(at, size_t(queries) * dim);
        float* scores = take<float>(at, MR * SPLIT);
        float* sink_scores = take<float>(at, MR * SPLIT);
        KeyAct* probabilities = take<KeyAct>(at, MR * SPLIT);
        float* exact = take<float>(at, MR * SPLIT);
        QuantSplit quant(pages.layout, b.head, at);

        RawRows raw;
        find(b, split, wanted, zeros, raw, quant, next);
        if (raw.any) {
            pack_keys(raw.keys, keys, dim, kp, Keys(), next);
            if (dim % NR) std::memset(vp, 0, size_t(SPLIT) * width() * sizeof(Elem));
            pack_values(raw.values, keys, dim, vp, Keys(), next);
        }
        gather(q, b, qs);
        if (sinks) gather(q_sinks, b, qs_sinks);

        const auto score = [&](const KeyAct* from, int n, int limit, float* to) {
            for (int t = 0; raw.any && t < limit; t += NR) {
                next.some();
                micro_rows<Keys>(n, from, dim, kp + int64_t(t) * dim, dim / Keys::STEP, to + t, SPLIT);
            }
            if (!quant.empty()) quant.score(from, n, limit, to, next);
        };
        row_blocks(queries, [&](int m, int n) {
            score(qs + int64_t(m) * dim, n, keys, scores);
            if (sinks) {
                const int count = std::min(keys, plan.sinks[b.sequence] - first);
                score(qs_sinks + int64_t(m) * dim, n, count, sink_scores);
                for (int i = 0; i < n; i++)
                    std::memcpy(scores + i * SPLIT, sink_scores + i * SPLIT, count * sizeof(float));
            }
            for (int i = 0; i < n; i++)
                soften(scores + i * SPLIT, padded,
                       Seen::of(plan, b.sequence, b.position + (m + i) / group, first, keys), scale, softcap, raw.at,
                       probabilities + i * SPLIT, exact + i * SPLIT, to.peak[m + i], to.total[m + i]);
            float* mixed = to.mixed + int64_t(m) * width();
            for (int d = 0; raw.any && d < width(); d += NR) {
                next.some();
                micro_rows<Keys>(n, probabilities, SPLIT, vp + int64_t(d) * SPLIT, steps, mixed + d, width());
            }
            if (!raw.any) std::memset(mixed, 0, size_t(n) * width() * sizeof(float));
            if (!quant.empty()) quant.mix(exact, n, mixed, width(), next);
        });
    }

    // A block's queries of one KV head, side by side.
    void gather(const Act* from, const Block& b, KeyAct* to) const {
        const int64_t run = int64_t(group) * pages.layout.dim;
        for (int r = 0; r < b.rows; r++)
            std::memcpy(to + r * run, from + ((int64_t(b.row) + r) * heads() + b.head) * run, run * sizeof(Act));
    }

    size_t scratch_bytes(int queries) const {
        const size_t dim = pages.layout.dim;
        return lines(SPLIT * dim * sizeof(Elem)) + lines(SPLIT * width() * sizeof(Elem)) + lines(dim * sizeof(Stored)) +
               2 * lines(queries * dim * sizeof(KeyAct)) + 2 * lines(MR * SPLIT * sizeof(float)) +
               lines(MR * SPLIT * sizeof(KeyAct)) + lines(MR * SPLIT * sizeof(float)) + QuantSplit::bytes(pages.layout);
    }

    void finish(const Partial& done, const Block& b) const {
        const int dim = pages.layout.dim;
        for (int r = 0; r < b.rows; r++)
            for (int g = 0; g < group; g++) {
                const int i = r * group + g, head = b.head * group + g;
                const int64_t at = (int64_t(b.row) + r) * query_heads() + head;
                float peak = done.peak[i], total = done.total[i], weight = 1.0f;
                if (sink_logits) {
                    const float high = std::max(peak, sink_logits[head]);
                    weight = std::exp(peak - high);
                    total = total * weight + std::exp(sink_logits[head] - high);
                    peak = high;
                }
                const float inverse = weight / total;
                convert(done.mixed + int64_t(i) * done.width, out + at * dim, dim,
                        [&](Act* p, vf v) { F::act(p, v * inverse); });
                if (lse) lse[at] = peak + std::log(total);
            }
    }
};

}  // namespace kvt
