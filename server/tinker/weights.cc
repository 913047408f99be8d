#include <memory>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/http/replies.h"
#include "server/tinker/accounts.h"
#include "server/tinker/adapters.h"
#include "server/tinker/checkpoints.h"
#include "server/tinker/handlers.h"
#include "server/tinker/optimizers.h"
#include "server/tinker/sessions.h"
#include "server/tinker/steps.h"
#include "server/wire/field_checks.h"
#include "src/base/files/file_source.h"
#include "src/base/reason.h"
#include "src/base/sha256.h"
#include "src/base/status_macros.h"
#include "src/base/tokens.h"
#include "weft/v1/adapters.pb.h"

namespace weft::server::tinker {
namespace {

using Done = Callback<FutureResult>;

// Returns the extras with the type of the model's optimizer. A load that ended
// since the save began may have changed it.
CheckpointExtras WithOptimizer(const Front& front, const CheckpointPath& path,
                               CheckpointExtras extras) {
  if (const Model* const model = front.FindModel(path.run)) {
    extras.optimizer = model->optimizer;
  }
  if (extras.optimizer == kAdamType) extras.optimizer.clear();
  return extras;
}

// Begins to save a checkpoint. When the save has succeeded, stores the
// checkpoint's extras.
absl::Status StartSave(Front& front, const CallPtr& call,
                       const CallOrigin& origin, CheckpointKind kind,
                       const StepPlace& place, const Done& done) {
  WEFT_ASSIGN_OR_RETURN(
      const std::string name,
      Text(call->body, "path", absl::StrCat("step-", place.seq)));
  WEFT_ASSIGN_OR_RETURN(const CheckpointPath path,
                        NameCheckpoint("name", place.model, kind, name));
  WEFT_ASSIGN_OR_RETURN(const bool overwrite,
                        Bool(call->body, "overwrite", false));
  WEFT_ASSIGN_OR_RETURN(CheckpointExtras extras, ReadExtras(call->body));
  if (const Model* const model = front.FindModel(place.model)) {
    extras.base_model = model->base_model;
    extras.optimizer = model->optimizer;
  }
  WEFT_RETURN_IF_ERROR(ChargeExtras(front, call->caller, &extras));
  auto request = RequestOf<v1::SaveCheckpointRequest>(place);
  request.set_name(path.WeftName());
  request.set_overwrite(overwrite);
  return front.port.Call(
      origin, Rpc::kSaveCheckpoint, request, &engine::Engine::SaveCheckpoint,
      IfOk(done, [&front, call, path, extras,
                  done](const StepReply<CheckpointInfo>& reply) {
        KeepExtras(front, call->caller, path,
                   WithOptimizer(front, path, extras));
        if (!reply.replayed) {
          NoteEvent(front, call->caller, "create", path);
          CountUsage(front, call->owner(), std::string(SessionOf(path.run)),
                     {.checkpoints = 1});
        }
        done(OutputOf(path.run, reply.result));
      }));
}

// Promises a step that saves a checkpoint.
absl::Status PromiseSave(Front& front, const CallPtr& call, CheckpointKind kind,
                         const Respond& respond) {
  WEFT_ASSIGN_OR_RETURN(const StepPlace place, ReadPlace(call->body));
  return PromiseStep(
      front, call, Rpc::kSaveCheckpoint, place, /*cost=*/{},
      [&front, call, kind, place](const CallOrigin& origin, const Done& done) {
        return StartSave(front, call, origin, kind, place, done);
      },
      respond);
}

// Ends a load of the checkpoint with its optimizer, which becomes the model's.
// Before the first step the engine does not know it: then it is that of the
// checkpoint's extras, else the model keeps its own, and a new model has AdamW.
void EndLoad(Front& front, const Caller& caller, const std::string& id,
             const CheckpointPath& path,
             const absl::StatusOr<StepReply<AdapterInfo>>& reply) {
  Model* const model = front.FindModel(id);
  if (model == nullptr) return;
  --model->loads;
  if (!reply.ok()) return;
  const AdapterInfo& info = reply->result;
  std::string type = info.optim_steps > 0
                         ? TypeOf(info.optimizer)
                         : FindExtras(front, caller, path).optimizer;
  if (type.empty()) type = model->optimizer;
  if (type.empty()) type = kAdamType;
  if (type == model->optimizer) return;
  model->optimizer = std::move(type);
  KeepModel(front, *model, [](const absl::Status& /*kept*/) {});
}

// Begins to load the checkpoint into the model's adapter, or to make the
// adapter if there is none. The number is kCreateSeq if the load makes the
// model.
absl::Status StartLoad(Front& front, const CallPtr& call,
                       const CallOrigin& origin, const StepPlace& place,
                       const Done& done) {
  WEFT_ASSIGN_OR_RETURN(const CheckpointPath path,
                        ParseCheckpointPath(Text(call->body, "path")));
  WEFT_ASSIGN_OR_RETURN(const bool with_optimizer,
                        Bool(call->body, "optimizer", false));
  Model* const model = front.FindModel(place.model);
  if (model == nullptr) return absl::NotFoundError("no such model");
  const FutureResult loaded = FutureResult::Of({{"path", path.ToString()},
                                                {"model_id", place.model},
                                                {"type", "load_weights"}});
  if (place.seq == kCreateSeq && model->made) {
    done(loaded);
    return absl::OkStatus();
  }
  if (place.seq != kCreateSeq && AsksFor(call->body, "optimizer_config")) {
    return BadField("optimizer_config",
                    "is set, but the model has an optimizer: leave it out");
  }
  auto request = RequestOf<v1::LoadCheckpointRequest>(place);
  request.set_source_adapter_id(AdapterOfModel(path.run));
  request.set_name(path.WeftName());
  request.set_weights_only(!with_optimizer);
  const Callback<StepReply<AdapterInfo>> end =
      IfOk(done, [&front, call, id = place.model, loaded, path,
                  done](const StepReply<AdapterInfo>& /*reply*/) {
        NoteEvent(front, call->caller, "read", path, "load");
        if (front.models.contains(id)) return done(loaded);
        // The model is gone. An earlier DeleteOrphan may have run before the
        // load made the adapter, so this one deletes the adapter.
        DeleteOrphan(front, call->caller, AdapterOfModel(id));
        done(absl::NotFoundError("the session has ended"));
      });
  if (with_optimizer) ++model->loads;
  const absl::Status refused = front.port.Call(
      origin, Rpc::kLoadCheckpoint, request, &engine::Engine::LoadCheckpoint,
      [&front, call, id = place.model, path, with_optimizer,
       end](const absl::StatusOr<StepReply<AdapterInfo>>& reply) {
        if (with_optimizer) EndLoad(front, call->caller, id, path, reply);
        end(reply);
      });
  if (with_optimizer && !refused.ok()) --model->loads;
  return refused;
}

absl::Status LoadNewModel(Front& front, const CallPtr& call,
                          const Respond& respond) {
  return MakeModel(
      front, call, respond,
      [&front, call](const Model& model, const Done& done) -> absl::Status {
        WEFT_RETURN_IF_ERROR(CheckBaseModel(
            front, Text(call->body, "base_model", front.model_name())));
        WEFT_RETURN_IF_ERROR(ReadOptimizer(call->body).status());
        return StartLoad(front, call, call->origin(),
                         {.model = model.id, .seq = kCreateSeq}, done);
      });
}

// Returns the run that shall have the copy of a checkpoint: the one that the
// body names, else a new one. A repeated request gets the same run. Like all
// projects, `destination_project_id` is dropped; the SDK always sends one.
absl::StatusOr<std::string> RunOfCopy(Front& front, const Call& call,
                                      const CheckpointPath& from) {
  if (Find(call.body, "session_id") == nullptr) {
    const std::string& key = call.http.idempotency_key;
    if (key.empty()) return NewId();
    return absl::BytesToHexString(
        Sha256(
            absl::StrCat("copy ", call.owner(), " ", from.ToString(), " ", key))
            .substr(0, 16));
  }
  WEFT_ASSIGN_OR_RETURN(const Session* const session,
                        front.FindSession(call, Text(call.body, "session_id")));
  WEFT_ASSIGN_OR_RETURN(const int64_t number, Int(call.body, "model_seq_id"));
  const std::string run = absl::StrCat(session->id, ":train:", number);
  if (number >= 0 && !front.models.contains(run)) return run;
  return BadField("model_seq_id",
                  absl::StrCat("is ", number, ", must be that of no model"));
}

// Stores the extras of a copy that the engine has made. A request that comes
// again gets the same copy from the engine, also if a crash came between the
// copy and this. Returns the error that the client gets.
absl::Status EndCopy(Front& front, const Caller& caller,
                     const CheckpointPath& to, const CheckpointExtras& extras,
                     const absl::Status& copied) {
  const bool repeats =
      FindExtras(front, caller, to).copied_from == extras.copied_from;
  // The source may be another one by now, and the copy have another lifetime.
  if (repeats && (copied.ok() || absl::IsAlreadyExists(copied))) {
    return absl::OkStatus();
  }
  WEFT_RETURN_IF_ERROR(copied);
  KeepExtras(front, caller, to, extras);
  NoteEvent(front, caller, "copy", to);
  return absl::OkStatus();
}

}  // namespace

absl::Status SaveWeights(Front& front, const CallPtr& call,
                         const Respond& respond) {
  return PromiseSave(front, call, CheckpointKind::kTraining, respond);
}

absl::Status SaveWeightsForSampler(Front& front, const CallPtr& call,
                                   const Respond& respond) {
  if (Find(call->body, "sampling_session_seq_id") != nullptr) {
    return PublishSampler(front, call, respond);
  }
  return PromiseSave(front, call, CheckpointKind::kSampler, respond);
}

absl::Status SaveWeightsExternal(Front& front, const CallPtr& call,
                                 const Respond& respond) {
  return PromiseSave(front, call, CheckpointKind::kExternal, respond);
}

absl::Status CopyWeights(Front& front, const CallPtr& call,
                         const Respond& respond) {
  WEFT_RETURN_IF_ERROR(front.CheckOffered(call->body));
  WEFT_ASSIGN_OR_RETURN(const CheckpointPath from,
                        ParseCheckpointPath(Text(call->body, "source_path")));
  CheckpointPath to = from;
  WEFT_ASSIGN_OR_RETURN(to.run, RunOfCopy(front, *call, from));
  WEFT_ASSIGN_OR_RETURN(const CheckpointExtras given, ReadExtras(call->body));
  CheckpointExtras extras = FindExtras(front, call->caller, from);
  extras.expires_at = given.expires_at;
  extras.copied_from = from.ToString();
  WEFT_RETURN_IF_ERROR(ChargeExtras(front, call->caller, &extras));
  // This message has what a copy needs, and its validation.
  v1::LoadCheckpointRequest request;
  request.set_adapter_id(AdapterOfModel(to.run));
  request.set_source_adapter_id(AdapterOfModel(from.run));
  request.set_name(from.WeftName());
  if (!front.copying.insert(call->owner()).second) {
    return WithReason(
        absl::ResourceExhaustedError("another copy has not ended yet"),
        {.name = "CALLS_UNDER_WAY", .values = {{"limit", "1"}}});
  }
  const absl::Status refused = front.port.CallWith<CheckpointInfo>(
      call->origin(), Rpc::kUploadCheckpoint, request,
      [](engine::Engine& engine, LoadCheckpointRequest plain, auto then) {
        engine.UploadCheckpoint(
            {.adapter_id = std::move(plain.adapter_id),
             .name = std::move(plain.name),
             .tenant = std::move(plain.tenant),
             .files = {},
             .source_adapter_id = std::move(plain.source_adapter_id)},
            std::move(then));
      },
      [&front, call, to, extras,
       respond](const absl::StatusOr<CheckpointInfo>& info) {
        front.copying.erase(call->owner());
        const absl::Status copied =
            EndCopy(front, call->caller, to, extras, info.status());
        respond(copied.ok() ? JsonReply({{"tinker_path", to.ToString()}})
                            : ErrorReply(copied));
      });
  if (!refused.ok()) front.copying.erase(call->owner());
  return refused;
}

absl::Status LoadWeights(Front& front, const CallPtr& call,
                         const Respond& respond) {
  if (Find(call->body, "model_id") == nullptr) {
    return LoadNewModel(front, call, respond);
  }
  WEFT_ASSIGN_OR_RETURN(const StepPlace place, ReadPlace(call->body));
  return PromiseStep(
      front, call, Rpc::kLoadCheckpoint, place, /*cost=*/{},
      [&front, call, place](const CallOrigin& origin, const Done& done) {
        return StartLoad(front, call, origin, place, done);
      },
      respond);
}

namespace {

constexpr absl::Duration kUrlLifetime = absl::Hours(1);
constexpr const char* kFiles[] = {"adapter_config.json",
                                  "adapter_model.safetensors"};

constexpr uint64_t kArchivePieceBytes = 1 << 20;
constexpr size_t kMaxOpening = 256;

// The file that a signed URL opens, and the time when the URL expires.
struct Ticket {
  int64_t expires = 0;  // Unix seconds.
  std::string adapter;  // The adapter's name in the engine.
  std::string checkpoint;
  std::string file;

