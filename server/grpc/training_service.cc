// weft.v1.TrainingService: ForwardBackward, Forward, OptimStep, ReportMetrics.
#include "server/grpc/services.h"
#include "server/grpc/unary_call.h"
#include "weft/v1/training.pb.h"

namespace weft::server {
std::unique_ptr<RawService> MakeTrainingService(ServiceCore* core) {
  auto service = std::make_unique<RawService>(core);
  AddUnary<v1::ForwardBackwardRequest, v1::ForwardBackwardResponse>(
      service.get(), Rpc::kForwardBackward, &engine::Engine::Train);
  AddUnary<v1::ForwardRequest, v1::ForwardResponse>(
      service.get(), Rpc::kForward, &engine::Engine::Train);
  AddUnary<v1::OptimStepRequest, v1::OptimStepResponse>(
      service.get(), Rpc::kOptimStep, &engine::Engine::OptimStep);
  AddUnary<v1::ReportMetricsRequest, v1::ReportMetricsResponse>(
      service.get(), Rpc::kReportMetrics, &engine::Engine::ReportMetrics);
  return service;
}

}  // namespace weft::server
