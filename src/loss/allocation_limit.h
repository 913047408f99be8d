// Limits the host memory that LibTorch allocates on one thread.
#ifndef WEFT_SRC_LOSS_ALLOCATION_LIMIT_H_
#define WEFT_SRC_LOSS_ALLOCATION_LIMIT_H_

#include <cstddef>
#include <cstdint>

namespace weft::loss {

// While an object of this class lives, LibTorch may allocate so many bytes on
// this thread, with those that it frees meanwhile. Instead of more, it throws
// c10::Error. So the limit bounds memory, and the time to fill it. Threads: one
// object for each thread at a time.
class AllocationLimit {
 public:
  // Has LibTorch's present allocator obey limits. Call it after each change of
  // the allocator, before other threads use the new one.
  static void Install();

  explicit AllocationLimit(int64_t bytes);
  ~AllocationLimit();
  AllocationLimit(const AllocationLimit&) = delete;
  AllocationLimit& operator=(const AllocationLimit&) = delete;

  // Counts an allocation. Throws c10::Error if it is too large.
  void Take(size_t bytes);
  int64_t taken() const { return taken_; }

 private:
  const int64_t bytes_;
  int64_t taken_ = 0;
};

}  // namespace weft::loss

#endif  // WEFT_SRC_LOSS_ALLOCATION_LIMIT_H_
