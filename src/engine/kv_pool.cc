#include "src/engine/kv_pool.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstddef>
#include <utility>

#include "src/base/huge_pages.h"

namespace weft::engine {
namespace {

int64_t BytesPerPage(const model::ModelConfig& config, at::ScalarType dtype) {
  return 2 * config.num_layers * kPageTokens * config.num_kv_heads *
         config.head_dim * static_cast<int64_t>(at::elementSize(dtype));
}

}  // namespace

KvPool::KvPool(const model::ModelConfig& config, int64_t bytes,
               at::ScalarType dtype, at::Device device)
    : bytes_per_page_(BytesPerPage(config, dtype)),
      num_pages_(
          std::max<int64_t>(1, bytes / std::max<int64_t>(1, bytes_per_page_))),
      allocator_(static_cast<int32_t>(num_pages_)),
      prefixes_(&allocator_, kPageTokens) {
  for (int layer = 0; layer < config.num_layers; ++layer) {
    for (std::vector<at::Tensor>* pages :
         {&store_.k_pages_PSKC, &store_.v_pages_PSKC}) {
      const at::Tensor& layer_pages = pages->emplace_back(at::empty(
          {num_pages_, kPageTokens, config.num_kv_heads, config.head_dim},
          at::TensorOptions().dtype(dtype).device(device)));
      if (!layer_pages.is_cpu()) continue;
      PreferHugePages(absl::MakeSpan(
          static_cast<std::byte*>(layer_pages.mutable_data_ptr()),
          layer_pages.nbytes()));
    }
  }
}

kv::SequencePages KvPool::Begin(uint64_t version,
                                absl::Span<const int32_t> tokens) {
  return {&allocator_, kPageTokens, prefixes_.Lookup(version, tokens)};
}

bool KvPool::Append(kv::SequencePages& sequence, int64_t count) {
  const auto held = static_cast<int64_t>(sequence.pages().size());
  MakeFree(PagesFor(sequence.num_tokens() + count) - held);
  return sequence.AppendMany(count);
}

std::optional<kv::SequencePages> KvPool::Fork(const kv::SequencePages& source) {
  if (source.num_tokens() % kPageTokens > 0) MakeFree(1);
  std::optional<kv::SequencePages::Fork> fork = source.ForkSequence();
  if (!fork.has_value()) return std::nullopt;
  if (fork->copy.has_value()) Copy(*fork->copy);
  return std::move(fork->sequence);
}

void KvPool::Remember(uint64_t version, absl::Span<const int32_t> tokens,
                      kv::SequencePages& sequence) {
  prefixes_.Insert(version, tokens, sequence);
}

void KvPool::MakeFree(int64_t count) {
  const int64_t missing = count - allocator_.num_free();
  if (missing > 0) prefixes_.Evict(missing);
}

void KvPool::Copy(const kv::PageCopy& copy) {
  for (std::vector<at::Tensor>* pages :
       {&store_.k_pages_PSKC, &store_.v_pages_PSKC}) {
    for (at::Tensor& layer : *pages) {
      layer[copy.to]
          .narrow(0, 0, copy.num_rows)
          .copy_(layer[copy.from].narrow(0, 0, copy.num_rows));
    }
  }
}

}  // namespace weft::engine
