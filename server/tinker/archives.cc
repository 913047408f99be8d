#include "server/tinker/archives.h"

#include <openssl/crypto.h>

#include <memory>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/tinker/audit.h"
#include "server/tinker/models.h"
#include "server/tinker/runs.h"
#include "server/tinker/signature.h"
#include "src/base/file_source.h"
#include "src/base/status_macros.h"
#include "src/base/tokens.h"

namespace weft::tinker {
namespace {

constexpr const char* kFiles[] = {"adapter_config.json",
                                  "adapter_model.safetensors"};

constexpr uint64_t kArchivePieceBytes = 1 << 20;
// The pause before the next try when Front::files refuses a read.
constexpr absl::Duration kBusyPause = absl::Milliseconds(50);

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
// on the front's thread. If front.files refuses the read, tries again later.
void NextPiece(Front& front, const DownloadPtr& download,
               const std::function<void(std::string)>& then) {
  const bool taken = front.files.TryRun(download->owner, [&front, download,
                                                          then] {
    front.port.Post([then, piece = ReadPiece(download.get())] { then(piece); });
  });
  if (taken) return;
  front.after(kBusyPause,
              [&front, download, then] { NextPiece(front, download, then); });
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
  WEFT_ASSIGN_OR_RETURN(
      const CheckpointPath path,
      ParseCheckpointId(call->args[0],
                        absl::StrCat(call->args[1], "/", call->args[2])));
  if (path.kind != CheckpointKind::kExternal) {
    return absl::InvalidArgumentError(
        "only checkpoints of save_weights_external can be downloaded");
  }
  return FindCheckpoint(
      front, call, path,
      [&front, call, path,
       respond](const absl::StatusOr<CheckpointInfo>& info) {
        if (!info.ok()) return respond(ErrorReply(info.status()));
        NoteEvent(front, call->caller, "read", path, "download");
        const absl::StatusOr<Json> urls = UrlsOf(*call, path);
        respond(urls.ok() ? JsonReply(*urls) : ErrorReply(urls.status()));
      });
}

absl::Status DownloadFile(Front& front, const CallPtr& call,
                          const Respond& respond) {
  Ticket ticket{.adapter = call->args[1],
                .checkpoint = call->args[2],
                .file = call->args[3]};
  const bool numbered = absl::SimpleAtoi(call->args[0], &ticket.expires);
  WEFT_ASSIGN_OR_RETURN(const std::string signature, Sign(ticket.Path()));
  const std::string& given = call->args[4];
  const bool genuine =
      numbered && given.size() == signature.size() &&
      CRYPTO_memcmp(given.data(), signature.data(), signature.size()) == 0;
  if (!genuine || absl::FromUnixSeconds(ticket.expires) < absl::Now()) {
    return absl::NotFoundError("the URL is not valid, or has expired");
  }
  const bool taken =
      front.files.TryRun(ticket.Owner(), [&front, ticket, respond] {
        const auto opened =
            OpenDownload(front.port.core()->options.checkpoint_dir, ticket);
        front.port.Post(
            [&front, opened, respond] { respond(FileReply(front, opened)); });
      });
  if (taken) return absl::OkStatus();
  return absl::UnavailableError("too many files are read: come again later");
}

}  // namespace weft::tinker
