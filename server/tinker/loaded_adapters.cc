#include "server/tinker/loaded_adapters.h"

#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "server/tinker/reaper.h"
#include "src/base/sha256.h"
#include "weft/v1/adapters.pb.h"

namespace weft::tinker {
namespace {

using State = LoadedAdapter::State;

std::string LoadedKey(const std::string& owner, const std::string& adapter) {
  return absl::StrCat(owner, " ", adapter);
}

// Handles the end of a load, and tells the outcome to all sessions that wait.
void EndLoad(Front& front, const CallOrigin& origin, const std::string& adapter,
             const absl::Status& loaded) {
  const std::string key = LoadedKey(OwnerKey(*origin.caller), adapter);
  LoadedAdapter& entry = front.loaded.at(key);
  const auto waiting = std::exchange(entry.waiting, {});
  if (loaded.ok()) {
    entry.state = State::kReady;
    entry.users += static_cast<int>(waiting.size());
    KeepAtNextStart(front, *origin.caller, adapter);
  } else {
    // `users` counts sessions from before this load. Each of them will call
    // LeaveAdapter with this adapter's name when it ends. If the entry were
    // erased now, these calls would subtract users of a later load.
    if (entry.users > 0) {
      entry.state = State::kLeaving;
    } else {
      front.loaded.erase(key);
    }
    DeleteOrphan(front, *origin.caller, adapter);
  }
  for (const auto& done : waiting) done(loaded);
}

void StartLoad(Front& front, const CallOrigin& origin,
               const std::string& adapter, const CheckpointInfo& info) {
  DeleteAtNextStart(front, *origin.caller, adapter);
  v1::LoadCheckpointRequest request;
  request.set_adapter_id(adapter);
  request.set_source_adapter_id(info.adapter_id);
  request.set_name(info.name);
  request.set_weights_only(true);
  const absl::Status refused = front.port.Call<StepReply<AdapterInfo>>(
      origin, Rpc::kLoadCheckpoint, request,
      [](Engine& engine, LoadCheckpointRequest plain, auto then) {
        engine.LoadCheckpoint(std::move(plain), std::move(then));
      },
      [&front, origin,
       adapter](const absl::StatusOr<StepReply<AdapterInfo>>& reply) {
        EndLoad(front, origin, adapter, reply.status());
      });
  if (!refused.ok()) EndLoad(front, origin, adapter, refused);
}

// Counts a user of an adapter whose state is kReady. If a client has deleted
// the adapter over gRPC, loads the adapter again.
void UseReady(Front& front, const CallOrigin& origin,
              const std::string& adapter, const CheckpointInfo& info,
              const std::function<void(const absl::Status&)>& done) {
  const auto end = [&front, origin, adapter, info,
                    done](const absl::Status& found) {
    const auto entry =
        front.loaded.find(LoadedKey(OwnerKey(*origin.caller), adapter));
    // The state may have changed during the call of GetAdapter: the last user
    // may have left, or another session may load the adapter again.
    if (entry == front.loaded.end() || entry->second.state != State::kReady) {
      return UseAdapter(front, origin, info, done);
    }
    if (found.ok()) ++entry->second.users;
    if (!absl::IsNotFound(found)) return done(found);
    entry->second.state = State::kLoading;
    entry->second.waiting.push_back(done);
    StartLoad(front, origin, adapter, info);
  };
  v1::GetAdapterRequest request;
  request.set_adapter_id(adapter);
  const absl::Status refused = front.port.Call<AdapterInfo>(
      origin, Rpc::kGetAdapter, request,
      [](Engine& engine, std::string id, auto then) {
        engine.GetAdapter(std::move(id), std::move(then));
      },
      [end](const absl::StatusOr<AdapterInfo>& got) { end(got.status()); });
  if (!refused.ok()) end(refused);
}

}  // namespace

std::string AdapterOfCheckpoint(const CheckpointInfo& info) {
  const std::string key = absl::StrCat(info.adapter_id, "/", info.name, "@",
                                       absl::ToUnixNanos(info.created_at));
  return absl::StrCat(kSamplerAdapterPrefix,
                      absl::BytesToHexString(Sha256(key).substr(0, 16)));
}

void UseAdapter(Front& front, const CallOrigin& origin,
                const CheckpointInfo& info,
                std::function<void(const absl::Status&)> done) {
  const std::string adapter = AdapterOfCheckpoint(info);
  const std::string key = LoadedKey(OwnerKey(*origin.caller), adapter);
  const auto [entry, added] = front.loaded.try_emplace(key);
  LoadedAdapter& loaded = entry->second;
  if (loaded.state == State::kReady) {
    return UseReady(front, origin, adapter, info, done);
  }
  loaded.waiting.push_back(std::move(done));
  // An old adapter of this name may still wait for its deletion, for example
  // after its last user has left. The old adapter must be gone before the load
  // begins. The first session that waits for the load has the old one deleted.
  const bool leaves =
      added ? IsOrphan(front, *origin.caller, adapter)
            : loaded.state == State::kLeaving && loaded.waiting.size() == 1;
  if (leaves) {
    loaded.state = State::kLeaving;
    // After the deletion, this session loads the adapter for all sessions that
    // wait.
    DeleteOrphan(front, *origin.caller, adapter,
                 [&front, key, origin, adapter, info] {
                   front.loaded.at(key).state = State::kLoading;
                   StartLoad(front, origin, adapter, info);
                 });
  } else if (added) {
    StartLoad(front, origin, adapter, info);
  }
}

void LeaveAdapter(Front& front, const Caller& caller,
                  const std::string& adapter) {
  const std::string key = LoadedKey(OwnerKey(caller), adapter);
  const auto found = front.loaded.find(key);
  if (found == front.loaded.end() || --found->second.users > 0) return;
  // Keeps an adapter if other sessions wait for its load. EndLoad then counts
  // these sessions as users, or has the adapter deleted if the load fails.
  if (!found->second.waiting.empty()) return;
  found->second.state = State::kLeaving;
  DeleteOrphan(front, caller, adapter, [&front, key] {
    const auto left = front.loaded.find(key);
    if (left != front.loaded.end() && left->second.waiting.empty()) {
      front.loaded.erase(left);
    }
  });
}

void HaveAdapter(Front& front, const Caller& caller,
                 const std::string& adapter) {
  LoadedAdapter& loaded = front.loaded[LoadedKey(OwnerKey(caller), adapter)];
  loaded.state = State::kReady;
  ++loaded.users;
}

bool IsLoaded(const Front& front, const std::string& owner,
              const std::string& adapter) {
  return front.loaded.contains(LoadedKey(owner, adapter));
}

}  // namespace weft::tinker
