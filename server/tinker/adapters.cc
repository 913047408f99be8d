#include "server/tinker/adapters.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/tinker/front.h"
#include "src/base/reason.h"
#include "weft/v1/adapters.pb.h"

namespace weft::server::tinker {
namespace {

std::string KeyOf(const Caller& caller, const std::string& adapter) {
  return absl::StrCat(OwnerKey(caller), " ", adapter);
}

}  // namespace

void Adapters::TryToDelete(const std::string& key) {
  Deletion& deletion = deletions_.at(key);
  if (std::exchange(deletion.running, true)) return;
  const Callback<bool> end = [this, key](const absl::StatusOr<bool>& gone) {
    const auto found = deletions_.find(key);
    if (found == deletions_.end()) return;
    found->second.running = false;
    // One that another log has is that log's to delete.
    const std::optional<Reason> reason = FindReason(gone.status());
    const bool moved = reason && reason->name == "MOVED";
    if (!gone.ok() && !absl::IsNotFound(gone.status()) && !moved) return;
    deletions_.erase(found);
    front_.ledger.Erase(EntryKind::kOrphan, key);
  };
  const absl::Status refused = DeleteAdapterOf(
      front_, {.caller = deletion.caller}, deletion.adapter, end);
  if (!refused.ok()) end(refused);
}

absl::Status DeleteAdapterOf(Front& front, CallOrigin origin,
                             const std::string& adapter, Callback<bool> done) {
  v1::DeleteAdapterRequest request;
  request.set_adapter_id(adapter);
  return front.port.Call(std::move(origin), Rpc::kDeleteAdapter, request,
                         &engine::Engine::DeleteAdapter, std::move(done));
}

absl::Status GetAdapterOf(Front& front, CallOrigin origin,
                          const std::string& adapter,
                          Callback<AdapterInfo> done) {
  v1::GetAdapterRequest request;
  request.set_adapter_id(adapter);
  return front.port.Call(std::move(origin), Rpc::kGetAdapter, request,
                         &engine::Engine::GetAdapter, std::move(done));
}

void Adapters::Delete(const Caller& caller, const std::string& adapter) {
  const std::string key = KeyOf(caller, adapter);
  Deletion& deletion = deletions_[key];
  deletion.caller = caller;
  deletion.adapter = adapter;
  front_.ledger.Put(
      EntryKind::kOrphan,
      {.id = key,
       .fields = {{"caller", CallerToJson(caller)}, {"adapter", adapter}}},
      [](const absl::Status& /*put*/) {});
  TryToDelete(key);
}

void Adapters::SweepDeletions() {
  std::vector<std::string> keys;
  for (const auto& [key, deletion] : deletions_) keys.push_back(key);
  // A deletion may end at once.
  for (const std::string& key : keys) {
    if (deletions_.contains(key)) TryToDelete(key);
  }
}

void Adapters::Restore() {
  for (LedgerEntry& entry : front_.ledger.ReadAll(EntryKind::kOrphan)) {
    deletions_.try_emplace(
        entry.id, Deletion{.caller = CallerFromJson(entry.fields["caller"]),
                           .adapter = entry.fields.value("adapter", "")});
  }
}

}  // namespace weft::server::tinker
