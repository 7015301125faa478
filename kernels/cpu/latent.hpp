// Attention over keys that are rows of numbers: absorbed latent attention (DeepSeek-V2, arXiv 2405.04434), where a key
// is a latent and a rope key and the latent is its own value, and attention over keys and values outside pages.
#pragma once
#include "quant.hpp"
#include "softmax.hpp"

namespace kvt {

// The keys of a split, in the type they are multiplied in.
template <class Elem>
struct SplitRows {
    const Elem *keys[SPLIT], *ropes[SPLIT], *values[SPLIT];
    float scales[SPLIT];         // of a key and its value, but not of its rope key
    bool is_raw[SPLIT / LANES];  // whether scales are 1
    int count;
};

// What both kinds have in common. Queries are [rows, heads, group, dim + rope_dim].
template <class F>
struct RowAttention {
    using Act = typename F::Weights::Act;
    using Keys = typename F::Keys;
    using Elem = typename Keys::Elem;
    static_assert(std::is_same_v<Act, Elem> && std::is_same_v<Act, typename Keys::Act>);

    int heads_, group, dim, rope_dim, value_dim;
    float scale;
    const Act* q;
    Act* out;
    float* lse;

    int heads() const { return heads_; }
    int width() const { return round_up(value_dim, NR); }

    // seen(row of the block) tells which of the keys a row attends.
    template <class S>
    void attend(const Block& b, const SplitRows<Elem>& rows, const S& seen, const Partial& to, char* at,
                Fetcher& next) const {
        const int queries = b.rows * group, keys = rows.count, padded = round_up(keys, LANES);
        const int steps = (keys + Keys::STEP - 1) / Keys::STEP, row = dim + rope_dim;
        Elem* kp = take<Elem>(at, size_t(SPLIT) * dim);
        Elem* rp = take<Elem>(at, size_t(SPLIT) * rope_dim);
        Elem* vp = take<Elem>(at, size_t(SPLIT) * width());
        Act* qs = take<Act>(at, size_t(queries) * row);
        float* scores = take<float>(at, MR * SPLIT);
        float* rope_scores = take<float>(at, MR * SPLIT);
        float* exact = take<float>(at, MR * SPLIT);
        Act* probabilities = take<Act>(at, MR * SPLIT);
        float* scales = take<float>(at, SPLIT);
        std::copy_n(rows.scales, keys, scales);
        std::fill(scales + keys, scales + padded, 0.0f);

        pack_keys(rows.keys, keys, dim, kp, Keys(), next);
        if (rope_dim) pack_keys(rows.ropes, keys, rope_dim, rp, Keys(), next);
        if (value_dim % NR) std::memset(vp, 0, size_t(SPLIT) * width() * sizeof(Elem));
        pack_values(rows.values, keys, value_dim, vp, Keys(), next);
        const int64_t run = int64_t(group) * row;
        for (int r = 0; r < b.rows; r++)
            std::memcpy(qs + r * run, q + ((int64_t(b.row) + r) * heads_ + b.head) * run, run * sizeof(Act));

        row_blocks(queries, [&](int m, int n) {
            const Act* from = qs + int64_t(m) * row;
            for (int t = 0; t < keys; t += NR) {
                next.some();
                micro_rows<Keys>(n, from, row, kp + int64_t(t) * dim, dim / Keys::STEP, scores + t, SPLIT);
                if (rope_dim)
                    micro_rows<Keys>(n, from + dim, row, rp + int64_t(t) * rope_dim, rope_dim / Keys::STEP,
                                     rope_scores + t, SPLIT);
            }
            for (int i = 0; i < n; i++) {
                float *s = scores + i * SPLIT, *x = exact + i * SPLIT;
                Act* p = probabilities + i * SPLIT;
                for (int t = 0; rope_dim && t < padded; t += LANES)
                    store(s + t, load<vf>(s + t) * load<vf>(scales + t) + load<vf>(rope_scores + i * SPLIT + t));
                soften(s, padded, seen((m + i) / group), scale, 0.0f, rows.is_raw, p, x, to.peak[m + i],
                       to.total[m + i]);
                for (int t = 0; t < padded; t += LANES)
                    if (!rows.is_raw[t / LANES]) store_rounded(p + t, load<vf>(x + t) * load<vf>(scales + t));
            }
            for (int d = 0; d < width(); d += NR) {
                next.some();
                micro_rows<Keys>(n, probabilities, SPLIT, vp + int64_t(d) * SPLIT, steps,
                                 to.mixed + int64_t(m) * width() + d, width());
            }
        });
    }

    size_t attend_bytes(int queries) const {
        return lines(size_t(SPLIT) * dim * sizeof(Elem)) + lines(size_t(SPLIT) * rope_dim * sizeof(Elem)) +
               lines(size_t(SPLIT) * width() * sizeof(Elem)) + lines(size_t(queries) * (dim + rope_dim) * sizeof(Act)) +
               3 * lines(MR * SPLIT * sizeof(float)) + lines(MR * SPLIT * sizeof(Act)) + lines(SPLIT * sizeof(float));
    }

    // A row that attends nothing keeps what `out` and `lse` were set to.
    void finish(const Partial& done, const Block& b) const {
        for (int i = 0; i < b.rows * group; i++) {
            const int64_t at = (int64_t(b.row) + i / group) * heads_ * group + b.head * group + i % group;
            if (done.total[i] == 0.0f) continue;
            const float inverse = 1.0f / done.total[i];
            convert(done.mixed + int64_t(i) * done.width, out + at * value_dim, value_dim,
                    [&](Act* p, vf v) { F::act(p, v * inverse); });
            lse[at] = done.peak[i] + std::log(done.total[i]);
        }
    }
};

// Queries of any heads over pages of latents.
template <class F>
struct LatentAttention : RowAttention<F> {
    using typename RowAttention<F>::Elem;
    using Stored = typename F::Stored;

