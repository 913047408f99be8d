#include "server/tinker/adapters.h"

#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "server/tinker/checkpoints.h"
#include "server/tinker/credentials.h"
#include "server/tinker/front.h"
#include "server/tinker/handlers.h"
#include "src/base/clock.h"
#include "src/base/sha256.h"
#include "src/base/status_macros.h"
#include "weft/v1/adapters.pb.h"

namespace weft::server::tinker {
namespace {

std::string KeyOf(const Caller& caller, const std::string& adapter) {
  return absl::StrCat(OwnerKey(caller), " ", adapter);
}

// Returns the beginning of the names of a checkpoint's adapters.
std::string StemOf(const CheckpointInfo& info) {
  const std::string key = absl::StrCat(info.adapter_id, "/", info.name, "@",
                                       absl::ToUnixNanos(info.created_at));
  return absl::StrCat(kSamplerAdapterPrefix,
                      absl::BytesToHexString(Sha256(key).substr(0, 16)), ".");
}

}  // namespace

void Adapters::DeleteAtNextStart(const Caller& caller,
                                 const std::string& adapter) {
  front_.ledger.Put(
      EntryKind::kOrphan,
      {.id = KeyOf(caller, adapter),
       .fields = {{"caller", CallerToJson(caller)}, {"adapter", adapter}}},
      [](const absl::Status& /*put*/) {});
}

void Adapters::TryToDelete(const std::string& key) {
  Deletion& deletion = deletions_.at(key);
  if (std::exchange(deletion.running, true)) return;
  const Callback<bool> end = [this, key](const absl::StatusOr<bool>& gone) {
    const auto found = deletions_.find(key);
    if (found == deletions_.end()) return;
    found->second.running = false;
    if (!gone.ok() && !absl::IsNotFound(gone.status())) return;
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
  DeleteAtNextStart(caller, adapter);
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
    if (loaded_.contains(entry.id)) continue;
    deletions_.try_emplace(
        entry.id, Deletion{.caller = CallerFromJson(entry.fields["caller"]),
                           .adapter = entry.fields.value("adapter", "")});
  }
}

Adapters::LoadedAdapters::iterator Adapters::FindLoaded(
    const Caller& caller, const CheckpointInfo& info) {
  const std::string stem = KeyOf(caller, StemOf(info));
  const auto found = loaded_.lower_bound(stem);
  const bool has =
      found != loaded_.end() && absl::StartsWith(found->first, stem);
  return has ? found : loaded_.end();
}

void Adapters::EndLoad(const CallOrigin& origin, const std::string& adapter,
                       const absl::Status& loaded) {
  const auto entry = loaded_.find(KeyOf(*origin.caller, adapter));
  const auto waiting = std::exchange(entry->second.waiting, {});
  if (loaded.ok()) {
    entry->second.ready = true;
    entry->second.users = static_cast<int>(waiting.size());
  } else {
    loaded_.erase(entry);
    Delete(*origin.caller, adapter);
  }
  for (const auto& done : waiting) {
    loaded.ok() ? done(adapter) : done(loaded);
  }
}

void Adapters::StartLoad(const CallOrigin& origin, const CheckpointInfo& info,
                         Callback<std::string> done) {
  const absl::StatusOr<std::string> id = NewId();
  if (!id.ok()) return done(id.status());
  const std::string adapter = absl::StrCat(StemOf(info), id->substr(0, 8));
  loaded_[KeyOf(*origin.caller, adapter)].waiting.push_back(std::move(done));
  DeleteAtNextStart(*origin.caller, adapter);
  v1::LoadCheckpointRequest request;
  request.set_adapter_id(adapter);
  request.set_source_adapter_id(info.adapter_id);
  request.set_name(info.name);
  request.set_weights_only(true);
  const absl::Status refused = front_.port.Call(
      origin, Rpc::kLoadCheckpoint, request, &engine::Engine::LoadCheckpoint,
      [this, origin,
       adapter](const absl::StatusOr<StepReply<AdapterInfo>>& reply) {
        EndLoad(origin, adapter, reply.status());
      });
  if (!refused.ok()) EndLoad(origin, adapter, refused);
}

void Adapters::UseReady(const CallOrigin& origin, const std::string& adapter,
                        const CheckpointInfo& info,
                        const Callback<std::string>& done) {
  const Callback<AdapterInfo> end =
      [this, origin, adapter, info,
       done](const absl::StatusOr<AdapterInfo>& got) {
        const auto entry = loaded_.find(KeyOf(*origin.caller, adapter));
        // The last user may have left during the call of GetAdapter.
        if (entry != loaded_.end() && !absl::IsNotFound(got.status())) {
          if (!got.ok()) return done(got.status());
          ++entry->second.users;
          return done(adapter);
        }
        if (entry != loaded_.end()) {
          front_.ledger.Erase(EntryKind::kOrphan, entry->first);
          loaded_.erase(entry);
        }
        UseFound(origin, info, done);
      };
  const absl::Status refused = GetAdapterOf(front_, origin, adapter, end);
  if (!refused.ok()) end(refused);
}

void Adapters::UseFound(const CallOrigin& origin, const CheckpointInfo& info,
                        Callback<std::string> done) {
  const auto found = FindLoaded(*origin.caller, info);
  if (found == loaded_.end()) return StartLoad(origin, info, std::move(done));
  if (!found->second.ready) {
    return found->second.waiting.push_back(std::move(done));
  }
  UseReady(origin, found->first.substr(KeyOf(*origin.caller, "").size()), info,
           done);
}

absl::Status Adapters::Use(const CallPtr& call, const std::string& model_path,
                           bool note, const Callback<std::string>& done) {
  WEFT_ASSIGN_OR_RETURN(const CheckpointPath path,
                        ParseCheckpointPath(model_path));
  const auto use = [this, call, path, note, done](const CheckpointInfo& info) {
    const bool notes = note || FindLoaded(call->caller, info) == loaded_.end();
    UseFound(
        call->origin(), info,
        IfOk(done, [this, call, path, notes, done](const std::string& adapter) {
          if (notes) {
            front_.accounts.Note(call->caller, "read", path, "sample");
          }
          done(adapter);
        }));
  };
  return FindCheckpoint(front_, call, path, IfOk(done, use));
}

absl::Status Adapters::Lend(const CallPtr& call, const std::string& model_path,
                            const Callback<std::string>& done) {
  const auto lend = [this, caller = call->caller,
                     done](const std::string& adapter) {
    Loaded& loaded = loaded_.at(KeyOf(caller, adapter));
    const absl::Time before =
        std::exchange(loaded.lent_until, SteadyNow() + kLease);
    if (before == absl::InfinitePast()) {
      EndLoans(caller, adapter);
    } else {
      Leave(caller, adapter);
    }
    done(adapter);
  };
  return Use(call, model_path, /*note=*/false, IfOk(done, lend));
}

void Adapters::EndLoans(const Caller& caller, const std::string& adapter) {
  const auto found = loaded_.find(KeyOf(caller, adapter));
  if (found == loaded_.end()) return;
  const absl::Duration left = found->second.lent_until - SteadyNow();
  if (left > absl::ZeroDuration()) {
    return front_.after(left,
                        [this, caller, adapter] { EndLoans(caller, adapter); });
  }
  found->second.lent_until = absl::InfinitePast();
  Leave(caller, adapter);
}

void Adapters::Leave(const Caller& caller, const std::string& adapter) {
  const auto found = loaded_.find(KeyOf(caller, adapter));
  if (found == loaded_.end() || --found->second.users > 0) return;
  loaded_.erase(found);
  Delete(caller, adapter);
}

void Adapters::Have(const Caller& caller, const std::string& adapter) {
  Loaded& loaded = loaded_[KeyOf(caller, adapter)];
  loaded.ready = true;
  ++loaded.users;
}

}  // namespace weft::server::tinker
