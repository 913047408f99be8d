#include "src/parallel/links.h"

#include "absl/strings/str_cat.h"

namespace weft::parallel {
namespace {

// Models take long to load, and some ranks are faster than others.
constexpr absl::Duration kJoinTimeout = absl::Minutes(30);
// Commands come when clients ask for something.
constexpr absl::Duration kCommandTimeout = absl::Hours(24 * 365);

}  // namespace

Links Join(const std::shared_ptr<Rendezvous>& rendezvous, int rank,
           const Topology& topology, at::Device device, bool local) {
  Links links{.topology = topology, .rank = rank};
  if (links.alone()) return links;
  const Shard all{.rank = rank, .size = topology.size()};
  links.commands = Communicator::Join(rendezvous, {.name = "commands",
                                                   .shard = all,
                                                   .timeout = kCommandTimeout,
                                                   .local = local});
  links.transfers = Communicator::Join(
      rendezvous,
      {.name = "transfers", .shard = all, .device = device, .local = local});
  if (topology.tensor_size > 1) {
    links.tensor = Communicator::Join(
        rendezvous, {.name = absl::StrCat("tensor-", links.replica()),
                     .shard = topology.ShardOf(rank),
                     .device = device,
                     .local = local});
  }
  return links;
}

Links Join(const World& world, const Topology& topology, at::Device device) {
  if (topology.size() == 1) return {};
  return Join(Rendezvous::Tcp(world.host, world.port, world.rank == 0,
                              world.listen_fd, kJoinTimeout),
              world.rank, topology, device, world.local());
}

}  // namespace weft::parallel
