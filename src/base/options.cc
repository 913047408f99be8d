#include "src/base/options.h"

#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "src/base/address.h"
#include "src/base/name.h"

namespace weft {
namespace {

constexpr int64_t kMaxTokens = int64_t{1} << 30;
constexpr int64_t kMaxBytes = int64_t{1} << 50;
// With --state-dir, a snapshot contains the stored replies. A snapshot is one
// Protobuf message, which must be smaller than 2 GiB.
constexpr int64_t kMaxDurableReplyBytes = int64_t{1} << 30;

// Collects all errors, so that an operator can fix the whole configuration at
// once.
class Complaints {
 public:
  template <typename T>
  void InRange(const char* flag, T value, T low, T high) {
    // The comparison is false for NaN, so NaN is refused.
    if (value >= low && value <= high) return;
    Add(absl::StrCat("--", flag, "=", value, " is outside [", low, ", ", high,
                     "]"));
  }

  void Add(std::string complaint) {
    complaints_.push_back(std::move(complaint));
  }

  absl::Status ToStatus() const {
    if (complaints_.empty()) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrJoin(complaints_, "\n"));
  }

 private:
  std::vector<std::string> complaints_;
};

void CheckState(const EngineOptions& options, Complaints* complaints) {
  if (!options.state_dir.empty() &&
      options.max_stored_reply_bytes > kMaxDurableReplyBytes) {
    complaints->Add(absl::StrCat(
        "--max-stored-reply-bytes=", options.max_stored_reply_bytes,
        " is above ", kMaxDurableReplyBytes,
        ", which is the limit with --state-dir"));
  }
}

}  // namespace

absl::Status EngineOptions::Validate() const {
  Complaints complaints;
  if (model_dir.empty()) {
    complaints.Add(
        "--model is required: a folder with config.json and weights in "
        "safetensors or .bin files");
  }
  if (checkpoint_dir.empty()) complaints.Add("--checkpoint-dir is empty");
  complaints.InRange("tensor-parallel-size", tensor_parallel_size, 1, 64);
  complaints.InRange("data-parallel-size", data_parallel_size, 1, 64);
  complaints.InRange("expert-parallel-size", expert_parallel_size, 1, 64);
  complaints.InRange("threads", num_threads, 0, 4096);
  complaints.InRange("max-adapters", max_adapters, 1, 100000);
  complaints.InRange<int64_t>("max-adapter-bytes-per-tenant",
                              max_adapter_bytes_per_tenant, 0,
                              std::numeric_limits<int64_t>::max());
  complaints.InRange("max-adapters-per-tenant", max_adapters_per_tenant, 0,
                     max_adapters);
  complaints.InRange("max-resident-adapters", max_resident_adapters, 0, 100000);
  complaints.InRange<int64_t>("adapter-host-bytes", adapter_host_bytes, -1,
                              kMaxBytes);
  complaints.InRange("max-rank", max_rank, 1, 1024);
  complaints.InRange("max-context", max_context_tokens, 0, 1 << 24);
  complaints.InRange<int64_t>("max-batch-tokens", max_batch_tokens, 0,
                              kMaxTokens);
  complaints.InRange<int64_t>("loss-chunk-size", loss_chunk_size, -1,
                              kMaxTokens);
  complaints.InRange<int64_t>("memory-budget", memory_budget_bytes, 0,
                              kMaxBytes);
  complaints.InRange("device-memory-share", device_memory_share, 0.05, 1.0);
  complaints.InRange<int64_t>("max-queue-requests", max_queue_requests, 1,
                              1 << 24);
  complaints.InRange<int64_t>("max-queue-tokens", max_queue_tokens, 1,
                              kMaxTokens);
  complaints.InRange<int64_t>("max-queue-requests-per-tenant",
                              max_queue_requests_per_tenant, 0,
                              max_queue_requests);
  complaints.InRange<int64_t>("max-queue-tokens-per-tenant",
                              max_queue_tokens_per_tenant, 0, max_queue_tokens);
  complaints.InRange<int64_t>("max-stored-reply-bytes", max_stored_reply_bytes,
                              0, kMaxBytes);
  CheckState(*this, &complaints);
  complaints.InRange<int64_t>("disk-reserve-bytes", disk_reserve_bytes, 0,
                              kMaxBytes);
  complaints.InRange<int64_t>("snapshot-log-bytes", snapshot_log_bytes, 1,
                              kMaxBytes);
  complaints.InRange("snapshot-replay-seconds", snapshot_replay_seconds, 1,
                     86400);
  const auto weights = ParseTenantWeights(tenant_weights);
  if (!weights.ok()) complaints.Add(std::string(weights.status().message()));
  complaints.InRange<int64_t>("kv-cache-bytes", kv_cache_bytes, 0, kMaxBytes);
  complaints.InRange("max-decode-sequences", max_decode_sequences, 1, 4096);
  complaints.InRange("sampling-share", sampling_share, 0.01, 0.99);
  return complaints.ToStatus();
}

