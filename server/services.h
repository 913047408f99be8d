// Creates the four services of weft.v1. Their classes are hidden behind
// functions, so that only one file includes each generated header *.grpc.pb.h.
// Threads: the services are thread-safe. REQUIRES: `core` outlives them.
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
