// Creates the four services of weft.v1, and grpc.health.v1.Health.
// Threads: the services are thread-safe. REQUIRES: `core` outlives them.
#ifndef WEFT_SERVER_GRPC_SERVICES_H_
#define WEFT_SERVER_GRPC_SERVICES_H_

#include <memory>

#include "server/grpc/raw_service.h"

namespace weft::server {

std::unique_ptr<RawService> MakeTrainingService(ServiceCore* core);
std::unique_ptr<RawService> MakeSamplingService(ServiceCore* core);
std::unique_ptr<RawService> MakeAdapterService(ServiceCore* core);
std::unique_ptr<RawService> MakeServerService(ServiceCore* core);
std::unique_ptr<RawService> MakeHealthService(ServiceCore* core);

// Adds SamplingService.SampleStream. If tokens come faster than the client
// reads, they are merged into one waiting message per sample, and if too many
// wait, the call is cancelled.
void AddSampleStream(RawService* service);
// Adds AdapterService's calls that transfer files.
//
// ExportAdapter and DownloadCheckpoint send the files in pieces of up to 1 MiB,
// which they read from disk when the client has read the piece before. An
// export has no file on disk, so its bytes count in ServiceCore::memory.
//
// ImportAdapter and UploadCheckpoint receive files until the client
// half-closes. They fail with RESOURCE_EXHAUSTED if their bytes find no room in
// ServiceCore::imports.
void AddFileStreams(RawService* service);

}  // namespace weft::server

#endif  // WEFT_SERVER_GRPC_SERVICES_H_
