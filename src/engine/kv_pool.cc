#include "src/engine/kv_pool.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

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
      allocator_(static_cast<int32_t>(num_pages_)) {
  for (int layer = 0; layer < config.num_layers; ++layer) {
    for (std::vector<at::Tensor>* pages :
         {&store_.k_pages_PSKC, &store_.v_pages_PSKC}) {
      pages->push_back(at::empty(
          {num_pages_, kPageTokens, config.num_kv_heads, config.head_dim},
          at::TensorOptions().dtype(dtype).device(device)));
    }
  }
}

std::optional<kv::SequencePages> KvPool::Allocate(int64_t num_tokens) {
  kv::SequencePages sequence(&allocator_, kPageTokens);
  if (!sequence.AppendMany(num_tokens)) return std::nullopt;
  return sequence;
}

std::optional<kv::SequencePages> KvPool::Fork(const kv::SequencePages& source,
                                              int64_t num_tokens) {
  std::optional<kv::SequencePages::Fork> fork = source.ForkSequence();
  if (!fork.has_value() ||
      !fork->sequence.AppendMany(num_tokens - source.num_tokens())) {
    return std::nullopt;
  }
  if (fork->copy.has_value()) Copy(*fork->copy);
  return std::move(fork->sequence);
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
