// Runs plans on all ranks, from rank 0: the engine computes through it, alone
// or with others.
//
// Adapters live whole on rank 0, with optimizer, versions and files. The other
// ranks have the weights of the versions that plans name, each its part, and
// send back its part of the gradients, which are added up here. So a rank that
// is lost takes nothing with it but the plan under way.
//
// Replicas share the plans of a micro-batch. Sampling runs on the first one,
// which has the cache.
#ifndef WEFT_SRC_EXECUTOR_EXECUTOR_H_
#define WEFT_SRC_EXECUTOR_EXECUTOR_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "src/executor/decode_graph.h"
#include "src/executor/message.h"
#include "src/executor/model_runner.h"
#include "src/executor/plan.h"
#include "src/lora/adapter_shard.h"
#include "src/lora/lora_gradients.h"
#include "src/parallel/links.h"

namespace weft::executor {

// Threads: engine thread only. What computes throws std::exception. When that
// happens after the other ranks were told something, failed() is true: they are
// out of step, and this process must end with them.
class Executor {
 public:
  // `decoder` outlives it. Links of rank 0.
  Executor(const model::Decoder& decoder, const loss::HeadOptions& head,
           parallel::Links links);
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  [[nodiscard]] const model::Decoder& decoder() const {
    return runner_.decoder();
  }
  [[nodiscard]] const loss::HeadOptions& head() const { return runner_.head(); }
  [[nodiscard]] int num_replicas() const {
    return links_.topology.num_replicas;
  }
  [[nodiscard]] bool failed() const { return failed_; }

  // Finds out whether the other ranks are there still, and lets them forget
  // weights that nobody uses. Cheap; for when there is nothing else to do.
  void Ping();
  [[nodiscard]] bool alone() const { return links_.alone(); }

  // Lets the other ranks end. The last call.
  void Stop();

  // At most one plan for each replica; scores in the order of plans. A plan
  // with `backward` waits for Backward.
  [[nodiscard]] std::vector<TrainScores> Forward(std::vector<TrainPlan> plans);
  // Takes dLoss/dlogprob [E] of each plan of the last Forward, f32, and adds to
  // the plan's gradients [N], of versions of its routing. Plans may share them.
  void Backward(const std::vector<at::Tensor>& gradients_E,
                const std::vector<lora::LoraGradients>& gradients);
  // Frees what rank 0 keeps for a Backward that will not come. The other ranks
  // do with their next plan.
  void DropPending();

  // Makes the cache, before the first plan that uses it; another one forgets
  // it, and its graphs.
  void MakeCache(int64_t num_pages, int64_t page_tokens);
  // Lets decode steps of up to so many rows run as graphs where the device has
  // them, from now on.
  void UseDecodeGraphs(int64_t max_rows);
  [[nodiscard]] DecodeGraphStats decode_graphs() const {
    return graphs_ == nullptr ? DecodeGraphStats() : graphs_->stats();
  }
  void CopyPage(const kv::PageCopy& copy);
  [[nodiscard]] CacheOutput Run(CachePlan plan);

 private:
  // A tensor rank's part of an adapter.
  struct Part {
    lora::AdapterShard shard;
    int64_t num_parameters;
  };
  // A version that the other ranks have.
  struct SentVersion {
    std::weak_ptr<const lora::AdapterVersion> whole;
    lora::AdapterVersionPtr own;  // This rank's part; null: the whole.
    std::vector<Part> parts;      // Empty: every rank has the whole.
  };
  // Checks that no call has failed yet; one that does not Succeed is a failure.
  class ScopedCall;

  // Sends to all other ranks. Until the call succeeds the executor has failed.
  void Broadcast(const Message& message);
  // Before plans that name them.
  void Announce(const lora::LoraRouting& routing);
  void AnnounceOne(const lora::AdapterVersionPtr& version);
  // The versions that no plan can name any more, forgotten here.
  [[nodiscard]] std::vector<uint64_t> TakeDead();
  // The routing with this rank's own parts.
  void UseOwnParts(lora::LoraRouting& routing) const;
  [[nodiscard]] TrainScores ReceiveScores(const TrainPlan& plan, int from);
  // Rank 0's share of a backward pass.
  void RunOwnBackward(const at::Tensor& gradients_E,
                      const lora::LoraGradients& gradients);
  void ReceiveGradients(const lora::LoraGradients& gradients, int from);
  // Adds the part of a rank to the whole gradient.
  void AddPart(const lora::LoraGradient& whole, int tensor_rank,
               const at::Tensor& part_N) const;

  ModelRunner runner_;
  parallel::Links links_;
  model::KvStore cache_;
  std::unique_ptr<DecodeGraphs> graphs_;  // Over the cache; null: none.
  std::map<uint64_t, SentVersion> sent_versions_;
  bool failed_ = false;
};

}  // namespace weft::executor

#endif  // WEFT_SRC_EXECUTOR_EXECUTOR_H_
