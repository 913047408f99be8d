// What one tenant may ask for at a time and per second, with tokens on: beside
// the limits of the queue, which count what waits.
#ifndef WEFT_SERVER_TENANT_QUOTA_H_
#define WEFT_SERVER_TENANT_QUOTA_H_

#include <cstdint>
#include <map>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "src/base/mutex.h"

namespace weft {

// Threads: any.
class TenantQuota {
 public:
  // Each 0: no limit.
  TenantQuota(int max_calls, int64_t tokens_per_second)
      : max_calls_(max_calls), tokens_per_second_(tokens_per_second) {}

  // A call begins. RESOURCE_EXHAUSTED when as many are under way; it counts
  // until Leave all the same.
  [[nodiscard]] absl::Status Enter(const std::string& tenant)
      ABSL_LOCKS_EXCLUDED(mu_);
  void Leave(const std::string& tenant) ABSL_LOCKS_EXCLUDED(mu_);

  // Takes tokens. RESOURCE_EXHAUSTED when the tenant has had more than its rate
  // allows. A tenant in credit gets any request, however large, and is then in
  // debt: so a large one is served late, not never. Credit grows for at most
  // kBurst.
  [[nodiscard]] absl::Status Spend(const std::string& tenant, int64_t tokens,
                                   absl::Time now) ABSL_LOCKS_EXCLUDED(mu_);
  static constexpr absl::Duration kBurst = absl::Seconds(10);

 private:
  struct Account {
    int calls = 0;
    bool has_spent = false;
    double credit = 0;
    absl::Time updated;
  };

  const int max_calls_;
  const int64_t tokens_per_second_;
  Mutex mu_;
  // Tenants of tokens: as many as the operator has named.
  std::map<std::string, Account> accounts_ ABSL_GUARDED_BY(mu_);
};

}  // namespace weft

#endif  // WEFT_SERVER_TENANT_QUOTA_H_
