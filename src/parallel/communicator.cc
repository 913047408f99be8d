#include "src/parallel/communicator.h"

#include <ATen/ATen.h>
#include <sched.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#ifndef USE_C10D_GLOO
#define USE_C10D_GLOO
#endif
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#if WEFT_WITH_CUDA
#ifndef USE_C10D_NCCL
#define USE_C10D_NCCL
#endif
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#endif

#include "absl/strings/str_cat.h"

namespace weft::parallel {
namespace {

// The bytes of a rank's message in Agree.
constexpr int64_t kMessageBytes = 1024;

// The timeout is long, because the machines of a job may start minutes apart.
constexpr absl::Duration kJoinTimeout = absl::Minutes(10);
// A year, which is practically no limit: rank 0 may work without the other
// ranks for any time before it sends the next command.
constexpr absl::Duration kCommandTimeout = absl::Hours(24 * 365);
// The largest tensor that pairs of ranks sum. Gloo's ring sends fewer bytes,
// but dozens of messages even for a single row, and waits for each of them.
constexpr size_t kPairwiseBytes = 256 << 10;
constexpr int kSumTag = 1;  // Send and Receive have tag 0.

using StorePtr = c10::intrusive_ptr<c10d::Store>;
using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

// c10d logs every operation of the process. Groups on several threads would
// write this log without a lock. TORCH_FR_BUFFER_SIZE=0 turns the log off. The
// variable is set here before the first group reads it, unless the user has set
// it.
[[maybe_unused]] const int kFlightRecorderOff =
    setenv("TORCH_FR_BUFFER_SIZE", "0", /*overwrite=*/0);

class StoreRendezvous : public Rendezvous {
 public:
  explicit StoreRendezvous(StorePtr store) : store_(std::move(store)) {}
  StorePtr ForGroup(const std::string& name) const {
    return c10::make_intrusive<c10d::PrefixStore>(name, store_);
  }

 private:
  StorePtr store_;
};

std::shared_ptr<::gloo::transport::Device> GlooDevice(bool local) {
  if (local)
    return c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1");
  // torch.distributed reads the same variable.
  const char* interface = std::getenv("GLOO_SOCKET_IFNAME");
  return interface != nullptr && *interface != '\0'
             ? c10d::ProcessGroupGloo::createDeviceForInterface(interface)
             : c10d::ProcessGroupGloo::createDefaultDevice();
}

BackendPtr MakeGloo(const StorePtr& store, const GroupOptions& options) {
  auto gloo = c10d::ProcessGroupGloo::Options::create(
      absl::ToChronoMilliseconds(options.timeout));
  gloo->devices.push_back(GlooDevice(options.local));
  return c10::make_intrusive<c10d::ProcessGroupGloo>(
      store, options.shard.rank, options.shard.size, std::move(gloo));
}

BackendPtr MakeBackend(const StorePtr& store, const GroupOptions& options) {
  if (options.device.is_cpu()) return MakeGloo(store, options);
#if WEFT_WITH_CUDA
  auto nccl = c10d::ProcessGroupNCCL::Options::create();
  nccl->timeout = absl::ToChronoMilliseconds(options.timeout);
  return c10::make_intrusive<c10d::ProcessGroupNCCL>(
      store, options.shard.rank, options.shard.size, std::move(nccl));
#else
  TORCH_CHECK(false, "a group on ", options.device.str(),
              " needs a build with CUDA");
#endif
}

// Sums over pairs of ranks whose numbers differ in one bit, one bit after the
// other. Both ranks of a pair add the same two tensors, so all ranks get the
// same bits. The number of ranks is a power of two.
void SumOverPairs(c10d::Backend& group, const Shard& shard,
                  at::Tensor& tensor) {
  std::vector<at::Tensor> own = {tensor};
  std::vector<at::Tensor> other = {at::empty_like(tensor)};
  for (int bit = 1; bit < shard.size; bit *= 2) {
    const auto received = group.recv(other, shard.rank ^ bit, kSumTag);
    group.send(own, shard.rank ^ bit, kSumTag)->wait();
    received->wait();
    tensor.add_(other[0]);
  }
}

void CheckContiguous(const at::Tensor& tensor) {
  TORCH_CHECK(tensor.is_contiguous(), "a group wants contiguous tensors");
}

}  // namespace

struct Communicator::Backend {
  BackendPtr group;
};

std::shared_ptr<Rendezvous> Rendezvous::Tcp(const std::string& host, int port,
                                            bool serve, int listen_fd,
                                            absl::Duration timeout,
                                            const std::string& attempt) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<std::uint16_t>(port);
  options.isServer = serve;
  options.waitWorkers = false;
  options.timeout = absl::ToChronoMilliseconds(timeout);
  if (listen_fd >= 0) options.masterListenFd = listen_fd;
  return std::make_shared<StoreRendezvous>(
      c10::make_intrusive<c10d::PrefixStore>(
          attempt, c10::make_intrusive<c10d::TCPStore>(host, options)));
}

std::shared_ptr<Rendezvous> Rendezvous::InProcess() {
  return std::make_shared<StoreRendezvous>(
      c10::make_intrusive<c10d::HashStore>());
}

Communicator::Communicator(const Shard& shard, std::unique_ptr<Backend> backend)
    : shard_(shard), backend_(std::move(backend)) {}

Communicator::~Communicator() = default;

