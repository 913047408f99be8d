// Decode steps as graphs: what a step launches is recorded once for its shape
// and replayed with other values, in one call instead of one for each kernel.
//
// One iteration is an upload of DecodeInputs, a replay, and a copy of tokens
// and log-probabilities back, with the one wait.
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
  // Queues it once more.
  virtual void Replay() = 0;
};

// What steps need of a device beside the model: that of CUDA, or a test's
// stand-in. Throws c10::Error.
class StepDevice {
 public:
  virtual ~StepDevice() = default;

  // Runs `step` once, and waits. Memory that it takes and gives back belongs to
  // the graphs of this device, of which one runs at a time.
  virtual void Run(const std::function<void()>& step) = 0;
  // Records what `step` queues, in the same memory. It has run before, so that
  // libraries are ready for its sizes.
  [[nodiscard]] virtual std::unique_ptr<StepGraph> Record(
      const std::function<void()>& step) = 0;
  // What the device has left, in bytes; 0 where nobody counts.
  [[nodiscard]] virtual int64_t FreeBytes() = 0;

  // Memory of the host that the device reads by itself, in bytes.
  [[nodiscard]] virtual at::Tensor HostBuffer(int64_t bytes) = 0;
  // Queues the copy of the first bytes of such memory. They stay as they are
  // until the next FetchDraws has returned.
  virtual void Upload(const at::Tensor& host, int64_t bytes,
                      const at::Tensor& device) = 0;

  // As those of sampling::cuda. FetchDraws is the one that waits.
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

// Null where graphs are not to be had: on a CPU, and for one of several ranks
// that share every layer.
[[nodiscard]] std::unique_ptr<StepDevice> MakeStepDevice(
    const model::Decoder& decoder);
// For a CUDA device; in a build with CUDA only.
[[nodiscard]] std::unique_ptr<StepDevice> MakeCudaStepDevice(at::Device device);

// Threads: engine thread only.
class DecodeGraphs {
 public:
  // All but the device outlive it.
  DecodeGraphs(const model::Decoder& decoder, const loss::HeadOptions& head,
               model::KvStore* store, int64_t max_rows,
               std::unique_ptr<StepDevice> device);

  // A token for each row. None: the plan, which nothing was done for, wants
  // launches.
  [[nodiscard]] std::optional<Draws> Run(const CachePlan& plan);

  [[nodiscard]] DecodeGraphStats stats() const { return stats_; }

 private:
  struct Graph {
    explicit Graph(const DecodeInputs& layout) : inputs(layout) {}

    DecodeInputs inputs;
    at::Tensor buffer;  // They lie here.
    sampling::cuda::DrawSpace draws;
    bool tried = false;                   // To record it.
    std::unique_ptr<StepGraph> recorded;  // Null: it could not be.
    int64_t bytes = 0;                    // That recording it took.
    uint64_t last_run = 0;
  };
  // The step itself, which is recorded.
  void Queue(const DecodeStep& step, int max_filters,
             const sampling::cuda::DrawSpace& draws) const;
  // The shape's, perhaps a new one.
  [[nodiscard]] Graph& Find(const DecodeShape& shape);
  void Record(const DecodeShape& shape, const CachePlan& plan, Graph& graph);
  // Takes the graph's own memory, puts the plan there and gives its step.
  [[nodiscard]] std::function<void()> MakeStep(const DecodeShape& shape,
                                               const CachePlan& plan,
                                               Graph& graph);
  // Runs a step of the most rows, all of them padding: whatever is recorded
  // afterwards fits into the memory that it took.
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
  // One is enough: an iteration has waited before the next one writes to it.
  at::Tensor host_inputs_;
  bool has_memory_ = false;
  uint64_t num_runs_ = 0;
  DecodeGraphStats stats_;
};

}  // namespace weft::executor

#endif  // WEFT_SRC_EXECUTOR_DECODE_GRAPH_H_
