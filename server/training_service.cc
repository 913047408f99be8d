// weft.v1.TrainingService: ForwardBackward, Forward, OptimStep.
#include "server/raw_services.h"
#include "server/response_conversion.h"
#include "server/services.h"
#include "server/unary_call.h"

namespace weft {
namespace {

class TrainingService final : public RawTrainingService {
 public:
  explicit TrainingService(ServiceCore* core) : core_(core) {}

  grpc::ServerUnaryReactor* ForwardBackward(
      grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
      grpc::ByteBuffer* response) override {
    return Train<v1::ForwardBackwardRequest, v1::ForwardBackwardResponse>(
        Rpc::kForwardBackward, context, request, response);
  }

  grpc::ServerUnaryReactor* Forward(grpc::CallbackServerContext* context,
                                    const grpc::ByteBuffer* request,
                                    grpc::ByteBuffer* response) override {
    return Train<v1::ForwardRequest, v1::ForwardResponse>(
        Rpc::kForward, context, request, response);
  }

  grpc::ServerUnaryReactor* OptimStep(grpc::CallbackServerContext* context,
                                      const grpc::ByteBuffer* request,
                                      grpc::ByteBuffer* response) override {
    return RunUnary<StepReply<OptimStepResult>, v1::OptimStepRequest,
                    v1::OptimStepResponse>(
        core_, context, Rpc::kOptimStep, request, response,
        [](Engine& engine, OptimStepRequest plain, auto done) {
          return engine.OptimStep(std::move(plain), std::move(done));
        },
        [](const OptimStepResult& result, auto* out) { ToProto(result, out); });
  }

 private:
  template <typename Request, typename Response>
  grpc::ServerUnaryReactor* Train(Rpc rpc, grpc::CallbackServerContext* context,
                                  const grpc::ByteBuffer* request,
                                  grpc::ByteBuffer* response) {
    return RunUnary<StepReply<TrainResult>, Request, Response>(
        core_, context, rpc, request, response,
        [](Engine& engine, TrainRequest plain, auto done) {
          return engine.Train(std::move(plain), std::move(done));
        },
        [](const TrainResult& result, auto* out) { ToProto(result, out); });
  }

  ServiceCore* const core_;
};

}  // namespace

std::unique_ptr<grpc::Service> MakeTrainingService(ServiceCore* core) {
  return std::make_unique<TrainingService>(core);
}

}  // namespace weft
