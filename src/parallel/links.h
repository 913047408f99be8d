// The groups that a rank belongs to.
//
// Ranks are numbered replica by replica: with 2 replicas of 3 ranks each, ranks
// 0 1 2 share the layers of replica 0 and 3 4 5 those of replica 1.
#ifndef WEFT_SRC_PARALLEL_LINKS_H_
#define WEFT_SRC_PARALLEL_LINKS_H_

#include <memory>

#include "src/config/world.h"
#include "src/parallel/communicator.h"

namespace weft::parallel {

struct Topology {
  int tensor_size = 1;   // Ranks that share the layers of a replica.
  int num_replicas = 1;  // They share the data.

  [[nodiscard]] int size() const { return tensor_size * num_replicas; }
  [[nodiscard]] int ReplicaOf(int rank) const { return rank / tensor_size; }
  [[nodiscard]] Shard ShardOf(int rank) const {
    return {.rank = rank % tensor_size, .size = tensor_size};
  }
};

// All null in a world of one rank.
struct Links {
  Topology topology;
  int rank = 0;
  std::shared_ptr<Rendezvous> rendezvous;
  bool local = true;  // All ranks are on this machine.
  // All ranks, on the host: messages of rank 0.
  std::unique_ptr<Communicator> commands;
  // All ranks, on the device: weights and gradients.
  std::unique_ptr<Communicator> transfers;
  // The ranks of this one's replica, on the device; null when it is alone.
  std::unique_ptr<Communicator> tensor;

  [[nodiscard]] bool alone() const { return topology.size() == 1; }
  [[nodiscard]] int replica() const { return topology.ReplicaOf(rank); }
};

// Ranks join in two parts, so that they can exchange errors before they need a
// device. Both parts return when all ranks have joined. They throw c10::Error
// or std::exception.

// Sets up only `commands`. `topology` has as many ranks as `world`.
[[nodiscard]] Links Meet(const World& world, const Topology& topology);
// The same over any rendezvous.
[[nodiscard]] Links Meet(const std::shared_ptr<Rendezvous>& rendezvous,
                         int rank, const Topology& topology, bool local);

// Adds the groups on `device`.
void JoinOn(at::Device device, Links* links);

}  // namespace weft::parallel

#endif  // WEFT_SRC_PARALLEL_LINKS_H_
