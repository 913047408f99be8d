// Checks bearer tokens against --auth-tokens-file, finds the caller, and
// decides whether the call is permitted.
//
// Processor checks every gRPC call, even a call of an unknown method, before
// gRPC reads the call's first message. CallRecord repeats the check to get the
// caller, because a processor can report a caller only for a whole connection.
#ifndef WEFT_SERVER_CALL_AUTHENTICATOR_H_
#define WEFT_SERVER_CALL_AUTHENTICATOR_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "grpcpp/security/auth_metadata_processor.h"
#include "server/call/caller.h"
#include "server/call/tenant_quota.h"
#include "server/http/file_poller.h"
#include "src/base/observe/log.h"
#include "src/base/observe/metrics.h"
#include "src/base/threads/mutex.h"
#include "src/base/tokens.h"

namespace weft::server {

// Threads: any, after Start.
class Authenticator {
 public:
  static constexpr int kLinesPerSecond = 20;

  // Reads the file now, and again within a second after each change. If a
  // changed file cannot be read or parsed, logs the error and keeps the last
  // good tokens. Errors: those of ReadOperatorFile and ParseTokens, with the
  // name of the flag.
  static absl::StatusOr<std::unique_ptr<Authenticator>> Start(
      const std::string& tokens_file, prometheus::Registry* registry);

  // Returns the caller to whom the token belongs. `path` is
  // "/package.Service/Method". `authorization` is the value of the header of
  // that name; empty if there is none. Errors: UNAUTHENTICATED if the token is
  // missing, unknown or expired; PERMISSION_DENIED if the token lacks the
  // method's scope; UNIMPLEMENTED if the method has no policy.
  absl::StatusOr<Caller> Check(absl::string_view path,
                               absl::string_view authorization) const
      ABSL_LOCKS_EXCLUDED(mu_);
  // Returns whether the token with this HashToken has the method's scope.
  bool Permits(absl::string_view path, const std::string& token_hash) const
      ABSL_LOCKS_EXCLUDED(mu_) {
    return Judge(path, token_hash).status.ok();
  }

  // Like Check, for an HTTP request that needs the scope of the gRPC method
  // `path`. Passes a refusal to Note, because Processor does not see HTTP
  // requests. `what` is the HTTP method and the HTTP path. `peer` is the
  // client's address.
  absl::StatusOr<Caller> CheckHttp(absl::string_view path,
                                   absl::string_view authorization,
                                   const std::string& what,
                                   const std::string& peer)
      ABSL_LOCKS_EXCLUDED(mu_);
  // Like CheckHttp, for a caller that has proved to have the token with this
  // HashToken.
  absl::StatusOr<Caller> CheckHash(absl::string_view path,
                                   const std::string& token_hash,
                                   const std::string& what,
                                   const std::string& peer)
      ABSL_LOCKS_EXCLUDED(mu_);

  // Returns the processor that gRPC asks about each call. The processor refuses
  // the calls that Check refuses, and passes them to Note. It also refuses
  // those that TenantQuota::Begin refuses. REQUIRES: this object and `quota`
  // outlive the processor.
  std::shared_ptr<grpc::AuthMetadataProcessor> MakeProcessor(
      TenantQuota* quota);

 private:
  class Processor;
  using Records = std::shared_ptr<const std::vector<TokenEntry>>;
  // Why a call was refused. The value is the index of a counter in failures_.
  enum Refusal : uint8_t { kNoToken, kUnknown, kExpired, kScope, kMethod };
  struct Verdict {
    absl::Status status;
    Refusal refusal = kNoToken;
    const TokenEntry* record = nullptr;  // Points into `records`; null if no
                                         // record was found.
    Records records;
  };

  Authenticator(std::string tokens_file, prometheus::Registry* registry);

  absl::StatusOr<Records> Read() const;
  void Reload() ABSL_LOCKS_EXCLUDED(mu_);
  // `token_hash` is the token's HashToken; empty without a token.
  Verdict Judge(absl::string_view path, const std::string& token_hash) const
      ABSL_LOCKS_EXCLUDED(mu_);
  // Counts a refusal. Logs at most kLinesPerSecond refusals per second, so that
  // a flood of calls does not flood the log. `asker` is a log field that
  // identifies the client.
  void Note(const Verdict& verdict, absl::string_view method,
            const LogField& asker) ABSL_LOCKS_EXCLUDED(mu_);
  bool MayLog() ABSL_LOCKS_EXCLUDED(mu_);

  const std::string tokens_file_;
  LabelledCounters failures_;
  mutable Mutex mu_;
  Records records_ ABSL_GUARDED_BY(mu_);
  // Start of the current one-second interval, and the refusals in it so far.
  absl::Time second_ ABSL_GUARDED_BY(mu_) = absl::InfinitePast();
  int lines_ ABSL_GUARDED_BY(mu_) = 0;
  // Declared last, so that its thread ends before the other members are
  // destroyed.
  std::unique_ptr<FilePoller> poller_;
};

}  // namespace weft::server

#endif  // WEFT_SERVER_CALL_AUTHENTICATOR_H_
