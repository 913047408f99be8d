// Allocates host memory for LibTorch and caches large blocks. A training step
// frees and allocates gigabytes in large blocks. The C library would return
// each block to the kernel, which would clear it again page by page.
//
// The allocator unmaps cached blocks so that the mapped bytes never exceed the
// largest number of bytes that were in use at once. A block may be larger than
// its tensor, so the process maps up to about a quarter more than its tensors
// need at their peak. It keeps this memory until ReleaseUnused or ReleaseCached
// gives it back. A cached block serves a tensor that is only slightly smaller.
// It may serve a tensor of at least half its size if a new block would cause
// others to be unmapped. Blocks consist of huge pages where the kernel has
// them.
#ifndef WEFT_SRC_ENGINE_DEVICE_HOST_ALLOCATOR_H_
#define WEFT_SRC_ENGINE_DEVICE_HOST_ALLOCATOR_H_

#include <c10/core/Allocator.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <unordered_map>

#include "absl/base/thread_annotations.h"
#include "src/base/threads/mutex.h"

namespace weft::engine {

// Threads: any. Lives until the process ends, because a tensor may live that
// long.
class HostAllocator final : public c10::Allocator {
 public:
  // Smaller blocks come from LibTorch's own allocator.
  static constexpr size_t kMinBytes = size_t{1} << 20;

  // Returns the allocator of this process, which LibTorch uses after Install.
  // In a build with AddressSanitizer, Install does nothing, so that the
  // sanitizer sees every block.
  static HostAllocator& Get();
  static void Install();

  // Errors: throws std::bad_alloc, or c10::Error for a small block, if there is
  // no memory.
  c10::DataPtr allocate(size_t bytes) override;
  c10::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

  // Unmaps all cached blocks.
  void ReleaseCached();
  // Unmaps the blocks that have been in the cache since before the last call.
  // If the process uses tcmalloc, also gives the heap's free pages back. Call
  // it at an interval longer than a training step, which uses the same blocks
  // again.
  void ReleaseUnused();

  struct Usage {
    size_t in_use = 0;  // Bytes of blocks that tensors hold.
    size_t cached = 0;
  };
  Usage usage() const;

 private:
  struct Cached {
    void* data = nullptr;
    uint64_t freed_at = 0;  // The value of num_frees_ after this free.
  };
  using Cache = std::multimap<size_t, Cached>;  // Keys: block sizes in bytes.
  struct Held {
    size_t block = 0;
    size_t asked = 0;  // Bytes asked for, at most `block`.
  };

  HostAllocator() = default;
  static void Free(void* data);
  // Returns whether a cached block of `block` bytes may serve a tensor of
  // `bytes`.
  bool Suits(size_t block, size_t bytes) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Takes a block from the cache or maps a new one. Returns null if there is no
  // memory.
  void* Take(size_t asked) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Unmap(Cache::iterator block) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Unmaps cached blocks, in the order in which they were freed, until a block
  // of `bytes` may be mapped.
  void MakeRoom(size_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  mutable Mutex mu_;
  std::unordered_map<void*, Held> in_use_ ABSL_GUARDED_BY(mu_);
  size_t unused_ ABSL_GUARDED_BY(mu_) = 0;  // Sum of `block` - `asked`.
  Cache cache_ ABSL_GUARDED_BY(mu_);
  Usage usage_ ABSL_GUARDED_BY(mu_);
  size_t most_in_use_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t num_frees_ ABSL_GUARDED_BY(mu_) = 0;
  // The value of num_frees_ at the last ReleaseUnused.
  uint64_t seen_frees_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace weft::engine

#endif  // WEFT_SRC_ENGINE_DEVICE_HOST_ALLOCATOR_H_
