#include "src/base/options/world.h"

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "src/base/status_macros.h"

namespace weft {
namespace {

constexpr int kMostRanks = 4096;
constexpr int kMostPort = 65535;

// Reads the variable as a number in [least, most]. Returns `fallback` if the
// variable is not set and there is a fallback.
absl::StatusOr<int> ReadNumber(const Environment& read, const char* name,
                               int least, int most,
                               std::optional<int> fallback) {
  const std::optional<std::string> text = read(name);
  if (!text.has_value() && fallback.has_value()) return *fallback;
  int number = 0;
  if (text.has_value() && absl::SimpleAtoi(*text, &number) && number >= least &&
      number <= most) {
    return number;
  }
  return absl::InvalidArgumentError(absl::StrCat(name, "=", text.value_or(""),
                                                 ": must be in [", least, ", ",
                                                 most, "] where RANK is set"));
}

}  // namespace

absl::StatusOr<std::optional<World>> WorldFromEnvironment(
    const Environment& read) {
  if (!read("RANK").has_value()) return std::nullopt;
  World world;
  WEFT_ASSIGN_OR_RETURN(
      world.size, ReadNumber(read, "WORLD_SIZE", 1, kMostRanks, std::nullopt));
  WEFT_ASSIGN_OR_RETURN(
      world.rank, ReadNumber(read, "RANK", 0, world.size - 1, std::nullopt));
  WEFT_ASSIGN_OR_RETURN(
      world.local_size,
      ReadNumber(read, "LOCAL_WORLD_SIZE", 1, world.size, world.size));
  WEFT_ASSIGN_OR_RETURN(world.local_rank,
                        ReadNumber(read, "LOCAL_RANK", 0, world.local_size - 1,
                                   world.rank % world.local_size));
  if (world.size == 1) return world;
  WEFT_ASSIGN_OR_RETURN(
      world.port, ReadNumber(read, "MASTER_PORT", 1, kMostPort, std::nullopt));
  const std::optional<std::string> host = read("MASTER_ADDR");
  if (!host.has_value() || host->empty()) {
    return absl::InvalidArgumentError(
        "MASTER_ADDR: must be rank 0's host where RANK is set");
  }
  world.host = *host;
  world.has_agent = read("TORCHELASTIC_USE_AGENT_STORE") == "True";
  world.attempt = read("TORCHELASTIC_RESTART_COUNT").value_or("");
  return world;
}

absl::Status CheckWorldSize(const World& world, int tensor_size,
                            int data_size) {
  if (world.size == tensor_size * data_size) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "WORLD_SIZE=", world.size, ": must be --tensor-parallel-size=",
      tensor_size, " times --data-parallel-size=", data_size));
}

}  // namespace weft
