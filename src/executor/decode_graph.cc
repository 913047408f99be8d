#include "src/executor/decode_graph.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <exception>
#include <span>
#include <string>
#include <utility>

#include "src/base/clock.h"
#include "src/base/observe/log.h"
#include "src/loss/fused_head.h"
#include "src/ops/cuda_dispatch.h"
#include "src/request/cache_copy.h"

namespace weft::executor {
namespace {

// Bucket sizes double up to this size.
constexpr int64_t kLastDoubled = 16;
constexpr int64_t kLeastTokens = 512;

int64_t NextBucket(int64_t bucket) {
  if (bucket < kLastDoubled) return 2 * bucket;
  // Above kLastDoubled, sizes alternate between 2^n and 3 * 2^(n - 1).
  return (bucket & (bucket - 1)) == 0 ? bucket / 2 * 3 : bucket / 3 * 4;
}

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

// Returns whether the plan is a decode step that scores nothing, is given no
// experts, and draws from the logits of all rows, in their order.
bool DrawsFromAllRows(const CachePlan& plan) {
  const int64_t num_rows = plan.batch.tokens_T.size(0);
  if (!plan.kv.decode || num_rows == 0 || !plan.score_rows.empty() ||
      plan.draws.empty() || plan.batch.experts_TE.defined() ||
      plan.logit_rows.size() != static_cast<size_t>(num_rows)) {
    return false;
  }
  for (int64_t row = 0; row < num_rows; ++row) {
    if (plan.logit_rows[row] != row) return false;
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

// Limits the number of graphs, because the driver keeps hundreds of launches
// for each.
constexpr size_t kMaxGraphs = 128;

// Returns the exception's message without a backtrace.
std::string ReasonOf(const std::exception& error) {
  const auto* own = dynamic_cast<const c10::Error*>(&error);
  return own != nullptr ? own->what_without_backtrace() : error.what();
}

std::span<std::byte> BytesOf(const at::Tensor& tensor) {
  return {static_cast<std::byte*>(tensor.mutable_data_ptr()), tensor.nbytes()};
}

}  // namespace

int64_t RowBucket(int64_t num_rows, int64_t max_rows) {
  int64_t bucket = 1;
  while (bucket < num_rows) bucket = NextBucket(bucket);
  return std::min(bucket, max_rows);
}

int64_t TokenBound(int64_t num_tokens) {
  int64_t bound = kLeastTokens;
  while (bound < num_tokens) bound *= 4;
  return bound;
}

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
  if (decoder.config().has_delta()) {
    states_ = Take(shape.rows * static_cast<int64_t>(sizeof(int64_t)), &bytes_);
  }
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
  if (states_ > 0) {
    Put<int64_t>(plan.kv.state_slots_Q, kPaddingState, shape_.rows,
                 to.data() + states_);
  }
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
  if (states_ > 0) {
    step.kv.state_slots_Q = view(states_, at::kLong, rows);
    step.kv.padding_state = kPaddingState;
  }
  if constexpr (ops::kHasCudaKernels) {
    if (adapter_table_ != nullptr) {
      adapter_table_->Bind(
          static_cast<const std::byte*>(buffer.const_data_ptr()) + adapters_);
      step.batch.table = adapter_table_;
    }
  }
  return step;
}

std::unique_ptr<StepDevice> MakeStepDevice(const model::Decoder& decoder) {
  if constexpr (ops::kHasCudaKernels) {
    // Only bf16 and f32 have kernels that skip padding.
    const bool has_kernels =
        decoder.dtype() == at::kBFloat16 || decoder.dtype() == at::kFloat;
    if (decoder.device().is_cuda() && decoder.tensor_group() == nullptr &&
        has_kernels && decoder.DecodesWithoutHost()) {
      return MakeCudaStepDevice(decoder.device());
    }
  }
  return nullptr;
}

DecodeGraphs::DecodeGraphs(const model::Decoder& decoder,
                           const loss::HeadOptions& head, model::KvStore* store,
                           int64_t max_rows, std::unique_ptr<StepDevice> device)
    : decoder_(decoder),
      head_(head),
      store_(store),
      max_rows_(max_rows),
      device_(std::move(device)) {}

std::optional<at::Tensor> DecodeGraphs::Run(const CachePlan& plan) {
  const std::optional<DecodeShape> shape =
      ShapeOf(plan, decoder_, max_rows_, store_->page_tokens);
  if (!shape.has_value()) return std::nullopt;
  Graph& graph = Find(*shape);
  if (!graph.inputs.Fits(plan)) return std::nullopt;
  if (!graph.tried) Record(*shape, graph);
  if (graph.recorded == nullptr) return std::nullopt;
  Upload(plan, graph);
  return graph.recorded->Replay();
}

DecodeGraphs::Graph& DecodeGraphs::Find(const DecodeShape& shape) {
  auto found = graphs_.find(shape);
  if (found == graphs_.end()) {
    if (graphs_.size() >= kMaxGraphs) DropOldest();
    found = graphs_.emplace(shape, Graph(DecodeInputs(shape, decoder_))).first;
  }
  found->second.last_run = ++num_runs_;
  return found->second;
}

StepFunction DecodeGraphs::MakeStep(const DecodeShape& shape, Graph& graph) {
  graph.buffer =
      at::empty({graph.inputs.bytes()},
                at::TensorOptions(at::kByte).device(decoder_.device()));
  CachePlan empty;
  empty.batch.tokens_T = at::empty({0}, at::kLong);
  empty.batch.positions_T = at::empty({0}, at::kInt);
  empty.kv = {.slots_T = at::empty({0}, at::kLong),
              .page_table_TL = at::empty({0, shape.table_entries}, at::kInt),
              .lengths_T = at::empty({0}, at::kInt),
              .state_slots_Q = at::empty({0}, at::kLong)};
  Upload(empty, graph);
  return [this, step = graph.inputs.At(graph.buffer)] { return Queue(step); };
}

void DecodeGraphs::TakeMemory(DecodeShape shape) {
  shape.rows = max_rows_;
  Graph largest(DecodeInputs(shape, decoder_));
  device_->Run(MakeStep(shape, largest));
  has_memory_ = true;
}

void DecodeGraphs::Upload(const CachePlan& plan, const Graph& graph) {
  if (!host_inputs_.defined() || host_inputs_.numel() < graph.inputs.bytes()) {
    host_inputs_ = device_->HostBuffer(graph.inputs.bytes());
  }
  const std::span<std::byte> bytes = BytesOf(host_inputs_);
  const int64_t count = graph.inputs.Write(plan, bytes);
  device_->Upload(host_inputs_, count, graph.buffer);
}

void DecodeGraphs::Record(const DecodeShape& shape, Graph& graph) {
  const absl::Time start = SteadyNow();
  graph.tried = true;
  try {
    const int64_t before = device_->FreeBytes();
    if (!has_memory_) TakeMemory(shape);
    const StepFunction step = MakeStep(shape, graph);
    device_->Run(step);
    graph.recorded = device_->Record(step);
    graph.bytes = std::max<int64_t>(0, before - device_->FreeBytes());
  } catch (const std::exception& error) {
    // The caller runs the step as launches instead. If the launches fail too,
    // they throw.
    Log(LogLevel::kWarning, "decode steps of this shape run without a graph",
        {{"rows", shape.rows},
         {"table_entries", shape.table_entries},
         {"max_rank", shape.max_rank},
         {"error", ReasonOf(error)}});
    graph.buffer.reset();
    return;
  }
  ++stats_.graphs;
  stats_.bytes += graph.bytes;
  Log(LogLevel::kInfo, "decode step recorded as a graph",
      {{"rows", shape.rows},
       {"table_entries", shape.table_entries},
       {"max_rank", shape.max_rank},
       {"bytes", graph.bytes},
       {"milliseconds", absl::ToDoubleMilliseconds(SteadyNow() - start)}});
}

at::Tensor DecodeGraphs::Queue(const DecodeStep& step) const {
  model::KvAccess kv = step.kv;
  kv.store = store_;
  const at::Tensor x_TH =
      decoder_.ForwardLayers(model::Mode::kEval, step.batch, /*tape=*/nullptr,
                             /*num_recomputed=*/0, &kv);
  return loss::HeadLogits(decoder_.FinalNorm(x_TH), decoder_.weights().head_VH,
                          /*routing=*/{}, head_.softcap, head_.shard);
}

void DecodeGraphs::DropOldest() {
  const auto oldest = std::ranges::min_element(
      graphs_, {}, [](const auto& entry) { return entry.second.last_run; });
  if (oldest->second.recorded != nullptr) --stats_.graphs;
  stats_.bytes -= oldest->second.bytes;
  graphs_.erase(oldest);
}

}  // namespace weft::executor
