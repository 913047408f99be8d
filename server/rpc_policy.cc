#include "server/rpc_policy.h"

namespace weft {
namespace {

constexpr RpcPolicy kPolicies[] = {
    {"/weft.v1.TrainingService/ForwardBackward", false, Scope::kTrain},
    {"/weft.v1.TrainingService/Forward", false, Scope::kTrain},
    {"/weft.v1.TrainingService/OptimStep", false, Scope::kTrain},
    {"/weft.v1.SamplingService/Sample", false, Scope::kSample},
    {"/weft.v1.SamplingService/SampleStream", false, Scope::kSample},
    {"/weft.v1.AdapterService/CreateAdapter", false, Scope::kTrain},
    {"/weft.v1.AdapterService/GetAdapter", false, Scope::kRead},
    {"/weft.v1.AdapterService/ListAdapters", false, Scope::kRead},
    {"/weft.v1.AdapterService/DeleteAdapter", false, Scope::kTrain},
    {"/weft.v1.AdapterService/SaveCheckpoint", false, Scope::kTrain},
    {"/weft.v1.AdapterService/LoadCheckpoint", false, Scope::kTrain},
    {"/weft.v1.AdapterService/ListCheckpoints", false, Scope::kRead},
    {"/weft.v1.AdapterService/DeleteCheckpoint", false, Scope::kTrain},
    // Needs kTrain like ExportAdapter, because the weights leave the server.
    {"/weft.v1.AdapterService/DownloadCheckpoint", false, Scope::kTrain},
    {"/weft.v1.AdapterService/UploadCheckpoint", false, Scope::kTrain},
    {"/weft.v1.AdapterService/PublishSnapshot", false, Scope::kTrain},
    {"/weft.v1.AdapterService/ReleaseSnapshot", false, Scope::kTrain},
    // Needs kTrain, not only kRead, because the weights leave the server.
    {"/weft.v1.AdapterService/ExportAdapter", false, Scope::kTrain},
    {"/weft.v1.AdapterService/ImportAdapter", false, Scope::kTrain},
    {"/weft.v1.ServerService/GetInfo", false, Scope::kRead},
    {"/weft.v1.ServerService/Drain", false, Scope::kAdmin},
    // Needs kAdmin, because a profile shows the work of all tenants.
    {"/weft.v1.ServerService/Profile", false, Scope::kAdmin},
    // Probes have no token, so Check needs none. Check reveals only one word.
    // Watch needs a token, because Watch also holds a stream.
    {"/grpc.health.v1.Health/Check", true, Scope::kRead},
    {"/grpc.health.v1.Health/Watch", false, Scope::kRead},
    {"/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", false,
     Scope::kRead},
};

}  // namespace

const RpcPolicy* FindPolicy(absl::string_view path) {
  for (const RpcPolicy& policy : kPolicies) {
    if (policy.path == path) return &policy;
  }
  return nullptr;
}

}  // namespace weft
