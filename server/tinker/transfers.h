// Copies checkpoints, and sends their files to clients.
// Threads: the front's.
#ifndef WEFT_SERVER_TINKER_TRANSFERS_H_
#define WEFT_SERVER_TINKER_TRANSFERS_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "server/http/message.h"
#include "server/tinker/checkpoint_path.h"
#include "src/base/files/file_source.h"
#include "src/base/tokens.h"

namespace weft::server::tinker {

struct Call;   // front.h
struct Front;  // front.h

// The file that a signed URL opens, and the time when the URL expires.
struct Ticket {
  int64_t expires = 0;  // Unix seconds.
  std::string adapter;  // The adapter's name in the engine.
  std::string checkpoint;
  std::string file;

  // Returns the part of the URL that is signed. No field contains a slash, so
  // no two tickets have the same part.
  std::string Path() const {
    return absl::StrCat(expires, "/", adapter, "/", checkpoint, "/", file);
  }
};

// What is being sent to a client: files and what lies between them.
struct Download {
  std::string owner;
  std::vector<FileSource> parts = {};
  size_t part = 0;    // The part that is being sent,
  uint64_t sent = 0;  // and how many of its bytes were sent.
};
using DownloadPtr = std::shared_ptr<Download>;

class Transfers {
 public:
  // `front` outlives this object and its calls.
  explicit Transfers(Front* front) : front_(*front) {}

  // Begins to copy the checkpoint `from` to `to`, which differ in their runs.
  // `end` gets the outcome. With `own_run` the name of the run is made from the
  // request, so that an earlier one like it has made a checkpoint that is
  // there. Errors: RESOURCE_EXHAUSTED while the owner's last copy has not
  // ended; those of FindCheckpoint. After an error, `end` does not run.
  absl::Status Copy(const std::shared_ptr<const Call>& call,
                    const CheckpointPath& from, const CheckpointPath& to,
                    bool own_run, uint64_t ttl_seconds,
                    const std::function<void(const absl::Status&)>& end);
  // Opens the ticket's file and responds with it. A file that is damaged ends
  // before its last piece. Errors: UNAVAILABLE if too many files of the owner
  // are being opened, or the server ends.
  absl::Status Send(const Ticket& ticket, const Respond& respond);

 private:
  // Passes the next piece of the file to `then`, which runs on the front's
  // thread. The piece is empty if the file has no more bytes, or if the read
  // fails.
  void NextPiece(const DownloadPtr& download,
                 const std::function<void(std::string)>& then);
  HttpReply FileReply(const DownloadPtr& download);

  Front& front_;
  std::set<std::string> copying_;  // The owners whose copy has not ended.
  // Downloads whose files are opened: by a number, and how many an owner has.
  std::map<uint64_t, Respond> opening_;
  std::map<std::string, int> num_opening_;
  uint64_t last_opening_ = 0;
};

}  // namespace weft::server::tinker

#endif  // WEFT_SERVER_TINKER_TRANSFERS_H_
