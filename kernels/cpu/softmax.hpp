// Softmax over splits of keys. Each split is a softmax of its own, and splits are merged in order, so that a row's bits
// depend on its query and its keys alone: not on the chunk it came in, nor on which thread took which split.
#pragma once
#include <atomic>
#include <memory>

#include "panels.hpp"
#include "pool.hpp"

namespace kvt {

constexpr int BLOCK_QUERIES = 96;  // query vectors (rows times heads of a group) of one task, about

// Keys of a split that one row attends: [0, sinks) and [from, end).
struct Seen {
    int sinks, from, end;

    // Of the keys [first, first + keys), by a row at `position`.
    static Seen of(const Plan& plan, int sequence, int position, int first, int keys) {
        const int window = plan.windows[sequence], end = std::clamp(position + 1 - first, 0, keys);
        if (!window) return {0, 0, end};
        const int from = std::clamp(position - window + 1 - first, 0, end);
        return {std::clamp(plan.sinks[sequence] - first, 0, end), from, end};
    }
    vi lanes(int at) const {
        const vi lane = vi{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} + at;
        return (lane < sinks) | ((lane >= from) & (lane < end));
    }
    bool none() const { return !sinks && from >= end; }
    bool all(int at) const { return at >= from && at + LANES <= end; }
    vf keep(int at, vf x, vf otherwise) const { return all(at) ? x : lanes(at) ? x : otherwise; }
};

// c * tanh(x / c) for scores that `scale` has still to multiply.
inline void cap(float* scores, int count, float scale, float softcap) {
    for (int i = 0; i < count; i += LANES) store(scores + i, tanh(load<vf>(scores + i) * (scale / softcap)) * softcap);
}

inline float highest(const float* scores, int padded, Seen seen) {
    vf high = splat(-INFINITY);
    for (int i = 0; i < padded; i += LANES)
        high = max(high, seen.keep(i, load<vf>(scores + i), splat(-INFINITY)));
    return top(high);
}
// e^((scores - m) * scale), as exactly as probabilities of the type need it.
inline vf exponentials(vf scores, float m, float scale, uint16_t) {
    return exp2_rough((scores - m) * (scale * 1.44269504f));
}
inline vf exponentials(vf scores, float m, float scale, float) { return exp((scores - m) * scale); }
inline vf store_rounded(uint16_t* p, vf v) {
    store_bf16(p, v);
    return load_bf16(p);
}
inline vf store_rounded(float* p, vf v) {
    store(p, v);
    return v;
}

// Scores of one query become probabilities relative to their own maximum: exact ones for quantized keys, and rounded
// ones for raw keys; is_raw is by 16 keys. The total is of what multiplies the values. Keys that the query doesn't see
// get 0.
template <class Act>
inline void soften(float* scores, int padded, Seen seen, float scale, float softcap, const bool* is_raw, Act* p,
                   float* exact, float& peak, float& total) {
    if (seen.none()) {
        std::memset(p, 0, padded * sizeof(Act));
        std::memset(exact, 0, padded * sizeof(float));
        peak = -INFINITY;
        total = 0.0f;
        return;
    }
    if (softcap > 0.0f) cap(scores, padded, scale, softcap);
    const float factor = softcap > 0.0f ? 1.0f : scale, m = highest(scores, padded, seen);
    vf sums = vf{};
    for (int i = 0; i < padded; i += LANES) {
        const vf e = exponentials(load<vf>(scores + i), m, factor, Act());
        const vf kept = seen.keep(i, e, vf{});
        const vf rounded = store_rounded(p + i, kept);
        store(exact + i, kept > 1e-30f ? kept : vf{});  // smaller, their products could be subnormal, which is slow
        sums += is_raw[i / LANES] ? rounded : kept;
    }
    peak = m * factor;
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

// Adds `b` to `a`; either may hold queries without keys. One function, so that all callers round alike.
__attribute__((noinline)) inline void merge(const Partial& a, const Partial& b, int queries) {
    alignas(64) float wa[LANES], wb[LANES];
    for (int q = 0; q < queries; q += LANES) {
        const vf pa = load<vf>(a.peak + q), pb = load<vf>(b.peak + q), peak = max(pa, pb);
        const vf ea = exp(pa - peak), eb = exp(pb - peak);  // 0 for a query that had no keys, in both too
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

// Rows [row, row + rows) of a step that one task takes, of one KV head; the first is at `position` of its sequence.
struct Block {
    int sequence, head, row, rows, position;
    Reach reach;
};

// Attention of a step in blocks of rows. A names the kind: it has heads(), group, width(), reach(sequence, position,
// rows), scratch_bytes(queries), and for a block fetch(next, block, split), split(block, split, to, scratch, next) and
// finish(done, block).
template <class A>
struct Blocks {
    const A& a;

    int rows() const { return a.group >= BLOCK_QUERIES ? 1 : BLOCK_QUERIES / a.group; }
    Block block(int sequence, int head, int row, int rows, int position) const {
        return {sequence, head, row, rows, position, a.reach(sequence, position, rows)};
    }

    // All splits of a block.
    void run(Scratch& scratch, const Block& b) const {
        const int queries = b.rows * a.group, splits = b.reach.splits();
        if (!splits) return;
        const size_t floats = partial_floats(queries, a.width());
        char* at = scratch.room(2 * lines(floats * sizeof(float)) + a.scratch_bytes(queries));
        const Partial done = partial(take<float>(at, floats), queries, a.width());
        const Partial next = partial(take<float>(at, floats), queries, a.width());
        for (int i = 0; i < splits; i++) {
            Fetcher fetcher;
            if (i + 1 < splits) a.fetch(fetcher, b, b.reach.split(i + 1));
            a.split(b, b.reach.split(i), i ? next : done, at, fetcher);
            if (i) merge(done, next, queries);
        }
        a.finish(done, b);
    }

    // Rows [from, to) of the step, all heads; rows of no sequence are left alone.
    void run_rows(Scratch& scratch, const Plan& plan, int from, int to) const {
        for (int s = 0; s < plan.sequences; s++) {
            const int first = std::max(from, plan.starts[s]), last = std::min(to, plan.starts[s] + plan.lengths[s]);
            for (int row = first; row < last; row += rows()) {
                const int position = plan.contexts[s] - plan.lengths[s] + row - plan.starts[s];
                for (int head = 0; head < a.heads(); head++)
                    run(scratch, block(s, head, row, std::min(rows(), last - row), position));
            }
        }
    }
};

// The attention of a step cut into tasks for several threads: made once per step, used by all layers.
class Tasks {
   public:
    template <class A>
    void plan(const Plan& plan, const A& a, int threads) {
        tasks_.clear();
        blocks_.clear();
        const Blocks<A> of{a};
        for (int s = 0; s < plan.sequences; s++)
            for (int done = 0; done < plan.lengths[s]; done += of.rows()) {
                const int n = std::min(of.rows(), plan.lengths[s] - done);
                const int position = plan.contexts[s] - plan.lengths[s] + done;
                for (int head = 0; head < a.heads(); head++)
                    blocks_.push_back({of.block(s, head, plan.starts[s] + done, n, position), 0});
            }
        const bool cut = int(blocks_.size()) < 8 * threads && threads > 1;
        int64_t floats = 0;
        for (int b = 0; b < int(blocks_.size()); b++) {
            const int splits = blocks_[b].block.reach.splits();
            if (!cut || splits <= 1) {
                tasks_.push_back({b, WHOLE});
                continue;
            }
            blocks_[b].memory = floats;
            floats += splits * int64_t(partial_floats(blocks_[b].block.rows * a.group, a.width()));
            for (int i = 0; i < splits; i++) tasks_.push_back({b, i});
        }
        if (int64_t(memory_.size()) < floats) memory_.resize(floats);
        if (left_size_ < blocks_.size()) {
            left_size_ = 2 * blocks_.size();
            left_ = std::make_unique<std::atomic<int>[]>(left_size_);
        }
    }

    template <class A>
    void run(Pool& pool, std::vector<Scratch>& scratch, const A& a) {
        for (size_t b = 0; b < blocks_.size(); b++)
            left_[b].store(blocks_[b].block.reach.splits(), std::memory_order_relaxed);
        pool.run(int64_t(tasks_.size()), [&](int i, int thread) {
            const Task& t = tasks_[i];
            const Block& b = blocks_[t.block].block;
            if (t.part == WHOLE) return Blocks<A>{a}.run(scratch[thread], b);
            const int queries = b.rows * a.group, width = a.width(), splits = b.reach.splits();
            const auto part = [&](int n) {
                const int64_t at = blocks_[t.block].memory + n * int64_t(partial_floats(queries, width));
                return partial(memory_.data() + at, queries, width);
            };
            Fetcher fetcher;
            if (i + pool.threads() < int(tasks_.size())) {
                const Task& later = tasks_[i + pool.threads()];  // most likely this thread's next
                const Block& of = blocks_[later.block].block;
                if (later.part != WHOLE) a.fetch(fetcher, of, of.reach.split(later.part));
            }
            a.split(b, b.reach.split(t.part), part(t.part), scratch[thread].room(a.scratch_bytes(queries)), fetcher);
            if (left_[t.block].fetch_sub(1, std::memory_order_acq_rel) > 1) return;
            for (int n = 1; n < splits; n++) merge(part(0), part(n), queries);
            a.finish(part(0), b);
        });
    }

   private:
    static constexpr int WHOLE = -1;
    struct Task {
        int block, part;  // of its splits, or WHOLE
    };
    struct Shared {
        Block block;
        int64_t memory;  // first float of its partials
    };
    std::vector<Task> tasks_;
    std::vector<Shared> blocks_;
    std::vector<float> memory_;
    std::unique_ptr<std::atomic<int>[]> left_;
    size_t left_size_ = 0;
};

}  // namespace kvt
