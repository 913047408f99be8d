#include "server/status_conversion.h"

#include <string>

#include "absl/strings/str_cat.h"

namespace weft {
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
  // Both enums are the canonical codes of google.rpc.Code.
  return {static_cast<grpc::StatusCode>(status.code()), message};
}

void AddRetryHint(const absl::Status& status,
                  grpc::ServerContextBase* context) {
  if (absl::IsResourceExhausted(status) || absl::IsUnavailable(status)) {
    context->AddTrailingMetadata("grpc-retry-pushback-ms",
                                 absl::StrCat(kRetryPushbackMillis));
  }
}

}  // namespace weft
