// weft.v1.SamplingService: Sample, SampleStream.
#include "server/grpc/services.h"
#include "server/grpc/unary_call.h"
#include "weft/v1/sampling.pb.h"

namespace weft::server {

std::unique_ptr<RawService> MakeSamplingService(ServiceCore* core) {
  auto service = std::make_unique<RawService>(core);
  AddUnary<v1::SampleRequest, v1::SampleResponse>(
      service.get(), Rpc::kSample,
      [](engine::Engine& engine, SampleRequest plain, auto done) {
        return engine.Sample(std::move(plain), nullptr, std::move(done));
      });
  AddSampleStream(service.get());
  return service;
}

}  // namespace weft::server
