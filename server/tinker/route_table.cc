#include "server/tinker/handlers.h"
#include "server/tinker/routes.h"

namespace weft::server::tinker {
namespace {

constexpr Rpc kRead = Rpc::kGetInfo;
constexpr bool kClosed = false;
constexpr bool kOpen = true;
constexpr bool kLarge = true;
constexpr char kNoSharing[] =
    "checkpoints cannot be published: each is its tenant's. Another tenant "
    "gets one by the files of save_weights_external, or of gRPC's "
    "DownloadCheckpoint and UploadCheckpoint";
constexpr Route kRoutes[] = {
    {"GET", "healthz", kRead, GetHealth, kOpen},
    {"POST", "auth/token", kRead, GetAuthToken},
    {"GET", "auth/apikey/me", kRead, GetApiKey},
    {"DELETE", "auth/apikey/me", kRead,
     "an API key is an entry of the server's --auth-tokens-file: ask its "
     "operator to remove the entry"},
    {"GET", "get_server_capabilities", kRead, GetCapabilities},
    {"POST", "client/config", kRead, GetClientConfig},
    {"POST", "client/dynamic_config", kRead, GetDynamicConfig},
    {"POST", "telemetry", kRead, TakeTelemetry, kClosed, kLarge},
    {"POST", "create_session", kRead, CreateSession},
    {"POST", "session_heartbeat", kRead, BeatSession},
    {"POST", "sessions/*/finish", kRead, FinishSession},
    {"GET", "sessions", kRead, ListSessions},
    {"GET", "sessions/*", kRead, GetSession},
    {"POST", "sessions/search", Rpc::kListCheckpoints, SearchSessions},
    {"PUT", "sessions/*/project", kRead,
     "a session cannot be of a project: this server has no projects"},
    {"GET", "sessions/*/trace_export", kRead,
     "a session has no trace of its own: `weftctl profile --time 10s -o "
     "trace.json`, with a token of scope admin, records what the engine does "
     "for all sessions, and https://ui.perfetto.dev shows it"},
    {"GET", "audit", kRead, GetAuditLog},
    {"GET", "billing/usage/events", kRead, GetUsage},
    {"GET", "billing/usage/checkpoints/current", Rpc::kListCheckpoints,
     GetStorage},
    {"POST", "create_custom_loss", Rpc::kForwardBackward, CreateCustomLoss},
    {"POST", "create_model", Rpc::kCreateAdapter, CreateModel},
    {"POST", "get_info", Rpc::kGetAdapter, GetModelInfo},
    {"POST", "unload_model", Rpc::kDeleteAdapter, UnloadModel},
    {"POST", "forward_backward", Rpc::kForwardBackward, RunForwardBackward,
     kClosed, kLarge, ReadTrain},
    {"POST", "forward", Rpc::kForward, RunForwardBackward, kClosed, kLarge,
     ReadTrain},
    {"POST", "optim_step", Rpc::kOptimStep, RunOptimStep},
    {"POST", "save_weights", Rpc::kSaveCheckpoint, SaveWeights},
    {"POST", "save_weights_for_sampler", Rpc::kPublishSnapshot,
     SaveWeightsForSampler},
    {"POST", "save_weights_external", Rpc::kSaveCheckpoint,
     SaveWeightsExternal},
    {"POST", "load_weights", Rpc::kLoadCheckpoint, LoadWeights},
    {"POST", "create_sampling_session", Rpc::kSample, CreateSampler},
    {"GET", "samplers/*", kRead, GetSampler},
    {"POST", "asample", Rpc::kSample, RunSample, kClosed, kLarge},
    {"POST", "retrieve_future", kRead, RetrieveFuture},
    {"POST", "cancel_future", Rpc::kSample, CancelFuture},
    {"GET", "training_runs", Rpc::kListCheckpoints, ListRuns},
    {"GET", "training_runs/*", Rpc::kListCheckpoints, GetRun},
    {"GET", "training_runs/*/checkpoints", Rpc::kListCheckpoints,
     ListRunCheckpoints},
    {"DELETE", "training_runs/*/checkpoints/*/*", Rpc::kDeleteCheckpoint,
     DeleteCheckpoint},
    {"PUT", "training_runs/*/checkpoints/*/*/ttl", Rpc::kSetCheckpointTtl,
     SetCheckpointTtl},
    {"POST", "training_runs/*/checkpoints/*/*/publish", kRead, kNoSharing},
    {"DELETE", "training_runs/*/checkpoints/*/*/publish", kRead, kNoSharing},
    {"GET", "training_runs/*/checkpoints/*/*/external_weights_urls",
     Rpc::kExportAdapter, GetArchive},
    {"GET", "training_runs/*/checkpoints/*/*/archive", Rpc::kExportAdapter,
     RedirectToArchive},
    {"GET", "files/*/*/*/*/*", kRead, DownloadFile, kOpen},
    {"GET", "checkpoints", Rpc::kListCheckpoints, ListAllCheckpoints},
    {"POST", "weights_info", Rpc::kListCheckpoints, GetWeightsInfo},
    {"POST", "copy_weights", Rpc::kUploadCheckpoint, CopyWeights}};

}  // namespace

std::span<const Route> Routes() { return kRoutes; }

}  // namespace weft::server::tinker
