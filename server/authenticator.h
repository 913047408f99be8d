// Checks bearer tokens against --auth-tokens-file, finds the caller, and
// decides whether the call is permitted.
//
// gRPC asks the authenticator about every call of every service before it reads
// the first message, including streams, reflection and methods that do not
// exist (Processor). A handler asks again to get the caller's tenant, because
// gRPC would keep the first answer for all calls of a connection.
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
#include "src/base/log.h"
#include "src/base/mutex.h"
#include "src/metrics/metrics.h"

namespace weft {

// Threads: any. One thread creates and destroys it.
class Authenticator {
 public:
  static constexpr int kLinesPerSecond = 20;

  // Reads the file, and reads it again within a second after a change. If the
  // new file cannot be read or parsed, logs that and keeps the last good one.
  // Errors: those of the present file, naming the flag.
  [[nodiscard]] static absl::StatusOr<std::unique_ptr<Authenticator>> Start(
      const std::string& tokens_file, prometheus::Registry* registry);

  // Returns the caller to whom the token belongs. `authorization` is the header
  // of that name; empty if there is none. Errors: UNAUTHENTICATED without a
  // known token that has not expired; PERMISSION_DENIED if the token lacks the
  // method's scope; UNIMPLEMENTED for a method without a policy.
  [[nodiscard]] absl::StatusOr<Caller> Check(
      absl::string_view path, absl::string_view authorization) const
      ABSL_LOCKS_EXCLUDED(mu_);

  // Like Check, for an HTTP request, about which gRPC does not ask: counts and
  // logs a refusal. `what` is the request's method and path without its query.
  [[nodiscard]] absl::StatusOr<Caller> CheckHttp(
      absl::string_view path, absl::string_view authorization,
      const std::string& what, const std::string& peer)
      ABSL_LOCKS_EXCLUDED(mu_);

  // Returns gRPC's processor, which refuses the calls that Check refuses, and
  // logs them. This object outlives the processor and all servers that use it.
  [[nodiscard]] std::shared_ptr<grpc::AuthMetadataProcessor> MakeProcessor();

 private:
  class Processor;
  using Records = std::shared_ptr<const std::vector<TokenRecord>>;
  // Why a call was refused. Serves as the metric's label.
  enum Refusal : uint8_t { kNoToken, kUnknown, kExpired, kScope, kMethod };
  struct Verdict {
    absl::Status status;
    Refusal refusal = kNoToken;
    const TokenRecord* record = nullptr;  // Points into `records`; null if
                                          // none.
    Records records;
  };

  Authenticator(std::string tokens_file, prometheus::Registry* registry);

  [[nodiscard]] absl::StatusOr<Records> Read() const;
  void Reload() ABSL_LOCKS_EXCLUDED(mu_);
  [[nodiscard]] Verdict Judge(absl::string_view path,
                              absl::string_view authorization) const
      ABSL_LOCKS_EXCLUDED(mu_);
  // Counts a refusal. Logs at most kLinesPerSecond refusals per second, so that
  // a flood of calls does not flood the log. `asker` is what the line says of
  // the client.
  void Note(const Verdict& verdict, absl::string_view method,
            const LogField& asker) ABSL_LOCKS_EXCLUDED(mu_);
  [[nodiscard]] bool MayLog() ABSL_LOCKS_EXCLUDED(mu_);

  const std::string tokens_file_;
  LabelledCounters failures_;
  mutable Mutex mu_;
  Records records_ ABSL_GUARDED_BY(mu_);
  absl::Time second_ ABSL_GUARDED_BY(mu_) = absl::InfinitePast();
  int lines_ ABSL_GUARDED_BY(mu_) = 0;  // Lines logged since second_.
  // Declared last, so that it stops first.
  std::unique_ptr<FilePoller> poller_;
};

}  // namespace weft

#endif  // WEFT_SERVER_AUTHENTICATOR_H_
