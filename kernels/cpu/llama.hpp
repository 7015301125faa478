// A whole step of a Llama-family model over pages: RMSNorm, fused QKV, rope, K/V into pages, attention, gated MLP.
//
// Few rows (decode): threads share the columns of each matrix, so that weights stream once. Many rows (prefill): each
// thread takes rows through a whole layer, so that activations stay in its cache. Both give the same bits.
#pragma once
#include "attention.hpp"
#include "write.hpp"

namespace kvt {

struct LlamaLayer {
    const float *attention_norm, *mlp_norm;  // [hidden]
    const float* qkv_bias;                   // [(query heads + 2 heads) dim] or null
    const float *q_norm, *k_norm;            // [dim] or null
    const void *qkv, *out, *gate_up, *down;  // panels; a gate_up panel holds 16 gates and their 16 ups
};

struct LlamaModel {
    int32_t dtype, num_layers, hidden, intermediate, query_heads, heads, dim, vocab, max_rows;
    KVLayout pages;
    float eps, scale;
    const LlamaLayer* layers;
    const void* head;       // panels [vocab]
    const void* embedding;  // rows [vocab, hidden], or null: taken from the head's panels
    const float* norm;
};

struct LlamaStep {
    int32_t rows, num_logits;
    const int32_t* token_ids;  // [rows]
    const float *cos, *sin;    // [rows, dim / 2]
    // [rows, dim / 2]: what turns a query that is in place into the one that sink keys see; or null
    const float *sink_cos, *sink_sin;
    Plan plan;
    uint8_t* arena;
    const int32_t* logit_rows;  // [num_logits]
    float* logits;              // [num_logits, vocab]
};

class LlamaBase {
   public:
    virtual ~LlamaBase() = default;
    virtual void forward(const LlamaStep& step) = 0;
};

template <class F>
class Llama : public LlamaBase {
    using Panel = typename F::Weights;
    using Act = typename Panel::Act;
    using Elem = typename Panel::Elem;
    using Stored = typename F::Stored;
    // Up to so many rows threads share columns, which reads each weight once; beyond, arithmetic takes longer than
    // reading, and sharing rows waits less often. One thread takes as long either way.
    static constexpr int FEW_ROWS_PER_THREAD = 24;
    static constexpr int CHUNK_ROWS = 8 * MR;  // measured: 4 to 16 times MR behave alike

   public:
    Llama(const LlamaModel& m, Pool& pool) : m_(m), pool_(pool), scratch_(pool.threads()) {
        const size_t rows = m.max_rows;
        inter_ = round_up(m.intermediate, LANES);
        x_.resize(rows * m.hidden);
        qkv_.resize(rows * qkv_width());
        act_.resize(rows * m.hidden);
        q_.resize(rows * m.query_heads * m.dim);
        attended_.resize(rows * m.query_heads * m.dim);
        mlp_.resize(rows * inter_);
    }

    void forward(const LlamaStep& s) override {
        const bool few = s.rows <= FEW_ROWS_PER_THREAD * pool_.threads();
        const int group = m_.query_heads / m_.heads;
        if (s.sink_cos) q_sinks_.resize(q_.size());
        const Attention<F> attention{
            .pages = pages(s),
            .plan = s.plan,
            .layer = 0,
            .group = group,
            .scale = m_.scale,
            .softcap = 0.0f,
            .q = q_.data(),
            .q_sinks = s.sink_cos ? q_sinks_.data() : nullptr,
            .sink_logits = nullptr,
            .out = attended_.data(),
            .lse = nullptr,
        };
        embed(s);
        std::fill(attended_.begin(), attended_.begin() + size_t(s.rows) * m_.query_heads * m_.dim, Act{});
        sequence_of(s);
        if (few) {
            tasks_.plan(s.plan, attention, pool_.threads());
            for (int l = 0; l < m_.num_layers; l++) layer_by_columns(s, l, attention);
        } else {
            for (int l = 0; l < m_.num_layers; l++) layer_by_rows(s, l, attention);
        }
        logits(s);
    }