    Pages pages;
    Plan plan;
    int layer;

    Reach reach(int sequence, int position, int rows) const { return Reach::of(plan, sequence, position, rows); }

    const Stored* rope(const Piece& p) const {
        return reinterpret_cast<const Stored*>(p.record + pages.layout.records[p.format].v) +
               int64_t(p.slot) * pages.layout.rope_dim;
    }
    int64_t latent_bytes(int format) const { return pages.layout.dim * int64_t(format == RAW ? sizeof(Stored) : 1); }
    const uint8_t* latent(const Piece& p) const { return p.record + p.slot * latent_bytes(p.format); }
    const uint16_t* scales(const Piece& p) const {
        return reinterpret_cast<const uint16_t*>(p.record + pages.layout.records[p.format].k_scales) + p.slot;
    }

    void fetch(Fetcher& next, const Block& b, int split) const {
        pages.each_piece(plan, b.sequence, layer, split, b.reach.wanted(split), [&](const Piece& p) {
            next.add(latent(p), p.count * latent_bytes(p.format));
            next.add(rope(p), int64_t(p.count) * pages.layout.rope_dim * sizeof(Stored));
        });
    }

    size_t scratch_bytes(int queries) const {
        return this->attend_bytes(queries) + 2 * lines(size_t(SPLIT + 1) * row_room() * sizeof(Elem));
    }

    void split(const Block& b, int split, const Partial& to, char* at, Fetcher& next) const {
        const Wanted wanted = b.reach.wanted(split);
        SplitRows<Elem> rows;
        rows.count = wanted.end;
        std::fill(rows.is_raw, rows.is_raw + SPLIT / LANES, false);
        Elem* latents = take<Elem>(at, size_t(SPLIT + 1) * row_room());
        Elem* ropes = take<Elem>(at, size_t(SPLIT + 1) * row_room());
        const Elem* zeros = latents + size_t(SPLIT) * row_room();
        if (!wanted.all()) {
            std::fill_n(latents + size_t(SPLIT) * row_room(), row_room(), Elem{});
            for (const Elem** x : {rows.keys, rows.ropes, rows.values}) std::fill_n(x, wanted.end, zeros);
            std::fill_n(rows.scales, wanted.end, 1.0f);
        }
        pages.each_piece(plan, b.sequence, layer, split, wanted, [&](const Piece& p) {
            if (p.format == RAW)
                std::fill(rows.is_raw + p.at / LANES, rows.is_raw + (p.at + p.count + LANES - 1) / LANES, true);
            for (int i = 0; i < p.count; i++) {
                const int t = p.at + i;
                const uint8_t* from = latent(p) + i * latent_bytes(p.format);
                rows.keys[t] = p.format == RAW ? numbers(reinterpret_cast<const Stored*>(from), this->dim,
                                                         latents + size_t(t) * row_room())
                                               : decoded(from, latents + size_t(t) * row_room());
                rows.ropes[t] = numbers(rope(p) + i * this->rope_dim, this->rope_dim, ropes + size_t(t) * row_room());
                rows.values[t] = rows.keys[t];
                rows.scales[t] = p.format == RAW ? 1.0f : from_f16(scales(p)[i]);
            }
        });
        const auto seen = [&](int row) {
            return Seen::of(plan, b.sequence, b.position + row, split * SPLIT, wanted.end);
        };
        this->attend(b, rows, seen, to, at, next);
    }

   private:
    int row_room() const { return round_up(std::max(this->dim, this->rope_dim), LANES); }
    // A stored row where it is, or converted into `room`.
    static const Elem* numbers(const Elem* stored, int, Elem*) { return stored; }
    template <class S>
    static const Elem* numbers(const S* stored, int n, Elem* room) {
        for (int i = 0; i < n; i++) room[i] = F::act_of(stored[i]);
        return room;
    }
    const Elem* decoded(const uint8_t* codes, Elem* room) const {
        for (int i = 0; i < this->dim; i += LANES) F::act(room + i, e4m3(load_bytes(codes + i, this->dim - i) << 24));
        return room;
    }
};

// Row r of one "sequence" attends the keys [keys, heads, dim] before offset + r + 1.
template <class F>
struct DenseAttention : RowAttention<F> {
    using typename RowAttention<F>::Elem;

    const Elem *k, *v;
    int keys;
    int64_t offset;

    int end(int64_t row) const { return int(std::clamp<int64_t>(offset + row + 1, 0, keys)); }
    Reach reach(int, int position, int rows) const { return {0, 0, end(int64_t(position) + rows - 1)}; }
    size_t scratch_bytes(int queries) const { return this->attend_bytes(queries); }
    void fetch(Fetcher&, const Block&, int) const {}  // rows of other heads lie between a head's: nothing to run along

    void split(const Block& b, int split, const Partial& to, char* at, Fetcher& next) const {
        SplitRows<Elem> rows;
        rows.count = b.reach.wanted(split).end;
        std::fill(rows.is_raw, rows.is_raw + SPLIT / LANES, true);
        std::fill_n(rows.scales, rows.count, 1.0f);
        for (int t = 0; t < rows.count; t++) {
            const int64_t key = (int64_t(split) * SPLIT + t) * this->heads_ + b.head;
            rows.keys[t] = k + key * this->dim;
            rows.values[t] = v + key * this->value_dim;
        }
        const auto seen = [&](int row) {
            return Seen{0, 0, std::clamp(end(int64_t(b.position) + row) - split * SPLIT, 0, rows.count)};
        };
        this->attend(b, rows, seen, to, at, next);
    }
};

}  // namespace kvt
