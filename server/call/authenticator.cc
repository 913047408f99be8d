#include "server/call/authenticator.h"

#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/call/rpc_policy.h"
#include "server/http/host.h"
#include "server/wire/status_conversion.h"
#include "src/base/clock.h"
#include "src/base/files/operator_file.h"
#include "src/base/files/token_file.h"
#include "src/base/observe/log.h"
#include "src/base/status_macros.h"
#include "src/base/trace_id.h"

namespace weft::server {
namespace {

constexpr char kHeader[] = "authorization";
constexpr char kRealAddress[] = "x-real-ip";
constexpr absl::string_view kScheme = "Bearer ";

// Returns the hash of the token, or an empty string if the header has none.
std::string BearerHash(absl::string_view authorization) {
  if (!absl::StartsWithIgnoreCase(authorization, kScheme)) return "";
  authorization.remove_prefix(kScheme.size());
  return authorization.empty() ? "" : HashToken(authorization);
}

// Returns the value of a header; empty if the header is missing. Also empty if
// the header comes twice, because a proxy might have checked the other value.
absl::string_view Only(const grpc::AuthMetadataProcessor::InputMetadata& all,
                       const char* name) {
  const auto [begin, end] = all.equal_range(name);
  if (begin == end || std::next(begin) != end) return "";
  return {begin->second.data(), begin->second.size()};
}

}  // namespace

class Authenticator::Processor final : public grpc::AuthMetadataProcessor {
 public:
  Processor(Authenticator* authenticator, TenantQuota* quota)
      : authenticator_(*authenticator), quota_(*quota) {}

  // The check takes microseconds, so gRPC needs no extra thread for it.
  bool IsBlocking() const override { return false; }

  grpc::Status Process(const InputMetadata& metadata,
                       grpc::AuthContext* /*context*/,
                       OutputMetadata* /*consumed*/,
                       OutputMetadata* /*response*/) override {
    const absl::string_view path = Only(metadata, ":path");
    const Verdict verdict =
        authenticator_.Judge(path, BearerHash(Only(metadata, kHeader)));
    if (verdict.status.ok()) {
      return ToGrpcStatus(quota_.Begin(verdict.record->tenant, SteadyNow()));
    }
    const TraceScope scope(
        MakeTraceId(std::string(Only(metadata, "traceparent")),
                    std::string(Only(metadata, "x-request-id"))));
    // gRPC does not tell the peer here. Only the edge and programs of this
    // machine can connect to a server with tokens.
    authenticator_.Note(
        verdict, path,
        {"peer", ClientAddress("", /*peer_is_local=*/true,
                               std::string(Only(metadata, kRealAddress)))});
    return ToGrpcStatus(verdict.status);
  }

