#include "server/call/rpc_policy.h"

#include <iterator>

namespace weft::server {
namespace {

constexpr char kUnary[] = "unary";
constexpr char kServerStream[] = "server_stream";
constexpr char kClientStream[] = "client_stream";

constexpr RpcPolicy kPolicies[] = {
    {"/weft.v1.TrainingService/ForwardBackward", kUnary, Scope::kTrain,
     kNoOwnLimit, kHasStep},
    {"/weft.v1.TrainingService/Forward", kUnary, Scope::kTrain, kNoOwnLimit,
     kHasStep},
    {"/weft.v1.TrainingService/OptimStep", kUnary, Scope::kTrain,
     kMaxSmallRequestBytes, kHasStep},
    {"/weft.v1.SamplingService/Sample", kUnary, Scope::kSample,
     kMaxPromptRequestBytes},
    {"/weft.v1.SamplingService/SampleStream", kServerStream, Scope::kSample,
     kMaxPromptRequestBytes},
    {"/weft.v1.AdapterService/CreateAdapter", kUnary, Scope::kTrain},
    {"/weft.v1.AdapterService/GetAdapter", kUnary, Scope::kRead,
     kMaxSmallRequestBytes, kGoesOnInADrain},
    {"/weft.v1.AdapterService/ListAdapters", kUnary, Scope::kRead,
     kMaxSmallRequestBytes, kGoesOnInADrain},
    {"/weft.v1.AdapterService/DeleteAdapter", kUnary, Scope::kTrain,
     kMaxSmallRequestBytes, kAudited},
    {"/weft.v1.AdapterService/SaveCheckpoint", kUnary, Scope::kTrain,
     kMaxSmallRequestBytes, kHasStep | kGoesOnInADrain},
    {"/weft.v1.AdapterService/LoadCheckpoint", kUnary, Scope::kTrain,
     kMaxSmallRequestBytes, kHasStep},
    {"/weft.v1.AdapterService/ListCheckpoints", kUnary, Scope::kRead,
     kMaxSmallRequestBytes, kGoesOnInADrain},
    {"/weft.v1.AdapterService/DeleteCheckpoint", kUnary, Scope::kTrain,
     kMaxSmallRequestBytes, kAudited},
    // Needs kTrain like ExportAdapter, because the weights leave the server.
    {"/weft.v1.AdapterService/DownloadCheckpoint", kServerStream, Scope::kTrain,
     kMaxSmallRequestBytes, kGoesOnInADrain},
    {"/weft.v1.AdapterService/UploadCheckpoint", kClientStream, Scope::kTrain,
     kNoOwnLimit},
    {"/weft.v1.AdapterService/PublishSnapshot", kUnary, Scope::kTrain,
     kMaxSmallRequestBytes, kHasStep},
    {"/weft.v1.AdapterService/ReleaseSnapshot", kUnary, Scope::kTrain},
    // Needs kTrain, not only kRead, because the weights leave the server.
    {"/weft.v1.AdapterService/ExportAdapter", kServerStream, Scope::kTrain,
     kMaxSmallRequestBytes, kGoesOnInADrain},
    {"/weft.v1.AdapterService/ImportAdapter", kClientStream, Scope::kTrain,
     kNoOwnLimit},
    {"/weft.v1.ServerService/GetInfo", kUnary, Scope::kRead},
    {"/weft.v1.ServerService/GetTokenizer", kServerStream, Scope::kRead},
    {"/weft.v1.ServerService/Drain", kUnary, Scope::kAdmin,
     kMaxSmallRequestBytes, kAudited},
    {"/weft.v1.ServerService/Undrain", kUnary, Scope::kAdmin,
     kMaxSmallRequestBytes, kAudited},
    {"/weft.v1.ServerService/WriteSnapshot", kUnary, Scope::kAdmin,
     kMaxSmallRequestBytes, kAudited},
    // Needs kAdmin, because a profile shows the work of all tenants.
    {"/weft.v1.ServerService/Profile", kServerStream, Scope::kAdmin},
    // Probes, which have no token, ask the metrics port (metrics_server.h).
    {"/grpc.health.v1.Health/Check", kUnary, Scope::kRead},
    {"/grpc.health.v1.Health/Watch", kServerStream, Scope::kRead},
    // Not in Rpc. Needs kAdmin, because gRPC's own service parses requests
    // without a bound on their memory.
    {"/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
     "bidi_stream", Scope::kAdmin},
};
static_assert(std::size(kPolicies) == static_cast<size_t>(Rpc::kCount) + 1);

}  // namespace

const RpcPolicy& PolicyOf(Rpc rpc) {
  return kPolicies[static_cast<size_t>(rpc)];
}

const RpcPolicy* FindPolicy(absl::string_view path) {
  for (const RpcPolicy& policy : kPolicies) {
    if (policy.path == path) return &policy;
  }
  return nullptr;
}

}  // namespace weft::server
