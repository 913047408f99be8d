// Runs decode steps as graphs: the launches of a step are recorded once for
// each shape and replayed with other values. So one call replaces one call per
// kernel.
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
  // Queues the recorded step on the device.
  virtual void Replay() = 0;
};

// The device functions that decode steps need beside the model. CUDA implements
// them; tests have a fake. Methods throw c10::Error.
class StepDevice {
 public:
  virtual ~StepDevice() = default;

  // Runs `step` once and waits for it. Memory that the step allocates and frees
  // belongs to this device's graphs, of which only one runs at a time.
  virtual void Run(const std::function<void()>& step) = 0;
  // Records the launches that `step` queues, in the memory of the graphs. The
  // step has run before, so that libraries are ready for its sizes.
  [[nodiscard]] virtual std::unique_ptr<StepGraph> Record(
      const std::function<void()>& step) = 0;
  // Returns the device's free bytes; 0 if they are unknown.
  [[nodiscard]] virtual int64_t FreeBytes() = 0;

  // Returns `bytes` bytes of pinned host memory.
  [[nodiscard]] virtual at::Tensor HostBuffer(int64_t bytes) = 0;
  // Queues a copy of the buffer's first `bytes` bytes to the device. The caller
  // does not change them until the next FetchDraws has returned.
  virtual void Upload(const at::Tensor& host, int64_t bytes,
                      const at::Tensor& device) = 0;

  // Like the functions in sampling::cuda. Only FetchDraws waits.
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

// Returns null if graphs are not available: on a CPU, or if several ranks share
// every layer.
[[nodiscard]] std::unique_ptr<StepDevice> MakeStepDevice(
    const model::Decoder& decoder);
// Makes the device for CUDA. Only a build with CUDA defines it.
[[nodiscard]] std::unique_ptr<StepDevice> MakeCudaStepDevice(at::Device device);

// Threads: engine thread only.
class DecodeGraphs {
 public:
  // All arguments except `device` outlive the graphs.
  DecodeGraphs(const model::Decoder& decoder, const loss::HeadOptions& head,
               model::KvStore* store, int64_t max_rows,
               std::unique_ptr<StepDevice> device);

  // Returns a token for each row. Returns none and does nothing if the plan
  // cannot run as a graph.
  [[nodiscard]] std::optional<Draws> Run(const CachePlan& plan);

  [[nodiscard]] DecodeGraphStats stats() const { return stats_; }

 private:
  struct Graph {
    explicit Graph(const DecodeInputs& layout) : inputs(layout) {}

    DecodeInputs inputs;
    at::Tensor buffer;  // The memory of DecodeInputs.
    sampling::cuda::DrawSpace draws;
    bool tried = false;                   // A recording was tried.
    std::unique_ptr<StepGraph> recorded;  // Null if no recording exists.
    int64_t bytes = 0;                    // Memory that the recording took.
    uint64_t last_run = 0;
  };
  // Queues the launches of the step. A recording captures them.
  void Queue(const DecodeStep& step, int max_filters,
             const sampling::cuda::DrawSpace& draws) const;
  // Returns the graph of the shape. Adds an empty one if there is none.
  [[nodiscard]] Graph& Find(const DecodeShape& shape);
  void Record(const DecodeShape& shape, const CachePlan& plan, Graph& graph);
  // Allocates the graph's memory, writes the plan into it, and returns the step
  // to record.
  [[nodiscard]] std::function<void()> MakeStep(const DecodeShape& shape,
                                               const CachePlan& plan,
                                               Graph& graph);
  // Runs a step of the largest size with only padding. All later recordings fit
  // into the memory that this step allocated.
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
  // One buffer is enough, because each iteration waits before the next one
  // writes.
  at::Tensor host_inputs_;
  bool has_memory_ = false;
  uint64_t num_runs_ = 0;
  DecodeGraphStats stats_;
};

}  // namespace weft::executor

#endif  // WEFT_SRC_EXECUTOR_DECODE_GRAPH_H_
