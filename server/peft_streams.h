// The reactors of AdapterService's calls that transfer files: ExportAdapter,
// DownloadCheckpoint, ImportAdapter and UploadCheckpoint. A reactor frees
// itself.
#ifndef WEFT_SERVER_PEFT_STREAMS_H_
#define WEFT_SERVER_PEFT_STREAMS_H_

#include "grpcpp/grpcpp.h"
#include "server/service_core.h"

namespace weft {

// StartExport and StartDownload send the files in pieces of up to 1 MiB, which
// they read from disk when the client has read the piece before. An export has
// no file on disk, so its bytes count in ServiceCore::memory.
[[nodiscard]] grpc::ServerWriteReactor<grpc::ByteBuffer>* StartExport(
    ServiceCore* core, grpc::CallbackServerContext* context,
    const grpc::ByteBuffer* request);
[[nodiscard]] grpc::ServerWriteReactor<grpc::ByteBuffer>* StartDownload(
    ServiceCore* core, grpc::CallbackServerContext* context,
    const grpc::ByteBuffer* request);

// StartImport and StartUpload receive files until the client half-closes. They
// fail with RESOURCE_EXHAUSTED if their bytes find no room in
// ServiceCore::imports.
[[nodiscard]] grpc::ServerReadReactor<grpc::ByteBuffer>* StartImport(
    ServiceCore* core, grpc::CallbackServerContext* context,
    grpc::ByteBuffer* response);
[[nodiscard]] grpc::ServerReadReactor<grpc::ByteBuffer>* StartUpload(
    ServiceCore* core, grpc::CallbackServerContext* context,
    grpc::ByteBuffer* response);

}  // namespace weft

#endif  // WEFT_SERVER_PEFT_STREAMS_H_
