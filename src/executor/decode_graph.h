// Runs decode steps as graphs: the kernel launches of the layers and of the
// head are recorded once for each shape and replayed with other values. So they
// take one call instead of one call for each kernel.
//
// One iteration uploads DecodeInputs and replays the graph. The caller launches
// what edits the logits and draws from them, so a graph does not depend on what
// the requests ask of their draws. The host queues these few launches while the
// device is still busy with the layers.
//
// Legend: T rows, L page table entries per row, V vocabulary.
#ifndef WEFT_SRC_EXECUTOR_DECODE_GRAPH_H_
#define WEFT_SRC_EXECUTOR_DECODE_GRAPH_H_

#include <ATen/core/Tensor.h>

#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>

#include "src/executor/plan.h"
#include "src/lora/lora_cuda.h"
#include "src/loss/fused_head.h"
#include "src/model/decoder.h"

namespace weft::executor {

// A graph has fixed sizes, so a batch runs in the smallest graph that holds it,
// and the rows that the batch does not fill are padding. RowBucket and
// TokenBound choose these sizes.

// Returns the smallest of 1, 2, 4, 8, 16, 24, 32, 48, 64, 96, ... that is at
// least `num_rows`, or `max_rows` if that is smaller. Beyond 16 rows, less than
// a third of the rows is padding. REQUIRES: 1 <= num_rows <= max_rows.
int64_t RowBucket(int64_t num_rows, int64_t max_rows);

// Returns the smallest of 512, 2048, 8192, ... that is at least `num_tokens`.
// Each graph is recorded for one such bound on the tokens per sequence, so few
// bounds mean few graphs.
int64_t TokenBound(int64_t num_tokens);

// The sizes that a capture fixes. Steps of one shape differ only in values.
struct DecodeShape {
  int64_t rows = 0;           // Including padding.
  int64_t table_entries = 0;  // Table entries per row; see TokenBound.
  int64_t max_rank = 0;       // Bound on the adapters' ranks; 0: no adapter.

  friend auto operator<=>(const DecodeShape&, const DecodeShape&) = default;
};

// Returns the shape in which the plan runs, or none if the plan cannot be
// captured. A plan can be captured if it is a decode step of at most `max_rows`
// rows. It must score nothing, draw tokens, want the logits of all rows in
// their order, and leave the experts to the router. If the plan has adapters,
// the device must be CUDA, the rows and the adapters must be bf16, and only the
// layers may have LoRA. A page has `page_tokens` tokens.
std::optional<DecodeShape> ShapeOf(const CachePlan& plan,
                                   const model::Decoder& decoder,
                                   int64_t max_rows, int64_t page_tokens);

// The arguments of a decode step, as views of the device's buffer.
struct DecodeStep {
  model::PackedBatch batch;
  model::KvAccess kv;  // The store is not set.
};

// Divides a buffer into parts, one for each argument of a decode step. The
// buffer holds all values that change between decode steps: tokens, positions,
// slots, lengths, slots of states, the adapter table, the page table. A
// captured step reads the buffer in place, so an iteration uploads one block of
// memory and launches one graph.
class DecodeInputs {
 public:
  DecodeInputs(const DecodeShape& shape, const model::Decoder& decoder);

  int64_t bytes() const { return bytes_; }
  // Returns whether the adapter table has room for the plan's distinct adapter
  // layouts. REQUIRES: the plan has this shape.
  bool Fits(const CachePlan& plan) const;
  // Writes the plan's values to `to`, which has at least bytes() bytes and is
  // aligned to 16. Returns how many bytes, from the start of `to`, must be
  // uploaded. Rows beyond the plan's are padding: they write to no slot of
  // keys, see no token, and have the state of kPaddingState. REQUIRES: the plan
  // has this shape.
  int64_t Write(const CachePlan& plan, std::span<std::byte> to) const;
  // Returns the step that reads `buffer` [bytes()] on the decoder's device.
  // Call it only once, because it also binds the adapter table to this buffer.
  DecodeStep At(const at::Tensor& buffer) const;

