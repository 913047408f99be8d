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

#include <memory>
#include <string>

#include "absl/time/time.h"
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
  [[nodiscard]] static std::unique_ptr<Communicator> Join(
      const std::shared_ptr<Rendezvous>& rendezvous,
      const GroupOptions& options);
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  [[nodiscard]] const Shard& shard() const { return shard_; }

  // Sets the timeout of later operations.
  void SetTimeout(absl::Duration timeout);

  // The operations below take contiguous tensors on the group's device, with
  // the same shape and dtype on all ranks. They throw std::exception. On CUDA
  // they queue work on the current stream and return before it is done.

  // Sums the tensors of all ranks in place. All ranks get the same bits.
  void AllReduce(at::Tensor& tensor);
  // Returns [size, ...]: the tensors of all ranks, in the order of ranks.
  [[nodiscard]] at::Tensor AllGather(const at::Tensor& tensor);
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

}  // namespace weft::parallel

#endif  // WEFT_SRC_PARALLEL_COMMUNICATOR_H_
