// Converts the engine's result structs (src/request) to protobuf responses.
//
// REQUIRES: `out` is empty. The functions cannot fail, because results come
// from the engine, not from a client. Threads: any.
#ifndef WEFT_SERVER_WIRE_RESPONSE_CONVERSION_H_
#define WEFT_SERVER_WIRE_RESPONSE_CONVERSION_H_

#include <vector>

#include "src/request/adapter.h"
#include "src/request/checkpoint.h"
#include "src/request/sample.h"
#include "src/request/step.h"
#include "src/request/train.h"
#include "weft/v1/adapters.pb.h"
#include "weft/v1/sampling.pb.h"
#include "weft/v1/training.pb.h"

namespace weft::server {

void ToProto(const TrainResult& result, v1::ForwardBackwardResponse* out);
void ToProto(const TrainResult& result, v1::ForwardResponse* out);
void ToProto(const OptimStepResult& result, v1::OptimStepResponse* out);

void ToProto(const SampleResult& result, v1::SampleResponse* out);
void ToProto(const SampleDelta& delta, v1::SampleStreamResponse* out);

v1::TargetModule ToProto(TargetModule module);
void ToProto(const LoraConfig& config, v1::LoraConfig* out);
void ToProto(const AdapterInfo& info, v1::Adapter* out);
void ToProto(const CheckpointInfo& info, v1::Checkpoint* out);
void ToProto(const AdapterPage& page, v1::ListAdaptersResponse* out);
void ToProto(const std::vector<CheckpointInfo>& checkpoints,
             v1::ListCheckpointsResponse* out);
void ToProto(const PublishedSnapshot& snapshot,
             v1::PublishSnapshotResponse* out);

// For every response that has one adapter or one checkpoint.
template <typename Response>
void ToProto(const AdapterInfo& info, Response* out) {
  ToProto(info, out->mutable_adapter());
}
template <typename Response>
void ToProto(const CheckpointInfo& info, Response* out) {
  ToProto(info, out->mutable_checkpoint());
}

}  // namespace weft::server

#endif  // WEFT_SERVER_WIRE_RESPONSE_CONVERSION_H_
