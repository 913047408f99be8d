#include "server/call/call_memory.h"

#include <unistd.h>

#include <algorithm>

#include "server/wire/parse_cost.h"
#include "src/base/cgroup.h"

namespace weft::server {
namespace {

// The model, the engine and the listeners need the rest.
constexpr int64_t kShare = 8;

}  // namespace

std::shared_ptr<FairBudget> MakeCallMemory(const ServerOptions& options) {
  int64_t most =
      int64_t{sysconf(_SC_PHYS_PAGES)} * int64_t{sysconf(_SC_PAGESIZE)};
  if (const auto left = ReadCgroupLimits().memory_left) {
    most = std::min(most, *left);
  }
  const int64_t largest =
      options.max_message_bytes * (1 + kMaxGrowth) + kSmallRequestBytes;
  most = std::max(most / kShare, 2 * largest);
  if (options.request_memory_bytes > 0) most = options.request_memory_bytes;
  return std::make_shared<FairBudget>(most, "bytes of memory",
                                      "--request-memory");
}

}  // namespace weft::server
