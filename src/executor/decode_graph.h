// Decode steps as graphs: the launches of a step are recorded once for each
// shape and replayed with other values, by one call instead of one per kernel.
//
// One iteration uploads DecodeInputs, replays the graph, and copies tokens and
// log-probabilities back. Only the copy back waits.
#ifndef WEFT_SRC_EXECUTOR_DECODE_GRAPH_H_
#define WEFT_SRC_EXECUTOR_DECODE_GRAPH_H_

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>

#include "src/executor/decode_inputs.h"
#include "src/executor/plan.h"
#include "src/loss/fused_head.h"
#include "src/model/decoder.h"
#include "src/sampling/draw_rows_cuda.h"

namespace weft::executor {

// A recorded step.
class StepGraph {
 public:
  virtual ~StepGraph() = default;
  // Queues the recorded step.
  virtual void Replay() = 0;
};

// What steps need of a device beside the model. CUDA implements it, and so does
// a fake in tests. Throws c10::Error.
class StepDevice {
 public:
  virtual ~StepDevice() = default;

  // Runs `step` once and waits for it. Memory that it allocates and frees
  // belongs to the graphs of this device, of which one runs at a time.
  virtual void Run(const std::function<void()>& step) = 0;
  // Records what `step` queues, in the same memory. `step` has run before, so
  // that libraries are ready for its sizes.
  [[nodiscard]] virtual std::unique_ptr<StepGraph> Record(
      const std::function<void()>& step) = 0;
  // Returns the device's free bytes; 0 if they are unknown.
  [[nodiscard]] virtual int64_t FreeBytes() = 0;

  // Returns pinned host memory of so many bytes.
  [[nodiscard]] virtual at::Tensor HostBuffer(int64_t bytes) = 0;
  // Queues the copy of the first bytes of a host buffer. The caller does not
  // change them until the next FetchDraws has returned.
  virtual void Upload(const at::Tensor& host, int64_t bytes,
                      const at::Tensor& device) = 0;

  // As in sampling::cuda. Only FetchDraws waits.
  [[nodiscard]] virtual int MaxFilters(const DrawRules& rules) = 0;
  virtual void PutRules(const DrawRules& rules,
                        std::span<std::byte> places) = 0;
  [[nodiscard]] virtual sampling::cuda::DrawSpace MakeDrawSpace(
      int64_t num_places, int64_t vocab, int max_filters) = 0;
  virtual void QueueDraw(const at::Tensor& logits_TV, const at::Tensor& rules,
                         int max_filters,
                         const sampling::cuda::DrawSpace& space) = 0;
  [[nodiscard]] virtual Draws FetchDraws(
      const DrawRules& rules, const sampling::cuda::DrawSpace& space) = 0;
};

// Returns null if graphs are not available: on a CPU, and if several ranks
// share every layer.
[[nodiscard]] std::unique_ptr<StepDevice> MakeStepDevice(
    const model::Decoder& decoder);
// For a CUDA device; only in a build with CUDA.
[[nodiscard]] std::unique_ptr<StepDevice> MakeCudaStepDevice(at::Device device);

// Threads: engine thread only.
class DecodeGraphs {
 public:
  // All arguments but the device outlive it.
  DecodeGraphs(const model::Decoder& decoder, const loss::HeadOptions& head,
               model::KvStore* store, int64_t max_rows,
               std::unique_ptr<StepDevice> device);

  // Returns a token for each row. Returns none, and does nothing, if the plan
  // has to run as launches.
  [[nodiscard]] std::optional<Draws> Run(const CachePlan& plan);

  [[nodiscard]] DecodeGraphStats stats() const { return stats_; }

 private:
  struct Graph {
    explicit Graph(const DecodeInputs& layout) : inputs(layout) {}

    DecodeInputs inputs;
    at::Tensor buffer;  // Holds the inputs.
    sampling::cuda::DrawSpace draws;
    bool tried = false;                   // Recording was tried.
    std::unique_ptr<StepGraph> recorded;  // Null: not recorded.
    int64_t bytes = 0;                    // Taken by recording.
    uint64_t last_run = 0;
  };
  // Queues the step that is recorded.
  void Queue(const DecodeStep& step, int max_filters,
             const sampling::cuda::DrawSpace& draws) const;
  // Returns the graph of the shape, which may be new.
  [[nodiscard]] Graph& Find(const DecodeShape& shape);
  void Record(const DecodeShape& shape, const CachePlan& plan, Graph& graph);
  // Allocates the graph's memory, writes the plan there and returns its step.
  [[nodiscard]] std::function<void()> MakeStep(const DecodeShape& shape,
                                               const CachePlan& plan,
                                               Graph& graph);
  // Runs a step of the maximal size in which all rows are padding. All later
  // recordings fit into the memory that it took.
  void TakeMemory(DecodeShape shape);
  void Upload(const CachePlan& plan, const Graph& graph);
  // Drops the graph that has not run for the longest time.
  void DropOldest();

  const model::Decoder& decoder_;
  const loss::HeadOptions head_;
  model::KvStore* const store_;
  const int64_t max_rows_;
  const std::unique_ptr<StepDevice> device_;
  std::map<DecodeShape, Graph> graphs_;
  // One is enough, because each iteration waits before the next one writes.
  at::Tensor host_inputs_;
  bool has_memory_ = false;
  uint64_t num_runs_ = 0;
  DecodeGraphStats stats_;
};

}  // namespace weft::executor

#endif  // WEFT_SRC_EXECUTOR_DECODE_GRAPH_H_
