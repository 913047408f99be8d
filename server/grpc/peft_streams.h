// AdapterService's calls that transfer files: ExportAdapter,
// DownloadCheckpoint, ImportAdapter and UploadCheckpoint.
#ifndef WEFT_SERVER_GRPC_PEFT_STREAMS_H_
#define WEFT_SERVER_GRPC_PEFT_STREAMS_H_

#include "server/grpc/raw_service.h"

namespace weft::server {

// ExportAdapter and DownloadCheckpoint send the files in pieces of up to 1 MiB,
// which they read from disk when the client has read the piece before. An
// export has no file on disk, so its bytes count in ServiceCore::memory.
//
// ImportAdapter and UploadCheckpoint receive files until the client
// half-closes. They fail with RESOURCE_EXHAUSTED if their bytes find no room in
// ServiceCore::imports.
void AddFileStreams(RawService* service);

}  // namespace weft::server

#endif  // WEFT_SERVER_GRPC_PEFT_STREAMS_H_
