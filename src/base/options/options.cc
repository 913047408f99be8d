#include "src/base/options/options.h"

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

// With --state-dir, a snapshot contains the stored replies and the records of
// samples. A snapshot is one Protobuf message, which must be smaller than 2
// GiB.
constexpr int64_t kMaxDurableReplyBytes = int64_t{1} << 30;
constexpr int64_t kMaxDurableRecordBytes = int64_t{1} << 29;

// Collects all errors, so that an operator can fix the whole configuration at
// once.
class Complaints {
 public:
  void NotAbove(const char* flag, int64_t value, const char* other,
                int64_t limit) {
    if (value <= limit) return;
    Add(absl::StrCat("--", flag, "=", value, " is above --", other, "=",
                     limit));
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
  if (!options.state_dir.empty() && !options.state.empty()) {
    complaints->Add(
        "--state-dir and --state are both given: the state is in a folder or "
        "in a store");
  }
  if (options.logs > 1 && options.state.empty()) {
    complaints->Add(
        absl::StrCat("--logs=", options.logs,
                     " needs --state: a folder of --state-dir has one log"));
  }
  if (!options.instance.empty() && !IsName(options.instance)) {
    complaints->Add(absl::StrCat("--instance=", options.instance,
                                 " does not match "
                                 "[A-Za-z0-9][A-Za-z0-9._-]{0,127}"));
  }
  if (!options.advertise_address.empty()) {
    const auto address =
        ParseHostPort("advertise-address", options.advertise_address);
    if (!address.ok()) complaints->Add(std::string(address.status().message()));
  }
  if (options.keeps_state() &&
      options.max_stored_reply_bytes > kMaxDurableReplyBytes) {
    complaints->Add(absl::StrCat(
        "--max-stored-reply-bytes=", options.max_stored_reply_bytes,
        " is above ", kMaxDurableReplyBytes,
        ", which is the limit with --state-dir"));
  }
  if (options.keeps_state() &&
      options.sample_record_bytes > kMaxDurableRecordBytes) {
    complaints->Add(absl::StrCat(
        "--sample-record-bytes=", options.sample_record_bytes, " is above ",
        kMaxDurableRecordBytes, ", which is the limit with --state-dir"));
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
  complaints.NotAbove("max-adapters-per-tenant", max_adapters_per_tenant,
                      "max-adapters", max_adapters);
  CheckState(*this, &complaints);
  const auto weights = ParseTenantWeights(tenant_weights);
  if (!weights.ok()) complaints.Add(std::string(weights.status().message()));
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
  if (!console_listen.empty()) {
    CheckReach(*this, "console-listen", console_listen, &complaints);
  }
  if (!metrics_listen.empty()) {
    const auto metrics = ParseHostPort("metrics-listen", metrics_listen);
    if (!metrics.ok()) complaints.Add(std::string(metrics.status().message()));
  }
  return complaints.ToStatus();
}

}  // namespace weft
