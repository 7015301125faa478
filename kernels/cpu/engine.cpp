// The C interface of our CPU kernels; kernels/cpu/native.py is its only caller and checks all arguments.
#include <type_traits>

#include "llama.hpp"

using namespace kvt;

namespace {

template <class F>
void attend(Pool& pool, const KVLayout& layout, const Plan& plan, uint8_t* arena, int layer, int group, float scale,
            int rows, const void* q, void* out, float* lse, std::vector<Scratch>& scratch) {
    using Act = typename F::Weights::Act;
    using Stored = typename F::Stored;
    const size_t count = size_t(rows) * layout.heads * group * layout.dim;
    std::vector<Act> queries(count), results(count);
    const Stored* given = static_cast<const Stored*>(q);
    for (size_t i = 0; i < count; i++) queries[i] = F::act_of(given[i]);
    const Attention<F> attention{{arena, layout}, plan, layer, group, scale, queries.data(), results.data(), lse};
    Tasks tasks;
    tasks.plan(plan, layout.heads, group, attention.block_rows(), attention.width(), pool.threads());
    tasks.run(pool, scratch, attention);
    Stored* wanted = static_cast<Stored*>(out);
    for (size_t i = 0; i < count; i++) wanted[i] = F::stored_of(results[i]);
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

// q and out [rows, heads * group, dim] in the pages' format; lse [rows, heads * group], set to -inf beforehand.
void kvt_attention(void* pool, int dtype, const KVLayout* layout, const Plan* plan, uint8_t* arena, int layer,
                   int group, float scale, int rows, const void* q, void* out, float* lse) {
    Pool& p = *static_cast<Pool*>(pool);
    std::vector<Scratch> scratch(p.threads());
    switch (dtype) {
        case F32: return attend<FormatF32>(p, *layout, *plan, arena, layer, group, scale, rows, q, out, lse, scratch);
        case BF16: return attend<FormatBF16>(p, *layout, *plan, arena, layer, group, scale, rows, q, out, lse, scratch);
        case F16: return attend<FormatF16>(p, *layout, *plan, arena, layer, group, scale, rows, q, out, lse, scratch);
    }
}

// k and v [rows, heads, dim] in the pages' format, `element_bytes` each.
void kvt_write(const KVLayout* layout, const Plan* plan, uint8_t* arena, int layer, int element_bytes, const uint8_t* k,
               const uint8_t* v) {
    const int64_t row_bytes = int64_t(layout->dim) * element_bytes;
    KVLayout bytes = *layout;  // the same pages in bytes
    bytes.dim = int(row_bytes);
    const Pages pages{arena, bytes};
    for (int s = 0; s < plan->sequences; s++)
        for (int i = 0; i < plan->lengths[s]; i++) {
            const int position = plan->contexts[s] - plan->lengths[s] + i;
            const int64_t row = int64_t(plan->starts[s]) + i;
            for (int h = 0; h < layout->heads; h++) {
                uint8_t* key = pages.key<uint8_t>(*plan, s, position, layer, h);
                std::memcpy(key, k + (row * layout->heads + h) * row_bytes, row_bytes);
                std::memcpy(key + pages.value_offset(), v + (row * layout->heads + h) * row_bytes, row_bytes);
            }
        }
}

// y [rows, outputs] = x [rows, inputs] W^T + bias; W in panels, x and y in the weights' format, bias [outputs] or null.
void kvt_linear(void* pool, int dtype, const void* x, int rows, int inputs, const void* w, int outputs,
                const float* bias, void* y) {
    Pool& p = *static_cast<Pool*>(pool);
    switch (dtype) {
        case F32: return multiply<FormatF32>(p, x, rows, inputs, w, outputs, bias, y);
        case BF16: return multiply<FormatBF16>(p, x, rows, inputs, w, outputs, bias, y);
        case F16: return multiply<FormatF16>(p, x, rows, inputs, w, outputs, bias, y);
    }
}

void* kvt_llama_new(const LlamaModel* model, void* pool) {
    Pool& p = *static_cast<Pool*>(pool);
    switch (model->dtype) {
        case F32: return static_cast<LlamaBase*>(new Llama<FormatF32>(*model, p));
        case BF16: return static_cast<LlamaBase*>(new Llama<FormatBF16>(*model, p));
        case F16: return static_cast<LlamaBase*>(new Llama<FormatF16>(*model, p));
    }
    return nullptr;
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
    out[2] = sizeof(LlamaLayer);
    out[3] = sizeof(LlamaModel);
    out[4] = sizeof(LlamaStep);
}
}
#pragma GCC visibility pop
