#include "server/tinker/loaded_adapters.h"

#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "server/tinker/reaper.h"
#include "server/tinker/sessions.h"
#include "src/base/sha256.h"
#include "weft/v1/adapters.pb.h"

namespace weft::tinker {
namespace {

std::string LoadedKey(const std::string& owner, const std::string& adapter) {
  return absl::StrCat(owner, " ", adapter);
}

// Returns the beginning of the names of a checkpoint's adapters.
std::string StemOf(const CheckpointInfo& info) {
  const std::string key = absl::StrCat(info.adapter_id, "/", info.name, "@",
                                       absl::ToUnixNanos(info.created_at));
  return absl::StrCat(kSamplerAdapterPrefix,
                      absl::BytesToHexString(Sha256(key).substr(0, 16)), ".");
}

// Returns the first of the checkpoint's adapters, or the end of `loaded`.
template <typename Loaded>
auto FindLoaded(Loaded& loaded, const std::string& owner,
                const CheckpointInfo& info) {
  const std::string stem = LoadedKey(owner, StemOf(info));
  const auto found = loaded.lower_bound(stem);
  const bool has =
      found != loaded.end() && absl::StartsWith(found->first, stem);
  return has ? found : loaded.end();
}

// Handles the end of a load, and tells the outcome to all sessions that wait.
void EndLoad(Front& front, const CallOrigin& origin, const std::string& adapter,
             const absl::Status& loaded) {
  const auto entry =
      front.loaded.find(LoadedKey(OwnerKey(*origin.caller), adapter));
  const auto waiting = std::exchange(entry->second.waiting, {});
  if (loaded.ok()) {
    entry->second.ready = true;
    entry->second.users = static_cast<int>(waiting.size());
    KeepAtNextStart(front, *origin.caller, adapter);
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
  front.loaded[LoadedKey(OwnerKey(*origin.caller), adapter)].waiting.push_back(
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
    const auto entry =
        front.loaded.find(LoadedKey(OwnerKey(*origin.caller), adapter));
    // The last user may have left during the call of GetAdapter.
    if (entry != front.loaded.end() && !absl::IsNotFound(found)) {
      if (!found.ok()) return done(found);
      ++entry->second.users;
      return done(adapter);
    }
    if (entry != front.loaded.end()) front.loaded.erase(entry);
    UseAdapter(front, origin, info, done);
  };
  v1::GetAdapterRequest request;
  request.set_adapter_id(adapter);
  const absl::Status refused = front.port.Call(
      origin, Rpc::kGetAdapter, request, &Engine::GetAdapter,
      [end](const absl::StatusOr<AdapterInfo>& got) { end(got.status()); });
  if (!refused.ok()) end(refused);
}

}  // namespace

void UseAdapter(Front& front, const CallOrigin& origin,
                const CheckpointInfo& info, Callback<std::string> done) {
  const std::string owner = OwnerKey(*origin.caller);
  const auto found = FindLoaded(front.loaded, owner, info);
  if (found == front.loaded.end()) {
    return StartLoad(front, origin, info, std::move(done));
  }
  if (!found->second.ready) {
    return found->second.waiting.push_back(std::move(done));
  }
  UseReady(front, origin, found->first.substr(LoadedKey(owner, "").size()),
           info, done);
}

bool HasCheckpoint(const Front& front, const std::string& owner,
                   const CheckpointInfo& info) {
  return FindLoaded(front.loaded, owner, info) != front.loaded.end();
}

void GoAtNextStart(Front& front, const Caller& caller,
                   const std::string& adapter) {
  const auto found = front.loaded.find(LoadedKey(OwnerKey(caller), adapter));
  if (found == front.loaded.end() ||
      std::exchange(found->second.goes_at_next_start, true)) {
    return;
  }
  DeleteAtNextStart(front, caller, adapter);
}

void LeaveAdapter(Front& front, const Caller& caller,
                  const std::string& adapter) {
  const auto found = front.loaded.find(LoadedKey(OwnerKey(caller), adapter));
  if (found == front.loaded.end() || --found->second.users > 0) return;
  front.loaded.erase(found);
  DeleteOrphan(front, caller, adapter);
}

void HaveAdapter(Front& front, const Caller& caller,
                 const std::string& adapter) {
  LoadedAdapter& loaded = front.loaded[LoadedKey(OwnerKey(caller), adapter)];
  loaded.ready = true;
  ++loaded.users;
}

bool IsLoaded(const Front& front, const std::string& owner,
              const std::string& adapter) {
  return front.loaded.contains(LoadedKey(owner, adapter));
}

}  // namespace weft::tinker