 private:
  DecodeShape shape_;
  // Null without adapters.
  std::shared_ptr<lora::cuda::DecodeTable> adapter_table_;
  // The offset of each part. The tokens are at 0. states_ is 0 in models
  // without states.
  int64_t slots_ = 0, positions_ = 0, lengths_ = 0, states_ = 0, adapters_ = 0,
          table_ = 0, bytes_ = 0;
};

// A recorded step.
class StepGraph {
 public:
  virtual ~StepGraph() = default;
  // Queues the recorded step on the device. Returns the step's result, whose
  // memory the next Run, Record or Replay of the same StepDevice reuses.
  virtual at::Tensor Replay() = 0;
};

// Queues a step's launches, and returns its result on the device.
using StepFunction = std::function<at::Tensor()>;

// The device functions that decode steps need in addition to the model. There
// is an implementation for CUDA and a fake for tests. Methods throw c10::Error.
class StepDevice {
 public:
  virtual ~StepDevice() = default;

  // Runs `step` and waits for it. May run it a second time if memory ran out.
  // The step allocates from a memory pool that all graphs of this StepDevice
  // share, so only one graph may run at a time.
  virtual void Run(const StepFunction& step) = 0;
  // Records the launches that `step` queues, with memory from Run's pool.
  // REQUIRES: `step` has run before, so that libraries are ready for its sizes.
  virtual std::unique_ptr<StepGraph> Record(const StepFunction& step) = 0;
  // Returns the device's free bytes; 0 if they are unknown.
  virtual int64_t FreeBytes() = 0;

  // Returns `bytes` bytes of pinned host memory.
  virtual at::Tensor HostBuffer(int64_t bytes) = 0;
  // Queues a copy of the first `bytes` bytes of `host` to the device. The
  // caller does not change `host` until the device has made the copy.
  virtual void Upload(const at::Tensor& host, int64_t bytes,
                      const at::Tensor& device) = 0;
};

// Returns null if graphs are not available: in a build without CUDA, on a CPU,
// if several ranks share every layer, if the decoder's type is neither bf16 nor
// f32, or if the host sorts rows by expert (Decoder::DecodesWithoutHost).
std::unique_ptr<StepDevice> MakeStepDevice(const model::Decoder& decoder);
// Makes the device for CUDA. Only a build with CUDA defines it.
std::unique_ptr<StepDevice> MakeCudaStepDevice(at::Device device);

// Threads: engine thread only.
class DecodeGraphs {
 public:
  // `decoder` and `store` outlive the graphs.
  DecodeGraphs(const model::Decoder& decoder, const loss::HeadOptions& head,
               model::KvStore* store, int64_t max_rows,
               std::unique_ptr<StepDevice> device);

  // Returns the logits of the plan's rows, and maybe of padding after them, as
  // [>= T, V] f32 on the device. Does not wait for them. They are valid until
  // the next call, before which the caller waits for the device. Returns none
  // if the plan cannot run as a graph; the caller then runs the plan as
  // launches.
  std::optional<at::Tensor> Run(const CachePlan& plan);

  DecodeGraphStats stats() const { return stats_; }

 private:
  struct Graph {
    explicit Graph(const DecodeInputs& layout) : inputs(layout) {}

    DecodeInputs inputs;
    at::Tensor buffer;                    // The memory of DecodeInputs.
    bool tried = false;                   // A recording was tried.
    std::unique_ptr<StepGraph> recorded;  // Null if there is no recording.
    int64_t bytes = 0;                    // Memory that the recording took.
    uint64_t last_run = 0;
  };
  // Queues the launches of the step, which Record captures. Returns the logits.
  at::Tensor Queue(const DecodeStep& step) const;
  // Returns the graph of the shape. If there is none, adds a graph without a
  // recording, and may call DropOldest.
  Graph& Find(const DecodeShape& shape);
  void Record(const DecodeShape& shape, Graph& graph);
  // Allocates the graph's memory and returns the step to record. All its rows
  // are padding, because a step that runs before it is recorded would replace
  // the states of sequences, and the replay would replace them again.
  StepFunction MakeStep(const DecodeShape& shape, Graph& graph);
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
  // The host memory of DecodeInputs. One buffer is enough, because the caller
  // waits for its draws before the next iteration writes the buffer.
  at::Tensor host_inputs_;
  bool has_memory_ = false;
  uint64_t num_runs_ = 0;
  DecodeGraphStats stats_;
};

}  // namespace weft::executor

#endif  // WEFT_SRC_EXECUTOR_DECODE_GRAPH_H_
