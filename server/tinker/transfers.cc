#include "server/tinker/transfers.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "server/http/replies.h"
#include "server/tinker/checkpoints.h"
#include "server/tinker/credentials.h"
#include "server/tinker/front.h"
#include "server/tinker/handlers.h"
#include "server/tinker/sessions.h"
#include "server/wire/field_checks.h"
#include "src/base/observe/log.h"
#include "src/base/reason.h"
#include "src/base/sha256.h"
#include "src/base/status_macros.h"
#include "weft/v1/adapters.pb.h"

namespace weft::server::tinker {
namespace {

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
  WEFT_ASSIGN_OR_RETURN(
      const Session* const session,
      front.sessions.FindOf(call.owner(), Text(call.body, "session_id")));
  WEFT_ASSIGN_OR_RETURN(const int64_t number, Int(call.body, "model_seq_id"));
  const std::string run = absl::StrCat(session->id, ":train:", number);
  if (number >= 0 && !front.models.Has(run)) return run;
  return BadField("model_seq_id",
                  absl::StrCat("is ", number, ", must be that of no model"));
}

// Begins to copy a checkpoint to the run `to`. Gives `end` the outcome.
void StartCopy(Front& front, const CallPtr& call, const CheckpointPath& from,
               const std::string& to, uint64_t ttl_seconds,
               const std::function<void(const absl::Status&)>& end) {
  // This message has what a copy needs, and its validation.
  v1::LoadCheckpointRequest request;
  request.set_adapter_id(AdapterOfModel(to));
  request.set_source_adapter_id(AdapterOfModel(from.run));
  request.set_name(from.WeftName());
  const absl::Status refused = front.port.CallWith<CheckpointInfo>(
      call->origin(), Rpc::kUploadCheckpoint, request,
      [ttl_seconds](engine::Engine& engine, LoadCheckpointRequest plain,
                    auto then) {
        engine.UploadCheckpoint(
            {.adapter_id = std::move(plain.adapter_id),
             .name = std::move(plain.name),
             .tenant = std::move(plain.tenant),
             .files = {},
             .source_adapter_id = std::move(plain.source_adapter_id),
             .ttl_seconds = ttl_seconds},
            std::move(then));
      },
      [end](const absl::StatusOr<CheckpointInfo>& info) {
        end(info.status());
      });
  if (!refused.ok()) end(refused);
}

}  // namespace

absl::Status Transfers::Copy(
    const CallPtr& call, const CheckpointPath& from, const CheckpointPath& to,
    bool own_run, uint64_t ttl_seconds,
    const std::function<void(const absl::Status&)>& end) {
  if (!copying_.insert(call->owner()).second) {
    return WithReason(
        absl::ResourceExhaustedError("another copy has not ended yet"),
        {.name = "CALLS_UNDER_WAY", .values = {{"limit", "1"}}});
  }
  const auto finish = [this, call, end](const absl::Status& copied) {
    copying_.erase(call->owner());
    end(copied);
  };
  const auto copy = [this, call, from, to, own_run, ttl_seconds,
                     finish](const absl::StatusOr<CheckpointInfo>& there) {
    // The source may be another by now, or the copy's lifetime.
    if (there.ok() && own_run) return finish(absl::OkStatus());
    if (!there.ok() && !absl::IsNotFound(there.status())) {
      return finish(there.status());
    }
    StartCopy(front_, call, from, to.run, ttl_seconds,
              [this, call, to, finish,
               is_new = !there.ok()](const absl::Status& copied) {
                if (copied.ok() && is_new) {
                  front_.accounts.Note(call->caller, "copy", to);
                }
                finish(copied);
              });
  };
  const absl::Status refused = FindCheckpoint(front_, call, to, copy);
  if (!refused.ok()) copying_.erase(call->owner());
  return refused;
}

absl::Status CopyWeights(Front& front, const CallPtr& call,
                         const Respond& respond) {
  WEFT_RETURN_IF_ERROR(front.CheckOffered(call->body));
  WEFT_ASSIGN_OR_RETURN(const CheckpointPath from,
                        ParseCheckpointPath(Text(call->body, "source_path")));
  CheckpointPath to = from;
  WEFT_ASSIGN_OR_RETURN(to.run, RunOfCopy(front, *call, from));
  WEFT_ASSIGN_OR_RETURN(const uint64_t ttl, ReadTtl(call->body));
  const bool own_run = Find(call->body, "session_id") == nullptr;
  return front.transfers.Copy(
      call, from, to, own_run, ttl, [to, respond](const absl::Status& copied) {
        respond(copied.ok() ? JsonReply({{"tinker_path", to.ToString()}})
                            : ErrorReply(copied));
      });
}