absl::StatusOr<std::map<std::string, int64_t>> ParseTenantWeights(
    absl::string_view text) {
  std::map<std::string, int64_t> weights;
  for (const absl::string_view entry :
       absl::StrSplit(text, ',', absl::SkipEmpty())) {
    const auto refuse = [entry](absl::string_view problem) {
      return absl::InvalidArgumentError(
          absl::StrCat("--tenant-weights: entry \"", entry, "\" ", problem));
    };
    const std::pair<std::string, absl::string_view> parts =
        absl::StrSplit(entry, absl::MaxSplits('=', 1));
    int64_t weight = 0;
    if (!IsName(parts.first) || parts.first == kOtherTenants) {
      return refuse("does not begin with the name of a tenant");
    }
    if (!absl::SimpleAtoi(parts.second, &weight) || weight < 1 ||
        weight > 1000) {
      return refuse("has no weight in [1, 1000]: write NAME=WEIGHT");
    }
    if (!weights.emplace(parts.first, weight).second) {
      return refuse("names a tenant again");
    }
  }
  return weights;
}

namespace {

constexpr size_t kMaxSocketPath = 107;  // What fits in a sockaddr_un.

// The edge (deploy/edge) speaks TLS and lives beside weftd.
void CheckReach(const ServerOptions& options, const char* flag,
                const std::string& listen, Complaints* complaints) {
  const auto address = ParseHostPort(flag, listen);
  if (!address.ok()) {
    complaints->Add(std::string(address.status().message()));
  } else if (IsLoopback(address->host)) {
    return;
  } else if (!options.auth_tokens_file.empty()) {
    complaints->Add(absl::StrCat(
        "--", flag, "=", listen,
        ": clients would send their tokens in plaintext: listen on 127.0.0.1 "
        "behind the edge (deploy/edge), which speaks TLS"));
  } else if (!options.trusted_network) {
    complaints->Add(absl::StrCat(
        "--", flag, "=", listen,
        " is not a loopback address, and whoever reaches the port can end the "
        "process: listen on 127.0.0.1 behind the edge (deploy/edge), or give "
        "--trusted-network if no stranger reaches it"));
  }
}

void CheckListen(const ServerOptions& options, Complaints* complaints) {
  const std::string& listen = options.listen;
  if (absl::StartsWith(listen, "unix:")) {
    const std::string path = UnixSocketPath(listen);
    if (path.empty() || path.size() > kMaxSocketPath) {
      complaints->Add(absl::StrCat("--listen=", listen, " has no path of 1 to ",
                                   kMaxSocketPath, " bytes"));
    }
    return;
  }
  CheckReach(options, "listen", listen, complaints);
  const auto address = ParseHostPort("listen", listen);
  // gRPC admits tokens in plaintext only on these addresses.
  if (address.ok() && !options.auth_tokens_file.empty() &&
      IsLoopback(address->host) && address->host != "127.0.0.1" &&
      address->host != "::1" && address->host != "localhost") {
    complaints->Add(absl::StrCat(
        "--listen=", listen,
        ": with tokens the host must be 127.0.0.1, ::1 or localhost"));
  }
}

}  // namespace

absl::Status ServerOptions::Validate() const {
  Complaints complaints;
  CheckListen(*this, &complaints);
  if (!tinker_listen.empty()) {
    CheckReach(*this, "tinker-listen", tinker_listen, &complaints);
  }
  if (!metrics_listen.empty()) {
    const auto metrics = ParseHostPort("metrics-listen", metrics_listen);
    if (!metrics.ok()) complaints.Add(std::string(metrics.status().message()));
  }
  complaints.InRange("max-connections", max_connections, 0, 1 << 20);
  complaints.InRange("max-calls-per-tenant", max_calls_per_tenant, 0, 1 << 20);
  complaints.InRange<int64_t>("max-tokens-per-second-per-tenant",
                              max_tokens_per_second_per_tenant, 0, kMaxTokens);
  complaints.InRange<int64_t>("max-message-bytes", max_message_bytes, 1 << 10,
                              (int64_t{2} << 30) - 1);
  complaints.InRange<int64_t>("max-import-bytes", max_import_bytes, 1 << 10,
                              kMaxBytes);
  complaints.InRange("max-data-per-request", max_data_per_request, 1, 1 << 20);
  complaints.InRange<int64_t>("max-tokens-per-request", max_tokens_per_request,
                              1, kMaxTokens);
  complaints.InRange("max-samples", max_samples, 1, 1 << 16);
  complaints.InRange("drain-timeout-seconds", drain_timeout_seconds, 0, 86400);
  return complaints.ToStatus();
}

}  // namespace weft
