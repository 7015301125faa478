// Causal attention over pages. Keys are taken in splits of 128 at fixed positions; each split is a softmax of its own,
// and splits are merged in order, so that a row's bits depend on its query and its keys alone: not on the chunk it came
// in, nor on which thread took which split.
#pragma once
#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

#include "gemm.hpp"
#include "pool.hpp"

namespace kvt {

constexpr int SPLIT = 128;         // keys of one softmax
constexpr int BLOCK_QUERIES = 96;  // query vectors (rows times heads of a group) of one task, about
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

struct KVLayout {
    int heads, dim, page_tokens;
    int64_t frame_bytes, record_bytes;
};

// The sequences of a step: see kernels/layout.py.
struct Plan {
    int sequences;
    const int32_t *starts, *lengths, *contexts, *first_frames, *frames;
};

struct Pages {
    uint8_t* arena;
    KVLayout layout;

    // The first of a token's `dim` keys of one head; its values lie value_offset() further.
    template <class S>
    S* key(const Plan& plan, int sequence, int position, int layer, int head) const {
        const int64_t frame = plan.frames[plan.first_frames[sequence] + position / layout.page_tokens];
        uint8_t* record = arena + frame * layout.frame_bytes + layer * layout.record_bytes;
        return reinterpret_cast<S*>(record) +
               (int64_t(head) * layout.page_tokens + position % layout.page_tokens) * layout.dim;
    }
    int64_t value_offset() const { return int64_t(layout.heads) * layout.page_tokens * layout.dim; }
};

inline int round_up(int n, int to) { return (n + to - 1) / to * to; }

// One thread's memory; grows to the largest task seen.
class Scratch {
   public:
    // Room for `bytes`, 64-byte aligned; what it held before is lost.
    char* room(size_t bytes) {
        if (memory_.size() < bytes + 64) memory_.resize(bytes + 64);
        return reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(memory_.data()) + 63) / 64 * 64);
    }

   private:
    std::vector<char> memory_;
};

inline size_t lines(size_t bytes) { return (bytes + 63) / 64 * 64; }

template <class T>
inline T* take(char*& at, size_t count) {
    T* p = reinterpret_cast<T*>(at);
    at += lines(count * sizeof(T));
    return p;
}

// The keys and values of the split that comes next, brought towards the cache a few lines at a time while this one is
// computed: asked for all at once they would hold up the core, which has room for a few dozen misses.
class Fetcher {
   public:
    void add(const void* run, int bytes) {
        runs_[count_++] = {static_cast<const char*>(run), static_cast<const char*>(run) + bytes};
    }
    void some() {
        for (int n = 0; n < LINES && at_ < count_; n++) {
            Run& r = runs_[at_];
            __builtin_prefetch(r.next);
            r.next += 64;
            if (r.next >= r.end) at_++;
        }
    }

   private:
    static constexpr int LINES = 24;  // a split's 512 lines (2-byte numbers, 64 of them) in its 22 calls
    struct Run {
        const char *next, *end;
    };
    Run runs_[2 * SPLIT];
    int count_ = 0, at_ = 0;
};

// out[c * NR + r] = rows[r][c]: 16 rows of 32-bit words become 16 lanes.
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
            _mm512_storeu_si512(out + (c + i) * NR, _mm512_shuffle_i32x4(b[i], b[i + 8], 0x88));
            _mm512_storeu_si512(out + (c + i + 8) * NR, _mm512_shuffle_i32x4(b[i], b[i + 8], 0xdd));
        }
    }
#endif
    for (; c < words; c++)
        for (int i = 0; i < 16; i++) out[c * NR + i] = rows[i][c];
}

