// Host memory with a limit that a test sets.
#ifndef WEFT_TESTS_SUPPORT_LIMITED_MEMORY_H_
#define WEFT_TESTS_SUPPORT_LIMITED_MEMORY_H_

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <new>
#include <utility>

namespace weft::testing {

// Replaces LibTorch's host allocator while the object exists, and counts the
// bytes that tensors take. Memory comes from the replaced allocator. Tensors
// may outlive the object.
class LimitedMemory {
 public:
  static constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();

  LimitedMemory()
      : below_(c10::GetCPUAllocator()), counter_(*new Counter(below_)) {
    c10::SetCPUAllocator(&counter_, /*priority=*/255);
  }
  ~LimitedMemory() { c10::SetCPUAllocator(below_, /*priority=*/255); }
  LimitedMemory(const LimitedMemory&) = delete;
  LimitedMemory& operator=(const LimitedMemory&) = delete;

  // Limits all tensors together to `bytes` bytes. An allocation that would
  // exceed the limit throws c10::OutOfMemoryError, as on a device. Threads:
  // any.
  void SetLimit(int64_t bytes) { counter_.state->limit = bytes; }
  // Sets a function that runs before each allocation and may throw. Call it
  // while nothing allocates.
  void SetHook(std::function<void()> hook) {
    counter_.state->hook = std::move(hook);
  }
  int64_t used() const { return counter_.state->used; }
  // Returns the most bytes in use since the last call.
  int64_t TakePeak() {
    return counter_.state->peak.exchange(counter_.state->used);
  }

 private:
  struct State {
    std::atomic<int64_t> limit = kNoLimit;
    std::atomic<int64_t> used = 0;
    std::atomic<int64_t> peak = 0;
    std::function<void()> hook;
  };
  // Precedes a tensor's memory and keeps the memory's alignment.
  struct alignas(64) Header {
    c10::Allocator* below;
    int64_t bytes;
    std::shared_ptr<State> state;
  };
  struct Counter final : public c10::Allocator {
    explicit Counter(c10::Allocator* allocator) : below(allocator) {}
    c10::DataPtr allocate(size_t size) override {
      const auto bytes = static_cast<int64_t>(size);
      if (state->hook) state->hook();
      const int64_t used = state->used += bytes;
      if (used > state->limit) {
        state->used -= bytes;
        TORCH_CHECK_WITH(OutOfMemoryError, false, "no ", bytes, " bytes left");
      }
      int64_t peak = state->peak;
      while (used > peak && !state->peak.compare_exchange_weak(peak, used)) {
      }
      auto* const header = new (below->raw_allocate(sizeof(Header) + size))
          Header{.below = below, .bytes = bytes, .state = state};
      void* const data = header + 1;
      return {data, data, &Free, c10::Device(c10::kCPU)};
    }
    static void Free(void* data) {
      auto* const header = static_cast<Header*>(data) - 1;
      header->state->used -= header->bytes;
      c10::Allocator* const below = header->below;
      header->~Header();
      below->raw_deallocate(header);
    }
    // oneDNN allocates raw memory, which needs this deleter.
    c10::DeleterFnPtr raw_deleter() const override { return &Free; }
    void copy_data(void* to, const void* from, size_t count) const override {
      default_copy_data(to, from, count);
    }

    c10::Allocator* const below;
    const std::shared_ptr<State> state = std::make_shared<State>();
  };

  c10::Allocator* const below_;
  Counter& counter_;  // Never freed, because tensors refer to it.
};

}  // namespace weft::testing

#endif  // WEFT_TESTS_SUPPORT_LIMITED_MEMORY_H_
