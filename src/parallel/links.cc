#include "src/parallel/links.h"

#include "absl/strings/str_cat.h"

namespace weft::parallel {
namespace {

// The timeout is long, because the machines of a job may start minutes apart.
constexpr absl::Duration kJoinTimeout = absl::Minutes(10);
// A year, which is practically no limit: rank 0 may work without the other
// ranks for any time before it sends the next command.
constexpr absl::Duration kCommandTimeout = absl::Hours(24 * 365);

}  // namespace

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
