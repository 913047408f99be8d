// All that changes from one decode step to the next, in one buffer: tokens,
// positions, slots, lengths, rules of the draws, the table of the adapters, the
// page table. A captured step reads it where it lies, so that an iteration
// uploads one piece of memory and launches one graph.
//
// Legend: T rows, L table entries per row.
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

// What a capture freezes. Steps of one shape differ in values alone.
struct DecodeShape {
  int64_t rows = 0;           // With padding.
  int64_t table_entries = 0;  // Pages of a sequence at most.
  int64_t max_rank = 0;       // The adapters' largest; 0: there are none.
  int max_filters = 0;        // A draw's, as sampling::cuda::MaxFilters.

  friend auto operator<=>(const DecodeShape&, const DecodeShape&) = default;
};

// The shape that the plan runs in; none when it is no decode step of captured
// kinds: tokens are drawn from every row, none of them with top_logprobs, and
// adapters are those of the layers and fit into a table. max_filters is left 0.
// Arguments: the most rows of a step, and tokens of a page.
[[nodiscard]] std::optional<DecodeShape> ShapeOf(const CachePlan& plan,
                                                 const model::Decoder& decoder,
                                                 int64_t max_rows,
                                                 int64_t page_tokens);

// A step's arguments, views of the buffer.
struct DecodeStep {
  model::PackedBatch batch;
  model::KvAccess kv;  // Without its store.
  at::Tensor rules;    // Bytes, as sampling::cuda::QueueDraw reads them.
};

// Where each part lies.
class DecodeInputs {
 public:
  DecodeInputs(const DecodeShape& shape, const model::Decoder& decoder);

  [[nodiscard]] int64_t bytes() const { return bytes_; }
  // Whether the plan, of this shape, has no more different configurations of
  // adapters than there is room for.
  [[nodiscard]] bool Fits(const CachePlan& plan) const;
  // Puts the plan's values, all but the rules, into `to`, which has bytes() of
  // them and is aligned to 16, and returns how many of them count: a prefix.
  // Rows beyond the plan's are padding, which writes to no slot and sees no
  // token. Arguments: a plan of this shape.
  [[nodiscard]] int64_t Write(const CachePlan& plan,
                              std::span<std::byte> to) const;
  // The rules' places in `to`, one for each row.
  [[nodiscard]] std::span<std::byte> RulePlaces(std::span<std::byte> to) const;
  // The step that reads `buffer` [bytes()], on the decoder's device. Once.
  [[nodiscard]] DecodeStep At(const at::Tensor& buffer) const;

 private:
  DecodeShape shape_;
  std::shared_ptr<lora::cuda::DecodeTable> adapter_table_;  // Null: none.
  // Where each begins; the tokens at 0.
  int64_t slots_ = 0, positions_ = 0, lengths_ = 0, rules_ = 0, adapters_ = 0,
          table_ = 0, bytes_ = 0;
};

}  // namespace weft::executor

#endif  // WEFT_SRC_EXECUTOR_DECODE_INPUTS_H_
