#include "src/executor/decode_inputs.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "src/executor/decode_buckets.h"
#include "src/ops/cuda_dispatch.h"
#include "src/sampling/draw_rows_cuda.h"

namespace weft::executor {
namespace {

// Each part of the buffer begins at a multiple of this number of bytes, because
// kernels use vector loads.
constexpr int64_t kAlignment = 256;

// DecodeShape::max_rank is 0, or this number times a power of two.
constexpr int64_t kLeastRank = 16;
// The most distinct adapter layouts in one step.
constexpr int64_t kMaxLayouts = 8;

// Reserves `bytes` bytes at *end and returns their offset.
int64_t Take(int64_t bytes, int64_t* end) {
  const int64_t begin = *end;
  *end += (bytes + kAlignment - 1) / kAlignment * kAlignment;
  return begin;
}

// Writes `count` values to `to`: first the values of a host tensor, then copies
// of `padding`.
template <typename T>
void Put(const at::Tensor& values, T padding, int64_t count, std::byte* to) {
  auto* const end = std::copy_n(values.const_data_ptr<T>(), values.numel(),
                                reinterpret_cast<T*>(to));
  std::fill_n(end, count - values.numel(), padding);
}

// Returns whether the plan is a decode step that scores nothing and draws one
// token from every row, without top_logprobs.
bool DrawsFromAllRows(const CachePlan& plan) {
  const int64_t num_rows = plan.batch.tokens_T.size(0);
  const auto all = static_cast<size_t>(num_rows);
  if (!plan.kv.decode || num_rows == 0 || !plan.score_rows.empty() ||
      plan.draws.size() != all || plan.logit_rows.size() != all) {
    return false;
  }
  for (int64_t row = 0; row < num_rows; ++row) {
    if (plan.logit_rows[row] != row ||
        plan.draws[row].config.top_logprobs > 0) {
      return false;
    }
  }
  return true;
}

// Returns whether the adapter has LoRA only in the layers. LoRA of the
// embedding and of the head runs segment by segment, so it cannot be captured.
bool IsInLayersAlone(const lora::AdapterLayout& layout) {
  return layout.group(/*layer=*/0, lora::ProjectionGroup::kEmbedTokens)
             .factors.empty() &&
         layout.group(/*layer=*/0, lora::ProjectionGroup::kLmHead)
             .factors.empty();
}

// Sets shape->max_rank. Returns false if the rows or an adapter are not bf16 on
// CUDA, or if an adapter has LoRA outside the layers.
bool AddAdapters(const lora::LoraRouting& routing,
                 const model::Decoder& decoder, DecodeShape* shape) {
  if constexpr (ops::kHasCudaKernels) {
    if (!lora::cuda::TakesSegments(routing, decoder.dtype(),
                                   decoder.device())) {
      return false;
    }
    shape->max_rank = kLeastRank;
    for (const lora::LoraSegment& segment : routing) {
      const lora::AdapterLayout& layout = *segment.version->layout;
      if (!IsInLayersAlone(layout)) return false;
      while (shape->max_rank < layout.max_rank()) shape->max_rank *= 2;
    }
    return true;
  }
  return false;
}

}  // namespace

std::optional<DecodeShape> ShapeOf(const CachePlan& plan,
                                   const model::Decoder& decoder,
                                   int64_t max_rows, int64_t page_tokens) {
  if (!DrawsFromAllRows(plan)) return std::nullopt;
  const int64_t num_rows = plan.batch.tokens_T.size(0);
  if (num_rows > max_rows) return std::nullopt;
  DecodeShape shape = {
      .rows = RowBucket(num_rows, max_rows),
      .table_entries = TokenBound(plan.kv.page_table_TL.size(1) * page_tokens) /
                       page_tokens};
  if (!plan.batch.routing.empty() &&
      !AddAdapters(plan.batch.routing, decoder, &shape)) {
    return std::nullopt;
  }
  return shape;
}

DecodeInputs::DecodeInputs(const DecodeShape& shape,
                           const model::Decoder& decoder)
    : shape_(shape) {
  Take(shape.rows * static_cast<int64_t>(sizeof(int64_t)), &bytes_);
  slots_ = Take(shape.rows * static_cast<int64_t>(sizeof(int64_t)), &bytes_);
  positions_ =
      Take(shape.rows * static_cast<int64_t>(sizeof(int32_t)), &bytes_);
  lengths_ = Take(shape.rows * static_cast<int64_t>(sizeof(int32_t)), &bytes_);
  rules_ = Take(shape.rows * static_cast<int64_t>(sampling::cuda::kRuleBytes),
                &bytes_);
  if constexpr (ops::kHasCudaKernels) {
    if (shape.max_rank > 0) {
      adapter_table_ = std::make_shared<lora::cuda::DecodeTable>(
          lora::cuda::DecodeCapacity{.rows = shape.rows,
                                     .layouts = kMaxLayouts,
                                     .rank = shape.max_rank},
          decoder.local_config().shape());
      adapters_ =
          Take(static_cast<int64_t>(adapter_table_->num_bytes()), &bytes_);
    }
  }
  // The page table comes last, so that its unused end is not uploaded.
  table_ = Take(
      shape.rows * shape.table_entries * static_cast<int64_t>(sizeof(int32_t)),
      &bytes_);
}

bool DecodeInputs::Fits(const CachePlan& plan) const {
  if constexpr (ops::kHasCudaKernels) {
    return adapter_table_ == nullptr ||
           adapter_table_->Fits(plan.batch.routing);
  }
  return true;
}

std::span<std::byte> DecodeInputs::RulePlaces(std::span<std::byte> to) const {
  return to.subspan(rules_, shape_.rows * sampling::cuda::kRuleBytes);
}

int64_t DecodeInputs::Write(const CachePlan& plan,
                            std::span<std::byte> to) const {
  const int64_t num_rows = plan.batch.tokens_T.size(0);
  const int64_t width = plan.kv.page_table_TL.size(1);
  TORCH_CHECK(num_rows <= shape_.rows && width <= shape_.table_entries &&
                  static_cast<int64_t>(to.size()) >= bytes_,
              "a plan of ", num_rows, " rows and ", width,
              " table entries in a shape of ", shape_.rows, " and ",
              shape_.table_entries);
  Put<int64_t>(plan.batch.tokens_T, 0, shape_.rows, to.data());
  Put<int64_t>(plan.kv.slots_T, -1, shape_.rows, to.data() + slots_);
  Put<int32_t>(plan.batch.positions_T, 0, shape_.rows, to.data() + positions_);
  Put<int32_t>(plan.kv.lengths_T, 0, shape_.rows, to.data() + lengths_);
  if constexpr (ops::kHasCudaKernels) {
    if (adapter_table_ != nullptr) {
      adapter_table_->Write(plan.batch.routing,
                            to.subspan(adapters_, adapter_table_->num_bytes()));
    }
  }
  // Sets only the plan's entries of the page table. No row reads the others.
  const auto* from = plan.kv.page_table_TL.const_data_ptr<int32_t>();
  auto* table = reinterpret_cast<int32_t*>(to.data() + table_);
  for (int64_t row = 0; row < num_rows; ++row) {
    std::copy_n(from + row * width, width, table + row * shape_.table_entries);
  }
  return table_ + num_rows * shape_.table_entries *
                      static_cast<int64_t>(sizeof(int32_t));
}

DecodeStep DecodeInputs::At(const at::Tensor& buffer) const {
  const auto view = [&](int64_t begin, at::ScalarType dtype, int64_t count) {
    const auto bytes = count * static_cast<int64_t>(at::elementSize(dtype));
    return buffer.narrow(0, begin, bytes).view(dtype);
  };
  const int64_t rows = shape_.rows;
  DecodeStep step;
  step.batch.tokens_T = view(0, at::kLong, rows);
  step.batch.positions_T = view(positions_, at::kInt, rows);
  step.kv = {
      .slots_T = view(slots_, at::kLong, rows),
      .decode = true,
      .page_table_TL = view(table_, at::kInt, rows * shape_.table_entries)
                           .view({rows, shape_.table_entries}),
      .lengths_T = view(lengths_, at::kInt, rows)};
  if constexpr (ops::kHasCudaKernels) {
    if (adapter_table_ != nullptr) {
      adapter_table_->Bind(
          static_cast<const std::byte*>(buffer.const_data_ptr()) + adapters_);
      step.batch.table = adapter_table_;
    }
  }
  step.rules = view(rules_, at::kByte,
                    rows * static_cast<int64_t>(sampling::cuda::kRuleBytes));
  return step;
}

}  // namespace weft::executor
