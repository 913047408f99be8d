// Joins ranks into groups that compute together. A group is a process group of
// c10d: NCCL for tensors on CUDA devices, Gloo for tensors on the CPU.
//
// All ranks of a group call the same operations in the same order, except that
// a Send on one rank matches a Receive on one other rank. If the process of a
// rank ends, Gloo's operations on the other ranks throw. NCCL's operations wait
// on the device until the watchdog of c10d ends the process, so the supervisor
// should end the other ranks earlier. A group that lost a rank cannot be used
// again.
#ifndef WEFT_SRC_PARALLEL_COMMUNICATOR_H_
#define WEFT_SRC_PARALLEL_COMMUNICATOR_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "src/base/options/world.h"
#include "src/parallel/shard.h"

namespace weft::parallel {

// The place where ranks find each other.
class Rendezvous {
 public:
  // Meets over TCP at `host`:`port`. If `serve`, this process serves the
  // address. It uses the socket `listen_fd`, or a new socket if `listen_fd` is
  // -1. Throws c10::Error if the address does not answer within `timeout`. Only
  // ranks with the same `attempt` meet.
  static std::shared_ptr<Rendezvous> Tcp(const std::string& host, int port,
                                         bool serve, int listen_fd,
                                         absl::Duration timeout,
                                         const std::string& attempt = "");
  // Lets threads of this process meet, for tests.
  static std::shared_ptr<Rendezvous> InProcess();

  virtual ~Rendezvous() = default;

 protected:
  Rendezvous() = default;
};

struct GroupOptions {
  // Identifies the group at the rendezvous. All ranks use the same name.
  std::string name;
  Shard shard;  // This rank and the group's size.
  at::Device device = at::kCPU;
  // If an operation takes longer, Gloo throws and NCCL ends the process.
  absl::Duration timeout = absl::Minutes(10);
  // If true, all ranks are on this machine, and Gloo listens only on loopback.
  bool local = true;
};

// Threads: not thread-safe.
class Communicator {
 public:
  // Joins the group. With Gloo, returns when all ranks have joined. NCCL
  // connects the ranks at the first operation. Throws std::exception.
  static std::unique_ptr<Communicator> Join(
      const std::shared_ptr<Rendezvous>& rendezvous,
      const GroupOptions& options);
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  const Shard& shard() const { return shard_; }

  // Sets the timeout of later operations.
  void SetTimeout(absl::Duration timeout);

  // The operations below take contiguous tensors on the group's device, with
  // the same shape and dtype on all ranks. They throw std::exception. On CUDA
  // they queue work on the current stream and return before it is done.

  // Sums the tensors of all ranks in place. All ranks get the same bits.
  void AllReduce(at::Tensor& tensor);
  // Returns [size, ...]: the tensors of all ranks, in the order of ranks.
  at::Tensor AllGather(const at::Tensor& tensor);
  // Copies rank 0's values to all ranks.
  void Broadcast(at::Tensor& tensor);
  void Send(const at::Tensor& tensor, int to);
  void Receive(at::Tensor& tensor, int from);

 private:
  struct Backend;
  Communicator(const Shard& shard, std::unique_ptr<Backend> backend);

  const Shard shard_;
  const std::unique_ptr<Backend> backend_;
};

// All ranks of `group` call Agree and Smallest together. `group` must be a
// group for tensors on the CPU. They throw what the operations of Communicator
// throw.

// Returns OK if `own` is OK on every rank. Otherwise every rank gets the error
// of the lowest rank that has an error. The message is "rank N: " and the first
// kilobyte of that rank's message.
absl::Status Agree(Communicator& group, const absl::Status& own);

// Returns the smallest of all ranks' `own`.
int64_t Smallest(Communicator& group, int64_t own);

// Ranks are numbered replica by replica: with 2 replicas of 3 ranks each, ranks
// 0 1 2 share the layers of replica 0, and ranks 3 4 5 those of replica 1.
struct Topology {
  int tensor_size = 1;   // Ranks that share a replica's layers.
  int num_replicas = 1;  // Copies of the model. They divide the training data.

  int size() const { return tensor_size * num_replicas; }
  int ReplicaOf(int rank) const { return rank / tensor_size; }
  Shard ShardOf(int rank) const {
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

  bool alone() const { return topology.size() == 1; }
  int replica() const { return topology.ReplicaOf(rank); }
};

// Makes this thread, and those that it starts, wait for their turn when they
// wake up, unless an operator has chosen their policy. Ranks that share the
// cores of one machine call it before they meet.
void YieldToSenders();

// Ranks join in two parts, so that they can exchange errors before they need a
// device. All ranks call each part. Both parts throw std::exception.

// First part: sets up only `commands`, and returns when all ranks have joined.
// `topology` and `world` have the same number of ranks.
Links Meet(const World& world, const Topology& topology);
// First part over any rendezvous. `local`: all ranks are on this machine.
Links Meet(const std::shared_ptr<Rendezvous>& rendezvous, int rank,
           const Topology& topology, bool local);

// The second part of joining: adds `transfers` and `tensor`, on `device`.
void JoinOn(at::Device device, Links* links);

}  // namespace weft::parallel

#endif  // WEFT_SRC_PARALLEL_COMMUNICATOR_H_
