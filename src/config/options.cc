#include "src/config/options.h"

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

}  // namespace

absl::Status EngineOptions::Validate() const {
  Complaints complaints;
  if (model_dir.empty()) {
    complaints.Add(
        "--model is required: a folder with config.json and weights in "
        "safetensors or .bin files");
  }
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
  if (!state_dir.empty() && max_stored_reply_bytes > kMaxDurableReplyBytes) {
    complaints.Add(absl::StrCat(
        "--max-stored-reply-bytes=", max_stored_reply_bytes, " is above ",
        kMaxDurableReplyBytes, ", which is the limit with --state-dir"));
  }
  if (state_dir.empty() && !recover_adapters.empty()) {
    complaints.Add("--recover-adapter goes with --state-dir");
  }
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

// The Tinker API is plaintext even if gRPC uses TLS.
void CheckTinker(const ServerOptions& options, Complaints* complaints) {
  const auto address = ParseHostPort("tinker-listen", options.tinker_listen);
  if (!address.ok()) {
    complaints->Add(std::string(address.status().message()));
  } else if (!IsLoopback(address->host) &&
             (!options.insecure || !options.auth_tokens_file.empty())) {
    complaints->Add(absl::StrCat(
        "--tinker-listen=", options.tinker_listen,
        " is not a loopback address, and this port speaks plaintext: listen on "
        "127.0.0.1 behind a proxy that speaks TLS, or give --insecure without "
        "tokens"));
  }
}

}  // namespace

absl::Status ServerOptions::Validate() const {
  Complaints complaints;
  const auto address = ParseHostPort("listen", listen);
  if (!address.ok()) {
    complaints.Add(std::string(address.status().message()));
  } else if (!IsLoopback(address->host) && !insecure && tls_cert.empty()) {
    complaints.Add(absl::StrCat(
        "--listen=", listen,
        " is not a loopback address, and the server speaks plaintext: give "
        "--tls-cert and --tls-key, or --insecure"));
  }
  if (address.ok() && !auth_tokens_file.empty() && tls_cert.empty() &&
      address->host != "127.0.0.1" && address->host != "::1" &&
      address->host != "localhost") {
    complaints.Add(absl::StrCat(
        "--listen=", listen,
        ": clients would send their tokens in plaintext: give --tls-cert and "
        "--tls-key, or listen on 127.0.0.1 behind a proxy that speaks TLS"));
  }
  if (tls_cert.empty() != tls_key.empty()) {
    complaints.Add("--tls-cert and --tls-key go together");
  }
  if (!tls_client_ca.empty() && tls_cert.empty()) {
    complaints.Add("--tls-client-ca goes with --tls-cert and --tls-key");
  }
  if (!tinker_listen.empty()) CheckTinker(*this, &complaints);
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

absl::StatusOr<HostPort> ParseHostPort(absl::string_view flag,
                                       absl::string_view address) {
  const size_t colon = address.rfind(':');
  HostPort result;
  if (colon == absl::string_view::npos || colon == 0 ||
      !absl::SimpleAtoi(address.substr(colon + 1), &result.port) ||
      result.port < 0 || result.port > 65535) {
    return absl::InvalidArgumentError(
        absl::StrCat("--", flag, "=", address,
                     " is not HOST:PORT with a port in [0, 65535]"));
  }
  absl::string_view host = address.substr(0, colon);
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);
  } else if (absl::StrContains(host, ':')) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--", flag, "=", address, ": write an IPv6 address as [ADDRESS]:PORT"));
  }
  result.host = std::string(host);
  return result;
}

bool IsLoopback(absl::string_view host) {
  if (host == "localhost" || host == "::1") return true;
  // Only a complete dotted quad is an address. "127.example.com" is a host name
  // that anybody may own.
  const std::vector<absl::string_view> parts = absl::StrSplit(host, '.');
  if (parts.size() != 4 || parts[0] != "127") return false;
  for (const absl::string_view part : parts) {
    int value = 0;
    if (!absl::SimpleAtoi(part, &value) || value < 0 || value > 255) {
      return false;
    }
  }
  return true;
}

}  // namespace weft
