#include "src/engine/device/host_allocator.h"

#include <c10/core/CPUAllocator.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <new>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "src/base/huge_pages.h"

// tcmalloc's functions. They are null in a process that does not use it.
extern "C" {
__attribute__((weak)) int MallocExtension_GetNumericProperty(
    const char* property, size_t* value);
__attribute__((weak)) void MallocExtension_ReleaseToSystem(size_t num_bytes);
}

namespace weft::engine {
namespace {

#if defined(__SANITIZE_ADDRESS__)
constexpr bool kHasAddressSanitizer = true;
#elif defined(__has_feature)
constexpr bool kHasAddressSanitizer = __has_feature(address_sanitizer);
#else
constexpr bool kHasAddressSanitizer = false;
#endif

constexpr size_t kHugePage = size_t{2} << 20;
// The size of every block is a multiple of this.
constexpr size_t kGranule = size_t{64} << 10;

size_t RoundUp(size_t bytes, size_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

// Maps a block that starts at a multiple of kHugePage. Returns null if there is
// no memory.
void* Map(size_t bytes) {
  const size_t mapped = bytes + kHugePage;
  void* const all = mmap(nullptr, mapped, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (all == MAP_FAILED) return nullptr;
  auto* const begin = static_cast<std::byte*>(all);
  const size_t head = RoundUp(reinterpret_cast<uintptr_t>(begin), kHugePage) -
                      reinterpret_cast<uintptr_t>(begin);
  if (head > 0) munmap(begin, head);
  munmap(begin + head + bytes, mapped - head - bytes);
  PreferHugePages(absl::MakeSpan(begin + head, bytes));
  return begin + head;
}

void ReleaseFreeHeap() {
  if (MallocExtension_ReleaseToSystem == nullptr) return;
  // Other threads wait for the heap while it releases a part.
  constexpr size_t kPart = size_t{16} << 20;
  size_t free = 0;
  MallocExtension_GetNumericProperty("tcmalloc.pageheap_free_bytes", &free);
  for (; free >= kPart; free -= kPart) MallocExtension_ReleaseToSystem(kPart);
}

}  // namespace

HostAllocator& HostAllocator::Get() {
  static HostAllocator& allocator = *new HostAllocator();
  return allocator;
}

void HostAllocator::Install() {
  if (!kHasAddressSanitizer) c10::SetCPUAllocator(&Get());
}

c10::DataPtr HostAllocator::allocate(size_t bytes) {
  if (bytes < kMinBytes || bytes > PTRDIFF_MAX) {
    return c10::GetDefaultCPUAllocator()->allocate(bytes);
  }
  void* data = nullptr;
  {
    MutexLock lock(&mu_);
    data = Take(RoundUp(bytes, kGranule));
  }
  // RunGuarded reports std::bad_alloc as exhausted memory. It would report a
  // c10::Error, which LibTorch's own allocator throws, as an internal error.
  if (data == nullptr) throw std::bad_alloc();
  return {data, data, &HostAllocator::Free, c10::Device(c10::kCPU)};
}

c10::DeleterFnPtr HostAllocator::raw_deleter() const { return &Free; }

void* HostAllocator::Take(size_t asked) {
  void* data = nullptr;
  size_t bytes = asked;
  const auto block = cache_.lower_bound(bytes);
  if (block != cache_.end() && Suits(block->first, bytes)) {
    data = block->second.data;
    bytes = block->first;
    usage_.cached -= bytes;
    cache_.erase(block);
  } else {
    MakeRoom(bytes);
    data = Map(bytes);
    if (data == nullptr && !cache_.empty()) {
      while (!cache_.empty()) Unmap(cache_.begin());
      data = Map(bytes);
    }
    if (data == nullptr) return nullptr;
  }
  in_use_.emplace(data, Held{.block = bytes, .asked = asked});
  unused_ += bytes - asked;
  usage_.in_use += bytes;
  most_in_use_ = std::max(most_in_use_, usage_.in_use);
  return data;
}

bool HostAllocator::Suits(size_t block, size_t bytes) const {
  // A block suits a tensor that is only slightly smaller.
  if (block <= bytes + bytes / 8) return true;
  // A block of up to twice the tensor's size also suits it if a new block would
  // cause cached blocks to be unmapped. This reuse saves the kernel from
  // clearing a new block. The last condition limits the unused bytes of all
  // blocks.
  const bool is_full = usage_.in_use + usage_.cached + bytes > most_in_use_;
  return is_full && block <= 2 * bytes &&
         unused_ + block - bytes <= most_in_use_ / 8;
}

void HostAllocator::MakeRoom(size_t bytes) {
  const size_t limit = std::max(most_in_use_, usage_.in_use + bytes);
  while (usage_.in_use + usage_.cached + bytes > limit) {
    Unmap(std::ranges::min_element(
        cache_, {}, [](const auto& entry) { return entry.second.freed_at; }));
  }
}

void HostAllocator::Unmap(Cache::iterator block) {
  usage_.cached -= block->first;
  munmap(block->second.data, block->first);
  cache_.erase(block);
}

void HostAllocator::Free(void* data) {
  HostAllocator& allocator = Get();
  {
    MutexLock lock(&allocator.mu_);
    const auto held = allocator.in_use_.find(data);
    if (held != allocator.in_use_.end()) {
      const auto [bytes, asked] = held->second;
      allocator.in_use_.erase(held);
      allocator.unused_ -= bytes - asked;
      // Inserts the block before cached blocks of its size. So Take finds the
      // block that was freed last, whose bytes may still be in the processor's
      // cache.
      allocator.cache_.emplace_hint(
          allocator.cache_.lower_bound(bytes), bytes,
          Cached{.data = data, .freed_at = ++allocator.num_frees_});
      allocator.usage_.in_use -= bytes;
      allocator.usage_.cached += bytes;
      return;
    }
  }
  c10::GetDefaultCPUAllocator()->raw_deallocate(data);
}

void HostAllocator::ReleaseCached() {
  MutexLock lock(&mu_);
  while (!cache_.empty()) Unmap(cache_.begin());
}

void HostAllocator::ReleaseUnused() {
  std::vector<std::pair<void*, size_t>> unused;
  {
    MutexLock lock(&mu_);
    for (auto block = cache_.begin(); block != cache_.end();) {
      const auto next = std::next(block);
      if (block->second.freed_at <= seen_frees_) {
        unused.emplace_back(block->second.data, block->first);
        usage_.cached -= block->first;
        cache_.erase(block);
      }
      block = next;
    }
    seen_frees_ = num_frees_;
  }
  // Large blocks take the kernel a while, in which others may allocate.
  for (const auto& [data, bytes] : unused) munmap(data, bytes);
  ReleaseFreeHeap();
}

HostAllocator::Usage HostAllocator::usage() const {
  MutexLock lock(&mu_);
  return usage_;
}

}  // namespace weft::engine
