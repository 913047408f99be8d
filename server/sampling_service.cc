// weft.v1.SamplingService: Sample, SampleStream.
#include "server/response_conversion.h"
#include "server/sample_stream.h"
#include "server/services.h"
#include "server/unary_call.h"
#include "weft/v1/sampling.grpc.pb.h"

namespace weft {
namespace {

class SamplingService final : public v1::SamplingService::CallbackService {
 public:
  explicit SamplingService(ServiceCore* core) : core_(core) {}

  grpc::ServerUnaryReactor* Sample(grpc::CallbackServerContext* context,
                                   const v1::SampleRequest* request,
                                   v1::SampleResponse* response) override {
    return RunUnary<SampleResult>(
        core_, context, Rpc::kSample, *request, response,
        [](Engine& engine, SampleRequest plain, auto done) {
          return engine.Sample(std::move(plain), nullptr, std::move(done));
        },
        [response](const SampleResult& result) { ToProto(result, response); });
  }

  grpc::ServerWriteReactor<v1::SampleStreamResponse>* SampleStream(
      grpc::CallbackServerContext* context,
      const v1::SampleStreamRequest* request) override {
    return StartSampleStream(core_, context, *request);
  }

 private:
  ServiceCore* const core_;
};

}  // namespace

std::unique_ptr<grpc::Service> MakeSamplingService(ServiceCore* core) {
  return std::make_unique<SamplingService>(core);
}

}  // namespace weft
