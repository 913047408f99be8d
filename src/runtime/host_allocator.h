// LibTorch's allocator of host memory, with a cache of large blocks. A training
// step frees and allocates gigabytes in blocks that the C library would return
// to the kernel each time, and the kernel would clear them again page by page.
//
// Cached blocks are unmapped before the mapped bytes exceed the largest number
// of bytes that were in use at once. So the cache does not raise the peak of
// tensors by more than a quarter, but it keeps their memory at that peak until
// ReleaseCached. A block is used for what is slightly smaller. It is used for
// what is at least half as large instead of a new one for which others would be
// unmapped. Blocks consist of huge pages where the kernel has them.
#ifndef WEFT_SRC_RUNTIME_HOST_ALLOCATOR_H_
#define WEFT_SRC_RUNTIME_HOST_ALLOCATOR_H_

#include <c10/core/Allocator.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <unordered_map>

#include "absl/base/thread_annotations.h"
#include "src/base/mutex.h"

namespace weft::engine {

// Threads: any. Lives until the process ends, because tensors do.
class HostAllocator final : public c10::Allocator {
 public:
  // Smaller blocks come from LibTorch's own allocator.
  static constexpr size_t kMinBytes = size_t{1} << 20;

  // Returns the allocator of this process, which LibTorch uses after Install.
  // With AddressSanitizer, Install does nothing, so that it sees every block.
  static HostAllocator& Get();
  static void Install();

  // Errors: throws c10::Error if there is no memory.
  c10::DataPtr allocate(size_t bytes) override;
  [[nodiscard]] c10::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

  // Unmaps all cached blocks.
  void ReleaseCached();

  struct Usage {
    size_t in_use = 0;  // Bytes of blocks that tensors hold.
    size_t cached = 0;
  };
  [[nodiscard]] Usage usage() const;

 private:
  struct Cached {
    void* data = nullptr;
    uint64_t freed_at = 0;  // Counts frees.
  };
  using Cache = std::multimap<size_t, Cached>;  // By size.
  struct Held {
    size_t block = 0;
    size_t asked = 0;  // At most the block's bytes.
  };

  HostAllocator() = default;
  static void Free(void* data);
  // Returns whether a cached block of this size is taken for `bytes`.
  [[nodiscard]] bool Suits(size_t block, size_t bytes) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Returns null if there is no memory.
  void* Take(size_t asked) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Unmap(Cache::iterator block) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Unmaps the blocks that were freed first, until `bytes` more may be mapped.
  void MakeRoom(size_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  mutable Mutex mu_;
  std::unordered_map<void*, Held> in_use_ ABSL_GUARDED_BY(mu_);
  size_t unused_ ABSL_GUARDED_BY(mu_) = 0;  // Bytes that nobody asked for.
  Cache cache_ ABSL_GUARDED_BY(mu_);
  Usage usage_ ABSL_GUARDED_BY(mu_);
  size_t most_in_use_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t num_frees_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace weft::engine

#endif  // WEFT_SRC_RUNTIME_HOST_ALLOCATOR_H_
