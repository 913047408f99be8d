// weft.v1.SamplingService: Sample, SampleStream.
#include "server/raw_services.h"
#include "server/response_conversion.h"
#include "server/sample_stream.h"
#include "server/services.h"
#include "server/unary_call.h"

namespace weft {
namespace {

class SamplingService final : public RawSamplingService {
 public:
  explicit SamplingService(ServiceCore* core) : core_(core) {}

  grpc::ServerUnaryReactor* Sample(grpc::CallbackServerContext* context,
                                   const grpc::ByteBuffer* request,
                                   grpc::ByteBuffer* response) override {
    return RunUnary<SampleResult, v1::SampleRequest, v1::SampleResponse>(
        core_, context, Rpc::kSample, request, response,
        [](Engine& engine, SampleRequest plain, auto done) {
          return engine.Sample(std::move(plain), nullptr, std::move(done));
        },
        [](const SampleResult& result, auto* out) { ToProto(result, out); });
  }

  grpc::ServerWriteReactor<grpc::ByteBuffer>* SampleStream(
      grpc::CallbackServerContext* context,
      const grpc::ByteBuffer* request) override {
    return StartSampleStream(core_, context, request);
  }

 private:
  ServiceCore* const core_;
};

}  // namespace

std::unique_ptr<grpc::Service> MakeSamplingService(ServiceCore* core) {
  return std::make_unique<SamplingService>(core);
}

}  // namespace weft
