#include "src/executor/decode_graph.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <exception>
#include <span>
#include <string>
#include <utility>

#include "src/base/clock.h"
#include "src/base/log.h"
#include "src/loss/logits.h"
#include "src/ops/cuda_dispatch.h"

namespace weft::executor {
namespace {

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

std::unique_ptr<StepDevice> MakeStepDevice(const model::Decoder& decoder) {
  if constexpr (ops::kHasCudaKernels) {
    // Only bf16 and f32 have kernels that skip padding.
    const bool has_kernels =
        decoder.dtype() == at::kBFloat16 || decoder.dtype() == at::kFloat;
    if (decoder.device().is_cuda() && decoder.tensor_group() == nullptr &&
        has_kernels) {
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

std::optional<Draws> DecodeGraphs::Run(const CachePlan& plan) {
  std::optional<DecodeShape> shape =
      ShapeOf(plan, decoder_, max_rows_, store_->k_pages_PSKC.front().size(1));
  if (!shape.has_value()) return std::nullopt;
  shape->max_filters = device_->MaxFilters(plan.draws);
  Graph& graph = Find(*shape);
  if (!graph.inputs.Fits(plan)) return std::nullopt;
  if (!graph.tried) Record(*shape, plan, graph);
  if (graph.recorded == nullptr) return std::nullopt;
  Upload(plan, graph);
  graph.recorded->Replay();
  return device_->FetchDraws(plan.draws, graph.draws);
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

std::function<void()> DecodeGraphs::MakeStep(const DecodeShape& shape,
                                             const CachePlan& plan,
                                             Graph& graph) {
  graph.buffer =
      at::empty({graph.inputs.bytes()},
                at::TensorOptions(at::kByte).device(decoder_.device()));
  graph.draws = device_->MakeDrawSpace(shape.rows, decoder_.config().vocab,
                                       shape.max_filters);
  Upload(plan, graph);
  return [this, step = graph.inputs.At(graph.buffer),
          max_filters = shape.max_filters,
          draws = graph.draws] { Queue(step, max_filters, draws); };
}

void DecodeGraphs::TakeMemory(DecodeShape shape) {
  shape.rows = max_rows_;
  CachePlan empty;
  empty.batch.tokens_T = at::empty({0}, at::kLong);
  empty.batch.positions_T = at::empty({0}, at::kInt);
  empty.kv = {.slots_T = at::empty({0}, at::kLong),
              .page_table_TL = at::empty({0, shape.table_entries}, at::kInt),
              .lengths_T = at::empty({0}, at::kInt)};
  Graph largest(DecodeInputs(shape, decoder_));
  device_->Run(MakeStep(shape, empty, largest));
  has_memory_ = true;
}

void DecodeGraphs::Upload(const CachePlan& plan, const Graph& graph) {
  if (!host_inputs_.defined() || host_inputs_.numel() < graph.inputs.bytes()) {
    host_inputs_ = device_->HostBuffer(graph.inputs.bytes());
  }
  const std::span<std::byte> bytes = BytesOf(host_inputs_);
  const int64_t count = graph.inputs.Write(plan, bytes);
  device_->PutRules(plan.draws, graph.inputs.RulePlaces(bytes));
  device_->Upload(host_inputs_, count, graph.buffer);
}

void DecodeGraphs::Record(const DecodeShape& shape, const CachePlan& plan,
                          Graph& graph) {
  const absl::Time start = SteadyNow();
  graph.tried = true;
  try {
    const int64_t before = device_->FreeBytes();
    if (!has_memory_) TakeMemory(shape);
    const std::function<void()> step = MakeStep(shape, plan, graph);
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
    graph.draws = {};
    return;
  }
  ++stats_.graphs;
  stats_.bytes += graph.bytes;
  Log(LogLevel::kInfo, "decode step recorded as a graph",
      {{"rows", shape.rows},
       {"table_entries", shape.table_entries},
       {"max_rank", shape.max_rank},
       {"max_filters", shape.max_filters},
       {"bytes", graph.bytes},
       {"milliseconds", absl::ToDoubleMilliseconds(SteadyNow() - start)}});
}

void DecodeGraphs::Queue(const DecodeStep& step, int max_filters,
                         const sampling::cuda::DrawSpace& draws) const {
  model::KvAccess kv = step.kv;
  kv.store = store_;
  const at::Tensor x_TH =
      decoder_.ForwardLayers(model::Mode::kEval, step.batch, /*tape=*/nullptr,
                             /*num_recomputed=*/0, &kv);
  const at::Tensor logits_TV =
      loss::HeadLogits(decoder_.FinalNorm(x_TH), decoder_.weights().head_VH,
                       /*routing=*/{}, head_.softcap, head_.shard);
  device_->QueueDraw(logits_TV, step.rules, max_filters, draws);
}

void DecodeGraphs::DropOldest() {
  const auto oldest = std::ranges::min_element(
      graphs_, {}, [](const auto& entry) { return entry.second.last_run; });
  if (oldest->second.recorded != nullptr) --stats_.graphs;
  stats_.bytes -= oldest->second.bytes;
  graphs_.erase(oldest);
}

}  // namespace weft::executor
