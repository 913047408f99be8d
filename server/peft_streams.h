// The reactors of AdapterService's calls that transfer files: ExportAdapter,
// DownloadCheckpoint, ImportAdapter and UploadCheckpoint. A reactor frees
// itself.
#ifndef WEFT_SERVER_PEFT_STREAMS_H_
#define WEFT_SERVER_PEFT_STREAMS_H_

#include "grpcpp/grpcpp.h"
#include "server/service_core.h"

namespace weft {

// StartExport and StartDownload send the files in pieces of up to 1 MiB.
[[nodiscard]] grpc::ServerWriteReactor<grpc::ByteBuffer>* StartExport(
    ServiceCore* core, grpc::CallbackServerContext* context,
    const grpc::ByteBuffer* request);
[[nodiscard]] grpc::ServerWriteReactor<grpc::ByteBuffer>* StartDownload(
    ServiceCore* core, grpc::CallbackServerContext* context,
    const grpc::ByteBuffer* request);

// StartImport and StartUpload receive files until the client half-closes. They
// fail with RESOURCE_EXHAUSTED if all open imports and uploads together hold
// more than ServerOptions::max_import_bytes.
[[nodiscard]] grpc::ServerReadReactor<grpc::ByteBuffer>* StartImport(
    ServiceCore* core, grpc::CallbackServerContext* context,
    grpc::ByteBuffer* response);
[[nodiscard]] grpc::ServerReadReactor<grpc::ByteBuffer>* StartUpload(
    ServiceCore* core, grpc::CallbackServerContext* context,
    grpc::ByteBuffer* response);

}  // namespace weft

#endif  // WEFT_SERVER_PEFT_STREAMS_H_
