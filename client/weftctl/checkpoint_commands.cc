#include "absl/strings/str_cat.h"
#include "client/weftctl/commands.h"
#include "client/weftctl/output.h"

namespace weft::weftctl {
namespace {

void PrintCheckpoints(const Session& session,
                      const v1::ListCheckpointsResponse& found) {
  if (session.json) {
    PrintJson(found, session.out);
    return;
  }
  std::vector<Row> rows = {{"ADAPTER", "NAME", "STEP", "SIZE", "CREATED"}};
  for (const v1::Checkpoint& checkpoint : found.checkpoints()) {
    rows.push_back({checkpoint.adapter_id(), checkpoint.name(),
                    absl::StrCat(checkpoint.last_step()),
                    FormatBytes(checkpoint.size_bytes()),
                    FormatTime(checkpoint.created_at())});
  }
  PrintTable(rows, session.out);
}

absl::Status Save(const Session& session) {
  v1::SaveCheckpointRequest request;
  request.set_adapter_id(session.arguments.word(0));
  request.set_name(session.arguments.word(1));
  request.set_overwrite(session.arguments.Has("overwrite"));
  auto saved = session.client.SaveCheckpoint(request);
  if (!saved.ok()) return saved.status();
  v1::ListCheckpointsResponse one;
  *one.add_checkpoints() = *std::move(saved);
  PrintCheckpoints(session, one);
  return absl::OkStatus();
}

absl::Status Load(const Session& session) {
  v1::LoadCheckpointRequest request;
  request.set_adapter_id(session.arguments.word(0));
  request.set_name(session.arguments.word(1));
  request.set_source_adapter_id(session.arguments.GetString("source"));
  request.set_weights_only(session.arguments.Has("weights-only"));
  request.set_tenant(session.arguments.GetString("tenant"));
  const auto loaded = session.client.LoadCheckpoint(request);
  if (!loaded.ok()) return loaded.status();
  if (session.json) {
    PrintJson(*loaded, session.out);
  } else {
    session.out << loaded->adapter_id() << " is at step " << loaded->last_step()
                << "\n";
  }
  return absl::OkStatus();
}

absl::Status List(const Session& session) {
  const auto found = session.client.ListCheckpoints(session.arguments.word(0));
  if (!found.ok()) return found.status();
  PrintCheckpoints(session, *found);
  return absl::OkStatus();
}

absl::Status Delete(const Session& session) {
  return session.client.DeleteCheckpoint(session.arguments.word(0),
                                         session.arguments.word(1));
}

absl::Status Publish(const Session& session) {
  v1::PublishSnapshotRequest request;
  request.set_adapter_id(session.arguments.word(0));
  request.set_name(session.arguments.word(1));
  const auto version = session.client.PublishSnapshot(request);
  if (!version.ok()) return version.status();
  if (session.json) {
    session.out << "{\"version\":\"" << *version << "\"}\n";
  } else {
    session.out << "version " << *version << "\n";
  }
  return absl::OkStatus();
}

absl::Status Release(const Session& session) {
  return session.client.ReleaseSnapshot(session.arguments.word(0),
                                        session.arguments.word(1));
}

}  // namespace

std::vector<Command> CheckpointCommands() {
  const std::vector<std::string> pair = {"ADAPTER", "NAME"};
  Command list{"checkpoints list",
               "Checkpoints on the server, newest first.",
               {"ADAPTER"},
               {},
               List};
  list.last_word_optional = true;
  return {
      {"checkpoints save",
       "Save an adapter on the server.",
       pair,
       {{"overwrite", "", "replace one of the same name", ""}},
       Save},
      {"checkpoints load",
       "Load a checkpoint into an adapter.",
       pair,
       {{"source", "ADAPTER", "adapter it was saved from", ""},
        {"weights-only", "", "leave out optimizer state and steps", ""},
        TenantFlag()},
       Load},
      list,
      {"checkpoints delete", "Delete a checkpoint.", pair, {}, Delete},
      {"snapshot publish",
       "Pin the current weights under a name.",
       pair,
       {},
       Publish},
      {"snapshot release", "Let go of a snapshot.", pair, {}, Release},
  };
}

}  // namespace weft::weftctl
