// weft.v1.TrainingService: ForwardBackward, Forward, OptimStep.
#include "server/grpc/services.h"
#include "server/grpc/unary_call.h"
#include "weft/v1/training.pb.h"

namespace weft {
std::unique_ptr<RawService> MakeTrainingService(ServiceCore* core) {
  auto service = std::make_unique<RawService>(core);
  AddUnary<v1::ForwardBackwardRequest, v1::ForwardBackwardResponse>(
      service.get(), Rpc::kForwardBackward, &Engine::Train);
  AddUnary<v1::ForwardRequest, v1::ForwardResponse>(
      service.get(), Rpc::kForward, &Engine::Train);
  AddUnary<v1::OptimStepRequest, v1::OptimStepResponse>(
      service.get(), Rpc::kOptimStep, &Engine::OptimStep);
  return service;
}

}  // namespace weft
