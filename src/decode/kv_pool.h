// The pages of the key/value cache, with the prefixes that it remembers. Pages
// of prefixes that no sequence uses give way to whoever needs pages. The memory
// behind them is the executor's.
#ifndef WEFT_SRC_DECODE_KV_POOL_H_
#define WEFT_SRC_DECODE_KV_POOL_H_

#include <cstdint>
#include <functional>
#include <optional>

#include "absl/types/span.h"
#include "src/kv/page_allocator.h"
#include "src/kv/prefix_cache.h"
#include "src/kv/sequence_pages.h"

namespace weft::engine {

inline constexpr int64_t kPageTokens = 16;

// Threads: engine thread only, but for num_pages and bytes_per_page.
class KvPool {
 public:
  // At least one page, however few `bytes`. `copy_page` copies the rows of one
  // in memory.
  KvPool(int64_t bytes_per_page, int64_t bytes,
         std::function<void(const kv::PageCopy&)> copy_page);

  [[nodiscard]] static int64_t PagesFor(int64_t num_tokens) {
    return (num_tokens + kPageTokens - 1) / kPageTokens;
  }
  [[nodiscard]] int64_t num_pages() const { return num_pages_; }
  // Pages that no sequence uses.
  [[nodiscard]] int64_t available_pages() const {
    return allocator_.num_free() + allocator_.num_idle();
  }
  // Pages of remembered prefixes, whether sequences use them or not.
  [[nodiscard]] int64_t prefix_pages() const { return prefixes_.num_pages(); }
  [[nodiscard]] int64_t bytes_per_page() const { return bytes_per_page_; }

  // A sequence that begins with what is remembered of `tokens` under `version`,
  // in whole pages: empty when that is nothing.
  [[nodiscard]] kv::SequencePages Begin(uint64_t version,
                                        absl::Span<const int32_t> tokens);
  // Room for `count` more tokens; false, and no change, when there is none.
  [[nodiscard]] bool Append(kv::SequencePages& sequence, int64_t count);
  // A second sequence with the same tokens; none when there is no page for the
  // copy of a part-filled last one.
  [[nodiscard]] std::optional<kv::SequencePages> Fork(
      const kv::SequencePages& source);

  // Keeps for later prompts the pages that `tokens`, the first ones of the
  // sequence, fill. Their keys and values are those of `version`. The sequence
  // shares from now on what others have computed at the same time.
  void CachePrefix(uint64_t version, absl::Span<const int32_t> tokens,
                   kv::SequencePages& sequence);
  void Forget(uint64_t version) { prefixes_.DropVersion(version); }

 private:
  // As many free pages as can be, up to `count`.
  void MakeFree(int64_t count);

  const int64_t bytes_per_page_;
  const int64_t num_pages_;
  kv::PageAllocator allocator_;
  kv::PrefixCache prefixes_;
  const std::function<void(const kv::PageCopy&)> copy_page_;
};

}  // namespace weft::engine

#endif  // WEFT_SRC_DECODE_KV_POOL_H_
