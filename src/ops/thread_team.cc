#include "src/ops/thread_team.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <memory>
#include <new>
#include <thread>

#include "absl/cleanup/cleanup.h"
#include "src/ops/cpu_dispatch.h"

namespace weft::ops {
namespace {

using Body = c10::function_ref<void(int64_t, int64_t)>;

// Returns how often a waiting thread polls before it sleeps. 10,000 polls take
// about 0.2 ms, which is longer than the work between two loops of a step. If
// there are more threads than processors, polling takes time from the threads
// that work. Threads of other processes are not counted.
int MaxLooks(int threads) {
  static const auto processors =
      static_cast<int>(std::thread::hardware_concurrency());
  return threads > processors ? 100 : 10000;
}

// A thread prefetches at most this much of its rows of the next weight, so that
// they fit its second-level cache beside the rows that it reads.
constexpr int64_t kPrefetchBytes = int64_t{256} << 10;
constexpr int64_t kLineBytes = 64;

// Tells the processor that this thread waits in a loop.
void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Returns the number of iterations of a part of [0, count); the last part may
// have fewer. at::parallel_for cuts a range in the same way.
int64_t PartSize(int64_t count, int64_t grain, int64_t threads) {
  const int64_t parts =
      std::min(threads, CeilDiv(count, std::max<int64_t>(1, grain)));
  return CeilDiv(count, std::max<int64_t>(1, parts));
}

// Prefetches a range of memory into the second-level cache, line by line.
class Prefetcher {
 public:
  // Makes Step prefetch `thread`'s part of `rows`, starting at the part's first
  // line. Does nothing if the last call was for the same rows.
  void Aim(const SharedRows& rows, int64_t thread, int64_t threads) {
    if (rows.data == aim_) return;
    aim_ = rows.data;
    const int64_t size = PartSize(rows.num_groups, rows.grain, threads);
    const auto first = std::min(rows.num_groups, thread * size);
    const auto count = std::min(rows.num_groups - first, size);
    at_ = rows.data + first * rows.group_bytes;
    end_ = at_ + std::min(count * rows.group_bytes, kPrefetchBytes);
  }
  // Prefetches the next line. Returns false if no line is left.
  bool Step() {
    if (at_ >= end_) return false;
    __builtin_prefetch(at_, /*rw=*/0, /*locality=*/2);
    at_ += kLineBytes;
    return true;
  }

 private:
  const char* aim_ = nullptr;
  const char* at_ = nullptr;
  const char* end_ = nullptr;
};

// Waits until `ready` returns true for the value of `number`. Meanwhile
// prefetches.
template <typename Ready>
void Await(const std::atomic<uint32_t>& number, Prefetcher& prefetcher,
           int max_looks, const Ready& ready) {
  int looks = 0;
  for (uint32_t value = number.load(std::memory_order_acquire); !ready(value);
       value = number.load(std::memory_order_acquire)) {
    if (prefetcher.Step()) continue;
    if (++looks < max_looks) {
      Pause();
    } else {
      number.wait(value, std::memory_order_acquire);
    }
  }
}

// Stores `value` in `number` and wakes the threads that sleep until `number`
// changes. notify_all wakes nobody if its count of waiters is 0. A thread that
// goes to sleep counts itself and then reads `number` again. So the store must
// come before notify_all reads the count. A release store would not ensure this
// order.
void Publish(std::atomic<uint32_t>& number, uint32_t value) {
  number.store(value, std::memory_order_seq_cst);
  number.notify_all();
}

class Team;
thread_local Team* current_team = nullptr;

// The team of one call of WithThreadTeam. Thread 0 runs the step (Lead). For
// each loop of the step, thread 0 sets loop_ and then raises number_. The other
// threads wait until number_ rises, and then run their parts of the loop
// (Serve).
class Team {
 public:
  Team(const std::vector<SharedRows>& order, int capacity)
      : max_looks_(MaxLooks(capacity)),
        order_(order),
        done_(std::make_unique<Done[]>(capacity)) {}

  // Runs `step` on thread 0, in a team of `threads` threads. Afterwards makes
  // Serve return on the other threads.
  void Lead(int64_t threads, c10::function_ref<void()> step) {
    threads_ = threads;
    const absl::Cleanup dismiss = [this] {
      current_team = nullptr;
      loop_.body = nullptr;
      Publish(number_, ++num_loops_);
    };
    current_team = this;
    step();
  }

  // Runs `thread`'s part of each loop until the step has ended.
  void Serve(int64_t thread) {
    std::atomic<uint32_t>& done = done_[thread].number;
    // If a loop throws, the exception leaves Serve. From then on thread 0 must
    // not wait for this thread.
    const absl::Cleanup leave = [&done] { Publish(done, kLeft); };
    Prefetcher prefetcher;
    for (uint32_t number = 1;; ++number) {
      Await(number_, prefetcher, max_looks_,
            [number](uint32_t given) { return given >= number; });
      if (loop_.body == nullptr) return;
      prefetcher.Aim(loop_.next, thread, threads_);
      RunPart(thread);
      Publish(done, number);
    }
  }

