// The key/value cache: the memory behind kv::PageAllocator's page numbers.
#ifndef WEFT_SRC_ENGINE_KV_POOL_H_
#define WEFT_SRC_ENGINE_KV_POOL_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "src/kv/page_allocator.h"
#include "src/kv/sequence_pages.h"
#include "src/model/model_config.h"
#include "src/model/packed_batch.h"

namespace weft::engine {

inline constexpr int64_t kPageTokens = 16;

// Threads: engine thread only, but for num_pages and bytes_per_page.
class KvPool {
 public:
  // At least one page, however few `bytes`.
  KvPool(const model::ModelConfig& config, int64_t bytes, at::ScalarType dtype,
         at::Device device);

  [[nodiscard]] static int64_t PagesFor(int64_t num_tokens) {
    return (num_tokens + kPageTokens - 1) / kPageTokens;
  }
  [[nodiscard]] int64_t num_pages() const { return num_pages_; }
  [[nodiscard]] int64_t free_pages() const { return allocator_.num_free(); }
  [[nodiscard]] int64_t bytes_per_page() const { return bytes_per_page_; }
  [[nodiscard]] model::KvStore& store() { return store_; }

  // Slots for num_tokens; none when there is no room.
  [[nodiscard]] std::optional<kv::SequencePages> Allocate(int64_t num_tokens);
  // The same, beginning with the tokens of `source`, which it shares.
  [[nodiscard]] std::optional<kv::SequencePages> Fork(
      const kv::SequencePages& source, int64_t num_tokens);

 private:
  void Copy(const kv::PageCopy& copy);

  const int64_t bytes_per_page_;
  const int64_t num_pages_;
  kv::PageAllocator allocator_;
  model::KvStore store_;
};

}  // namespace weft::engine

#endif  // WEFT_SRC_ENGINE_KV_POOL_H_
