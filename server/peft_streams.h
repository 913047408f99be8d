// The reactors of AdapterService's calls that transfer files: ExportAdapter,
// DownloadCheckpoint, ImportAdapter and UploadCheckpoint. A reactor frees
// itself.
#ifndef WEFT_SERVER_PEFT_STREAMS_H_
#define WEFT_SERVER_PEFT_STREAMS_H_

#include "grpcpp/grpcpp.h"
#include "server/service_core.h"
#include "weft/v1/adapters.pb.h"

namespace weft {

// StartExport and StartDownload send the files in pieces of up to 1 MiB, which
// they read from disk when the client has read the piece before. An export has
// no file on disk, so its bytes count in ServiceCore::memory.
[[nodiscard]] grpc::ServerWriteReactor<v1::ExportAdapterResponse>* StartExport(
    ServiceCore* core, grpc::CallbackServerContext* context,
    const v1::ExportAdapterRequest& request);
[[nodiscard]] grpc::ServerWriteReactor<v1::DownloadCheckpointResponse>*
StartDownload(ServiceCore* core, grpc::CallbackServerContext* context,
              const v1::DownloadCheckpointRequest& request);

// StartImport and StartUpload receive files until the client half-closes. They
// fail with RESOURCE_EXHAUSTED if their bytes find no room in
// ServiceCore::imports.
[[nodiscard]] grpc::ServerReadReactor<v1::ImportAdapterRequest>* StartImport(
    ServiceCore* core, grpc::CallbackServerContext* context,
    v1::ImportAdapterResponse* response);
[[nodiscard]] grpc::ServerReadReactor<v1::UploadCheckpointRequest>* StartUpload(
    ServiceCore* core, grpc::CallbackServerContext* context,
    v1::UploadCheckpointResponse* response);

}  // namespace weft

#endif  // WEFT_SERVER_PEFT_STREAMS_H_
