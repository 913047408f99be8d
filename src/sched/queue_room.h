// Limits of the queue, over all tenants and for each one.
//
// No tenant may fill the queue alone, and a full queue still takes work of a
// tenant below its guaranteed share: the limits of the whole queue divided by
// the number of tenants that wait, at least one request. So whatever others
// send, a tenant is refused only beyond what it asks for itself. The price is
// a queue that n tenants can fill to at most 2 + ln(n) times its limits and one
// request more of each: a tenant with nothing waiting may queue one of any
// size, or a big one could never be served. Threads: not thread-safe.
#ifndef WEFT_SRC_SCHED_QUEUE_ROOM_H_
#define WEFT_SRC_SCHED_QUEUE_ROOM_H_

#include <cstdint>
#include <map>
#include <string>

#include "absl/status/status.h"

namespace weft::sched {

// All >= 1.
struct QueueLimits {
  int64_t max_requests = 1024;
  int64_t max_tokens = 4 << 20;
  int64_t max_requests_per_tenant = 256;
  int64_t max_tokens_per_tenant = 1 << 20;
};

class QueueRoom {
 public:
  struct Load {
    int64_t requests = 0;
    int64_t tokens = 0;
  };

  explicit QueueRoom(const QueueLimits& limits) : limits_(limits) {}

  // RESOURCE_EXHAUSTED naming the limit when the tenant may not queue a
  // request of so many tokens now.
  [[nodiscard]] absl::Status Check(const std::string& tenant,
                                   int64_t tokens) const;
  void Add(const std::string& tenant, int64_t tokens);
  void Remove(const std::string& tenant, int64_t tokens);

  [[nodiscard]] const Load& total() const { return total_; }
  [[nodiscard]] Load LoadOf(const std::string& tenant) const;

 private:
  const QueueLimits limits_;
  Load total_;
  std::map<std::string, Load> tenants_;  // Those with requests.
};

}  // namespace weft::sched

#endif  // WEFT_SRC_SCHED_QUEUE_ROOM_H_
