// The C interface of our CPU kernels; kernels/cpu/native.py is its only caller and checks all arguments.
#include <type_traits>

#include "latent.hpp"
#include "llama.hpp"

using namespace kvt;

namespace {

template <class G>
void with_format(int dtype, const G& g) {
    switch (dtype) {
        case F32: return g(FormatF32());
        case BF16: return g(FormatBF16());
        case F16: return g(FormatF16());
    }
}

// One call of paged attention; native.py's _Attention.
struct AttentionCall {
    int32_t dtype, layer, group, rows;
    float scale, softcap;
    KVLayout layout;
    Plan plan;
    uint8_t* arena;
    const void *q, *q_sinks;   // [rows, heads * group, dim] in the layout's dtype; q_sinks may be null
    const float* sink_logits;  // [heads * group] or null
    void* out;                 // like q
    float* lse;                // [rows, heads * group], set to -inf beforehand
};

template <class F>
std::vector<typename F::Weights::Act> act_of(const void* x, size_t count) {
    const auto* given = static_cast<const typename F::Stored*>(x);
    std::vector<typename F::Weights::Act> result(x ? count : 0);
    for (size_t i = 0; i < result.size(); i++) result[i] = F::act_of(given[i]);
    return result;
}

// All rows of a plan; their results, which `attention` writes, go to `out` as they are stored.
template <class F, class A, class Act>
void run(Pool& pool, const Plan& plan, const A& attention, const std::vector<Act>& results, void* out) {
    std::vector<Scratch> scratch(pool.threads());
    Tasks tasks;
    tasks.plan(plan, attention, pool.threads());
    tasks.run(pool, scratch, attention);
    auto* wanted = static_cast<typename F::Stored*>(out);
    for (size_t i = 0; i < results.size(); i++) wanted[i] = F::stored_of(results[i]);
}

template <class F>
void attend(Pool& pool, const AttentionCall& c) {
    using Act = typename F::Weights::Act;
    const size_t count = size_t(c.rows) * c.layout.heads * c.group * c.layout.dim;
    const std::vector<Act> queries = act_of<F>(c.q, count), sink_queries = act_of<F>(c.q_sinks, count);
    std::vector<Act> results(count);
    const Attention<F> attention{
        .pages = {c.arena, c.layout},
        .plan = c.plan,
        .layer = c.layer,
        .group = c.group,
        .scale = c.scale,
        .softcap = c.softcap,
        .q = queries.data(),
        .q_sinks = c.q_sinks ? sink_queries.data() : nullptr,
        .sink_logits = c.sink_logits,
        .out = results.data(),
        .lse = c.lse,
    };
    run<F>(pool, c.plan, attention, results, c.out);
}

// q [rows, heads, dim + rope_dim] and out [rows, heads, dim] in the layout's dtype.
template <class F>
void attend_latents(Pool& pool, const AttentionCall& c) {
    using Act = typename F::Weights::Act;
    const KVLayout& kv = c.layout;
    const auto queries = act_of<F>(c.q, size_t(c.rows) * c.group * (kv.dim + kv.rope_dim));
    std::vector<Act> results(size_t(c.rows) * c.group * kv.dim);
    LatentAttention<F> attention;
    static_cast<RowAttention<F>&>(attention) = {1,       c.group,        kv.dim,         kv.rope_dim, kv.dim,
                                                c.scale, queries.data(), results.data(), c.lse};
    attention.pages = {c.arena, kv};
    attention.plan = c.plan;
    attention.layer = c.layer;
    run<F>(pool, c.plan, attention, results, c.out);
}

// One call of attention over keys outside pages; native.py's _Dense.
struct DenseCall {
    int32_t dtype, rows, keys, heads, dim, value_dim;
    int64_t offset;
    float scale;
    const void *q, *k, *v;  // [rows, heads, dim], [keys, heads, dim], [keys, heads, value_dim]
    void* out;              // [rows, heads, value_dim]
    float* lse;             // [rows, heads], set to -inf beforehand
};

template <class F>
void attend_dense(Pool& pool, const DenseCall& c) {
    using Act = typename F::Weights::Act;
    const auto q = act_of<F>(c.q, size_t(c.rows) * c.heads * c.dim);
    const auto k = act_of<F>(c.k, size_t(c.keys) * c.heads * c.dim);
    const auto v = act_of<F>(c.v, size_t(c.keys) * c.heads * c.value_dim);
    std::vector<Act> results(size_t(c.rows) * c.heads * c.value_dim);
    DenseAttention<F> attention;
    static_cast<RowAttention<F>&>(attention) = {c.heads, 1,        c.dim,          0,    c.value_dim,
                                                c.scale, q.data(), results.data(), c.lse};
    attention.k = k.data();
    attention.v = v.data();
    attention.keys = c.keys;
    attention.offset = c.offset;
    const int32_t start = 0;
    const Plan rows{.sequences = 1, .starts = &start, .lengths = &c.rows, .contexts = &c.rows};
    run<F>(pool, rows, attention, results, c.out);
}

constexpr int WRITE_ROWS = 16;  // of one task

// k and v [rows, heads, dim] in the layout's dtype.
template <class F>
void write(Pool& pool, const KVLayout& layout, const Plan& plan, uint8_t* arena, int layer, const void* k,
           const void* v) {
    using Stored = typename F::Stored;
    const Pages pages{arena, layout};
    const int room = round_up(layout.dim, LANES);
    std::vector<float> numbers(size_t(2 * room) * pool.threads());
    for (int s = 0; s < plan.sequences; s++)
        pool.run((plan.lengths[s] + WRITE_ROWS - 1) / WRITE_ROWS, [&](int task, int thread) {
            float *key = numbers.data() + size_t(2 * room) * thread, *value = key + room;
            for (int i = task * WRITE_ROWS; i < std::min((task + 1) * WRITE_ROWS, plan.lengths[s]); i++) {
                const Piece to = pages.piece(plan, s, plan.contexts[s] - plan.lengths[s] + i, layer);
                for (int h = 0; h < layout.heads; h++) {
                    const int64_t at = ((int64_t(plan.starts[s]) + i) * layout.heads + h) * layout.dim;
                    for (int d = 0; d < layout.dim; d++) {
                        key[d] = F::read(static_cast<const Stored*>(k)[at + d]);
                        value[d] = F::read(static_cast<const Stored*>(v)[at + d]);
                    }
                    write_token<F>(to, layout, h, key, value);
                }
            }
        });
}

template <class F>
void write_latents(const KVLayout& layout, const Plan& plan, uint8_t* arena, int layer, const void* latents,
                   const void* ropes) {
    using Stored = typename F::Stored;
    const Pages pages{arena, layout};
    std::vector<float> numbers(layout.dim);
    for (int s = 0; s < plan.sequences; s++)
        for (int i = 0; i < plan.lengths[s]; i++) {
            const Piece to = pages.piece(plan, s, plan.contexts[s] - plan.lengths[s] + i, layer);
            const int64_t row = int64_t(plan.starts[s]) + i;
            for (int d = 0; d < layout.dim; d++)
                numbers[d] = F::read(static_cast<const Stored*>(latents)[row * layout.dim + d]);
            write_latent<F>(to, layout, numbers.data());
            std::memcpy(rope_key<F>(to, layout), static_cast<const Stored*>(ropes) + row * layout.rope_dim,
                        layout.rope_dim * sizeof(Stored));
        }
}

template <class F>
void read_latents(const KVLayout& layout, const Plan& plan, uint8_t* arena, int layer, int sequence, int first,
                  int last, void* latents, void* ropes) {
    using Stored = typename F::Stored;
    const Pages pages{arena, layout};
    std::vector<float> numbers(layout.dim);
    for (int t = first; t < last; t++) {
        const Piece from = pages.piece(plan, sequence, t, layer);
        read_latent<F>(from, layout, numbers.data());
        convert(numbers.data(), static_cast<Stored*>(latents) + int64_t(t - first) * layout.dim, layout.dim, F::write);
        std::memcpy(static_cast<Stored*>(ropes) + int64_t(t - first) * layout.rope_dim, rope_key<F>(from, layout),
                    layout.rope_dim * sizeof(Stored));
    }
}

template <class F>
void convert_pages(Pool& pool, const KVLayout& layout, uint8_t* arena, int layers, int count, const int32_t* sources,
                   int source_format, const int32_t* targets, int target_format) {
    const Pages pages{arena, layout};
    const size_t run = size_t(layout.page_tokens) * layout.dim;
    std::vector<float> numbers(2 * run * pool.threads());
    pool.run(int64_t(count) * layers, [&](int task, int thread) {
        float *keys = numbers.data() + 2 * run * thread, *values = keys + run;
        const int page = task / layers, layer = task % layers;
        uint8_t* from = pages.record(sources[page], source_format, layer);
        uint8_t* to = pages.record(targets[page], target_format, layer);
        if (layout.rope_dim) return convert_latents<F>(from, source_format, to, target_format, layout, keys);
        for (int h = 0; h < layout.heads; h++) {
            read_head<F>(from, source_format, layout, h, keys, values);
            write_head<F>(to, target_format, layout, h, keys, values);
        }
    });
}

template <class F>
void multiply(Pool& pool, const void* x, int rows, int inputs, const void* w, int outputs, const float* bias, void* y) {
    using Panel = typename F::Weights;
    using Act = typename Panel::Act;
    using Stored = typename F::Stored;
    constexpr int CHUNK = 8 * MR;
    const Stored* given = static_cast<const Stored*>(x);
    std::vector<Act> converted;
    const Act* a;
    if constexpr (std::is_same_v<Act, Stored>) {
        a = given;
    } else {
        converted.resize(size_t(rows) * inputs);
        for (size_t i = 0; i < converted.size(); i++) converted[i] = F::act_of(given[i]);
        a = converted.data();
    }
    const int panels = (outputs + NR - 1) / NR, chunks = (rows + CHUNK - 1) / CHUNK;
    pool.run(int64_t(panels) * chunks, [&](int task, int) {
        const int p = task % panels, from = task / panels * CHUNK, n0 = p * NR, n = std::min(NR, outputs - n0);
        float added[NR] = {};
        if (bias) std::memcpy(added, bias + n0, n * sizeof(float));
        panel<Panel>(a + int64_t(from) * inputs, inputs, std::min(CHUNK, rows - from),
                     static_cast<const typename Panel::Elem*>(w) + int64_t(p) * NR * inputs, inputs / Panel::STEP,
                     [&](int at, int count, float* tile) {
                         for (int r = 0; r < count; r++) {
                             for (int i = 0; i < NR; i++) tile[r * NR + i] += added[i];
                             convert(tile + r * NR, static_cast<Stored*>(y) + (int64_t(from) + at + r) * outputs + n0,
                                     n, F::write);
                         }
                     });
    });
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

void* kvt_pool_new(int threads) { return new Pool(threads); }
void kvt_pool_delete(void* pool) { delete static_cast<Pool*>(pool); }

void kvt_attention(void* pool, const AttentionCall* call) {
    with_format(call->dtype, [&](auto f) { attend<decltype(f)>(*static_cast<Pool*>(pool), *call); });
}

// group: the query heads.
void kvt_latent_attention(void* pool, const AttentionCall* call) {
    with_format(call->dtype, [&](auto f) { attend_latents<decltype(f)>(*static_cast<Pool*>(pool), *call); });
}

void kvt_dense_attention(void* pool, const DenseCall* call) {
    with_format(call->dtype, [&](auto f) { attend_dense<decltype(f)>(*static_cast<Pool*>(pool), *call); });
}

// latents [rows, dim] and rope keys [rows, rope_dim] in the layout's dtype.
void kvt_write_latents(int dtype, const KVLayout* layout, const Plan* plan, uint8_t* arena, int layer,
                       const void* latents, const void* ropes) {
    with_format(dtype, [&](auto f) { write_latents<decltype(f)>(*layout, *plan, arena, layer, latents, ropes); });
}

// Latents and rope keys of positions [first, last) of a sequence, in the layout's dtype.
void kvt_read_latents(int dtype, const KVLayout* layout, const Plan* plan, uint8_t* arena, int layer, int sequence,
                      int first, int last, void* latents, void* ropes) {
    with_format(dtype, [&](auto f) {
        read_latents<decltype(f)>(*layout, *plan, arena, layer, sequence, first, last, latents, ropes);
    });
}

void kvt_write(void* pool, int dtype, const KVLayout* layout, const Plan* plan, uint8_t* arena, int layer,
               const void* k, const void* v) {
    Pool& p = *static_cast<Pool*>(pool);
    with_format(dtype, [&](auto f) { write<decltype(f)>(p, *layout, *plan, arena, layer, k, v); });
}

// Pages `sources` of one format, written again as `targets` of another, all layers.
void kvt_convert(void* pool, int dtype, const KVLayout* layout, uint8_t* arena, int layers, int count,
                 const int32_t* sources, int source_format, const int32_t* targets, int target_format) {
    with_format(dtype, [&](auto f) {
        convert_pages<decltype(f)>(*static_cast<Pool*>(pool), *layout, arena, layers, count, sources, source_format,
                                   targets, target_format);
    });
}

// y [rows, outputs] = x [rows, inputs] W^T + bias; W in panels, x and y in the weights' format, bias [outputs] or null.
void kvt_linear(void* pool, int dtype, const void* x, int rows, int inputs, const void* w, int outputs,
                const float* bias, void* y) {
    Pool& p = *static_cast<Pool*>(pool);
    with_format(dtype, [&](auto f) { multiply<decltype(f)>(p, x, rows, inputs, w, outputs, bias, y); });
}

void* kvt_llama_new(const LlamaModel* model, void* pool) {
    LlamaBase* made = nullptr;
    with_format(model->dtype, [&](auto f) { made = new Llama<decltype(f)>(*model, *static_cast<Pool*>(pool)); });
    return made;
}
void kvt_llama_forward(void* llama, const LlamaStep* step) { static_cast<LlamaBase*>(llama)->forward(*step); }
void kvt_llama_delete(void* llama) { delete static_cast<LlamaBase*>(llama); }

// Which instructions multiply: results differ between them within rounding.
const char* kvt_instructions() {
#if defined(__AVX512BF16__)
    return "avx512-bf16";
#elif defined(__AVX512F__)
    return "avx512";
#elif defined(__FMA__)
    return "fma";
#else
    return "plain";
#endif
}

// Sizes of the structures passed by pointer, so that a caller built for others is noticed.
void kvt_sizes(int64_t* out) {
    out[0] = sizeof(KVLayout);
    out[1] = sizeof(Plan);
    out[2] = sizeof(AttentionCall);
    out[3] = sizeof(DenseCall);
    out[4] = sizeof(LlamaLayer);
    out[5] = sizeof(LlamaModel);
    out[6] = sizeof(LlamaStep);
}
}
#pragma GCC visibility pop