std::unique_ptr<Communicator> Communicator::Join(
    const std::shared_ptr<Rendezvous>& rendezvous,
    const GroupOptions& options) {
  const auto& stores = static_cast<const StoreRendezvous&>(*rendezvous);
  auto backend = std::make_unique<Backend>();
  backend->group = MakeBackend(stores.ForGroup(options.name), options);
  return std::unique_ptr<Communicator>(
      new Communicator(options.shard, std::move(backend)));
}

void Communicator::SetTimeout(absl::Duration timeout) {
  backend_->group->setTimeout(absl::ToChronoMilliseconds(timeout));
}

void Communicator::AllReduce(at::Tensor& tensor) {
  CheckContiguous(tensor);
  const auto size = static_cast<unsigned>(shard_.size);
  if (tensor.is_cpu() && std::has_single_bit(size) &&
      tensor.nbytes() <= kPairwiseBytes) {
    return SumOverPairs(*backend_->group, shard_, tensor);
  }
  std::vector<at::Tensor> tensors = {tensor};
  backend_->group->allreduce(tensors)->wait();
}

at::Tensor Communicator::AllGather(const at::Tensor& tensor) {
  CheckContiguous(tensor);
  std::vector<int64_t> sizes = tensor.sizes().vec();
  sizes.insert(sizes.begin(), shard_.size);
  // The output is flat, because Gloo needs parts of exactly the input's shape.
  at::Tensor all = at::empty({shard_.size * tensor.numel()}, tensor.options());
  at::Tensor own = tensor.view({-1});
  backend_->group->_allgather_base(all, own)->wait();
  return all.view(sizes);
}

void Communicator::Broadcast(at::Tensor& tensor) {
  CheckContiguous(tensor);
  std::vector<at::Tensor> tensors = {tensor};
  backend_->group->broadcast(tensors)->wait();
}

void Communicator::Send(const at::Tensor& tensor, int to) {
  CheckContiguous(tensor);
  std::vector<at::Tensor> tensors = {tensor};
  backend_->group->send(tensors, to, /*tag=*/0)->wait();
}

void Communicator::Receive(at::Tensor& tensor, int from) {
  CheckContiguous(tensor);
  std::vector<at::Tensor> tensors = {tensor};
  backend_->group->recv(tensors, from, /*tag=*/0)->wait();
}

absl::Status Agree(Communicator& group, const absl::Status& own) {
  // The note is one byte with the code of `own`, then the message of `own`,
  // padded with zeros.
  at::Tensor note = at::zeros({1 + kMessageBytes}, at::kByte);
  auto* const bytes = note.mutable_data_ptr<uint8_t>();
  bytes[0] = static_cast<uint8_t>(own.raw_code());
  const std::string text(own.message());
  std::copy_n(text.begin(), std::min<int64_t>(kMessageBytes, std::ssize(text)),
              bytes + 1);
  const at::Tensor notes = group.AllGather(note);
  for (int rank = 0; rank < group.shard().size; ++rank) {
    const auto* const other =
        notes.const_data_ptr<uint8_t>() + rank * note.numel();
    if (other[0] == 0) continue;
    const auto* const end = std::find(other + 1, other + note.numel(), 0);
    return {static_cast<absl::StatusCode>(other[0]),
            absl::StrCat("rank ", rank, ": ", std::string(other + 1, end))};
  }
  return absl::OkStatus();
}

int64_t Smallest(Communicator& group, int64_t own) {
  return group.AllGather(at::tensor({own})).min().item<int64_t>();
}

// Otherwise Gloo's thread of the receiver takes the sender's core inside
// writev(). The sender then holds a lock for which Gloo's thread on its side
// polls with epoll_wait() until the sender gets a core: 3 ms for each message.
void YieldToSenders() {
  if (sched_getscheduler(/*pid=*/0) != SCHED_OTHER) return;
  const sched_param none{.sched_priority = 0};
  sched_setscheduler(/*pid=*/0, SCHED_BATCH, &none);
}

Links Meet(const std::shared_ptr<Rendezvous>& rendezvous, int rank,
           const Topology& topology, bool local) {
  Links links{.topology = topology,
              .rank = rank,
              .rendezvous = rendezvous,
              .local = local};
  if (links.alone()) return links;
  links.commands = Communicator::Join(
      rendezvous, {.name = "commands",
                   .shard = {.rank = rank, .size = topology.size()},
                   .timeout = kJoinTimeout,
                   .local = local});
  links.commands->SetTimeout(kCommandTimeout);
  return links;
}

Links Meet(const World& world, const Topology& topology) {
  if (topology.size() == 1) return {};
  const bool serves = world.rank == 0 && !world.has_agent;
  return Meet(Rendezvous::Tcp(world.host, world.port, serves, world.listen_fd,
                              kJoinTimeout, world.attempt),
              world.rank, topology, world.local());
}

void JoinOn(at::Device device, Links* links) {
  if (links->alone()) return;
  links->transfers = Communicator::Join(
      links->rendezvous,
      {.name = "transfers",
       .shard = {.rank = links->rank, .size = links->topology.size()},
       .device = device,
       .local = links->local});
  if (links->topology.tensor_size > 1) {
    links->tensor = Communicator::Join(
        links->rendezvous, {.name = absl::StrCat("tensor-", links->replica()),
                            .shard = links->topology.ShardOf(links->rank),
                            .device = device,
                            .local = links->local});
  }
}

}  // namespace weft::parallel
