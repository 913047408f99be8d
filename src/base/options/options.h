// The values that an operator can set. Their rows are in
// src/base/options/flags.inc. server/flags/flags.cc fills these structs from
// the flags, their environment variables and the file of --config.
#ifndef WEFT_SRC_BASE_OPTIONS_OPTIONS_H_
#define WEFT_SRC_BASE_OPTIONS_OPTIONS_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "src/base/choices.h"
#include "src/base/observe/log.h"

namespace weft {

// --max-resident-adapters=0 means this many adapters, or fewer if a CUDA device
// has no memory for them.
inline constexpr int kDefaultResidentAdapters = 64;

inline constexpr int64_t kMaxTokens = int64_t{1} << 30;
inline constexpr int64_t kMaxBytes = int64_t{1} << 50;

// The least and the greatest value of a flag of type T. Nothing: every value.
template <typename T>
using Range = std::optional<std::pair<T, T>>;
inline constexpr std::nullopt_t kAny = std::nullopt;
inline constexpr auto Between(auto least, auto greatest) {
  return std::pair(least, greatest);
}

#define WEFT_MEMBER(type, member, name, value, range, unit, help) \
  type member = value;

// The model that the engine runs, and the engine's limits.
struct EngineOptions {
#define WEFT_ENGINE_FLAG WEFT_MEMBER
#include "src/base/options/flags.inc"

  bool keeps_state() const { return !state_dir.empty() || !state.empty(); }
  std::string spill_root() const {
    return spill_dir.empty() ? checkpoint_dir + "/.spill" : spill_dir;
  }

  // Returns INVALID_ARGUMENT with one line for each value that does not go with
  // another. The line names the flag. ValidateSettings checks the ranges.
  absl::Status Validate() const;
};

// The name under which metrics count all tenants that --tenant-weights does not
// name.
inline constexpr char kOtherTenants[] = "other";

// Reads the tenants' weights from "NAME=WEIGHT,...", each in [1, 1000]. A
// tenant without an entry has weight 1. Errors: INVALID_ARGUMENT, which names
// the entry. kOtherTenants is not a valid name.
absl::StatusOr<std::map<std::string, int64_t>> ParseTenantWeights(
    absl::string_view text);

// What the server listens on and accepts.
struct ServerOptions {
#define WEFT_SERVER_FLAG WEFT_MEMBER
#include "src/base/options/flags.inc"
  // Copies of what EngineOptions say, for the Tinker API.
  bool keeps_state = false;

  // Validates like EngineOptions::Validate. gRPC and the Tinker API listen
  // beyond loopback only with --trusted-network and without tokens, because
  // they speak plaintext and gRPC 1.51 can be ended by whoever connects to it.
  // With tokens, gRPC needs a Unix socket, or the host 127.0.0.1, ::1 or
  // localhost.
  absl::Status Validate() const;
};

#undef WEFT_MEMBER

}  // namespace weft

#endif  // WEFT_SRC_BASE_OPTIONS_OPTIONS_H_