   private:
    Pages pages(const LlamaStep& s) const { return {s.arena, m_.pages}; }
    int qkv_width() const { return (m_.query_heads + 2 * m_.heads) * m_.dim; }

    template <class G>
    void each_row(int rows, const G& g) {  // a loop too short to share is not shared
        if (rows * m_.hidden <= 4096) {
            for (int r = 0; r < rows; r++) g(r, 0);
        } else {
            pool_.run(rows, g);
        }
    }

    void embed(const LlamaStep& s) {
        each_row(s.rows, [&](int r, int) {
            float* x = x_.data() + int64_t(r) * m_.hidden;
            const int64_t token = s.token_ids[r];
            if (m_.embedding) {
                const Stored* row = static_cast<const Stored*>(m_.embedding) + token * m_.hidden;
                for (int i = 0; i < m_.hidden; i++) x[i] = F::read(row[i]);
                return;
            }
            constexpr int STEP = Panel::STEP;
            const Elem* at = weights(m_.head, int(token / NR), m_.hidden) + token % NR * STEP;
            for (int i = 0; i < m_.hidden; i += STEP, at += NR * STEP)
                for (int j = 0; j < STEP; j++) x[i + j] = F::read(at[j]);
        });
    }

    void sequence_of(const LlamaStep& s) {
        sequence_.assign(s.rows, -1);
        for (int i = 0; i < s.plan.sequences; i++)
            std::fill_n(sequence_.begin() + s.plan.starts[i], s.plan.lengths[i], i);
    }

    void norm(const float* x, const float* weight, Act* out) const {
        vf squares = vf{};
        for (int i = 0; i < m_.hidden; i += LANES) squares = load<vf>(x + i) * load<vf>(x + i) + squares;
        const float r = 1.0f / std::sqrt(sum(squares) / m_.hidden + m_.eps);
        for (int i = 0; i < m_.hidden; i += LANES) F::act(out + i, load<vf>(x + i) * r * load<vf>(weight + i));
    }
    void norm_row(int r, const float* weight) {
        norm(x_.data() + int64_t(r) * m_.hidden, weight, act_.data() + int64_t(r) * m_.hidden);
    }

    // Rows [from, to) of act_ times one panel of W_qkv.
    void qkv_panel(const LlamaLayer& l, int p, int from, int to) {
        const int width = qkv_width(), n0 = p * NR, n = std::min(NR, width - n0);
        panel<Panel>(act_.data() + int64_t(from) * m_.hidden, m_.hidden, to - from, weights(l.qkv, p, m_.hidden),
                     m_.hidden / Panel::STEP, [&](int at, int rows, const float* tile) {
                         for (int r = 0; r < rows; r++)
                             std::memcpy(qkv_.data() + (int64_t(from) + at + r) * width + n0, tile + r * NR, n * 4);
                     });
    }
    static const Elem* weights(const void* w, int p, int k) {
        return static_cast<const Elem*>(w) + int64_t(p) * NR * k;
    }

