#include "server/tinker/adapters.h"

#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "src/base/sha256.h"
#include "weft/v1/adapters.pb.h"

namespace weft::tinker {
namespace {

std::string KeyOf(const Caller& caller, const std::string& adapter) {
  return absl::StrCat(OwnerKey(caller), " ", adapter);
}

// Writes to the ledger that the adapter is to be deleted, by the next process
// if this one does not do it.
void DeleteAtNextStart(Front& front, const Caller& caller,
                       const std::string& adapter) {
  front.ledger.Put(
      EntryKind::kOrphan,
      {.id = KeyOf(caller, adapter),
       .fields = {{"caller", CallerToJson(caller)}, {"adapter", adapter}}},
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

absl::Status GetAdapterOf(Front& front, CallOrigin origin,
                          const std::string& adapter,
                          Callback<AdapterInfo> done) {
  v1::GetAdapterRequest request;
  request.set_adapter_id(adapter);
  return front.port.Call(std::move(origin), Rpc::kGetAdapter, request,
                         &Engine::GetAdapter, std::move(done));
}

void DeleteOrphan(Front& front, const Caller& caller,
                  const std::string& adapter) {
  const std::string key = KeyOf(caller, adapter);
  Orphan& orphan = front.orphans[key];
  orphan.caller = caller;
  orphan.adapter = adapter;
  DeleteAtNextStart(front, caller, adapter);
  Try(front, key);
}

void SweepOrphans(Front& front) {
  const auto all = [](const Orphan& /*orphan*/) { return true; };
  for (const std::string& key : IdsWhere(front.orphans, all)) {
    if (front.orphans.contains(key)) Try(front, key);
  }
}

void RestoreOrphans(Front& front) {
  for (LedgerEntry& entry : front.ledger.ReadAll(EntryKind::kOrphan)) {
    if (front.loaded.contains(entry.id)) {
      front.ledger.Erase(EntryKind::kOrphan, entry.id);
      continue;
    }
    front.orphans.try_emplace(
        entry.id, Orphan{.caller = CallerFromJson(entry.fields["caller"]),
                         .adapter = entry.fields.value("adapter", "")});
  }
}

namespace {

// Returns the beginning of the names of a checkpoint's adapters.
std::string StemOf(const CheckpointInfo& info) {
  const std::string key = absl::StrCat(info.adapter_id, "/", info.name, "@",
                                       absl::ToUnixNanos(info.created_at));
  return absl::StrCat(kSamplerAdapterPrefix,
                      absl::BytesToHexString(Sha256(key).substr(0, 16)), ".");
}

// Returns the first of the checkpoint's adapters, or the end of `loaded`.
template <typename Loaded>
auto FindLoaded(Loaded& loaded, const Caller& caller,
                const CheckpointInfo& info) {
  const std::string stem = KeyOf(caller, StemOf(info));
  const auto found = loaded.lower_bound(stem);
  const bool has =
      found != loaded.end() && absl::StartsWith(found->first, stem);
  return has ? found : loaded.end();
}

// Handles the end of a load, and tells the outcome to all sessions that wait.
void EndLoad(Front& front, const CallOrigin& origin, const std::string& adapter,
             const absl::Status& loaded) {
  const auto entry = front.loaded.find(KeyOf(*origin.caller, adapter));
  const auto waiting = std::exchange(entry->second.waiting, {});
  if (loaded.ok()) {
    entry->second.ready = true;
    entry->second.users = static_cast<int>(waiting.size());
    front.ledger.Erase(EntryKind::kOrphan, entry->first);
  } else {
    front.loaded.erase(entry);
    DeleteOrphan(front, *origin.caller, adapter);
  }
  for (const auto& done : waiting) {
    loaded.ok() ? done(adapter) : done(loaded);
  }
}

void StartLoad(Front& front, const CallOrigin& origin,
               const CheckpointInfo& info, Callback<std::string> done) {
  const absl::StatusOr<std::string> id = NewId();
  if (!id.ok()) return done(id.status());
  const std::string adapter = absl::StrCat(StemOf(info), id->substr(0, 8));
  front.loaded[KeyOf(*origin.caller, adapter)].waiting.push_back(
      std::move(done));
  DeleteAtNextStart(front, *origin.caller, adapter);
  v1::LoadCheckpointRequest request;
  request.set_adapter_id(adapter);
  request.set_source_adapter_id(info.adapter_id);
  request.set_name(info.name);
  request.set_weights_only(true);
  const absl::Status refused = front.port.Call(
      origin, Rpc::kLoadCheckpoint, request, &Engine::LoadCheckpoint,
      [&front, origin,
       adapter](const absl::StatusOr<StepReply<AdapterInfo>>& reply) {
        EndLoad(front, origin, adapter, reply.status());
      });
  if (!refused.ok()) EndLoad(front, origin, adapter, refused);
}

// Counts a user of an adapter that is ready. If a client has deleted the
// adapter over gRPC, loads another one.
void UseReady(Front& front, const CallOrigin& origin,
              const std::string& adapter, const CheckpointInfo& info,
              const Callback<std::string>& done) {
  const auto end = [&front, origin, adapter, info,
                    done](const absl::Status& found) {
    const auto entry = front.loaded.find(KeyOf(*origin.caller, adapter));
    // The last user may have left during the call of GetAdapter.
    if (entry != front.loaded.end() && !absl::IsNotFound(found)) {
      if (!found.ok()) return done(found);
      ++entry->second.users;
      return done(adapter);
    }
    if (entry != front.loaded.end()) front.loaded.erase(entry);
    UseAdapter(front, origin, info, done);
  };
  const absl::Status refused = GetAdapterOf(
      front, origin, adapter,
      [end](const absl::StatusOr<AdapterInfo>& got) { end(got.status()); });
  if (!refused.ok()) end(refused);
}

}  // namespace

void UseAdapter(Front& front, const CallOrigin& origin,
                const CheckpointInfo& info, Callback<std::string> done) {
  const auto found = FindLoaded(front.loaded, *origin.caller, info);
  if (found == front.loaded.end()) {
    return StartLoad(front, origin, info, std::move(done));
  }
  if (!found->second.ready) {
    return found->second.waiting.push_back(std::move(done));
  }
  UseReady(front, origin, found->first.substr(KeyOf(*origin.caller, "").size()),
           info, done);
}

bool HasCheckpoint(const Front& front, const Caller& caller,
                   const CheckpointInfo& info) {
  return FindLoaded(front.loaded, caller, info) != front.loaded.end();
}

void GoAtNextStart(Front& front, const Caller& caller,
                   const std::string& adapter) {
  const auto found = front.loaded.find(KeyOf(caller, adapter));
  if (found == front.loaded.end() ||
      std::exchange(found->second.goes_at_next_start, true)) {
    return;
  }
  DeleteAtNextStart(front, caller, adapter);
}

void LeaveAdapter(Front& front, const Caller& caller,
                  const std::string& adapter) {
  const auto found = front.loaded.find(KeyOf(caller, adapter));
  if (found == front.loaded.end() || --found->second.users > 0) return;
  front.loaded.erase(found);
  DeleteOrphan(front, caller, adapter);
}

void HaveAdapter(Front& front, const Caller& caller,
                 const std::string& adapter) {
  LoadedAdapter& loaded = front.loaded[KeyOf(caller, adapter)];
  loaded.ready = true;
  ++loaded.users;
}

}  // namespace weft::tinker
