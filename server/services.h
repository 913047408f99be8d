// The four services of weft.v1. They are created by functions, so that each
// generated gRPC header stays inside one file. Threads: the services are
// thread-safe. `core` outlives them.
#ifndef WEFT_SERVER_SERVICES_H_
#define WEFT_SERVER_SERVICES_H_

#include <memory>

#include "grpcpp/grpcpp.h"
#include "grpcpp/impl/service_type.h"
#include "server/service_core.h"

namespace weft {

[[nodiscard]] std::unique_ptr<grpc::Service> MakeTrainingService(
    ServiceCore* core);
[[nodiscard]] std::unique_ptr<grpc::Service> MakeSamplingService(
    ServiceCore* core);
[[nodiscard]] std::unique_ptr<grpc::Service> MakeAdapterService(
    ServiceCore* core);
[[nodiscard]] std::unique_ptr<grpc::Service> MakeServerService(
    ServiceCore* core);

}  // namespace weft

#endif  // WEFT_SERVER_SERVICES_H_
