// Where keys and values lie in the arena, and which of them the rows of a step attend: kernels/layout.py in C++.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "simd.hpp"

namespace kvt {

constexpr int SPLIT = 128;  // keys of one softmax, at fixed positions

enum Format : uint8_t { RAW, FP8, INT8, K8V4, INT4, INT4C, FORMATS };

struct Record {
    int64_t v, k_scales, v_scales, nbytes;  // offsets within the record, and the distance to the next layer's
};

struct KVLayout {
    int32_t heads, dim, page_tokens, rope_dim, write_format;
    int64_t unit_bytes;
    Record records[FORMATS];
};

// The sequences of a step.
struct Plan {
    int32_t sequences;
    const int32_t *starts, *lengths, *contexts, *first_frames, *frames;
    const uint8_t* formats;
    const int32_t *sink_pages, *first_pages, *windows, *sinks;

    int entry(int sequence, int page) const {
        const int kept = sink_pages[sequence];
        return first_frames[sequence] + (page < kept ? page : kept + page - first_pages[sequence]);
    }
};

// Keys [0, sinks) and [from, end) of a split; sinks <= from.
struct Wanted {
    int sinks, from, end;

    bool all() const { return from == 0; }
};

// What rows [position, position + rows) of a sequence attend: keys before `end` that lie in the window of one of them
// or are sinks.
struct Reach {
    int sinks, from, end;

    static Reach of(const Plan& plan, int sequence, int position, int rows) {
        const int window = plan.windows[sequence], end = position + rows;
        if (!window) return {0, 0, end};
        const int from = std::max(0, position - window + 1);
        return {std::min(plan.sinks[sequence], from), from, end};
    }
    // Their splits in order: those of the sinks, then those of the window.
    int first_split() const { return from / SPLIT; }
    int sink_splits() const { return std::min((sinks + SPLIT - 1) / SPLIT, first_split()); }
    int splits() const { return sink_splits() + (end + SPLIT - 1) / SPLIT - first_split(); }
    int split(int i) const { return i < sink_splits() ? i : first_split() + i - sink_splits(); }

    Wanted wanted(int split) const {
        const int first = split * SPLIT, last = std::clamp(end - first, 0, SPLIT);
        const int a = std::clamp(sinks - first, 0, last), b = std::clamp(from - first, 0, last);
        if (b == last && a < b) return {0, 0, a};
        return a < b ? Wanted{a, b, last} : Wanted{0, 0, last};
    }
};

inline bool has_key_nibbles(int format) { return format == INT4 || format == INT4C; }
inline bool has_value_nibbles(int format) { return format >= K8V4; }

// Tokens [at, at + count) of a split, which lie in one page from `slot` on.
struct Piece {
    uint8_t* record;  // of the layer in question
    int format, at, count, slot;
};

// One head's part of a quantized record: codes of token t at t * key_bytes and t * value_bytes. Scales are halves: one
// per token, or pairs (scale, zero) where codes are nibbles; INT4C's keys have `dim` scales, then `dim` zeros.
struct Codes {
    uint8_t *keys, *values;
    uint16_t *key_scales, *value_scales;
    int key_bytes, value_bytes;

    static Codes of(uint8_t* record, int format, const KVLayout& kv, int head) {
        const int key_bytes = has_key_nibbles(format) ? kv.dim / 2 : kv.dim;
        const int value_bytes = has_value_nibbles(format) ? kv.dim / 2 : kv.dim;
        const int64_t tokens = int64_t(head) * kv.page_tokens;
        const Record& r = kv.records[format];
        const auto halves = [&](int64_t offset, int64_t at) {
            return reinterpret_cast<uint16_t*>(record + offset) + at;
        };
        return {
            record + tokens * key_bytes,
            record + r.v + tokens * value_bytes,
            halves(r.k_scales, format == INT4C ? int64_t(head) * 2 * kv.dim : tokens * (has_key_nibbles(format) + 1)),
            halves(r.v_scales, tokens * (has_value_nibbles(format) + 1)),
            key_bytes,
            value_bytes,
        };
    }
};

struct Pages {
    uint8_t* arena;
    KVLayout layout;

    bool all_raw() const {
        return std::all_of(layout.records + 1, layout.records + FORMATS, [](const Record& r) { return !r.nbytes; });
    }

    uint8_t* record(int64_t frame, int format, int layer) const {
        return arena + frame * layout.unit_bytes + layer * layout.records[format].nbytes;
    }
    Piece piece(const Plan& plan, int sequence, int position, int layer) const {
        const int entry = plan.entry(sequence, position / layout.page_tokens), format = plan.formats[entry];
        return {record(plan.frames[entry], format, layer), format, 0, 1, position % layout.page_tokens};
    }
    // Calls g(piece) for the wanted tokens of a split, page by page in order.
    template <class G>
    void each_piece(const Plan& plan, int sequence, int layer, int split, Wanted wanted, const G& g) const {
        each_piece(plan, sequence, layer, split * SPLIT, 0, wanted.sinks, g);
        each_piece(plan, sequence, layer, split * SPLIT, wanted.from, wanted.end, g);
    }

   private:
    template <class G>
    void each_piece(const Plan& plan, int sequence, int layer, int first, int from, int to, const G& g) const {
        for (int t = from; t < to;) {
            Piece p = piece(plan, sequence, first + t, layer);
            p.at = t;
            p.count = std::min(to - t, layout.page_tokens - p.slot);
            g(p);
            t += p.count;
        }
    }
};

inline int round_up(int n, int to) { return (n + to - 1) / to * to; }
inline size_t lines(size_t bytes) { return (bytes + 63) / 64 * 64; }

template <class T>
inline T* take(char*& at, size_t count) {
    T* p = reinterpret_cast<T*>(at);
    at += lines(count * sizeof(T));
    return p;
}

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

// The keys and values of the split that comes next, brought towards the cache a few lines at a time while this one is
// computed: asked for all at once they would hold up the core, which has room for a few dozen misses.
class Fetcher {
   public:
    void add(const void* run, int64_t bytes) {
        runs_[count_++] = {static_cast<const char*>(run), static_cast<const char*>(run) + bytes};
        lines_ += int(bytes / 64) + 1;
    }
    void some() {
        for (int n = lines_ / CALLS; n >= 0 && at_ < count_; n--) {
            Run& r = runs_[at_];
            __builtin_prefetch(r.next, 0, 2);  // not into the nearest cache, which has too few misses in flight
            r.next += 64;
            if (r.next >= r.end) at_++;
        }
    }

   private:
    static constexpr int CALLS = 20;  // at least so many while a split is computed
    struct Run {
        const char *next, *end;
    };
    Run runs_[2 * SPLIT + 8];
    int count_ = 0, at_ = 0, lines_ = 0;
};

}  // namespace kvt
