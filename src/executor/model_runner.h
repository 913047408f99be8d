// One rank's part of every plan.
#ifndef WEFT_SRC_EXECUTOR_MODEL_RUNNER_H_
#define WEFT_SRC_EXECUTOR_MODEL_RUNNER_H_

#include <ATen/core/Tensor.h>

#include <optional>

#include "src/executor/decode_graph.h"
#include "src/executor/plan.h"
#include "src/kv/sequence_pages.h"
#include "src/lora/lora_gradients.h"
#include "src/loss/fused_head.h"
#include "src/model/decoder.h"

namespace weft::executor {

// Threads: one. All of it throws c10::Error.
class ModelRunner {
 public:
  // decoder outlives it.
  ModelRunner(const model::Decoder& decoder, const loss::HeadOptions& head)
      : decoder_(decoder), head_(head) {}

  [[nodiscard]] const model::Decoder& decoder() const { return decoder_; }
  [[nodiscard]] const loss::HeadOptions& head() const { return head_; }

  // Scores of the plan's entries. With `backward` it keeps what Backward needs.
  [[nodiscard]] TrainScores Forward(TrainPlan plan);
  // Adds to the gradients [N] of the versions of the last Forward's plan, given
  // dLoss/dlogprob [E], f32 on the host.
  void Backward(const at::Tensor& gradients_E,
                const lora::LoraGradients& gradients);
  // Frees what a Forward keeps whose Backward will not come.
  void DropPending() { pending_.reset(); }

  // `graphs`, of decode steps over the store, may be null.
  [[nodiscard]] CacheOutput Run(CachePlan plan, model::KvStore* store,
                                DecodeGraphs* graphs = nullptr) const;

 private:
  // Whether it is the first one of its replica, which has the results.
  [[nodiscard]] bool IsFirst() const {
    return head_.shard.group == nullptr || head_.shard.group->shard().rank == 0;
  }

  // Between Forward and Backward.
  struct Pending {
    TrainPlan plan;
    model::Tape tape;
    at::Tensor x_TH;
    at::Tensor normed_RH;
    loss::HeadResult scores;
  };

  const model::Decoder& decoder_;
  const loss::HeadOptions head_;
  std::optional<Pending> pending_;
};

// Uninitialised pages for this rank's part of every layer.
[[nodiscard]] model::KvStore AllocateCache(const model::Decoder& decoder,
                                           int64_t num_pages,
                                           int64_t page_tokens);
// Bytes of one page of all layers on the rank that has most of it.
[[nodiscard]] int64_t PageBytes(const model::Decoder& decoder,
                                int64_t page_tokens);
// The same of the model that model::LargestConfig describes.
[[nodiscard]] int64_t PageBytes(const model::ModelConfig& largest,
                                int64_t element_bytes, int64_t page_tokens);

// Copies the first rows of a page to another one, in every layer.
void CopyPage(const kv::PageCopy& copy, model::KvStore* store);

}  // namespace weft::executor

#endif  // WEFT_SRC_EXECUTOR_MODEL_RUNNER_H_
