#include "server/tinker/reaper.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "weft/v1/adapters.pb.h"

namespace weft::tinker {
namespace {

std::string KeyOf(const Caller& caller, const std::string& adapter) {
  return absl::StrCat(OwnerKey(caller), " ", adapter);
}

void Put(Front& front, const Caller& caller, const std::string& adapter) {
  front.ledger.Put(
      EntryKind::kOrphan,
      {.id = KeyOf(caller, adapter),
       .fields = {{"caller", CallerToJson(caller)}, {"adapter", adapter}},
       .bytes = ""},
      [](const absl::Status& /*put*/) {});
}

// Asks the engine to delete the adapter of front.orphans[key], unless such a
// request is running already. An adapter that does not exist counts as deleted.
void Try(Front& front, const std::string& key) {
  Orphan& orphan = front.orphans.at(key);
  if (std::exchange(orphan.running, true)) return;
  const auto end = [&front, key](const absl::Status& status) {
    const auto found = front.orphans.find(key);
    if (found == front.orphans.end()) return;
    found->second.running = false;
    if (!status.ok() && !absl::IsNotFound(status)) return;
    front.orphans.erase(found);
    front.ledger.Erase(EntryKind::kOrphan, key);
  };
  const absl::Status refused = DeleteAdapterOf(
      front, {.caller = orphan.caller}, orphan.adapter,
      [end](const absl::StatusOr<bool>& deleted) { end(deleted.status()); });
  if (!refused.ok()) end(refused);
}

}  // namespace

absl::Status DeleteAdapterOf(Front& front, CallOrigin origin,
                             const std::string& adapter, Callback<bool> done) {
  v1::DeleteAdapterRequest request;
  request.set_adapter_id(adapter);
  return front.port.Call(std::move(origin), Rpc::kDeleteAdapter, request,
                         &Engine::DeleteAdapter, std::move(done));
}

void DeleteOrphan(Front& front, const Caller& caller,
                  const std::string& adapter) {
  const std::string key = KeyOf(caller, adapter);
  Orphan& orphan = front.orphans[key];
  orphan.caller = caller;
  orphan.adapter = adapter;
  Put(front, caller, adapter);
  Try(front, key);
}

void DeleteAtNextStart(Front& front, const Caller& caller,
                       const std::string& adapter) {
  Put(front, caller, adapter);
}

void KeepAtNextStart(Front& front, const Caller& caller,
                     const std::string& adapter) {
  front.ledger.Erase(EntryKind::kOrphan, KeyOf(caller, adapter));
}

void SweepOrphans(Front& front) {
  std::vector<std::string> keys;
  for (const auto& [key, orphan] : front.orphans) keys.push_back(key);
  for (const std::string& key : keys) {
    if (front.orphans.contains(key)) Try(front, key);
  }
}

void RestoreOrphans(
    Front& front,
    const std::function<bool(const std::string& owner,
                             const std::string& adapter)>& is_used) {
  for (const LedgerEntry& entry : front.ledger.ReadAll(EntryKind::kOrphan)) {
    const Caller caller = CallerFromJson(entry.fields.value("caller", Json()));
    const std::string adapter = entry.fields.value("adapter", "");
    if (is_used(OwnerKey(caller), adapter)) {
      front.ledger.Erase(EntryKind::kOrphan, entry.id);
    } else {
      front.orphans.try_emplace(entry.id,
                                Orphan{.caller = caller, .adapter = adapter});
    }
  }
}

}  // namespace weft::tinker
