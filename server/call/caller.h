// A caller, and the names that it uses for adapters.
//
// On a server with access tokens, each tenant has its own names. The adapter
// that a tenant calls "a" is "tenant~a" in the engine, in the log and on disk.
// So no RPC lets a tenant name another tenant's adapter, and two tenants may
// use the same name. An admin, and every caller on a server without tokens,
// uses the engine's names.
#ifndef WEFT_SERVER_CALL_CALLER_H_
#define WEFT_SERVER_CALL_CALLER_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "server/wire/request_fields.h"
#include "src/base/tokens.h"
#include "src/request/reply.h"
#include "src/request/step.h"

namespace weft::server {

struct CallError;

// Threads: any; all methods are const.
class Caller {
 public:
  // Makes a caller without a token, which sees all adapters.
  Caller() = default;
  explicit Caller(const TokenEntry& record);

  // Returns the token's id; empty without a token.
  const std::string& token_id() const { return token_id_; }
  const std::string& tenant() const { return tenant_; }
  bool sees_all() const { return prefix_.empty(); }

  // Replaces the caller's names of adapters in a validated request by the
  // engine's names. Also sets the tenant of a new adapter and of the call, and
  // limits a list to the caller's adapters. Errors: PERMISSION_DENIED if a
  // tenant's request names another tenant; INVALID_ARGUMENT if an admin's
  // request names a tenant that differs from the one in the adapter's name.
  absl::Status Qualify(const RequestFields& fields) const;

  // Replaces the engine's names in a result by the caller's names. If the
  // result is a list, removes the entries that the caller does not own. A
  // result type without a line here does not compile.
  void Reveal(AdapterInfo* adapter) const;
  void Reveal(AdapterPage* page) const;
  void Reveal(CheckpointInfo* checkpoint) const;
  void Reveal(std::vector<CheckpointInfo>* checkpoints) const;
  void Reveal(CallError* error) const;
  template <typename Result>
  void Reveal(StepReply<Result>* reply) const {
    Reveal(&reply->result);
  }
  // These results have no names.
  void Reveal(TrainResult* /*result*/) const {}
  void Reveal(OptimStepResult* /*result*/) const {}
  void Reveal(SampleResult* /*result*/) const {}
  void Reveal(PublishedSnapshot* /*result*/) const {}
  // The Tinker front shows no names of a shared result.
  void Reveal(StepResultPtr* /*result*/) const {}
  void Reveal(bool* /*result*/) const {}

  // Returns whether the adapter belongs to the caller's tenant; always true if
  // sees_all().
  bool Owns(absl::string_view engine_name) const;
  // Returns `status`, with the engine's names in its message and Reason
  // replaced by the caller's.
  absl::Status RevealError(const absl::Status& status) const;

 private:
  void QualifyId(std::string* adapter_id) const;
  template <typename Entry>
  void RevealOwned(std::vector<Entry>* entries) const;
  // Returns the caller's name for an adapter; the engine's name if the caller
  // does not own the adapter.
  std::string NameOf(const std::string& engine_name) const;
  absl::Status SettleTenant(std::string* adapter_id, std::string* tenant) const;

  std::string token_id_;
  std::string tenant_;
  std::string prefix_;  // Empty: the caller sees all adapters.
};

// Returns the name of the owner that the caller belongs to; empty on a server
// without tokens. All of a tenant's callers except its admins are one owner and
// share sessions. The tenant's admins are another owner, because they use the
// engine's names for adapters.
std::string OwnerKey(const Caller& caller);

}  // namespace weft::server

#endif  // WEFT_SERVER_CALL_CALLER_H_
