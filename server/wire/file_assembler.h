// Joins the messages of ImportAdapter, or of UploadCheckpoint, into one
// request.
// Threads: not thread-safe.
#ifndef WEFT_SERVER_WIRE_FILE_ASSEMBLER_H_
#define WEFT_SERVER_WIRE_FILE_ASSEMBLER_H_

#include <cstddef>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "src/request/adapter.h"
#include "src/request/checkpoint.h"
#include "weft/v1/adapters.pb.h"

namespace weft::server {

// Return a request without files. An adapter's name may be TENANT~ID if
// `engine_names`. Errors: INVALID_ARGUMENT.
absl::StatusOr<ImportAdapterRequest> ReadOptions(
    const v1::ImportOptions& options, bool engine_names);
absl::StatusOr<UploadCheckpointRequest> ReadOptions(
    const v1::UploadOptions& options, bool engine_names);

// `Message` is v1::ImportAdapterRequest or v1::UploadCheckpointRequest.
template <typename Message>
class FileAssembler {
 public:
  using Request = typename decltype(ReadOptions(
      std::declval<Message>().options(), true))::value_type;
  static constexpr size_t kMaxFiles = 16;
  static constexpr size_t kMaxChunkBytes = 1 << 20;

  explicit FileAssembler(bool engine_names = true)
      : engine_names_(engine_names) {}

  // Adds a message. The first message has the options. Every later message has
  // a chunk of a file. The chunks of a file come one after another. Errors:
  // INVALID_ARGUMENT for a message out of order, an invalid field, or more than
  // kMaxFiles files.
  absl::Status Add(const Message& message);

  // Returns the joined request and empties the assembler. Call it when the
  // stream has ended. Errors: INVALID_ARGUMENT if the options or
  // adapter_config.json are missing.
  absl::StatusOr<Request> Finish();

 private:
  absl::Status AddChunk(const v1::FileChunk& chunk);

  bool engine_names_;
  std::optional<Request> request_;  // Once the options are there.
};

}  // namespace weft::server

#endif  // WEFT_SERVER_WIRE_FILE_ASSEMBLER_H_
