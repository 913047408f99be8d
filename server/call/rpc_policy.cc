#include "server/call/rpc_policy.h"

#include <iterator>

namespace weft::server {
namespace {

constexpr char kUnary[] = "unary";
constexpr char kServerStream[] = "server_stream";
constexpr char kClientStream[] = "client_stream";

using enum Scope;

constexpr RpcPolicy kPolicies[] = {
    {"/weft.v1.TrainingService/ForwardBackward", kUnary, kTrain, kHasStep,
     kNoOwnLimit},
    {"/weft.v1.TrainingService/Forward", kUnary, kTrain, kHasStep, kNoOwnLimit},
    {"/weft.v1.TrainingService/OptimStep", kUnary, kTrain, kHasStep},
    // A drain waits for training steps, whose clients report on them.
    {"/weft.v1.TrainingService/ReportMetrics", kUnary, kTrain, kGoesOnInADrain},
    {"/weft.v1.SamplingService/Sample", kUnary, kSample, kNoTraits,
     kMaxPromptRequestBytes},
    {"/weft.v1.SamplingService/SampleStream", kServerStream, kSample, kNoTraits,
     kMaxPromptRequestBytes},
    {"/weft.v1.AdapterService/CreateAdapter", kUnary, kTrain},
    {"/weft.v1.AdapterService/GetAdapter", kUnary, kRead, kGoesOnInADrain},
    {"/weft.v1.AdapterService/ListAdapters", kUnary, kRead, kGoesOnInADrain},
    {"/weft.v1.AdapterService/DeleteAdapter", kUnary, kTrain, kAudited},
    {"/weft.v1.AdapterService/MoveAdapter", kUnary, kAdmin, kAudited},
    {"/weft.v1.AdapterService/SaveCheckpoint", kUnary, kTrain,
     kHasStep | kGoesOnInADrain},
    {"/weft.v1.AdapterService/LoadCheckpoint", kUnary, kTrain, kHasStep},
    {"/weft.v1.AdapterService/ListCheckpoints", kUnary, kRead, kGoesOnInADrain},
    {"/weft.v1.AdapterService/DeleteCheckpoint", kUnary, kTrain, kAudited},
    // Audited, because the checkpoint may be gone a second later.
    {"/weft.v1.AdapterService/SetCheckpointTtl", kUnary, kTrain, kAudited},
    // Needs kTrain like ExportAdapter, because the weights leave the server.
    {"/weft.v1.AdapterService/DownloadCheckpoint", kServerStream, kTrain,
     kGoesOnInADrain},
    {"/weft.v1.AdapterService/UploadCheckpoint", kClientStream, kTrain,
     kNoTraits, kNoOwnLimit},
    {"/weft.v1.AdapterService/PublishSnapshot", kUnary, kTrain, kHasStep},
    {"/weft.v1.AdapterService/ReleaseSnapshot", kUnary, kTrain},
    // Needs kTrain, not only kRead, because the weights leave the server.
    {"/weft.v1.AdapterService/ExportAdapter", kServerStream, kTrain,
     kGoesOnInADrain},
    {"/weft.v1.AdapterService/ImportAdapter", kClientStream, kTrain, kNoTraits,
     kNoOwnLimit},
    {"/weft.v1.ServerService/GetInfo", kUnary, kRead},
    {"/weft.v1.ServerService/GetTokenizer", kServerStream, kRead},
    {"/weft.v1.ServerService/Drain", kUnary, kAdmin, kAudited},
    {"/weft.v1.ServerService/Undrain", kUnary, kAdmin, kAudited},
    {"/weft.v1.ServerService/DrainLog", kUnary, kAdmin, kAudited},
    {"/weft.v1.ServerService/WriteSnapshot", kUnary, kAdmin, kAudited},
    // Needs kAdmin, because a profile shows the work of all tenants.
    {"/weft.v1.ServerService/Profile", kServerStream, kAdmin},
    // Probes, which have no token, ask the metrics port (metrics_server.h).
    {"/grpc.health.v1.Health/Check", kUnary, kRead},
    {"/grpc.health.v1.Health/Watch", kServerStream, kRead},
    // Not in Rpc. Needs kAdmin, because gRPC's own service parses requests
    // without a bound on their memory.
    {"/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
     "bidi_stream", kAdmin}};
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
