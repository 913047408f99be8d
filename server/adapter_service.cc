// weft.v1.AdapterService: adapters, checkpoints, snapshots, PEFT folders.
#include <string>
#include <utility>
#include <vector>

#include "server/peft_streams.h"
#include "server/response_conversion.h"
#include "server/services.h"
#include "server/unary_call.h"
#include "weft/v1/adapters.pb.h"

namespace weft {
namespace {

constexpr auto kNothing = [](bool, auto*) {};
constexpr auto kAdapter = [](const AdapterInfo& info, auto* out) {
  ToProto(info, out->mutable_adapter());
};

void AddAdapters(RawService* service) {
  AddUnary<AdapterInfo, v1::CreateAdapterRequest, v1::CreateAdapterResponse>(
      service, Rpc::kCreateAdapter, &Engine::CreateAdapter, kAdapter);
  AddUnary<AdapterInfo, v1::GetAdapterRequest, v1::GetAdapterResponse>(
      service, Rpc::kGetAdapter, &Engine::GetAdapter, kAdapter);
  AddUnary<AdapterPage, v1::ListAdaptersRequest, v1::ListAdaptersResponse>(
      service, Rpc::kListAdapters, &Engine::ListAdapters,
      [](const AdapterPage& page, auto* out) {
        for (const AdapterInfo& info : page.adapters) {
          ToProto(info, out->add_adapters());
        }
        if (page.more) {
          out->set_next_page_token(page.adapters.back().adapter_id);
        }
      });
  AddUnary<bool, v1::DeleteAdapterRequest, v1::DeleteAdapterResponse>(
      service, Rpc::kDeleteAdapter, &Engine::DeleteAdapter, kNothing);
}

void AddCheckpoints(RawService* service) {
  AddUnary<StepReply<CheckpointInfo>, v1::SaveCheckpointRequest,
           v1::SaveCheckpointResponse>(
      service, Rpc::kSaveCheckpoint, &Engine::SaveCheckpoint,
      [](const CheckpointInfo& info, auto* out) {
        ToProto(info, out->mutable_checkpoint());
      });
  AddUnary<StepReply<AdapterInfo>, v1::LoadCheckpointRequest,
           v1::LoadCheckpointResponse>(service, Rpc::kLoadCheckpoint,
                                       &Engine::LoadCheckpoint, kAdapter);
  AddUnary<std::vector<CheckpointInfo>, v1::ListCheckpointsRequest,
           v1::ListCheckpointsResponse>(
      service, Rpc::kListCheckpoints, &Engine::ListCheckpoints,
      [](const std::vector<CheckpointInfo>& checkpoints, auto* out) {
        for (const CheckpointInfo& info : checkpoints) {
          ToProto(info, out->add_checkpoints());
        }
      });
  AddUnary<bool, v1::DeleteCheckpointRequest, v1::DeleteCheckpointResponse>(
      service, Rpc::kDeleteCheckpoint,
      [](Engine& engine, std::pair<std::string, std::string> names, auto done) {
        engine.DeleteCheckpoint(std::move(names.first), std::move(names.second),
                                std::move(done));
      },
      kNothing);
}

void AddSnapshots(RawService* service) {
  AddUnary<StepReply<PublishedSnapshot>, v1::PublishSnapshotRequest,
           v1::PublishSnapshotResponse>(
      service, Rpc::kPublishSnapshot, &Engine::PublishSnapshot,
      [](PublishedSnapshot snapshot, auto* out) {
        out->set_version(snapshot.version);
      });
  AddUnary<bool, v1::ReleaseSnapshotRequest, v1::ReleaseSnapshotResponse>(
      service, Rpc::kReleaseSnapshot, &Engine::ReleaseSnapshot, kNothing);
}

}  // namespace

std::unique_ptr<RawService> MakeAdapterService(ServiceCore* core) {
  auto service = std::make_unique<RawService>(core);
  AddAdapters(service.get());
  AddCheckpoints(service.get());
  AddSnapshots(service.get());
  AddFileStreams(service.get());
  return service;
}

}  // namespace weft
