// The reactors behind AdapterService.ExportAdapter and ImportAdapter. A reactor
// frees itself.
#ifndef WEFT_SERVER_PEFT_STREAMS_H_
#define WEFT_SERVER_PEFT_STREAMS_H_

#include "grpcpp/grpcpp.h"
#include "server/service_core.h"
#include "weft/v1/adapters.pb.h"

namespace weft {

// Sends the files in pieces of up to 1 MiB.
[[nodiscard]] grpc::ServerWriteReactor<v1::ExportAdapterResponse>* StartExport(
    ServiceCore* core, grpc::CallbackServerContext* context,
    const v1::ExportAdapterRequest& request);

// Receives files until the client half-closes. Fails with RESOURCE_EXHAUSTED if
// all open imports together hold more than ServerOptions::max_import_bytes.
[[nodiscard]] grpc::ServerReadReactor<v1::ImportAdapterRequest>* StartImport(
    ServiceCore* core, grpc::CallbackServerContext* context,
    v1::ImportAdapterResponse* response);

}  // namespace weft

#endif  // WEFT_SERVER_PEFT_STREAMS_H_
