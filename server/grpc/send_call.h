// A call that sends files, in pieces of up to 1 MiB.
#ifndef WEFT_SERVER_GRPC_SEND_CALL_H_
#define WEFT_SERVER_GRPC_SEND_CALL_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "server/grpc/call_reactor.h"
#include "src/base/files/file_source.h"

namespace weft::server {

// Response has a chunk with a name and data, or a piece of a trace. A piece is
// read when the client has read the piece before.
template <typename Request, typename Response>
class SendCall : public RequestReactor<Request> {
 public:
  using RequestReactor<Request>::RequestReactor;

 protected:
  // Charges the caller for what SendFiles takes: a piece as it is read, as a
  // message and as bytes, and open files. These are scarcer than memory, so it
  // is much.
  absl::Status HoldPieces() { return this->record().Hold(int64_t{8} << 20); }

  // Sends the files and ends the call. REQUIRES: HoldPieces has returned OK.
  void SendFiles(std::vector<FileSource> files) {
    files_ = std::move(files);
    SendNext();
  }

 private:
  static constexpr uint64_t kChunkBytes = 1 << 20;

  // Reads and sends the next piece, or sends the status after the last one. An
  // empty file is sent as one empty piece, so that the client gets its name.
  void SendNext() {
    if (file_ == files_.size()) return this->End(absl::OkStatus());
    const auto send = [this] {
      absl::StatusOr<std::string> piece =
          files_[file_].Read(offset_, kChunkBytes);
      piece.ok() ? SendPiece(*std::move(piece)) : this->End(piece.status());
    };
    this->record().core()->files.Post(send, this->record().caller()->tenant());
  }

  void SendPiece(std::string piece) {
    const FileSource& file = files_[file_];
    offset_ += piece.size();
    if (piece.empty() && offset_ < file.size()) {
      return this->End(
          absl::DataLossError(file.name() + " has become shorter"));
    }
    Response message;
    if constexpr (requires { message.mutable_chunk(); }) {
      message.mutable_chunk()->set_name(file.name());
      message.mutable_chunk()->set_data(std::move(piece));
    } else {
      message.set_trace(std::move(piece));
    }
    if (offset_ == file.size()) {
      ++file_;
      offset_ = 0;
    }
    this->Write(message);
  }

  void OnWriteDone(bool ok) override {
    this->record().StopAwaiting();
    if (!ok) return this->End(absl::CancelledError("the client went away"));
    SendNext();
  }

  std::vector<FileSource> files_;
  size_t file_ = 0;      // The next file to send.
  uint64_t offset_ = 0;  // The next byte of this file to send.
};

}  // namespace weft::server

#endif  // WEFT_SERVER_GRPC_SEND_CALL_H_
