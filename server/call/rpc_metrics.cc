#include "server/call/rpc_metrics.h"

#include <map>
#include <optional>

#include "absl/strings/str_split.h"
#include "server/flags/version.h"
#include "src/base/reason.h"

namespace weft::server {
namespace {

// The names that gRPC for Go gives to status codes. The metrics use them as
// labels, as go-grpc-prometheus does.
constexpr const char* kCodeNames[] = {"OK",
                                      "Canceled",
                                      "Unknown",
                                      "InvalidArgument",
                                      "DeadlineExceeded",
                                      "NotFound",
                                      "AlreadyExists",
                                      "PermissionDenied",
                                      "ResourceExhausted",
                                      "FailedPrecondition",
                                      "Aborted",
                                      "OutOfRange",
                                      "Unimplemented",
                                      "Internal",
                                      "Unavailable",
                                      "DataLoss",
                                      "Unauthenticated"};

size_t Index(auto value) { return static_cast<size_t>(value); }

RejectReason ReasonOfExhausted(const absl::Status& status) {
  static const auto& reasons = *new std::map<std::string, RejectReason>{
      {"STEP_OUT_OF_ORDER", RejectReason::kOrder},
      {"CALLS_UNDER_WAY", RejectReason::kQuota},
      {"TOKEN_RATE", RejectReason::kQuota},
      {"IMPORTS_UNDER_WAY", RejectReason::kQuota},
      {"SHARE_IN_USE", RejectReason::kQuota},
      {"ALL_ADAPTER_SLOTS_IN_USE", RejectReason::kAdapterRoom},
      {"ADAPTER_BYTES", RejectReason::kAdapterRoom},
      {"SAMPLER_CACHE_FULL", RejectReason::kAdapterRoom},
      {"STATE_DISK_FULL", RejectReason::kDiskFull},
      {"CHECKPOINT_DISK_FULL", RejectReason::kDiskFull},
      {"CHECKPOINT_STORE_UNREACHABLE", RejectReason::kStoreUnreachable},
      {"TOO_LARGE", RejectReason::kTooLarge}};
  const std::optional<Reason> reason = FindReason(status);
  const auto known = reason ? reasons.find(reason->name) : reasons.end();
  return known == reasons.end() ? RejectReason::kNoRoom : known->second;
}

}  // namespace

RejectReason ReasonOf(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kInvalidArgument:
      return RejectReason::kInvalid;
    case absl::StatusCode::kResourceExhausted:
      return ReasonOfExhausted(status);
    case absl::StatusCode::kUnavailable: {
      const std::optional<Reason> reason = FindReason(status);
      if (reason && reason->name == "CALL_MEMORY_FULL") {
        return RejectReason::kQuota;
      }
      if (reason && reason->name == "STATE_STORE_UNREACHABLE") {
        return RejectReason::kStoreUnreachable;
      }
      return reason && reason->name == "ADAPTER_RECOVERING"
                 ? RejectReason::kStarting
                 : RejectReason::kDraining;
    }
    case absl::StatusCode::kAlreadyExists:
    case absl::StatusCode::kOutOfRange:
      return RejectReason::kOrder;
    default:
      return RejectReason::kCount;
  }
}

RpcMetrics::RpcMetrics(prometheus::Registry* registry)
    : rejected_(
          registry, "weft_requests_rejected_total",
          "Calls refused without running.", "reason",
          {"invalid", "too_large", "quota", "adapter_room", "disk_full",
           "store_unreachable", "no_room", "starting", "draining", "order"}),
      phase_(registry, "weft_startup_phase",
             "1 for the phase the server is in, 0 for the others.", "phase",
             {"listening", "loading", "standby", "serving", "draining"}),
      inflight_(AddGauge(registry, "weft_requests_inflight",
                         "Calls accepted and not answered yet.")) {
  for (size_t i = 0; i < Index(Rpc::kCount); ++i) {
    const RpcPolicy& policy = PolicyOf(static_cast<Rpc>(i));
    const std::vector<std::string> parts = absl::StrSplit(policy.path, '/');
    const prometheus::Labels labels = {{"grpc_type", policy.type},
                                       {"grpc_service", parts[1]},
                                       {"grpc_method", parts[2]}};
    Method method{};
    method.started = &AddCounter(registry, "grpc_server_started_total",
                                 "Calls started.", labels);
    method.seconds =
        &AddHistogram(registry, "grpc_server_handling_seconds",
                      "Seconds from a call's request to its status.",
                      LatencyBuckets(), labels);
    method.received =
        &AddCounter(registry, "grpc_server_msg_received_total",
                    "Messages of clients that were read.", labels);
    method.sent = &AddCounter(registry, "grpc_server_msg_sent_total",
                              "Messages sent to clients.", labels);
    for (size_t code = 0; code < method.handled.size(); ++code) {
      prometheus::Labels with_code = labels;
      with_code["grpc_code"] = kCodeNames[code];
      method.handled[code] = &AddCounter(registry, "grpc_server_handled_total",
                                         "Calls answered, by code.", with_code);
    }
    if ((policy.traits & kHasStep) != 0) {
      method.replayed = &AddCounter(registry, "weft_replayed_requests_total",
                                    "Repeated steps answered from memory.",
                                    {{"method", parts[2]}});
    }
    methods_.push_back(method);
  }
  AddGauge(registry, "weft_build_info", "Always 1; labels name the build.",
           {{"version", kVersion}, {"git", kGitRevision}})
      .Set(1);
  SetPhase(StartupPhase::kListening);
}

void RpcMetrics::Started(Rpc rpc) {
  methods_[Index(rpc)].started->Increment();
  inflight_.Increment();
}

void RpcMetrics::Handled(Rpc rpc, const absl::Status& status,
                         absl::Duration elapsed) {
  const Method& method = methods_[Index(rpc)];
  const auto code = static_cast<size_t>(status.code());
  // A code outside the canonical set counts as Unknown (2).
  method.handled[code < method.handled.size() ? code : 2]->Increment();
  method.seconds->Observe(absl::ToDoubleSeconds(elapsed));
  inflight_.Decrement();
}

void RpcMetrics::Received(Rpc rpc) {
  methods_[Index(rpc)].received->Increment();
}

void RpcMetrics::Sent(Rpc rpc) { methods_[Index(rpc)].sent->Increment(); }

void RpcMetrics::Rejected(RejectReason reason) {
  if (reason != RejectReason::kCount) rejected_[Index(reason)].Increment();
}

void RpcMetrics::Replayed(Rpc rpc) {
  prometheus::Counter* const replayed = methods_[Index(rpc)].replayed;
  if (replayed != nullptr) replayed->Increment();
}

void RpcMetrics::SetPhase(StartupPhase phase) { phase_.Select(Index(phase)); }

}  // namespace weft::server
