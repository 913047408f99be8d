// Runs decode steps as graphs: the kernel launches of a step are recorded once
// for each shape and replayed with other values. So a step takes one call
// instead of one call for each kernel.
//
// One iteration uploads DecodeInputs, replays the graph, and copies tokens and
// log-probabilities back. Only the copy back waits for the device.
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

// The device functions that decode steps need in addition to the model. There
// is an implementation for CUDA and a fake for tests. Methods throw c10::Error.
class StepDevice {
 public:
  virtual ~StepDevice() = default;

  // Runs `step` and waits for it. May run it a second time if memory ran out.
  // The step allocates from a memory pool that all graphs of this StepDevice
  // share, so only one graph may run at a time.
  virtual void Run(const std::function<void()>& step) = 0;
  // Records the launches that `step` queues, with memory from Run's pool.
  // REQUIRES: `step` has run before, so that libraries are ready for its sizes.
  [[nodiscard]] virtual std::unique_ptr<StepGraph> Record(
      const std::function<void()>& step) = 0;
  // Returns the device's free bytes; 0 if they are unknown.
  [[nodiscard]] virtual int64_t FreeBytes() = 0;

  // Returns `bytes` bytes of pinned host memory.
  [[nodiscard]] virtual at::Tensor HostBuffer(int64_t bytes) = 0;
  // Queues a copy of the first `bytes` bytes of `host` to the device. The
  // caller does not change `host` until the next Run or FetchDraws has
  // returned.
  virtual void Upload(const at::Tensor& host, int64_t bytes,
                      const at::Tensor& device) = 0;

  // The methods below do what the functions of the same names in sampling::cuda
  // do. Only FetchDraws waits for the device.
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

// Returns null if graphs are not available: in a build without CUDA, on a CPU,
// if several ranks share every layer, or if the decoder's type is neither bf16
// nor f32.
[[nodiscard]] std::unique_ptr<StepDevice> MakeStepDevice(
    const model::Decoder& decoder);
// Makes the device for CUDA. Only a build with CUDA defines it.
[[nodiscard]] std::unique_ptr<StepDevice> MakeCudaStepDevice(at::Device device);

// Threads: engine thread only.
class DecodeGraphs {
 public:
  // `decoder` and `store` outlive the graphs.
  DecodeGraphs(const model::Decoder& decoder, const loss::HeadOptions& head,
               model::KvStore* store, int64_t max_rows,
               std::unique_ptr<StepDevice> device);

  // Returns a draw for each row. Returns none if the plan cannot run as a
  // graph; the caller then runs the plan as launches.
  [[nodiscard]] std::optional<Draws> Run(const CachePlan& plan);

  [[nodiscard]] DecodeGraphStats stats() const { return stats_; }

 private:
  struct Graph {
    explicit Graph(const DecodeInputs& layout) : inputs(layout) {}

    DecodeInputs inputs;
    at::Tensor buffer;  // The memory of DecodeInputs.
    sampling::cuda::DrawSpace draws;
    bool tried = false;                   // A recording was tried.
    std::unique_ptr<StepGraph> recorded;  // Null if there is no recording.
    int64_t bytes = 0;                    // Memory that the recording took.
    uint64_t last_run = 0;
  };
  // Queues the launches of the step. Record captures them.
  void Queue(const DecodeStep& step, int max_filters,
             const sampling::cuda::DrawSpace& draws) const;
  // Returns the graph of the shape. If there is none, adds a graph without a
  // recording, and may call DropOldest.
  [[nodiscard]] Graph& Find(const DecodeShape& shape);
  void Record(const DecodeShape& shape, const CachePlan& plan, Graph& graph);
  // Allocates the graph's memory, writes the plan into it, and returns the step
  // to record.
  [[nodiscard]] std::function<void()> MakeStep(const DecodeShape& shape,
                                               const CachePlan& plan,
                                               Graph& graph);
  // Runs a step of max_rows_ rows, all of them padding, so that the graphs'
  // memory pool gets the memory that later recordings use.
  void TakeMemory(DecodeShape shape);
  void Upload(const CachePlan& plan, const Graph& graph);
  // Drops the least recently run graph.
  void DropOldest();

  const model::Decoder& decoder_;
  const loss::HeadOptions head_;
  model::KvStore* const store_;
  const int64_t max_rows_;
  const std::unique_ptr<StepDevice> device_;
  std::map<DecodeShape, Graph> graphs_;
  // The host memory of DecodeInputs. One buffer is enough, because each
  // iteration waits for its draws before the next iteration writes the buffer.
  at::Tensor host_inputs_;
  bool has_memory_ = false;
  uint64_t num_runs_ = 0;
  DecodeGraphStats stats_;
};

}  // namespace weft::executor

#endif  // WEFT_SRC_EXECUTOR_DECODE_GRAPH_H_
