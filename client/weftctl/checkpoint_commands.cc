#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "client/weftctl/commands.h"
#include "client/weftctl/output.h"
#include "src/base/status_macros.h"

namespace weft::client::weftctl {
namespace {

const char* KindName(v1::CheckpointKind kind) {
  return kind == v1::CHECKPOINT_KIND_SAMPLER ? "sampler" : "train";
}

absl::Status Print(const Session& session,
                   const absl::StatusOr<v1::ListCheckpointsResponse>& found) {
  if (!found.ok()) return found.status();
  if (session.json) {
    PrintJson(*found, session.out);
    return absl::OkStatus();
  }
  std::vector<Row> rows = {{"ADAPTER", "NAME", "KIND", "STEP", "SIZE",
                            "CREATED", "EXPIRES", "BASE MODEL"}};
  for (const v1::Checkpoint& checkpoint : found->checkpoints()) {
    rows.push_back(
        {checkpoint.adapter_id(), checkpoint.name(),
         KindName(checkpoint.kind()), absl::StrCat(checkpoint.last_step()),
         FormatBytes(checkpoint.size_bytes()),
         FormatTime(checkpoint.created_at()),
         checkpoint.expires_at() > 0 ? FormatTime(checkpoint.expires_at())
                                     : "never",
         checkpoint.base_model()});
  }
  PrintTable(rows, session.out);
  return absl::OkStatus();
}

absl::Status Print(const Session& session,
                   const absl::StatusOr<v1::Checkpoint>& checkpoint) {
  if (!checkpoint.ok()) return checkpoint.status();
  v1::ListCheckpointsResponse one;
  *one.add_checkpoints() = *checkpoint;
  return Print(session, one);
}

// Returns a request about the checkpoint or snapshot that the first two words
// name.
template <typename Request>
Request MakeRequest(const Arguments& arguments) {
  Request request;
  request.set_adapter_id(arguments.word(0));
  request.set_name(arguments.word(1));
  return request;
}

// Reads the entries of --metadata KEY=VALUE,KEY=VALUE.
absl::Status ReadMetadata(const std::string& text,
                          v1::SaveCheckpointRequest* request) {
  for (const absl::string_view entry :
       absl::StrSplit(text, ',', absl::SkipEmpty())) {
    const std::pair<std::string, std::string> parts =
        absl::StrSplit(entry, absl::MaxSplits('=', 1));
    if (!absl::StrContains(entry, '=')) {
      return UsageError(
          absl::StrCat("--metadata: '", entry, "' is not KEY=VALUE"));
    }
    (*request->mutable_metadata())[parts.first] = parts.second;
  }
  return absl::OkStatus();
}

absl::Status ReadProperties(const Arguments& arguments,
                            v1::SaveCheckpointRequest* request) {
  const std::string kind = arguments.GetString("kind");
  if (kind == KindName(v1::CHECKPOINT_KIND_SAMPLER)) {
    request->set_kind(v1::CHECKPOINT_KIND_SAMPLER);
  } else if (kind != KindName(v1::CHECKPOINT_KIND_TRAIN)) {
    return UsageError(
        absl::StrCat("--kind: '", kind, "' is neither train nor sampler"));
  }
  WEFT_ASSIGN_OR_RETURN(const auto ttl, arguments.GetInt("ttl"));
  WEFT_ASSIGN_OR_RETURN(const auto keep, arguments.GetUint32("keep-newest"));
  request->set_ttl_seconds(static_cast<uint64_t>(ttl));
  request->set_keep_newest(keep);
  return ReadMetadata(arguments.GetString("metadata"), request);
}

absl::Status SaveCheckpoint(const Session& session) {
  auto request = MakeRequest<v1::SaveCheckpointRequest>(session.arguments);
  request.set_overwrite(session.arguments.Has("overwrite"));
  WEFT_RETURN_IF_ERROR(ReadProperties(session.arguments, &request));
  return Print(session, session.client.SaveCheckpoint(request));
}

absl::Status LoadCheckpoint(const Session& session) {
  WEFT_ASSIGN_OR_RETURN(const auto durability,
                        ReadDurability(session.arguments));
  auto request = MakeRequest<v1::LoadCheckpointRequest>(session.arguments);
  request.set_durability(durability);
  request.set_source_adapter_id(session.arguments.GetString("source"));
  request.set_weights_only(session.arguments.Has("weights-only"));
  request.set_tenant(session.arguments.GetString("tenant"));
  WEFT_ASSIGN_OR_RETURN(const auto loaded,
                        session.client.LoadCheckpoint(request));
  if (session.json) {
    PrintJson(loaded, session.out);
  } else {
    session.out << Printable(loaded.adapter_id()) << " is at step "
                << loaded.last_step() << "\n";
  }
  return absl::OkStatus();
}

absl::Status ListCheckpoints(const Session& session) {
  return Print(session,
               session.client.ListCheckpoints(session.arguments.word(0)));
}

absl::Status DeleteCheckpoint(const Session& session) {
  return session.client.DeleteCheckpoint(session.arguments.word(0),
                                         session.arguments.word(1));
}

absl::Status SetCheckpointTtl(const Session& session) {
  auto request = MakeRequest<v1::SetCheckpointTtlRequest>(session.arguments);
  WEFT_ASSIGN_OR_RETURN(const auto ttl, session.arguments.GetInt("ttl"));
  request.set_ttl_seconds(static_cast<uint64_t>(ttl));
  return Print(session, session.client.SetCheckpointTtl(request));
}

absl::Status DownloadCheckpoint(const Session& session) {
  return session.client.DownloadCheckpoint(session.arguments.word(0),
                                           session.arguments.word(1),
                                           session.arguments.word(2));
}

absl::Status UploadCheckpoint(const Session& session) {
  auto options = MakeRequest<v1::UploadOptions>(session.arguments);
  options.set_overwrite(session.arguments.Has("overwrite"));
  options.set_tenant(session.arguments.GetString("tenant"));
  return Print(session, session.client.UploadCheckpoint(
                            options, session.arguments.word(2)));
}

absl::Status PublishSnapshot(const Session& session) {
  const auto request =
      MakeRequest<v1::PublishSnapshotRequest>(session.arguments);
  WEFT_ASSIGN_OR_RETURN(const auto version,
                        session.client.PublishSnapshot(request));
  if (session.json) {
    session.out << "{\"version\":\"" << version << "\"}\n";
  } else {
    session.out << "version " << version << "\n";
  }
  return absl::OkStatus();
}

absl::Status ReleaseSnapshot(const Session& session) {
  return session.client.ReleaseSnapshot(session.arguments.word(0),
                                        session.arguments.word(1));
}

}  // namespace

std::vector<Command> CheckpointCommands() {
  const std::vector<std::string> pair = {"ADAPTER", "NAME"};
  return {
      {"checkpoints save",
       "Save an adapter on the server.",
       SaveCheckpoint,
       pair,
       {{"overwrite", "", "replace one of the same name", ""},
        {"kind", "KIND", "train, or sampler: weights only", "train"},
        {"metadata", "KEY=VALUE,...", "entries of your own", ""},
        {"ttl", "SECONDS", "the server deletes it then; 0: never", "0"},
        {"keep-newest", "N",
         "delete the adapter's older ones of this kind; 0: none", "0"}}},
      {"checkpoints load",
       "Load a checkpoint into an adapter.",
       LoadCheckpoint,
       pair,
       {{"source", "ADAPTER", "adapter it was saved from", ""},
        {"weights-only", "", "leave out optimizer state and steps", ""},
        DurabilityFlag(),
        TenantFlag()}},
      {.name = "checkpoints list",
       .help = "Checkpoints on the server, newest first.",
       .run = ListCheckpoints,
       .words = {"ADAPTER"},
       .last_word_optional = true},
      {"checkpoints delete", "Delete a checkpoint.", DeleteCheckpoint, pair},
      {"checkpoints expire",
       "Set anew when the server deletes a checkpoint.",
       SetCheckpointTtl,
       pair,
       {{"ttl", "SECONDS", "the server deletes it then; 0: never", "0"}}},
      {"checkpoints download",
       "Write a checkpoint's files to a local folder.",
       DownloadCheckpoint,
       {"ADAPTER", "NAME", "FOLDER"}},
      {"checkpoints upload",
       "Make a checkpoint from a downloaded folder.",
       UploadCheckpoint,
       {"ADAPTER", "NAME", "FOLDER"},
       {{"overwrite", "", "replace one of the same name", ""}, TenantFlag()}},
      {"snapshot publish", "Pin the current weights under a name.",
       PublishSnapshot, pair},
      {"snapshot release", "Let go of a snapshot.", ReleaseSnapshot, pair}};
}

}  // namespace weft::client::weftctl