  // Returns the tenant of the adapter, as the name tells it.
  [[nodiscard]] std::string Owner() const {
    return adapter.substr(0, adapter.find(kTenantSeparator));
  }
  // Returns the part of the URL that is signed. No field contains a slash, so
  // no two tickets have the same part.
  [[nodiscard]] std::string Path() const {
    return absl::StrCat(expires, "/", adapter, "/", checkpoint, "/", file);
  }
};

// Returns the scheme of the URLs that the client uses. It is "https" only if a
// proxy ends TLS in front of this port and says so in X-Forwarded-Proto.
const char* SchemeOf(const HttpRequest& request) {
  return request.forwarded_proto == "https" ? "https" : "http";
}

// Returns the signed URLs of a checkpoint's files, and when they expire.
absl::StatusOr<Json> UrlsOf(const Call& call, const CheckpointPath& path) {
  std::string adapter = AdapterOfModel(path.run);
  WEFT_RETURN_IF_ERROR(call.caller.Qualify(FieldsOf(&adapter)));
  const absl::Time expires = absl::Now() + kUrlLifetime;
  Json urls = Json::object();
  for (const char* const file : kFiles) {
    const Ticket ticket{.expires = absl::ToUnixSeconds(expires),
                        .adapter = adapter,
                        .checkpoint = path.WeftName(),
                        .file = file};
    WEFT_ASSIGN_OR_RETURN(const std::string signature, Sign(ticket.Path()));
    urls[file] = absl::StrCat(SchemeOf(call.http), "://", call.http.host,
                              "/api/v1/files/", ticket.Path(), "/", signature);
  }
  return Json{{"urls", urls},
              {"expires", absl::FormatTime("%Y-%m-%dT%H:%M:%SZ", expires,
                                           absl::UTCTimeZone())}};
}

// A file that is being sent to a client.
struct Download {
  std::string owner;
  FileSource file;
  uint64_t sent = 0;
};
using DownloadPtr = std::shared_ptr<Download>;

absl::StatusOr<DownloadPtr> OpenDownload(const std::string& checkpoint_dir,
                                         const Ticket& ticket) {
  WEFT_ASSIGN_OR_RETURN(const UniqueFd root,
                        OpenDirectory(checkpoint_dir, "the checkpoints"));
  WEFT_ASSIGN_OR_RETURN(const UniqueFd adapter,
                        OpenDirectoryAt(root.get(), ticket.adapter));
  WEFT_ASSIGN_OR_RETURN(const UniqueFd checkpoint,
                        OpenDirectoryAt(adapter.get(), ticket.checkpoint));
  WEFT_ASSIGN_OR_RETURN(FileSource file,
                        FileSource::OpenAt(checkpoint.get(), ticket.file));
  return std::make_shared<Download>(
      Download{.owner = ticket.Owner(), .file = std::move(file)});
}

// Reads the next piece, of at most kArchivePieceBytes. Returns an empty piece
// if the read fails or the file has no more bytes.
std::string ReadPiece(Download* download) {
  auto piece = download->file.Read(download->sent, kArchivePieceBytes);
  if (!piece.ok()) return "";
  download->sent += piece->size();
  return *std::move(piece);
}

// Reads the next piece on a thread of front.files, and then passes it to `then`
// on the front's thread.
void NextPiece(Front& front, const DownloadPtr& download,
               const std::function<void(std::string)>& then) {
  // Moves `then`, so that the last copy ends on the front's thread. Captured
  // without an initializer, it would be const, and be copied.
  front.files.Run(download->owner, [&front, download, then = then]() mutable {
    front.port.Post([then = std::move(then),
                     piece = ReadPiece(download.get())] { then(piece); });
  });
}

HttpReply FileReply(Front& front, const absl::StatusOr<DownloadPtr>& opened) {
  if (!opened.ok()) return ErrorReply(opened.status());
  const DownloadPtr& download = *opened;
  HttpReply reply{.content_type = "application/octet-stream", .body = ""};
  reply.stream = ReplyStream{
      .size = download->file.size(),
      .next = [&front, download](const std::function<void(std::string)>& then) {
        NextPiece(front, download, then);
      }};
  return reply;
}

}  // namespace

absl::Status GetArchive(Front& front, const CallPtr& call,
                        const Respond& respond) {
  WEFT_ASSIGN_OR_RETURN(const CheckpointPath path, PathOf(*call));
  if (path.kind != CheckpointKind::kExternal) {
    return absl::InvalidArgumentError(
        "only checkpoints of save_weights_external can be downloaded");
  }
  const auto give = [&front, call, path](const CheckpointInfo& /*info*/) {
    NoteEvent(front, call->caller, "read", path, "download");
    return UrlsOf(*call, path);
  };
  return FindCheckpoint(front, call, path, ReplyWith(respond, give));
}

absl::Status DownloadFile(Front& front, const CallPtr& call,
                          const Respond& respond) {
  Ticket ticket{.adapter = call->args[1],
                .checkpoint = call->args[2],
                .file = call->args[3]};
  const bool numbered = absl::SimpleAtoi(call->args[0], &ticket.expires);
  WEFT_ASSIGN_OR_RETURN(const std::string signature, Sign(ticket.Path()));
  const bool genuine = numbered && IsSignature(call->args[4], signature);
  if (!genuine || absl::FromUnixSeconds(ticket.expires) < absl::Now()) {
    return absl::NotFoundError("the URL is not valid, or has expired");
  }
  // The disk may be slow, and a URL is asked for without a key.
  if (front.num_opening >= kMaxOpening) {
    return absl::UnavailableError("too many files are opened: ask again later");
  }
  ++front.num_opening;
  front.files.Run(
      ticket.Owner(), [&front, ticket, respond = respond]() mutable {
        const auto opened =
            OpenDownload(front.port.core()->options.checkpoint_dir, ticket);
        front.port.Post([&front, opened, respond = std::move(respond)] {
          --front.num_opening;
          respond(FileReply(front, opened));
        });
      });
  return absl::OkStatus();
}

}  // namespace weft::server::tinker
