#include "server/rpc_policy.h"

namespace weft {
namespace {

constexpr RpcPolicy kPolicies[] = {
    {"/weft.v1.TrainingService/ForwardBackward", Scope::kTrain, kNoOwnLimit},
    {"/weft.v1.TrainingService/Forward", Scope::kTrain, kNoOwnLimit},
    {"/weft.v1.TrainingService/OptimStep", Scope::kTrain},
    {"/weft.v1.SamplingService/Sample", Scope::kSample, kMaxPromptRequestBytes},
    {"/weft.v1.SamplingService/SampleStream", Scope::kSample,
     kMaxPromptRequestBytes},
    {"/weft.v1.AdapterService/CreateAdapter", Scope::kTrain},
    {"/weft.v1.AdapterService/GetAdapter", Scope::kRead},
    {"/weft.v1.AdapterService/ListAdapters", Scope::kRead},
    {"/weft.v1.AdapterService/DeleteAdapter", Scope::kTrain},
    {"/weft.v1.AdapterService/SaveCheckpoint", Scope::kTrain},
    {"/weft.v1.AdapterService/LoadCheckpoint", Scope::kTrain},
    {"/weft.v1.AdapterService/ListCheckpoints", Scope::kRead},
    {"/weft.v1.AdapterService/DeleteCheckpoint", Scope::kTrain},
    // Needs kTrain like ExportAdapter, because the weights leave the server.
    {"/weft.v1.AdapterService/DownloadCheckpoint", Scope::kTrain},
    {"/weft.v1.AdapterService/UploadCheckpoint", Scope::kTrain, kNoOwnLimit},
    {"/weft.v1.AdapterService/PublishSnapshot", Scope::kTrain},
    {"/weft.v1.AdapterService/ReleaseSnapshot", Scope::kTrain},
    // Needs kTrain, not only kRead, because the weights leave the server.
    {"/weft.v1.AdapterService/ExportAdapter", Scope::kTrain},
    {"/weft.v1.AdapterService/ImportAdapter", Scope::kTrain, kNoOwnLimit},
    {"/weft.v1.ServerService/GetInfo", Scope::kRead},
    {"/weft.v1.ServerService/GetTokenizer", Scope::kRead},
    {"/weft.v1.ServerService/Drain", Scope::kAdmin},
    {"/weft.v1.ServerService/Undrain", Scope::kAdmin},
    {"/weft.v1.ServerService/WriteSnapshot", Scope::kAdmin},
    // Needs kAdmin, because a profile shows the work of all tenants.
    {"/weft.v1.ServerService/Profile", Scope::kAdmin},
    // Probes, which have no token, ask the metrics port (metrics_server.h).
    {"/grpc.health.v1.Health/Check", Scope::kRead},
    {"/grpc.health.v1.Health/Watch", Scope::kRead},
    // Needs kAdmin, because gRPC's own service parses requests without a bound
    // on their memory.
    {"/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
     Scope::kAdmin},
};

}  // namespace

const RpcPolicy* FindPolicy(absl::string_view path) {
  for (const RpcPolicy& policy : kPolicies) {
    if (policy.path == path) return &policy;
  }
  return nullptr;
}

}  // namespace weft