  // Runs a loop on all threads of the team. Threads: thread 0.
  void Run(int64_t count, int64_t part_size, const Body& body) {
    loop_ = {
        .body = &body, .count = count, .part_size = part_size, .next = next_};
    Publish(number_, ++num_loops_);
    prefetcher_.Aim(next_, /*thread=*/0, threads_);
    // Even if thread 0's part throws, waits for the other threads, which use
    // `body`. During the loop current_team is null, so that loops within `body`
    // do not use the team.
    const absl::Cleanup join = [this] {
      current_team = this;
      Join();
    };
    current_team = nullptr;
    RunPart(/*thread=*/0);
  }

  // If `rows` belong to the weight that order_ expects now, sets next_ to the
  // weight after it. Does nothing for other weights, such as those of adapters,
  // which are not in order_.
  void Follow(const SharedRows& rows) {
    if (position_ == order_.size() || order_[position_].data != rows.data) {
      return;
    }
    ++position_;
    next_ = position_ < order_.size() ? order_[position_] : SharedRows();
  }

  int64_t threads() const { return threads_; }

 private:
  static constexpr uint32_t kLeft = std::numeric_limits<uint32_t>::max();

  struct Loop {
    const Body* body = nullptr;  // Null when the step has ended.
    int64_t count = 0;
    int64_t part_size = 0;
    SharedRows next;  // The weight to prefetch after the loop.
  };
  // The number of the latest loop in which a thread has run its part, or kLeft.
  // Each Done has its own cache line, because each thread writes its own Done.
  struct alignas(kLineBytes) Done {
    std::atomic<uint32_t> number = 0;
  };

  void RunPart(int64_t thread) const {
    const int64_t begin = thread * loop_.part_size;
    const int64_t end = std::min(loop_.count, begin + loop_.part_size);
    if (begin < end) (*loop_.body)(begin, end);
  }

  void Join() {
    for (int64_t thread = 1; thread < threads_; ++thread) {
      Await(done_[thread].number, prefetcher_, max_looks_,
            [this](uint32_t done) { return done >= num_loops_; });
    }
  }

  const int max_looks_;

  // Thread 0 writes loop_ and threads_ before it raises number_, the number of
  // the latest loop. The other threads read them afterwards.
  Loop loop_;
  int64_t threads_ = 1;
  alignas(kLineBytes) std::atomic<uint32_t> number_ = 0;

  // Only thread 0 uses these. They are not in the cache line of number_, which
  // the waiting threads read.
  alignas(kLineBytes) const std::vector<SharedRows>& order_;
  size_t position_ = 0;
  SharedRows next_;
  uint32_t num_loops_ = 0;
  Prefetcher prefetcher_;

  const std::unique_ptr<Done[]> done_;
};

}  // namespace

SharedRows RowsOf(const at::Tensor& weight, int64_t num_rows, int64_t stride) {
  constexpr int64_t kGroup = kernels::cpu::kRowOutputs;
  return {.data = static_cast<const char*>(weight.const_data_ptr()),
          .num_groups = CeilDiv(num_rows, kGroup),
          .group_rows = kGroup,
          .group_bytes =
              kGroup * stride * static_cast<int64_t>(weight.element_size()),
          .grain = RowGrain(kGroup * stride)};
}

void ParallelFor(int64_t count, int64_t grain, Body run) {
  Team* const team = current_team;
  if (team == nullptr) return at::parallel_for(0, count, grain, run);
  const int64_t part_size = PartSize(count, grain, team->threads());
  if (part_size < count) {
    team->Run(count, part_size, run);
  } else if (count > 0) {
    run(0, count);
  }
}

int64_t NumWorkers(int64_t count) {
  const int threads = at::in_parallel_region() ? 1 : at::get_num_threads();
  return std::min<int64_t>(threads, count);
}

void ForEachTask(int64_t count, Body run) {
  std::atomic<int64_t> next = 0;
  at::parallel_for(0, NumWorkers(count), 1, [&](int64_t worker, int64_t) {
    for (int64_t i = next++; i < count; i = next++) run(worker, i);
  });
}

void ParallelForRows(const SharedRows& rows, Body run) {
  if (current_team != nullptr) current_team->Follow(rows);
  ParallelFor(rows.num_groups, rows.grain, run);
}

float* ThreadMemory(int64_t floats) {
  constexpr size_t kAlignment = 64;  // A vector of any kernel.
  struct Free {
    void operator()(float* memory) const { std::free(memory); }
  };
  thread_local std::unique_ptr<float, Free> memory;
  thread_local int64_t capacity = 0;
  if (capacity < floats) {
    const size_t bytes =
        CeilDiv(floats * int64_t{sizeof(float)}, kAlignment) * kAlignment;
    capacity = 0;
    memory.reset(static_cast<float*>(std::aligned_alloc(kAlignment, bytes)));
    if (memory == nullptr) throw std::bad_alloc();
    capacity = floats;
  }
  return memory.get();
}

void WithThreadTeam(const std::vector<SharedRows>& order,
                    c10::function_ref<void()> step) {
  const int capacity = at::get_num_threads();
  if (capacity == 1 || at::in_parallel_region()) return step();
  Team team(order, capacity);
  at::parallel_for(0, capacity, 1, [&](int64_t begin, int64_t end) {
    if (begin == 0) {
      // at::parallel_for may have fewer threads than `capacity`. In that case
      // it makes CeilDiv(capacity, end) parts of `end` > 1 iterations.
      team.Lead(CeilDiv(capacity, end), step);
    } else {
      team.Serve(at::get_thread_num());
    }
  });
}

}  // namespace weft::ops
