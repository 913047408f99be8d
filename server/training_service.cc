// weft.v1.TrainingService: ForwardBackward, Forward, OptimStep.
#include "server/response_conversion.h"
#include "server/services.h"
#include "server/unary_call.h"
#include "weft/v1/training.pb.h"

namespace weft {
namespace {

template <typename Request, typename Response>
void AddTrain(RawService* service, Rpc rpc) {
  AddUnary<StepReply<TrainResult>, Request, Response>(
      service, rpc, &Engine::Train,
      [](const TrainResult& result, auto* out) { ToProto(result, out); });
}

}  // namespace

std::unique_ptr<RawService> MakeTrainingService(ServiceCore* core) {
  auto service = std::make_unique<RawService>(core);
  AddTrain<v1::ForwardBackwardRequest, v1::ForwardBackwardResponse>(
      service.get(), Rpc::kForwardBackward);
  AddTrain<v1::ForwardRequest, v1::ForwardResponse>(service.get(),
                                                    Rpc::kForward);
  AddUnary<StepReply<OptimStepResult>, v1::OptimStepRequest,
           v1::OptimStepResponse>(
      service.get(), Rpc::kOptimStep, &Engine::OptimStep,
      [](const OptimStepResult& result, auto* out) { ToProto(result, out); });
  return service;
}

}  // namespace weft
