// Ranks that compute together: c10d's process groups, NCCL for tensors on CUDA
// devices, Gloo for those of the CPU.
//
// All ranks of a group call the same operations in the same order. Over Gloo a
// rank that is gone makes the others' operations throw at once; over NCCL they
// wait on the device until its watchdog ends the process, so that whoever
// watches the ranks should be quicker. Nothing can be done with the group from
// then on.
#ifndef WEFT_SRC_PARALLEL_COMMUNICATOR_H_
#define WEFT_SRC_PARALLEL_COMMUNICATOR_H_

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>

#include "absl/time/time.h"
#include "src/parallel/shard.h"

namespace weft::parallel {

// Where ranks find each other.
class Rendezvous {
 public:
  // Over TCP. One process serves it at `host`:`port`, or on `listen_fd`, a
  // bound socket that it takes over, when that is not -1. Throws c10::Error
  // after `timeout`. Only ranks that give the same `attempt` meet.
  static std::shared_ptr<Rendezvous> Tcp(const std::string& host, int port,
                                         bool serve, int listen_fd,
                                         absl::Duration timeout,
                                         const std::string& attempt = "");
  // Between threads of this process, for tests.
  static std::shared_ptr<Rendezvous> InProcess();

  virtual ~Rendezvous() = default;

 protected:
  Rendezvous() = default;
};

struct GroupOptions {
  // Tells the group from others at the rendezvous; the same on every rank.
  std::string name;
  Shard shard;  // This rank, and how many there are.
  at::Device device = at::kCPU;
  // An operation that takes longer throws.
  absl::Duration timeout = absl::Minutes(10);
  // Ranks are on this machine: nothing listens beyond loopback.
  bool local = true;
};

// Threads: one at a time.
class Communicator {
 public:
  // Returns when all ranks are there.
  // Errors: throws c10::Error or std::exception.
  [[nodiscard]] static std::unique_ptr<Communicator> Join(
      const std::shared_ptr<Rendezvous>& rendezvous,
      const GroupOptions& options);
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  [[nodiscard]] const Shard& shard() const { return shard_; }

  // Applies to the operations that come after it.
  void SetTimeout(absl::Duration timeout);

  // All operations below take contiguous tensors on the group's device, of the
  // same shape and dtype on all ranks. They throw std::exception. On CUDA they
  // only queue on the current stream, and return before they are done.

  // The sum over ranks, in place, with the same bits on all of them.
  void AllReduce(at::Tensor& tensor);
  // [size, ...]: every rank's tensor, in the order of ranks.
  [[nodiscard]] at::Tensor AllGather(const at::Tensor& tensor);
  // Rank 0's values, on all ranks.
  void Broadcast(at::Tensor& tensor);
  void Send(const at::Tensor& tensor, int to);
  void Receive(at::Tensor& tensor, int from);

 private:
  struct Backend;
  Communicator(const Shard& shard, std::unique_ptr<Backend> backend);

  const Shard shard_;
  const std::unique_ptr<Backend> backend_;
};

}  // namespace weft::parallel

#endif  // WEFT_SRC_PARALLEL_COMMUNICATOR_H_