    // Bias, norms and rope of a row's q, k and v; k and v go to their page.
    void place_row(const LlamaStep& s, int layer, int r) {
        const LlamaLayer& l = m_.layers[layer];
        const int dim = m_.dim, half = dim / 2, sequence = sequence_[r];
        float* row = qkv_.data() + int64_t(r) * qkv_width();
        if (l.qkv_bias)
            for (int i = 0; i < qkv_width(); i++) row[i] += l.qkv_bias[i];
        const float *cos = s.cos + int64_t(r) * half, *sin = s.sin + int64_t(r) * half;
        for (int h = 0; h < m_.query_heads + m_.heads; h++) {
            float* x = row + h * dim;
            const float* weight = h < m_.query_heads ? l.q_norm : l.k_norm;
            if (weight) head_norm(x, weight);
            turn(x, cos, sin);
        }
        const int64_t at = int64_t(r) * m_.query_heads * dim;
        convert(row, q_.data() + at, m_.query_heads * dim, F::act);
        if (sequence < 0) return;
        float *k = row + m_.query_heads * dim, *v = k + m_.heads * dim;
        const int position = s.plan.contexts[sequence] - s.plan.lengths[sequence] + r - s.plan.starts[sequence];
        const Piece to = pages(s).piece(s.plan, sequence, position, layer);
        for (int h = 0; h < m_.heads; h++, k += dim, v += dim) write_token<F>(to, m_.pages, h, k, v);
        if (!s.sink_cos) return;
        for (int h = 0; h < m_.query_heads; h++)
            turn(row + h * dim, s.sink_cos + int64_t(r) * half, s.sink_sin + int64_t(r) * half);
        convert(row, q_sinks_.data() + at, m_.query_heads * dim, F::act);
    }

    void turn(float* x, const float* cos, const float* sin) const {
        const int half = m_.dim / 2;
        for (int i = 0; i < half; i++) {
            const float a = x[i], b = x[i + half];
            x[i] = a * cos[i] - b * sin[i];
            x[i + half] = b * cos[i] + a * sin[i];
        }
    }

    void head_norm(float* x, const float* weight) const {
        float squares = 0.0f;
        for (int i = 0; i < m_.dim; i++) squares += x[i] * x[i];
        const float r = 1.0f / std::sqrt(squares / m_.dim + m_.eps);
        for (int i = 0; i < m_.dim; i++) x[i] = x[i] * r * weight[i];
    }

    // Adds rows of `a` times one panel of W to the residual stream.
    void add_panel(const void* w, int k, const Act* a, int p, int from, int to) {
        const int n0 = p * NR;
        panel<Panel>(a + int64_t(from) * k, k, to - from, weights(w, p, k), k / Panel::STEP,
                     [&](int at, int rows, const float* tile) {
                         for (int r = 0; r < rows; r++) {
                             float* x = x_.data() + (int64_t(from) + at + r) * m_.hidden + n0;
                             for (int i = 0; i < NR; i += LANES)
                                 store(x + i, load<vf>(x + i) + load<vf>(tile + r * NR + i));
                         }
                     });
    }

    void gate_panel(const LlamaLayer& l, int p, int from, int to) {
        panel<Panel>(act_.data() + int64_t(from) * m_.hidden, m_.hidden, to - from, weights(l.gate_up, p, m_.hidden),
                     m_.hidden / Panel::STEP, [&](int at, int rows, const float* tile) {
                         for (int r = 0; r < rows; r++) {
                             const vf gate = load<vf>(tile + r * NR), up = load<vf>(tile + r * NR + LANES);
                             F::act(mlp_.data() + (int64_t(from) + at + r) * inter_ + p * LANES,
                                    gate / (exp(-gate) + 1.0f) * up);
                         }
                     });
    }

    int attention_width() const { return m_.query_heads * m_.dim; }

    void layer_by_columns(const LlamaStep& s, int index, Attention<F> attention) {
        const LlamaLayer& l = m_.layers[index];
        attention.layer = index;
        each_row(s.rows, [&](int r, int) { norm_row(r, l.attention_norm); });
        pool_.run((qkv_width() + NR - 1) / NR, [&](int p, int) { qkv_panel(l, p, 0, s.rows); });
        each_row(s.rows, [&](int r, int) { place_row(s, index, r); });
        tasks_.run(pool_, scratch_, attention);
        pool_.run(m_.hidden / NR,
                  [&](int p, int) { add_panel(l.out, attention_width(), attended_.data(), p, 0, s.rows); });
        each_row(s.rows, [&](int r, int) { norm_row(r, l.mlp_norm); });
        pool_.run(inter_ / LANES, [&](int p, int) { gate_panel(l, p, 0, s.rows); });
        pool_.run(m_.hidden / NR, [&](int p, int) { add_panel(l.down, inter_, mlp_.data(), p, 0, s.rows); });
    }

