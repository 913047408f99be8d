// weft.v1.TrainingService: ForwardBackward, Forward, OptimStep.
#include "server/response_conversion.h"
#include "server/services.h"
#include "server/unary_call.h"
#include "weft/v1/training.grpc.pb.h"

namespace weft {
namespace {

class TrainingService final : public v1::TrainingService::CallbackService {
 public:
  explicit TrainingService(ServiceCore* core) : core_(core) {}

  grpc::ServerUnaryReactor* ForwardBackward(
      grpc::CallbackServerContext* context,
      const v1::ForwardBackwardRequest* request,
      v1::ForwardBackwardResponse* response) override {
    return Train(Rpc::kForwardBackward, context, request, response);
  }

  grpc::ServerUnaryReactor* Forward(grpc::CallbackServerContext* context,
                                    const v1::ForwardRequest* request,
                                    v1::ForwardResponse* response) override {
    return Train(Rpc::kForward, context, request, response);
  }

  grpc::ServerUnaryReactor* OptimStep(
      grpc::CallbackServerContext* context, const v1::OptimStepRequest* request,
      v1::OptimStepResponse* response) override {
    return RunUnary<StepReply<OptimStepResult>>(
        core_, context, Rpc::kOptimStep, *request, response,
        [](Engine& engine, OptimStepRequest plain, auto done) {
          return engine.OptimStep(std::move(plain), std::move(done));
        },
        [response](const OptimStepResult& result) {
          ToProto(result, response);
        });
  }

 private:
  template <typename Request, typename Response>
  grpc::ServerUnaryReactor* Train(Rpc rpc, grpc::CallbackServerContext* context,
                                  const Request* request, Response* response) {
    return RunUnary<StepReply<TrainResult>>(
        core_, context, rpc, *request, response,
        [](Engine& engine, TrainRequest plain, auto done) {
          return engine.Train(std::move(plain), std::move(done));
        },
        [response](const TrainResult& result) { ToProto(result, response); });
  }

  ServiceCore* const core_;
};

}  // namespace

std::unique_ptr<grpc::Service> MakeTrainingService(ServiceCore* core) {
  return std::make_unique<TrainingService>(core);
}

}  // namespace weft
