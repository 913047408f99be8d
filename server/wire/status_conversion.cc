#include "server/wire/status_conversion.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <string>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "src/base/reason.h"
#include "src/request/reply.h"
#include "weft/v1/errors.pb.h"

namespace weft::server {
namespace {

bool ContinuesCharacter(char c) {
  return (static_cast<unsigned char>(c) & 0xC0) == 0x80;
}

}  // namespace

grpc::Status ToGrpcStatus(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  std::string message(status.message());
  if (message.size() > kMaxStatusMessageBytes) {
    size_t end = kMaxStatusMessageBytes;
    while (end > 0 && ContinuesCharacter(message[end])) --end;
    message.resize(end);
  }
  // Both enums have the same numbers, those of google.rpc.Code.
  const auto code = static_cast<grpc::StatusCode>(status.code());
  const std::optional<Reason> reason = FindReason(status);
  if (!reason) return {code, message};
  v1::ErrorInfo info;
  info.set_reason(reason->name);
  info.set_domain("weft");
  info.mutable_metadata()->insert(reason->values.begin(), reason->values.end());
  v1::StatusDetails details;
  details.set_code(code);
  details.set_message(message);
  google::protobuf::Any* const any = details.add_details();
  any->set_type_url("type.googleapis.com/google.rpc.ErrorInfo");
  any->set_value(info.SerializeAsString());
  return {code, message, details.SerializeAsString()};
}

std::optional<int> RetryMillis(const absl::Status& status) {
  const std::optional<Reason> reason = FindReason(status);
  if (!absl::IsUnavailable(status)) {
    if (status.GetPayload(kStepDonePayload)) return std::nullopt;
    if (!reason || !absl::IsResourceExhausted(status)) return std::nullopt;
    constexpr const char* kPassing[] = {"CALLS_UNDER_WAY",
                                        "TOKEN_RATE",
                                        "IMPORTS_UNDER_WAY",
                                        "STATE_DISK_FULL",
                                        "CHECKPOINT_STORE_UNREACHABLE",
                                        "SHARE_IN_USE",
                                        "SAMPLER_CACHE_FULL"};
    if (std::ranges::find(kPassing, reason->name) == std::end(kPassing)) {
      return std::nullopt;
    }
  }
  if (!reason) return kRetryPushbackMillis;
  const auto told = reason->values.find("retry_ms");
  int millis = 0;
  if (told != reason->values.end() && absl::SimpleAtoi(told->second, &millis)) {
    return millis;
  }
  return kRetryPushbackMillis;
}

bool KeepsNumber(const absl::Status& status) {
  return !RetryMillis(status) && !absl::IsNotFound(status) &&
         !absl::IsDeadlineExceeded(status) &&
         !absl::IsUnauthenticated(status) && !absl::IsPermissionDenied(status);
}

void AddRetryHint(const absl::Status& status,
                  grpc::ServerContextBase* context) {
  if (const std::optional<int> millis = RetryMillis(status)) {
    context->AddTrailingMetadata("grpc-retry-pushback-ms",
                                 absl::StrCat(*millis));
  }
}

}  // namespace weft::server
