// Creates the four services of weft.v1, and grpc.health.v1.Health.
// Threads: the services are thread-safe. REQUIRES: `core` outlives them.
#ifndef WEFT_SERVER_GRPC_SERVICES_H_
#define WEFT_SERVER_GRPC_SERVICES_H_

#include <memory>

#include "server/grpc/raw_service.h"

namespace weft::server {

[[nodiscard]] std::unique_ptr<RawService> MakeTrainingService(
    ServiceCore* core);
[[nodiscard]] std::unique_ptr<RawService> MakeSamplingService(
    ServiceCore* core);
[[nodiscard]] std::unique_ptr<RawService> MakeAdapterService(ServiceCore* core);
[[nodiscard]] std::unique_ptr<RawService> MakeServerService(ServiceCore* core);
[[nodiscard]] std::unique_ptr<RawService> MakeHealthService(ServiceCore* core);

}  // namespace weft::server

#endif  // WEFT_SERVER_GRPC_SERVICES_H_
