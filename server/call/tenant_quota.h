// Limits each tenant's calls and tokens per second on a server with
// --auth-tokens-file.
#ifndef WEFT_SERVER_CALL_TENANT_QUOTA_H_
#define WEFT_SERVER_CALL_TENANT_QUOTA_H_

#include <cstdint>
#include <map>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "src/base/threads/mutex.h"

namespace weft::server {

// Threads: any.
class TenantQuota {
 public:
  // 0 means no limit.
  TenantQuota(int max_calls, int64_t tokens_per_second)
      : max_calls_(max_calls), tokens_per_second_(tokens_per_second) {}

  // Counts a call whose header gRPC has read. Arrive takes it off the count
  // when its request is there. A call that is cancelled before never arrives;
  // it stays on the count for a while (kBegunPerSecond), because gRPC takes as
  // long to free it. Returns RESOURCE_EXHAUSTED if kMaxBegun are on the count.
  absl::Status Begin(const std::string& tenant, absl::Time now)
      ABSL_LOCKS_EXCLUDED(mu_);
  void Arrive(const std::string& tenant) ABSL_LOCKS_EXCLUDED(mu_);
  static constexpr double kMaxBegun = 1024;
  static constexpr double kBegunPerSecond = 128;

  // Counts a new call. Returns RESOURCE_EXHAUSTED if the tenant has too many
  // open calls. The caller must call Leave in both cases.
  absl::Status Enter(const std::string& tenant) ABSL_LOCKS_EXCLUDED(mu_);
  void Leave(const std::string& tenant) ABSL_LOCKS_EXCLUDED(mu_);
  // Returns RESOURCE_EXHAUSTED if the tenant may have no call besides those
  // that it has. A call must not wait for another one then.
  absl::Status CheckSpare(const std::string& tenant) ABSL_LOCKS_EXCLUDED(mu_);

  // Takes `tokens` from the tenant's credit. The credit grows with time, up to
  // kBurst times tokens_per_second. If the credit is not positive, returns
  // RESOURCE_EXHAUSTED and takes nothing. A positive credit is enough for a
  // request of any size, and may become negative. Later requests are then
  // refused until the credit is positive again.
  absl::Status Spend(const std::string& tenant, int64_t tokens, absl::Time now)
      ABSL_LOCKS_EXCLUDED(mu_);
  // Gives back what an earlier Spend took.
  void Refund(const std::string& tenant, int64_t tokens)
      ABSL_LOCKS_EXCLUDED(mu_);
  static constexpr absl::Duration kBurst = absl::Seconds(10);

 private:
  struct Account {
    int calls = 0;
    double begun = 0;
    absl::Time begun_at;  // When `begun` was last computed.
    bool has_spent = false;
    double credit = 0;
    absl::Time updated;
  };

  absl::Status TooManyCalls(const std::string& tenant) const;

  const int max_calls_;
  const int64_t tokens_per_second_;
  Mutex mu_;
  // One account for each tenant that has made a call.
  std::map<std::string, Account> accounts_ ABSL_GUARDED_BY(mu_);
};

}  // namespace weft::server

#endif  // WEFT_SERVER_CALL_TENANT_QUOTA_H_
