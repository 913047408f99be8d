#include "server/call/caller.h"

#include <optional>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "server/call/call_errors.h"
#include "src/base/reason.h"

namespace weft::server {

Caller::Caller(const TokenEntry& record)
    : token_id_(record.id), tenant_(record.tenant) {
  if (record.Allows(Scope::kAdmin)) return;
  prefix_ = absl::StrCat(tenant_, std::string(1, kTenantSeparator));
}

void Caller::QualifyId(std::string* adapter_id) const {
  // An empty id stands for the base model.
  if (!adapter_id->empty()) adapter_id->insert(0, prefix_);
}

absl::Status Caller::SettleTenant(std::string* adapter_id,
                                  std::string* tenant) const {
  if (!sees_all()) {
    if (!tenant->empty() && *tenant != tenant_) {
      return absl::PermissionDeniedError(
          absl::StrCat("tenant is not that of the token, '", tenant_, "'"));
    }
    *tenant = tenant_;
    QualifyId(adapter_id);
    return absl::OkStatus();
  }
  const size_t separator = adapter_id->find(kTenantSeparator);
  if (separator != std::string::npos) {
    const std::string owner = adapter_id->substr(0, separator);
    if (!tenant->empty() && *tenant != owner) {
      return absl::InvalidArgumentError(
          absl::StrCat("tenant is '", *tenant,
                       "', must be that of adapter_id, '", owner, "'"));
    }
    *tenant = owner;
  } else if (tenant->empty()) {
    // Neither the request nor the adapter's name has a tenant. An admin's
    // adapter gets the admin's tenant. On a server without tokens, the
    // adapter's name becomes its tenant.
    *tenant = tenant_.empty() ? *adapter_id : tenant_;
  }
  return absl::OkStatus();
}

absl::Status Caller::Qualify(const RequestFields& fields) const {
  absl::Status status;
  if (fields.tenant != nullptr) {
    status = SettleTenant(fields.adapter_id, fields.tenant);
  } else if (fields.all_if_empty) {
    fields.adapter_id->insert(0, prefix_);
  } else if (fields.adapter_id != nullptr) {
    QualifyId(fields.adapter_id);
  }
  if (fields.caller != nullptr) *fields.caller = tenant_;
  if (fields.source_adapter_id != nullptr) QualifyId(fields.source_adapter_id);
  if (fields.list != nullptr) {
    fields.list->after.insert(0, prefix_);
    fields.list->prefix = prefix_;
  }
  return status;
}

void Caller::Reveal(AdapterInfo* adapter) const {
  adapter->adapter_id = NameOf(adapter->adapter_id);
}

void Caller::Reveal(CheckpointInfo* checkpoint) const {
  checkpoint->adapter_id = NameOf(checkpoint->adapter_id);
}

void Caller::Reveal(CallError* error) const {
  error->adapter_id = NameOf(error->adapter_id);
}

template <typename Entry>
void Caller::RevealOwned(std::vector<Entry>* entries) const {
  std::erase_if(*entries,
                [this](const Entry& entry) { return !Owns(entry.adapter_id); });
  for (Entry& entry : *entries) Reveal(&entry);
}

void Caller::Reveal(AdapterPage* page) const {
  // The list is sorted and, through Qualify, begins at the tenant's adapters.
  // So if RevealOwned removes an adapter from this page, no later page has an
  // adapter of the tenant.
  const size_t size = page->adapters.size();
  RevealOwned(&page->adapters);
  page->more = page->more && page->adapters.size() == size;
}

void Caller::Reveal(std::vector<CheckpointInfo>* checkpoints) const {
  RevealOwned(checkpoints);
}

bool Caller::Owns(absl::string_view engine_name) const {
  return absl::StartsWith(engine_name, prefix_);
}

std::string Caller::NameOf(const std::string& engine_name) const {
  return Owns(engine_name) ? engine_name.substr(prefix_.size()) : engine_name;
}

absl::Status Caller::RevealError(const absl::Status& status) const {
  if (status.ok() || prefix_.empty()) return status;
  const auto reveal = [this](absl::string_view text) {
    return absl::StrReplaceAll(text, {{prefix_, ""}});
  };
  const absl::Status shown(status.code(), reveal(status.message()));
  std::optional<Reason> reason = FindReason(status);
  if (!reason) return shown;
  for (auto& [key, value] : reason->values) value = reveal(value);
  return WithReason(shown, *reason);
}

std::string OwnerKey(const Caller& caller) {
  if (caller.tenant().empty() || !caller.sees_all()) return caller.tenant();
  return absl::StrCat(caller.tenant(), "/admin");
}

}  // namespace weft::server