namespace {

constexpr absl::Duration kUrlLifetime = absl::Hours(1);
constexpr const char* kFiles[] = {"adapter_config.json",
                                  "adapter_model.safetensors"};

// The file that a URL of RedirectToArchive names: a tar archive of kFiles.
constexpr char kArchive[] = "archive.tar";
constexpr size_t kTarBlock = 512;
constexpr uint64_t kMaxTarFile = uint64_t{1} << 33;  // Eleven octal digits.

constexpr uint64_t kArchivePieceBytes = 1 << 20;
// Downloads of one owner whose files are being opened.
constexpr int kMaxOpening = 64;

// Returns the scheme of the URLs that the client uses. It is "https" only if a
// proxy ends TLS in front of this port and says so in X-Forwarded-Proto.
const char* SchemeOf(const HttpRequest& request) {
  return request.forwarded_proto == "https" ? "https" : "http";
}

// Returns the signed URL of a file of a checkpoint.
absl::StatusOr<std::string> UrlOf(const Call& call, const CheckpointPath& path,
                                  const char* file, absl::Time expires) {
  std::string adapter = AdapterOfModel(path.run);
  WEFT_RETURN_IF_ERROR(call.caller.Qualify(FieldsOf(&adapter)));
  const Ticket ticket{.expires = absl::ToUnixSeconds(expires),
                      .adapter = adapter,
                      .checkpoint = path.WeftName(),
                      .file = file};
  WEFT_ASSIGN_OR_RETURN(const std::string signature, Sign(ticket.Path()));
  return absl::StrCat(SchemeOf(call.http), "://", call.http.host,
                      "/api/v1/files/", ticket.Path(), "/", signature);
}

// Returns the signed URLs of a checkpoint's files, and when they expire.
absl::StatusOr<Json> UrlsOf(const Call& call, const CheckpointPath& path) {
  const absl::Time expires = absl::Now() + kUrlLifetime;
  Json urls = Json::object();
  for (const char* const file : kFiles) {
    WEFT_ASSIGN_OR_RETURN(urls[file], UrlOf(call, path, file, expires));
  }
  return Json{{"urls", urls},
              {"expires", absl::FormatTime("%Y-%m-%dT%H:%M:%SZ", expires,
                                           absl::UTCTimeZone())}};
}

// Returns the header of a file in a tar archive (POSIX ustar), one block.
std::string TarHeader(const std::string& name, uint64_t size) {
  std::string block(kTarBlock, '\0');
  const auto put = [&block](size_t at, const std::string& text) {
    block.replace(at, text.size(), text);
  };
  put(0, name);
  put(100, "0000644");
  put(124, absl::StrFormat("%011o", size));
  put(136, "00000000000");
  put(148, "        ");  // The sum of the header counts itself as blanks.
  put(156, "0");         // A plain file.
  put(257, "ustar");
  put(263, "00");
  int sum = 0;
  for (const char c : block) sum += static_cast<unsigned char>(c);
  put(148, absl::StrFormat("%06o", sum));
  block[154] = '\0';
  return block;
}

// Returns the parts of a tar archive of the files, and of an empty file that
// says that the checkpoint is whole. The SDK's command line looks for it.
std::vector<FileSource> TarOf(std::vector<FileSource> files) {
  files.emplace_back("checkpoint_complete", "");
  std::vector<FileSource> parts;
  for (FileSource& file : files) {
    const uint64_t rest = (kTarBlock - file.size() % kTarBlock) % kTarBlock;
    parts.emplace_back("header", TarHeader(file.name(), file.size()));
    parts.push_back(std::move(file));
    parts.emplace_back("padding", std::string(rest, '\0'));
  }
  parts.emplace_back("end", std::string(2 * kTarBlock, '\0'));
  return parts;
}

// Returns the parts that the ticket names, of a checkpoint's files.
absl::StatusOr<DownloadPtr> MakeDownload(const Ticket& ticket,
                                         std::vector<FileSource> files) {
  Download download{.owner = OwnerOf(ticket.adapter)};
  std::erase_if(files, [&ticket](const FileSource& file) {
    return ticket.file == kArchive ? !std::ranges::count(kFiles, file.name())
                                   : file.name() != ticket.file;
  });
  if (files.empty()) {
    return absl::NotFoundError(absl::StrCat(ticket.file, " does not exist"));
  }
  if (ticket.file != kArchive) {
    download.parts = std::move(files);
    return std::make_shared<Download>(std::move(download));
  }
  for (const FileSource& file : files) {
    if (file.size() >= kMaxTarFile) {
      return absl::FailedPreconditionError(
          absl::StrCat(file.name(), " has ", file.size(),
                       " bytes, an archive holds files of less than ",
                       kMaxTarFile, ": use get_external_weights_urls"));
    }
  }
  download.parts = TarOf(std::move(files));
  return std::make_shared<Download>(std::move(download));
}

// Reads the next piece, of at most kArchivePieceBytes. Returns an empty piece
// if the read fails or there are no more bytes.
std::string ReadPiece(Download* download) {
  for (; download->part < download->parts.size(); ++download->part) {
    auto piece = download->parts[download->part].Read(download->sent,
                                                      kArchivePieceBytes);
    if (!piece.ok()) {
      Log(LogLevel::kWarning, "a download ends before its end",
          {{"owner", download->owner}, {"reason", piece.status().message()}});
      return "";
    }
    download->sent += piece->size();
    if (!piece->empty()) return *std::move(piece);
    download->sent = 0;
  }
  return "";
}

}  // namespace

