// Sends and receives the files of AdapterService's streaming calls.
#ifndef WEFT_CLIENT_FILE_TRANSFER_H_
#define WEFT_CLIENT_FILE_TRANSFER_H_

#include <string>

#include "absl/status/status.h"
#include "client/peft_folder.h"
#include "client/retry.h"
#include "grpcpp/grpcpp.h"

namespace weft::client {

// Sends `request`, which holds the options. Then sends the folder's files,
// which `read_folder` reads (peft_folder.h). Errors: those of `read_folder` and
// of the call.
template <typename Request, typename Read>
[[nodiscard]] absl::Status SendFiles(grpc::ClientWriter<Request>& writer,
                                     grpc::ClientContext& context,
                                     Request request, const std::string& folder,
                                     Read read_folder) {
  writer.Write(request);
  const absl::Status read =
      read_folder(folder, [&](const v1::FileChunk& chunk) {
        *request.mutable_chunk() = chunk;
        return writer.Write(request);
      });
  if (!read.ok()) context.TryCancel();
  writer.WritesDone();
  const grpc::Status status = writer.Finish();
  return read.ok() ? FromGrpcStatus(status) : read;
}

// Writes the files that `reader` receives to `folder`. Errors: those of
// PeftFolderWriter and of the call.
template <typename Response>
[[nodiscard]] absl::Status ReceiveFiles(grpc::ClientReader<Response>& reader,
                                        grpc::ClientContext& context,
                                        const std::string& folder) {
  PeftFolderWriter writer(folder);
  Response response;
  absl::Status written;
  while (written.ok() && reader.Read(&response)) {
    written = writer.Add(response.chunk());
  }
  if (!written.ok()) context.TryCancel();
  const grpc::Status status = reader.Finish();
  if (!written.ok()) return written;
  if (!status.ok()) return FromGrpcStatus(status);
  return writer.Commit();
}

}  // namespace weft::client

#endif  // WEFT_CLIENT_FILE_TRANSFER_H_