 private:
  Authenticator& authenticator_;
  TenantQuota& quota_;
};

absl::StatusOr<std::unique_ptr<Authenticator>> Authenticator::Start(
    const std::string& tokens_file, prometheus::Registry* registry) {
  std::unique_ptr<Authenticator> authenticator(
      new Authenticator(tokens_file, registry));
  WEFT_ASSIGN_OR_RETURN(Records records, authenticator->Read());
  {
    MutexLock lock(&authenticator->mu_);
    authenticator->records_ = std::move(records);
  }
  authenticator->poller_ = std::make_unique<FilePoller>(
      tokens_file, [raw = authenticator.get()] { raw->Reload(); });
  return authenticator;
}

Authenticator::Authenticator(std::string tokens_file,
                             prometheus::Registry* registry)
    : tokens_file_(std::move(tokens_file)),
      failures_(registry, "weft_auth_failures_total",
                "Calls refused for their token; only with --auth-tokens-file.",
                "reason",
                {"no_token", "unknown_token", "expired", "scope", "method"}) {}

absl::StatusOr<Authenticator::Records> Authenticator::Read() const {
  const auto named = [](const absl::Status& status) {
    return absl::Status(status.code(),
                        absl::StrCat("--auth-tokens-file: ", status.message()));
  };
  const absl::StatusOr<std::string> text = ReadOperatorFile(tokens_file_);
  if (!text.ok()) return named(text.status());
  WarnIfOthersMayWrite(tokens_file_);
  absl::StatusOr<std::vector<TokenEntry>> records = ParseTokens(*text);
  if (!records.ok()) return named(records.status());
  return std::make_shared<const std::vector<TokenEntry>>(*std::move(records));
}

void Authenticator::Reload() {
  absl::StatusOr<Records> records = Read();
  if (!records.ok()) {
    Log(LogLevel::kError, "the new tokens are bad; the old ones stay in use",
        {{"error", std::string(records.status().message())}});
    return;
  }
  Log(LogLevel::kInfo, "tokens have been read",
      {{"tokens", (*records)->size()}});
  MutexLock lock(&mu_);
  records_ = *std::move(records);
}

Authenticator::Verdict Authenticator::Judge(
    absl::string_view path, const std::string& token_hash) const {
  const RpcPolicy* const policy = FindPolicy(path);
  if (token_hash.empty()) {
    return {absl::UnauthenticatedError("a bearer token is needed"), kNoToken};
  }
  Verdict verdict;
  {
    MutexLock lock(&mu_);
    verdict.records = records_;
  }
  verdict.record = FindTokenOfHash(*verdict.records, token_hash);
  if (verdict.record == nullptr) {
    verdict.status = absl::UnauthenticatedError("the token is not known");
    verdict.refusal = kUnknown;
  } else if (verdict.record->expires <= absl::Now()) {
    verdict.status = absl::UnauthenticatedError("the token has expired");
    verdict.refusal = kExpired;
  } else if (policy == nullptr) {
    verdict.status = absl::UnimplementedError("there is no such method");
    verdict.refusal = kMethod;
  } else if (!verdict.record->Allows(policy->scope)) {
    verdict.status = absl::PermissionDeniedError(
        absl::StrCat("the token lacks the scope ", ScopeName(policy->scope)));
    verdict.refusal = kScope;
  }
  return verdict;
}

absl::StatusOr<Caller> Authenticator::Check(
    absl::string_view path, absl::string_view authorization) const {
  const Verdict verdict = Judge(path, BearerHash(authorization));
  if (!verdict.status.ok()) return verdict.status;
  return Caller(*verdict.record);
}

absl::StatusOr<Caller> Authenticator::CheckHttp(absl::string_view path,
                                                absl::string_view authorization,
                                                const std::string& what,
                                                const std::string& peer) {
  return CheckHash(path, BearerHash(authorization), what, peer);
}

absl::StatusOr<Caller> Authenticator::CheckHash(absl::string_view path,
                                                const std::string& token_hash,
                                                const std::string& what,
                                                const std::string& peer) {
  const Verdict verdict = Judge(path, token_hash);
  if (!verdict.status.ok()) {
    Note(verdict, what, {"peer", peer});
    return verdict.status;
  }
  return Caller(*verdict.record);
}

void Authenticator::Note(const Verdict& verdict, absl::string_view method,
                         const LogField& asker) {
  failures_[verdict.refusal].Increment();
  if (!MayLog()) return;
  const TokenEntry* const record = verdict.record;
  Log(LogLevel::kWarning, "audit",
      {{"outcome", absl::StatusCodeToString(verdict.status.code())},
       {"reason", std::string(verdict.status.message())},
       {"method", method.substr(0, 128)},
       {"token", record == nullptr ? "" : record->id},
       {"tenant", record == nullptr ? "" : record->tenant},
       asker});
}

bool Authenticator::MayLog() {
  const absl::Time now = SteadyNow();
  MutexLock lock(&mu_);
  if (now - second_ >= absl::Seconds(1)) {
    second_ = now;
    lines_ = 0;
  }
  return ++lines_ <= kLinesPerSecond;
}

std::shared_ptr<grpc::AuthMetadataProcessor> Authenticator::MakeProcessor(
    TenantQuota* quota) {
  return std::make_shared<Processor>(this, quota);
}

}  // namespace weft::server
