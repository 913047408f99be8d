#include "src/parallel/links.h"

#include "absl/strings/str_cat.h"

namespace weft::parallel {
namespace {

// Of a job some machines start later than others.
constexpr absl::Duration kJoinTimeout = absl::Minutes(10);
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
                                                   .timeout = kJoinTimeout,
                                                   .local = local});
  links.commands->SetTimeout(kCommandTimeout);
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
  const bool serves = world.rank == 0 && !world.has_agent;
  return Join(Rendezvous::Tcp(world.host, world.port, serves, world.listen_fd,
                              kJoinTimeout, world.attempt),
              world.rank, topology, device, world.local());
}

}  // namespace weft::parallel
