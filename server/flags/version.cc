#include "server/flags/version.h"

#include "absl/strings/str_cat.h"
#include "google/protobuf/stubs/common.h"
#include "grpcpp/grpcpp.h"

namespace weft::server {

const char kVersion[] = WEFT_VERSION;
const char kGitRevision[] = WEFT_GIT_REVISION;

std::string VersionText() {
  return absl::StrCat(
      "weftd ", kVersion, " (git ", kGitRevision, ")\n", "  compute   ",
      WEFT_COMPUTE, "\n", "  gRPC      ", grpc::Version(), "\n", "  protobuf  ",
      google::protobuf::internal::VersionString(GOOGLE_PROTOBUF_VERSION), "\n",
      "  compiler  ", __VERSION__, "\n");
}

}  // namespace weft::server
