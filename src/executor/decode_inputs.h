// Holds all values that change between decode steps in one buffer: tokens,
// positions, slots, lengths, draw rules, the adapter table, the page table. A
// captured step reads the buffer in place, so an iteration uploads one block of
// memory and launches one graph.
//
// Legend: T rows, L page table entries per row.
#ifndef WEFT_SRC_EXECUTOR_DECODE_INPUTS_H_
#define WEFT_SRC_EXECUTOR_DECODE_INPUTS_H_

#include <ATen/core/Tensor.h>

#include <compare>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "src/executor/plan.h"
#include "src/lora/lora_cuda.h"
#include "src/model/decoder.h"

namespace weft::executor {

// The sizes that a capture fixes. Steps of one shape differ only in values.
struct DecodeShape {
  int64_t rows = 0;           // Including padding.
  int64_t table_entries = 0;  // Table entries per row; see TokenBound.
  int64_t max_rank = 0;       // Bound on the adapters' ranks; 0: no adapter.
  int max_filters = 0;        // See sampling::cuda::MaxFilters.

  friend auto operator<=>(const DecodeShape&, const DecodeShape&) = default;
};

// Returns the shape in which the plan runs, or none if the plan cannot be
// captured. A plan can be captured if it is a decode step of at most `max_rows`
// rows. It must score nothing, and draw one token from each row without
// top_logprobs. If the plan has adapters, the device must be CUDA, the rows and
// the adapters must be bf16, and only the layers may have LoRA. A page has
// `page_tokens` tokens. The result's max_filters is 0.
[[nodiscard]] std::optional<DecodeShape> ShapeOf(const CachePlan& plan,
                                                 const model::Decoder& decoder,
                                                 int64_t max_rows,
                                                 int64_t page_tokens);

// The arguments of a decode step, as views of the device's buffer.
struct DecodeStep {
  model::PackedBatch batch;
  model::KvAccess kv;  // The store is not set.
  at::Tensor rules;    // For sampling::cuda::QueueDraw.
};

// Divides a buffer into parts, one for each argument of a decode step.
class DecodeInputs {
 public:
  DecodeInputs(const DecodeShape& shape, const model::Decoder& decoder);

  [[nodiscard]] int64_t bytes() const { return bytes_; }
  // Returns whether the adapter table has room for the plan's distinct adapter
  // layouts. REQUIRES: the plan has this shape.
  [[nodiscard]] bool Fits(const CachePlan& plan) const;
  // Writes the plan's values, except the rules, to `to`, which has at least
  // bytes() bytes and is aligned to 16. Returns how many bytes, from the start
  // of `to`, must be uploaded. Rows beyond the plan's are padding: they write
  // to no slot and see no token. REQUIRES: the plan has this shape.
  [[nodiscard]] int64_t Write(const CachePlan& plan,
                              std::span<std::byte> to) const;
  // Returns the part of `to` that holds the rules, one for each row.
  [[nodiscard]] std::span<std::byte> RulePlaces(std::span<std::byte> to) const;
  // Returns the step that reads `buffer` [bytes()] on the decoder's device.
  // Call it only once, because it also binds the adapter table to this buffer.
  [[nodiscard]] DecodeStep At(const at::Tensor& buffer) const;

 private:
  DecodeShape shape_;
  // Null without adapters.
  std::shared_ptr<lora::cuda::DecodeTable> adapter_table_;
  // The offset of each part. The tokens are at 0.
  int64_t slots_ = 0, positions_ = 0, lengths_ = 0, rules_ = 0, adapters_ = 0,
          table_ = 0, bytes_ = 0;
};

}  // namespace weft::executor

#endif  // WEFT_SRC_EXECUTOR_DECODE_INPUTS_H_