// Keys [n] of one split as panels of 32 keys along `dim`; keys behind n repeat key 0 (their scores are masked).
inline void pack_keys(const uint16_t* const* keys, int n, int dim, uint16_t* out, PanelBF16, Fetcher& next) {
    const uint32_t* rows[16];
    for (int at = 0; at < round_up(n, NR); at += 16) {
        for (int i = 0; i < 16; i++) rows[i] = reinterpret_cast<const uint32_t*>(keys[at + i < n ? at + i : 0]);
        next.some();
        uint32_t* panel = reinterpret_cast<uint32_t*>(out) + at / NR * (dim / 2 * NR) + at % NR;
        transpose_words(rows, dim / 2, panel);
    }
}
inline void pack_keys(const float* const* keys, int n, int dim, float* out, PanelF32, Fetcher& next) {
    const uint32_t* rows[16];
    for (int at = 0; at < round_up(n, NR); at += 16) {
        for (int i = 0; i < 16; i++) rows[i] = reinterpret_cast<const uint32_t*>(keys[at + i < n ? at + i : 0]);
        next.some();
        transpose_words(rows, dim, reinterpret_cast<uint32_t*>(out + at / NR * (dim * NR) + at % NR));
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

// Scores of one query become probabilities relative to their own maximum, summed as they are rounded. Lanes behind
// `valid` become 0.
inline float highest(const float* scores, int valid) {
    const vi lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    vf high = splat(-INFINITY);
    int i = 0;
    for (; i + LANES <= valid; i += LANES) high = max(high, load<vf>(scores + i));
    if (i < valid) high = max(high, lane < valid - i ? load<vf>(scores + i) : splat(-INFINITY));
    return top(high);
}
inline vf probabilities(const float* scores, float m, float scale, uint16_t* p, vi kept) {
    const vf e = exp2_rough((load<vf>(scores) - m) * (scale * 1.44269504f));
    store_bf16(p, kept ? e : vf{});
    return load_bf16(p);
}
inline vf probabilities(const float* scores, float m, float scale, float* p, vi kept) {
    const vf e = exp((load<vf>(scores) - m) * scale);
    store(p, kept ? e : vf{});
    return kept ? e : vf{};
}
template <class Act>
inline void soften(const float* scores, int valid, int padded, float scale, Act* p, float& peak, float& total) {
    const vi lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const float m = highest(scores, valid);
    vf sums = vf{};
    for (int i = 0; i < padded; i += LANES) sums += probabilities(scores + i, m, scale, p + i, lane < valid - i);
    peak = m * scale;
    total = sum(sums);
}

// Softmax sums of some queries over some keys, relative to each query's highest score.
struct Partial {
    float *peak, *total;  // [queries, rounded up to lanes]
    float* mixed;         // [queries, width]
    int width;
};

inline size_t partial_floats(int queries, int width) {
    return size_t(queries) * width + 2 * size_t(round_up(queries, LANES));
}
inline Partial partial(float* memory, int queries, int width) {
    float* peak = memory + int64_t(queries) * width;
    return {peak, peak + round_up(queries, LANES), memory, width};
}

// Adds `b` to `a`, whose queries have all had keys. One function, so that all callers round alike.
__attribute__((noinline)) inline void merge(const Partial& a, const Partial& b, int queries) {
    alignas(64) float wa[LANES], wb[LANES];
    for (int q = 0; q < queries; q += LANES) {
        const vf pa = load<vf>(a.peak + q), pb = load<vf>(b.peak + q), peak = max(pa, pb);
        const vf ea = exp(pa - peak), eb = exp(pb - peak);  // 0 for a query that had no keys in b
        store(wa, ea);
        store(wb, eb);
        store(a.peak + q, peak);
        store(a.total + q, load<vf>(b.total + q) * eb + load<vf>(a.total + q) * ea);
        for (int i = 0; i < std::min(LANES, queries - q); i++) {
            float* x = a.mixed + int64_t(q + i) * a.width;
            const float* y = b.mixed + int64_t(q + i) * b.width;
            for (int d = 0; d < a.width; d += LANES) store(x + d, load<vf>(y + d) * wb[i] + load<vf>(x + d) * wa[i]);
        }
    }
}

// Queries [rows, query heads, dim] and where their results go, one row after another.
template <class F>
struct Attention {
    using Act = typename F::Weights::Act;
    using Stored = typename F::Stored;
    using Keys = typename F::Keys;
    using Elem = typename Keys::Elem;

    Pages pages;
    Plan plan;
    int layer, group;
    float scale;
    const Act* q;
    Act* out;
    float* lse;  // [rows, query heads] or null

    int width() const { return round_up(pages.layout.dim, NR); }
    int query_heads() const { return pages.layout.heads * group; }
    int block_rows() const { return group >= BLOCK_QUERIES ? 1 : BLOCK_QUERIES / group; }

    // Calls g(token of the split, its key, tokens that lie behind it in its page) once per page.
    template <class G>
    void each_page(int sequence, int head, int first, int keys, const G& g) const {
        const int page_tokens = pages.layout.page_tokens;
        for (int t = 0; t < keys;) {
            const int n = std::min(keys - t, page_tokens - (first + t) % page_tokens);
            g(t, pages.key<const Stored>(plan, sequence, first + t, layer, head), n);
            t += n;
        }
    }

    void fetch(Fetcher& next, int sequence, int head, int split, int end) const {
        const int first = split * SPLIT, keys = std::min(SPLIT, end - first), dim = pages.layout.dim;
        each_page(sequence, head, first, keys, [&](int, const Stored* key, int n) {
            next.add(key, n * dim * int(sizeof(Stored)));
            next.add(key + pages.value_offset(), n * dim * int(sizeof(Stored)));
        });
    }

    // One split of `rows` rows of a sequence, the first at `position`, of one KV head.
    void split(int sequence, int head, int row, int rows, int position, int split, const Partial& to,
               char* at, Fetcher& next) const {
        const KVLayout& kv = pages.layout;
        const int dim = kv.dim, queries = rows * group;
        const int first = split * SPLIT, keys = std::min(SPLIT, position + rows - first);
        const int padded = round_up(keys, LANES), steps = (keys + Keys::STEP - 1) / Keys::STEP;
        Elem* kp = take<Elem>(at, size_t(SPLIT) * dim);
        Elem* vp = take<Elem>(at, size_t(SPLIT) * width());
        typename Keys::Act* qs = take<typename Keys::Act>(at, size_t(queries) * dim);
        float* scores = take<float>(at, size_t(queries) * SPLIT);
        typename Keys::Act* probabilities = take<typename Keys::Act>(at, size_t(queries) * SPLIT);

        const Stored *key_rows[SPLIT], *value_rows[SPLIT];
        each_page(sequence, head, first, keys, [&](int t, const Stored* key, int n) {
            for (int i = 0; i < n; i++) {
                key_rows[t + i] = key + i * dim;
                value_rows[t + i] = key + i * dim + pages.value_offset();
            }
        });
        pack_keys(key_rows, keys, dim, kp, Keys(), next);
        if (dim % NR) std::memset(vp, 0, size_t(SPLIT) * width() * sizeof(Elem));
        pack_values(value_rows, keys, dim, vp, Keys(), next);
        for (int r = 0; r < rows; r++)
            std::memcpy(qs + int64_t(r) * group * dim, q + ((int64_t(row) + r) * query_heads() + head * group) * dim,
                        size_t(group) * dim * sizeof(Act));

        row_blocks(queries, [&](int m, int n) {
            for (int t = 0; t < keys; t += NR) {
                next.some();
                micro_rows<Keys>(n, qs + int64_t(m) * dim, dim, kp + int64_t(t) * dim, dim / Keys::STEP,
                                 scores + int64_t(m) * SPLIT + t, SPLIT);
            }
            for (int i = m; i < m + n; i++) {
                const int valid = std::min(keys, position + i / group + 1 - first);
                if (valid > 0) {
                    soften(scores + int64_t(i) * SPLIT, valid, padded, scale, probabilities + int64_t(i) * SPLIT,
                           to.peak[i], to.total[i]);
                } else {
                    std::memset(probabilities + int64_t(i) * SPLIT, 0, padded * sizeof(Act));
                    to.peak[i] = -INFINITY;
                    to.total[i] = 0.0f;
                }
            }
            for (int d = 0; d < width(); d += NR) {
                next.some();
                micro_rows<Keys>(n, probabilities + int64_t(m) * SPLIT, SPLIT, vp + int64_t(d) * SPLIT, steps,
                                 to.mixed + int64_t(m) * width() + d, width());
            }
        });
    }

    size_t split_bytes(int queries) const {
        const size_t dim = pages.layout.dim;
        return lines(SPLIT * dim * sizeof(Elem)) + lines(SPLIT * width() * sizeof(Elem)) +
               lines(queries * dim * sizeof(Act)) + lines(size_t(queries) * SPLIT * sizeof(float)) +
               lines(size_t(queries) * SPLIT * sizeof(Act));
    }

    void finish(const Partial& done, int head, int row, int rows) const {
        const int dim = pages.layout.dim;
        for (int r = 0; r < rows; r++)
            for (int g = 0; g < group; g++) {
                const int i = r * group + g;
                const int64_t at = (int64_t(row) + r) * query_heads() + head * group + g;
                const float inverse = 1.0f / done.total[i];
                convert(done.mixed + int64_t(i) * done.width, out + at * dim, dim,
                        [&](Act* p, vf v) { F::act(p, v * inverse); });
                if (lse) lse[at] = done.peak[i] + std::log(done.total[i]);
            }
    }

    // All splits of up to block_rows() rows of a sequence.
    void block(Scratch& scratch, int sequence, int head, int row, int rows, int position) const {
        const int queries = rows * group;
        const size_t floats = partial_floats(queries, width());
        char* at = scratch.room(2 * lines(floats * sizeof(float)) + split_bytes(queries));
        const Partial done = partial(take<float>(at, floats), queries, width());
        const Partial next = partial(take<float>(at, floats), queries, width());
        const int splits = (position + rows + SPLIT - 1) / SPLIT;
        for (int s = 0; s < splits; s++) {
            Fetcher fetcher;
            if (s + 1 < splits) fetch(fetcher, sequence, head, s + 1, position + rows);
            split(sequence, head, row, rows, position, s, s ? next : done, at, fetcher);
            if (s) merge(done, next, queries);
        }
        finish(done, head, row, rows);
    }

    // Rows [from, to) of the step, all heads; rows of no sequence are left alone.
    void rows(Scratch& scratch, int from, int to) const {
        for (int s = 0; s < plan.sequences; s++) {
            const int first = std::max(from, plan.starts[s]), last = std::min(to, plan.starts[s] + plan.lengths[s]);
            for (int row = first; row < last; row += block_rows()) {
                const int n = std::min(block_rows(), last - row);
                const int position = plan.contexts[s] - plan.lengths[s] + row - plan.starts[s];
                for (int head = 0; head < pages.layout.heads; head++) block(scratch, s, head, row, n, position);
            }
        }
    }
};

// The attention of a step cut into tasks for several threads: made once per step, used by all layers.
struct Task {
    int sequence, head, row, rows, position, split;  // split < 0: all of them
    int block;
};
struct Block {
    int sequence, head, row, rows, position, splits;
    int64_t memory;  // first float of its partials
};
struct Tasks {
    std::vector<Task> tasks;
    std::vector<Block> blocks;
    std::vector<float> memory;
    std::unique_ptr<std::atomic<int>[]> left;
    size_t left_size = 0;

    void plan(const Plan& plan, int heads, int group, int block_rows, int width, int threads) {
        tasks.clear();
        blocks.clear();
        for (int s = 0; s < plan.sequences; s++)
            for (int done = 0; done < plan.lengths[s]; done += block_rows) {
                const int n = std::min(block_rows, plan.lengths[s] - done);
                const int position = plan.contexts[s] - plan.lengths[s] + done;
                for (int head = 0; head < heads; head++)
                    blocks.push_back(
                        {s, head, plan.starts[s] + done, n, position, (position + n + SPLIT - 1) / SPLIT, 0});
            }
        const bool cut = int(blocks.size()) < 8 * threads && threads > 1;
        int64_t floats = 0;
        for (int b = 0; b < int(blocks.size()); b++) {
            Block& k = blocks[b];
            if (!cut || k.splits == 1) {
                tasks.push_back({k.sequence, k.head, k.row, k.rows, k.position, -1, b});
                continue;
            }
            k.memory = floats;
            floats += k.splits * int64_t(partial_floats(k.rows * group, width));
            for (int i = 0; i < k.splits; i++) tasks.push_back({k.sequence, k.head, k.row, k.rows, k.position, i, b});
        }
        if (int64_t(memory.size()) < floats) memory.resize(floats);
        if (left_size < blocks.size()) {
            left_size = 2 * blocks.size();
            left = std::make_unique<std::atomic<int>[]>(left_size);
        }
    }

    template <class F>
    void run(Pool& pool, std::vector<Scratch>& scratch, const Attention<F>& a) {
        for (size_t b = 0; b < blocks.size(); b++) left[b].store(blocks[b].splits, std::memory_order_relaxed);
        pool.run(int64_t(tasks.size()), [&](int i, int thread) {
            const Task& t = tasks[i];
            if (t.split < 0) return a.block(scratch[thread], t.sequence, t.head, t.row, t.rows, t.position);
            const Block& k = blocks[t.block];
            const int queries = k.rows * a.group, width = a.width();
            const auto part = [&](int split) {
                return partial(memory.data() + k.memory + split * partial_floats(queries, width), queries, width);
            };
            Fetcher fetcher;
            if (i + pool.threads() < int(tasks.size())) {
                const Task& later = tasks[i + pool.threads()];  // most likely this thread's next
                if (later.split >= 0)
                    a.fetch(fetcher, later.sequence, later.head, later.split, later.position + later.rows);
            }
            a.split(t.sequence, t.head, t.row, t.rows, t.position, t.split, part(t.split),
                    scratch[thread].room(a.split_bytes(queries)), fetcher);
            if (left[t.block].fetch_sub(1, std::memory_order_acq_rel) > 1) return;
            for (int s = 1; s < k.splits; s++) merge(part(0), part(s), queries);
            a.finish(part(0), k.head, k.row, k.rows);
        });
    }
};

}  // namespace kvt