void Transfers::NextPiece(const DownloadPtr& download,
                          const std::function<void(std::string)>& then) {
  // Moves `then`, so that the last copy ends on the front's thread. Captured
  // without an initializer, it would be const, and be copied.
  front_.files.Post(
      [this, download, then = then]() mutable {
        front_.port.Post([then = std::move(then),
                          piece = ReadPiece(download.get())] { then(piece); });
      },
      download->owner);
}

HttpReply Transfers::FileReply(const DownloadPtr& download) {
  HttpReply reply{.content_type = "application/octet-stream", .body = ""};
  uint64_t size = 0;
  for (const FileSource& part : download->parts) size += part.size();
  reply.stream = ReplyStream{
      .size = size,
      .next = [this, download](const std::function<void(std::string)>& then) {
        NextPiece(download, then);
      }};
  return reply;
}

absl::Status Transfers::Send(const Ticket& ticket, const Respond& respond) {
  // The disk may be slow, and a URL is asked for without a key.
  const std::string owner = OwnerOf(ticket.adapter);
  if (const auto open = num_opening_.find(owner);
      open != num_opening_.end() && open->second >= kMaxOpening) {
    return absl::UnavailableError("too many files are opened: ask again later");
  }
  const absl::StatusOr<engine::Engine*> engine =
      front_.port.core()->engine.GetInADrain();
  // The SDK asks again, also if another process has the state.
  if (!engine.ok()) return absl::UnavailableError(engine.status().message());
  const uint64_t number = ++last_opening_;
  opening_[number] = respond;
  ++num_opening_[owner];
  // The front may be gone when the files are open. So only what the port runs
  // may use it.
  (*engine)->DownloadCheckpoint(
      ticket.adapter, ticket.checkpoint,
      [this, port = front_.port, ticket, owner,
       number](const absl::StatusOr<std::vector<FileSource>>& files) {
        port.Post([this, ticket, owner, number, files] {
          if (--num_opening_[owner] == 0) num_opening_.erase(owner);
          const absl::StatusOr<DownloadPtr> download =
              files.ok() ? MakeDownload(ticket, *files)
                         : absl::StatusOr<DownloadPtr>(files.status());
          const auto opening = opening_.extract(number);
          opening.mapped()(download.ok() ? FileReply(*download)
                                         : ErrorReply(download.status()));
        });
      });
  return absl::OkStatus();
}

absl::Status GetArchive(Front& front, const CallPtr& call,
                        const Respond& respond) {
  WEFT_ASSIGN_OR_RETURN(const CheckpointPath path, PathOf(*call));
  if (path.kind != CheckpointKind::kExternal) {
    return absl::InvalidArgumentError(
        "only checkpoints of save_weights_external can be downloaded");
  }
  const auto give = [&front, call, path](const CheckpointInfo& /*info*/) {
    front.accounts.Note(call->caller, "read", path, "download");
    return UrlsOf(*call, path);
  };
  return FindCheckpoint(front, call, path, ReplyWith(respond, give));
}

absl::Status RedirectToArchive(Front& front, const CallPtr& call,
                               const Respond& respond) {
  WEFT_ASSIGN_OR_RETURN(const CheckpointPath path, PathOf(*call));
  const auto redirect = [&front, call, path,
                         respond](const CheckpointInfo& /*info*/) {
    const absl::Time expires = absl::Now() + kUrlLifetime;
    const auto url = UrlOf(*call, path, kArchive, expires);
    if (!url.ok()) return Fail(respond, url.status());
    front.accounts.Note(call->caller, "read", path, "download");
    HttpReply reply = JsonReply(Json::object(), 302);
    reply.headers = {
        {"Location", *url},
        {"Expires", absl::FormatTime("%a, %d %b %Y %H:%M:%S GMT", expires,
                                     absl::UTCTimeZone())}};
    respond(std::move(reply));
  };
  return FindCheckpoint(front, call, path, IfOk(respond, redirect));
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
  return front.transfers.Send(ticket, respond);
}

}  // namespace weft::server::tinker
