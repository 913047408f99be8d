// Joins a rank to its process groups.
//
// Ranks are numbered replica by replica: with 2 replicas of 3 ranks each, ranks
// 0 1 2 share the layers of replica 0, and ranks 3 4 5 those of replica 1.
#ifndef WEFT_SRC_PARALLEL_LINKS_H_
#define WEFT_SRC_PARALLEL_LINKS_H_

#include <memory>

#include "src/base/world.h"
#include "src/parallel/communicator.h"

namespace weft::parallel {

struct Topology {
  int tensor_size = 1;   // Ranks that share a replica's layers.
  int num_replicas = 1;  // Copies of the model. They divide the training data.

  [[nodiscard]] int size() const { return tensor_size * num_replicas; }
  [[nodiscard]] int ReplicaOf(int rank) const { return rank / tensor_size; }
  [[nodiscard]] Shard ShardOf(int rank) const {
    return {.rank = rank % tensor_size, .size = tensor_size};
  }
};

// The process groups to which a rank belongs. If it is the only rank, all three
// groups are null.
struct Links {
  Topology topology;
  int rank = 0;
  std::shared_ptr<Rendezvous> rendezvous;
  bool local = true;  // All ranks are on this machine.
  // CPU group of all ranks, for rank 0's messages and their results.
  std::unique_ptr<Communicator> commands;
  // Device group of all ranks, for weights and gradients.
  std::unique_ptr<Communicator> transfers;
  // Device group of this replica's ranks; null if the replica has only this
  // rank.
  std::unique_ptr<Communicator> tensor;

  [[nodiscard]] bool alone() const { return topology.size() == 1; }
  [[nodiscard]] int replica() const { return topology.ReplicaOf(rank); }
};

// Ranks join in two parts, so that they can exchange errors before they need a
// device. All ranks call each part. Both parts throw std::exception.

// First part: sets up only `commands`, and returns when all ranks have joined.
// `topology` and `world` have the same number of ranks.
[[nodiscard]] Links Meet(const World& world, const Topology& topology);
// First part over any rendezvous. `local`: all ranks are on this machine.
[[nodiscard]] Links Meet(const std::shared_ptr<Rendezvous>& rendezvous,
                         int rank, const Topology& topology, bool local);

// The second part of joining: adds `transfers` and `tensor`, on `device`.
void JoinOn(at::Device device, Links* links);

}  // namespace weft::parallel

#endif  // WEFT_SRC_PARALLEL_LINKS_H_
