// A few threads that share the chunks of one loop after another. Made for cores that other processes use too.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvt {

inline void relax() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// The caller of run() takes chunks as well, and waits for chunks to be done, never for threads to arrive: a helper that
// isn't scheduled holds nothing up. Helpers spin for some microseconds, then sleep.
//
// One 64-bit ticket names loop, number of chunks and next chunk, so that a late helper can't mistake one loop's chunk
// for another's. A loop's description is overwritten two loops later, when all its chunks are done.
class Pool {
   public:
    explicit Pool(int threads) : threads_(threads < 1 ? 1 : threads) {
        for (int i = 1; i < threads_; i++) helpers_.emplace_back([this, i] { help(i); });
    }
    ~Pool() {
        stop_.store(true);
        wake_.fetch_add(1);
        wake_.notify_all();
        for (auto& t : helpers_) t.join();
    }
    int threads() const { return threads_; }

    // f(chunk, thread) for each chunk in [0, chunks); returns when all are done. One caller at a time.
    template <class F>
    void run(int64_t chunks, const F& f) {
        for (int64_t first = 0; first < chunks; first += MOST)
            share(std::min(MOST, chunks - first), [&](int i, int thread) { f(int(first) + i, thread); });
    }

   private:
    static constexpr uint64_t LOOP_MASK = (1 << 24) - 1, COUNT_MASK = (1 << 20) - 1;
    static constexpr int64_t MOST = 1 << 19;  // chunks of one ticket, which late helpers overrun by one each
    static constexpr int SPINS = 1500;        // about 30 microseconds; anything from 500 to 5000 behaves alike
    struct Loop {
        void (*call)(const void*, int, int);
        const void* f;
    };

    template <class F>
    void share(int64_t chunks, const F& f) {
        if (threads_ == 1 || chunks == 1) {
            for (int64_t i = 0; i < chunks; i++) f(int(i), 0);
            return;
        }
        const uint64_t loop = ++loop_ & LOOP_MASK;
        Loop& l = loops_[loop & 1];
        l.call = [](const void* g, int chunk, int thread) { (*static_cast<const F*>(g))(chunk, thread); };
        l.f = &f;
        done_.store(0, std::memory_order_relaxed);
        ticket_.store(loop << 40 | uint64_t(chunks) << 20, std::memory_order_seq_cst);
        if (asleep_.load(std::memory_order_seq_cst)) {
            wake_.fetch_add(1, std::memory_order_seq_cst);
            wake_.notify_all();
        }
        work(0);
        for (int spins = 0; done_.load(std::memory_order_acquire) != chunks; spins++) {
            if (spins < SPINS) relax();
            else std::this_thread::yield();
        }
    }

    void work(int thread) {
        for (;;) {
            uint64_t t = ticket_.load(std::memory_order_acquire);
            if ((t & COUNT_MASK) >= ((t >> 20) & COUNT_MASK)) return;
            t = ticket_.fetch_add(1, std::memory_order_acq_rel);
            const int64_t chunk = t & COUNT_MASK;
            if (chunk >= int64_t((t >> 20) & COUNT_MASK)) return;
            const Loop& l = loops_[(t >> 40) & 1];
            l.call(l.f, int(chunk), thread);
            done_.fetch_add(1, std::memory_order_acq_rel);
        }
    }
    bool pending() const {
        const uint64_t t = ticket_.load(std::memory_order_seq_cst);
        return (t & COUNT_MASK) < ((t >> 20) & COUNT_MASK);
    }
    void help(int thread) {
        while (!stop_.load(std::memory_order_relaxed)) {
            work(thread);
            int spins = 0;
            while (!pending() && ++spins < SPINS) relax();
            if (pending()) continue;
            const uint32_t seen = wake_.load(std::memory_order_seq_cst);
            asleep_.fetch_add(1, std::memory_order_seq_cst);
            if (!pending() && !stop_.load()) wake_.wait(seen, std::memory_order_seq_cst);
            asleep_.fetch_sub(1, std::memory_order_seq_cst);
        }
    }

    const int threads_;
    alignas(64) std::atomic<uint64_t> ticket_{0};
    alignas(64) std::atomic<int64_t> done_{0};
    alignas(64) std::atomic<uint32_t> wake_{0};
    std::atomic<int> asleep_{0};
    std::atomic<bool> stop_{false};
    uint64_t loop_ = 0;
    Loop loops_[2];
    std::vector<std::thread> helpers_;
};

}  // namespace kvt
