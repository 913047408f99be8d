// Joins the messages of ImportAdapter, or of UploadCheckpoint, into one
// request.
// Threads: not thread-safe.
#ifndef WEFT_SERVER_FILE_ASSEMBLER_H_
#define WEFT_SERVER_FILE_ASSEMBLER_H_

#include <cstddef>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "src/request/adapter.h"
#include "src/request/checkpoint.h"
#include "weft/v1/adapters.pb.h"

namespace weft {

// Joins the messages of a stream that uploads files into one request.
// ImportAssembler and UploadAssembler are the two instances.
template <typename Message, typename Options, typename Request>
class FileAssembler {
 public:
  static constexpr size_t kMaxFiles = 16;
  static constexpr size_t kMaxChunkBytes = 1 << 20;

  virtual ~FileAssembler() = default;

  // Adds a message. The first message has the options. Every later message has
  // a chunk of a file. The chunks of a file come one after another. Errors:
  // INVALID_ARGUMENT for a message out of order, an invalid field, or more than
  // kMaxFiles files.
  [[nodiscard]] absl::Status Add(const Message& message);

  // Returns the joined request and empties the assembler. Call it when the
  // stream has ended. Errors: INVALID_ARGUMENT if the options or
  // adapter_config.json are missing.
  [[nodiscard]] absl::StatusOr<Request> Finish();

 protected:
  explicit FileAssembler(bool engine_names) : engine_names_(engine_names) {}

  [[nodiscard]] virtual absl::Status ReadOptions(const Options& options) = 0;

  bool engine_names_;
  Request request_;

 private:
  [[nodiscard]] absl::Status AddChunk(const v1::FileChunk& chunk);

  bool has_options_ = false;
};

class ImportAssembler final
    : public FileAssembler<v1::ImportAdapterRequest, v1::ImportOptions,
                           ImportAdapterRequest> {
 public:
  // If `engine_names`, an adapter's name may be TENANT~ID.
  explicit ImportAssembler(bool engine_names = true)
      : FileAssembler(engine_names) {}

 private:
  [[nodiscard]] absl::Status ReadOptions(
      const v1::ImportOptions& options) override;
};

class UploadAssembler final
    : public FileAssembler<v1::UploadCheckpointRequest, v1::UploadOptions,
                           UploadCheckpointRequest> {
 public:
  explicit UploadAssembler(bool engine_names = true)
      : FileAssembler(engine_names) {}

 private:
  [[nodiscard]] absl::Status ReadOptions(
      const v1::UploadOptions& options) override;
};

}  // namespace weft

#endif  // WEFT_SERVER_FILE_ASSEMBLER_H_