    void layer_by_rows(const LlamaStep& s, int index, Attention<F> attention) {
        const LlamaLayer& l = m_.layers[index];
        attention.layer = index;
        const int per_thread = (s.rows + pool_.threads() - 1) / pool_.threads();
        const int chunk = std::min(CHUNK_ROWS, round_up(per_thread, MR));
        const int chunks = (s.rows + chunk - 1) / chunk;
        pool_.run(chunks, [&](int c, int) {
            const int from = c * chunk, to = std::min(s.rows, from + chunk);
            for (int r = from; r < to; r++) norm_row(r, l.attention_norm);
            for (int p = 0; p * NR < qkv_width(); p++) qkv_panel(l, p, from, to);
            for (int r = from; r < to; r++) place_row(s, index, r);
        });
        runs_.clear();
        if (index + 1 < m_.num_layers) {
            for (int c = chunks - 1; c >= 0; c--) runs_.push_back({c * chunk, std::min(s.rows, (c + 1) * chunk)});
        } else {
            wanted_runs(s, chunk);
        }
        pool_.run(int64_t(runs_.size()), [&](int i, int thread) {
            const auto [from, to] = runs_[i];
            Blocks<Attention<F>>{attention}.run_rows(scratch_[thread], s.plan, from, to);
            for (int p = 0; p < m_.hidden / NR; p++) add_panel(l.out, attention_width(), attended_.data(), p, from, to);
            for (int r = from; r < to; r++) norm_row(r, l.mlp_norm);
            for (int p = 0; p < inter_ / LANES; p++) gate_panel(l, p, from, to);
            for (int p = 0; p < m_.hidden / NR; p++) add_panel(l.down, inter_, mlp_.data(), p, from, to);
        });
    }

    // The last layer goes on with the rows whose logits are wanted: of the others only K and V are ever read.
    void wanted_runs(const LlamaStep& s, int chunk) {
        wanted_.assign(s.rows, 0);
        for (int i = 0; i < s.num_logits; i++) wanted_[s.logit_rows[i]] = 1;
        for (int r = 0; r < s.rows;) {
            if (!wanted_[r]) {
                r++;
                continue;
            }
            const int from = r;
            while (r < s.rows && wanted_[r] && r - from < chunk) r++;
            runs_.push_back({from, r});
        }
    }

    void logits(const LlamaStep& s) {
        if (!s.num_logits) return;
        each_row(s.num_logits, [&](int i, int) {
            norm(x_.data() + int64_t(s.logit_rows[i]) * m_.hidden, m_.norm, act_.data() + int64_t(i) * m_.hidden);
        });
        const int panels = (m_.vocab + NR - 1) / NR, grain = panels > 64 * pool_.threads() ? 8 : 1;
        pool_.run((panels + grain - 1) / grain, [&](int c, int) {
            for (int p = c * grain; p < std::min(panels, (c + 1) * grain); p++) {
                const int n0 = p * NR, n = std::min(NR, m_.vocab - n0);
                panel<Panel>(act_.data(), m_.hidden, s.num_logits, weights(m_.head, p, m_.hidden),
                             m_.hidden / Panel::STEP, [&](int at, int rows, const float* tile) {
                                 for (int r = 0; r < rows; r++)
                                     std::memcpy(s.logits + (int64_t(at) + r) * m_.vocab + n0, tile + r * NR, n * 4);
                             });
            }
        });
    }

    struct Run {
        int from, to;
    };
    const LlamaModel m_;
    Pool& pool_;
    int inter_;
    std::vector<Scratch> scratch_;
    Tasks tasks_;
    std::vector<int> sequence_;
    std::vector<char> wanted_;
    std::vector<Run> runs_;
    std::vector<float> x_, qkv_;
    std::vector<Act> act_, q_, q_sinks_, attended_, mlp_;
};

}  // namespace kvt
