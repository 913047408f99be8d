// Runs plans on all ranks, from rank 0. The engine uses it even if there is
// only one rank.
//
// Rank 0 holds the whole adapters, with optimizer state, versions and files.
// Before a plan names a new adapter version, every other rank receives its part
// of the version's weights. After a backward pass, these ranks send back their
// parts of the gradients, and the executor adds up the parts. So the other
// ranks hold no state that must be saved.
//
// Each replica of the model runs at most one plan of a micro-batch. Sampling
// runs on the first replica, which alone has the key/value cache.
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
#include "src/lora/adapter.h"
#include "src/lora/adapter_shard.h"
#include "src/parallel/communicator.h"

namespace weft::executor {

// Threads: engine thread only. Methods that compute throw std::exception. If a
// method throws after it has sent a message, failed() is true. Then the ranks
// are out of step, and the processes of all ranks must end.
class Executor {
 public:
  // `decoder` outlives the executor. `links` are those of rank 0.
  Executor(const model::Decoder& decoder, const loss::HeadOptions& head,
           parallel::Links links);
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  const model::Decoder& decoder() const { return runner_.decoder(); }
  const loss::HeadOptions& head() const { return runner_.head(); }
  int num_replicas() const { return links_.topology.num_replicas; }
  bool failed() const { return failed_; }

  // Throws if another rank is lost. Makes the other ranks drop weights that no
  // plan can name any more. Costs little.
  void Ping();
  bool alone() const { return links_.alone(); }

  // Ends the other ranks. REQUIRES: no other call follows.
  void Stop();

  // Runs plans[i] on replica i. Returns the scores of each plan, in the same
  // order. After plans with `backward`, the caller calls Backward or
  // DropPending. REQUIRES: at least one plan, and at most num_replicas().
  std::vector<TrainScores> Forward(std::vector<TrainPlan> plans);
  // Runs the backward pass of the latest Forward's plans. gradients_E[i] is
  // dLoss/dlogprob [E], f32, of plan i. Adds the results to gradients[i], which
  // has the gradients [N] of the versions in plan i's routing. Several plans
  // may add to the same tensors.
  void Backward(const std::vector<at::Tensor>& gradients_E,
                const std::vector<lora::LoraGradients>& gradients);
  // Frees what rank 0 keeps for Backward. Call it if Backward will not be
  // called. Other ranks free theirs at their next plan with `backward`.
  void DropPending();

  // Allocates the cache. Call it before the first CachePlan. A second call
  // replaces the cache and drops its graphs. `num_states` is 0 in models
  // without states.
  void MakeCache(int64_t num_pages, int64_t page_tokens, int64_t num_states);
  // Makes decode steps of up to `max_rows` rows run as graphs from now on, if
  // the device has graphs.
  void UseDecodeGraphs(int64_t max_rows);
  DecodeGraphStats decode_graphs() const {
    return graphs_ == nullptr ? DecodeGraphStats() : graphs_->stats();
  }
  void Copy(const CacheCopy& copy);
  CacheOutput Run(CachePlan plan);
  // Returns the experts of the tokens in these slots of the cache
  // (model_runner.h).
  at::Tensor ReadExperts(const std::vector<int64_t>& slots) const {
    return executor::ReadExperts(cache_, slots);
  }

 private:
  // The part of an adapter that one rank of a tensor-parallel group has.
  struct Part {
    lora::AdapterShard shard;
    int64_t num_parameters;
  };
  // A version that was sent to the other ranks.
  struct SentVersion {
    std::weak_ptr<const lora::AdapterVersion> whole;
    lora::AdapterVersionPtr own;  // Rank 0's part; null if `parts` is empty.
    std::vector<Part> parts;      // Empty if every rank has the whole version.
  };
  // A method that sends messages begins and ends with these two. BeginCall
  // throws if an earlier call has failed. From its first message to EndCall, a
  // call counts as failed: an exception between them leaves failed_ true.
  void BeginCall() const;
  void EndCall() { failed_ = false; }

  // Sends the message to all other ranks, if there are any, and sets failed_.
  void Broadcast(const Message& message);
  // Sends the routing's versions to the other ranks, except versions that were
  // sent before. Called before the plan that names the versions.
  void Announce(const lora::LoraRouting& routing);
  void AnnounceOne(const lora::AdapterVersionPtr& version);
  // Removes the versions that no plan can name any more from sent_versions_ and
  // returns their ids.
  std::vector<uint64_t> TakeDead();
  // If rank 0 runs only a part of a version, replaces the version in the
  // routing by this part.
  void UseOwnParts(lora::LoraRouting& routing) const;
  TrainScores ReceiveScores(const TrainPlan& plan, int from);
  // Runs rank 0's part of a backward pass.
  void RunOwnBackward(const at::Tensor& gradients_E,
                      const lora::LoraGradients& gradients);
  void ReceiveGradients(const lora::LoraGradients& gradients, int from);
  // Adds one rank's part of a gradient to the whole gradient.
  void AddPart(const lora::LoraGradient& whole, int tensor_rank,
               const at::Tensor& part_N) const;

  ModelRunner runner_;
  parallel::Links links_;
  model::KvStore cache_;
  std::unique_ptr<DecodeGraphs> graphs_;  // Uses cache_. May be null.
  std::map<uint64_t, SentVersion> sent_versions_;
  bool failed_ = false;
};

}  // namespace weft::executor

#endif  // WEFT_SRC_EXECUTOR_EXECUTOR_H_
