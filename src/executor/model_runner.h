// Runs one rank's part of every plan.
#ifndef WEFT_SRC_EXECUTOR_MODEL_RUNNER_H_
#define WEFT_SRC_EXECUTOR_MODEL_RUNNER_H_

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "src/executor/decode_graph.h"
#include "src/executor/plan.h"
#include "src/lora/adapter.h"
#include "src/loss/fused_head.h"
#include "src/model/decoder.h"
#include "src/ops/thread_team.h"
#include "src/request/cache_copy.h"

namespace weft::executor {

// Threads: not thread-safe. Methods that compute throw std::exception.
class ModelRunner {
 public:
  // `decoder` outlives the runner.
  ModelRunner(const model::Decoder& decoder, const loss::HeadOptions& head);

  const model::Decoder& decoder() const { return decoder_; }
  const loss::HeadOptions& head() const { return head_; }

  // Returns the scores of the plan's entries. If plan.backward is set, keeps
  // what Backward needs.
  TrainScores Forward(TrainPlan plan);
  // Runs the backward pass of the latest Forward. `gradients_E` is f32, on the
  // host, and TrainScores says what it has. Adds the results to `gradients`,
  // which has the gradients [N] of the versions in the plan.
  void Backward(const at::Tensor& gradients_E,
                const lora::LoraGradients& gradients);
  // Frees what Forward has kept. Call it if Backward will not be called.
  void DropPending() { pending_.reset(); }

  // Runs a plan over `store`. `graphs` runs decode steps over the same store;
  // it may be null.
  CacheOutput Run(CachePlan plan, model::KvStore* store,
                  DecodeGraphs* graphs = nullptr) const;

 private:
  // Returns whether this rank is the first of its replica. Only the first rank
  // returns results in CacheOutput and experts in TrainScores.
  bool IsFirst() const {
    return head_.shard.group == nullptr || head_.shard.group->shard().rank == 0;
  }

  // Returns the output [T, H] of the layers. If the model is dense and f32 on a
  // CPU, a thread team runs decode steps of few rows.
  at::Tensor RunLayers(CachePlan& plan) const;

  // Returns the final hidden rows [D, H] of the plan's teachers.
  at::Tensor RunTeachers(DistillPlan& plan) const;

  // What Forward keeps for Backward.
  struct Pending {
    TrainPlan plan;
    model::Tape tape;
    at::Tensor x_TH;
    at::Tensor normed_RH;
    loss::HeadResult scores;
    // Undefined if no row has a teacher.
    at::Tensor student_DH;
    at::Tensor teacher_DH;
    loss::DistillResult distilled;
  };

  const model::Decoder& decoder_;
  const loss::HeadOptions head_;
  const std::vector<ops::SharedRows> weights_in_order_;
  std::optional<Pending> pending_;
};

// Allocates uninitialised pages and states for this rank's part of every layer.
// `num_states` is 0 in models without states.
model::KvStore AllocateCache(const model::Decoder& decoder, int64_t num_pages,
                             int64_t page_tokens, int64_t num_states);
// Returns the bytes of one page in all layers, on the rank with configuration
// `largest` (from model_config::LargestConfig).
int64_t PageBytes(const model_config::ModelConfig& largest,
                  int64_t element_bytes, int64_t page_tokens);
// Does the same for the state of one sequence. Returns 0 if no layer has
// states.
int64_t StateBytes(const model_config::ModelConfig& largest,
                   int64_t element_bytes);

// Returns the experts that computed the tokens in these N slots, as [N, L K],
// i16, on the host. L is the number of layers with experts, and K is the number
// of experts per token. REQUIRES: the model has experts.
at::Tensor ReadExperts(const model::KvStore& store,
                       const std::vector<int64_t>& slots);

// Copies the first rows of a page: the keys and values of every layer, and the
// experts of the rows. Or replaces a state, in every layer that has states.
void Copy(const CacheCopy& copy, model::KvStore* store);

}  // namespace weft::executor

#endif  // WEFT_SRC_EXECUTOR_MODEL_RUNNER_H_
