// Limits the requests and tokens that wait, for all tenants together and for
// each tenant.
//
// A tenant may fill the queue if no other tenant has requests in it. Each
// tenant has a guaranteed share: the limits of the whole queue, divided by the
// number of tenants with waiting requests, the asking tenant included. A full
// queue still accepts work that keeps its tenant within this share. So a tenant
// within its share is never refused because of other tenants. A tenant with
// nothing waiting may queue one request of any size, because a big request
// could never run otherwise. These two rules let the queue exceed its limits.
// Threads: not thread-safe.
#ifndef WEFT_SRC_DISPATCH_QUEUE_ROOM_H_
#define WEFT_SRC_DISPATCH_QUEUE_ROOM_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace weft::dispatch {

struct QueueLimits {
  int64_t max_requests = 0;  // >= 1
  int64_t max_tokens = 0;    // >= 1
  // Limits for each tenant. 0: the limits of the whole queue.
  int64_t max_requests_per_tenant = 0;
  int64_t max_tokens_per_tenant = 0;
  // The calls that a tenant may have under way, which the server limits. One
  // fewer may wait here, so that a call is left for the step that the others
  // wait for. 0: no limit. Does not concern work without a tenant.
  int64_t max_calls_per_tenant = 0;
};

// Waiting work behind a step number that is missing. It must not take the place
// of work that can run.
struct StrandedWork {
  uint64_t ahead = 0;    // Steps from the missing number.
  uint64_t arrival = 0;  // Higher for later work.
  uint64_t id = 0;
  int64_t tokens = 0;
};

class QueueRoom {
 public:
  struct Load {
    int64_t requests = 0;
    int64_t tokens = 0;
  };

  explicit QueueRoom(const QueueLimits& limits) : limits_(limits) {}

  // Returns RESOURCE_EXHAUSTED, which names the limit, if the tenant may not
  // queue a request of `tokens` tokens after its requests `leaving` have left.
  [[nodiscard]] absl::Status Check(const std::string& tenant, int64_t tokens,
                                   const Load& leaving) const;
  // Returns the ids of the tenant's `stranded` work that must leave so that a
  // request of `tokens` tokens has room: the work that is farthest ahead, and
  // among equals the latest. Errors: that of Check, if it is not enough that
  // all of it leaves.
  [[nodiscard]] absl::StatusOr<std::vector<uint64_t>> MakeRoom(
      const std::string& tenant, int64_t tokens,
      std::vector<StrandedWork> stranded) const;
  void Add(const std::string& tenant, int64_t tokens);
  void Remove(const std::string& tenant, int64_t tokens);

  [[nodiscard]] const Load& total() const { return total_; }
  [[nodiscard]] Load LoadOf(const std::string& tenant) const;

 private:
  const QueueLimits limits_;
  Load total_;
  std::map<std::string, Load> tenants_;  // Tenants that have requests.
};

}  // namespace weft::dispatch

#endif  // WEFT_SRC_DISPATCH_QUEUE_ROOM_H_
