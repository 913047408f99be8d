// The authenticator holds bearer tokens against --auth-tokens-file: it tells
// who calls, and whether they may.
//
// gRPC asks the authenticator about every call of every service, before the
// first message is read: also about streams, reflection and methods that do not
// exist (Processor). A handler asks once more for the caller's tenant, since
// gRPC would keep what it is told for all calls of a connection.
#ifndef WEFT_SERVER_AUTHENTICATOR_H_
#define WEFT_SERVER_AUTHENTICATOR_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "grpcpp/security/auth_metadata_processor.h"
#include "server/caller.h"
#include "server/file_poller.h"
#include "src/auth/tokens.h"
#include "src/base/mutex.h"
#include "src/metrics/metrics.h"

namespace weft {

// Threads: any; made and destroyed by one.
class Authenticator {
 public:
  static constexpr int kLinesPerSecond = 20;

  // Follows the file: a new one counts from the next call on, within a second.
  // One that cannot be read or parsed is logged, and the last good one stays.
  // Errors: of the file as it is now, naming the flag.
  [[nodiscard]] static absl::StatusOr<std::unique_ptr<Authenticator>> Start(
      const std::string& tokens_file, prometheus::Registry* registry);

  // Returns who the bearer is. `authorization`: the header of that name, empty
  // if there is none.
  // Errors: UNAUTHENTICATED without a token that is known and in date;
  // PERMISSION_DENIED when it lacks the method's scope; UNIMPLEMENTED for
  // methods without a policy.
  [[nodiscard]] absl::StatusOr<Caller> Check(
      absl::string_view path, absl::string_view authorization) const
      ABSL_LOCKS_EXCLUDED(mu_);

  // Refuses calls that Check refuses, with a line in the log. It outlives no
  // server that uses it, and this object outlives both.
  [[nodiscard]] std::shared_ptr<grpc::AuthMetadataProcessor> MakeProcessor();

 private:
  class Processor;
  using Records = std::shared_ptr<const std::vector<TokenRecord>>;
  // Why a call was refused, as the metric has it.
  enum Refusal : uint8_t { kNoToken, kUnknown, kExpired, kScope, kMethod };
  struct Verdict {
    absl::Status status;
    Refusal refusal = kNoToken;
    const TokenRecord* record = nullptr;  // In `records`; null: none.
    Records records;
  };

  Authenticator(std::string tokens_file, prometheus::Registry* registry);

  [[nodiscard]] absl::StatusOr<Records> Read() const;
  void Reload() ABSL_LOCKS_EXCLUDED(mu_);
  [[nodiscard]] Verdict Judge(absl::string_view path,
                              absl::string_view authorization) const
      ABSL_LOCKS_EXCLUDED(mu_);
  // Counts a refusal, and logs it unless kLinesPerSecond have been logged: a
  // flood of calls must not become a flood of lines.
  void Note(const Verdict& verdict, absl::string_view path,
            absl::string_view certificate) ABSL_LOCKS_EXCLUDED(mu_);
  [[nodiscard]] bool MayLog() ABSL_LOCKS_EXCLUDED(mu_);

  const std::string tokens_file_;
  LabelledCounters failures_;
  mutable Mutex mu_;
  Records records_ ABSL_GUARDED_BY(mu_);
  absl::Time second_ ABSL_GUARDED_BY(mu_) = absl::InfinitePast();
  int lines_ ABSL_GUARDED_BY(mu_) = 0;  // Since second_.
  // Declared last: it stops first.
  std::unique_ptr<FilePoller> poller_;
};

}  // namespace weft

#endif  // WEFT_SERVER_AUTHENTICATOR_H_
