// Runs plans on all ranks, from rank 0. The engine uses it even if there is
// only one rank.
//
// Rank 0 holds the whole adapters, with optimizer, versions and files. Every
// other rank receives its part of the weights of the versions that plans name.
// It sends back its part of the gradients, which the executor adds up. So the
// loss of another rank loses only the running plan.
//
// Replicas share the plans of a micro-batch. Sampling runs on the first
// replica, which has the cache.
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

// Threads: engine thread only. Methods that compute throw std::exception. If
// one throws after a message to the other ranks, failed() is true: the ranks
// are out of step, and this process must end with them.
class Executor {
 public:
  // `decoder` outlives the executor. `links` are those of rank 0.
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

  // Checks that the other ranks are alive, and lets them drop weights that no
  // plan can name. Costs little. Called when there is no other work.
  void Ping();
  [[nodiscard]] bool alone() const { return links_.alone(); }

  // Ends the other ranks. REQUIRES: no other call follows.
  void Stop();

  // Runs up to one plan for each replica. Returns the scores in the order of
  // plans. After plans with `backward`, the caller calls Backward or
  // DropPending.
  [[nodiscard]] std::vector<TrainScores> Forward(std::vector<TrainPlan> plans);
  // `gradients_E` has dLoss/dlogprob [E], f32, for each plan of the last
  // Forward. Adds to the gradients [N] of the versions in the plan's routing.
  // Plans may share gradients.
  void Backward(const std::vector<at::Tensor>& gradients_E,
                const std::vector<lora::LoraGradients>& gradients);
  // Frees what rank 0 keeps for a Backward that will not come. The other ranks
  // free theirs at the next plan.
  void DropPending();

  // Allocates the cache; must precede the first plan that uses it. A second
  // call replaces the cache and drops its graphs.
  void MakeCache(int64_t num_pages, int64_t page_tokens);
  // From now on decode steps of up to `max_rows` rows run as graphs, if the
  // device has graphs.
  void UseDecodeGraphs(int64_t max_rows);
  [[nodiscard]] DecodeGraphStats decode_graphs() const {
    return graphs_ == nullptr ? DecodeGraphStats() : graphs_->stats();
  }
  void CopyPage(const kv::PageCopy& copy);
  [[nodiscard]] CacheOutput Run(CachePlan plan);
  // Returns the experts of the tokens in these slots of the cache, as the
  // function of the same name.
  [[nodiscard]] at::Tensor ReadExperts(
      const std::vector<int64_t>& slots) const {
    return executor::ReadExperts(cache_, slots);
  }

 private:
  // A tensor rank's part of an adapter.
  struct Part {
    lora::AdapterShard shard;
    int64_t num_parameters;
  };
  // A version that was sent to the other ranks.
  struct SentVersion {
    std::weak_ptr<const lora::AdapterVersion> whole;
    lora::AdapterVersionPtr own;  // Rank 0's part; null if it is whole.
    std::vector<Part> parts;      // Empty if every rank has the whole version.
  };
  // Fails if an earlier call has failed. A call has failed unless it ends with
  // Succeed.
  class ScopedCall;

  // Sends to all other ranks. The executor counts as failed until the call
  // succeeds.
  void Broadcast(const Message& message);
  // Sends versions to the other ranks before the plans that name them.
  void Announce(const lora::LoraRouting& routing);
  void AnnounceOne(const lora::AdapterVersionPtr& version);
  // Removes and returns the versions that no plan can name any more.
  [[nodiscard]] std::vector<uint64_t> TakeDead();
  // Replaces the routing's versions by this rank's parts.
  void UseOwnParts(lora::LoraRouting& routing) const;
  [[nodiscard]] TrainScores ReceiveScores(const TrainPlan& plan, int from);
  // Runs rank 0's part of a backward pass.
  void RunOwnBackward(const at::Tensor& gradients_E,
                      const lora::LoraGradients& gradients);
  void ReceiveGradients(const lora::LoraGradients& gradients, int from);
  // Adds a rank's part to the whole gradient.
  void AddPart(const lora::LoraGradient& whole, int tensor_rank,
               const at::Tensor& part_N) const;

  ModelRunner runner_;
  parallel::Links links_;
  model::KvStore cache_;
  std::unique_ptr<DecodeGraphs> graphs_;  // Runs over the cache; may be null.
  std::map<uint64_t, SentVersion> sent_versions_;
  bool failed_ = false;
};

}  // namespace weft::executor

#endif  // WEFT_SRC_EXECUTOR_EXECUTOR_H_
