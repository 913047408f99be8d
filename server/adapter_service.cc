// weft.v1.AdapterService: adapters, checkpoints, snapshots, PEFT folders.
#include <string>
#include <utility>
#include <vector>

#include "server/peft_streams.h"
#include "server/response_conversion.h"
#include "server/services.h"
#include "server/unary_call.h"
#include "weft/v1/adapters.grpc.pb.h"

namespace weft {
namespace {

using Reactor = grpc::ServerUnaryReactor;
using Context = grpc::CallbackServerContext;

class AdapterService final : public v1::AdapterService::CallbackService {
 public:
  explicit AdapterService(ServiceCore* core) : core_(core) {}

  Reactor* CreateAdapter(Context* context,
                         const v1::CreateAdapterRequest* request,
                         v1::CreateAdapterResponse* response) override {
    return RunUnary<AdapterInfo>(
        core_, context, Rpc::kCreateAdapter, *request, response,
        [](Engine& engine, CreateAdapterRequest plain, auto done) {
          engine.CreateAdapter(std::move(plain), std::move(done));
        },
        [response](const AdapterInfo& info) {
          ToProto(info, response->mutable_adapter());
        });
  }

  Reactor* GetAdapter(Context* context, const v1::GetAdapterRequest* request,
                      v1::GetAdapterResponse* response) override {
    return RunUnary<AdapterInfo>(
        core_, context, Rpc::kGetAdapter, *request, response,
        [](Engine& engine, std::string id, auto done) {
          engine.GetAdapter(std::move(id), std::move(done));
        },
        [response](const AdapterInfo& info) {
          ToProto(info, response->mutable_adapter());
        });
  }

  Reactor* ListAdapters(Context* context,
                        const v1::ListAdaptersRequest* request,
                        v1::ListAdaptersResponse* response) override {
    return RunUnary<AdapterPage>(
        core_, context, Rpc::kListAdapters, *request, response,
        [](Engine& engine, ListAdaptersRequest plain, auto done) {
          engine.ListAdapters(std::move(plain), std::move(done));
        },
        [response](const AdapterPage& page) {
          for (const AdapterInfo& info : page.adapters) {
            ToProto(info, response->add_adapters());
          }
          if (page.more) {
            response->set_next_page_token(page.adapters.back().adapter_id);
          }
        });
  }

  Reactor* DeleteAdapter(Context* context,
                         const v1::DeleteAdapterRequest* request,
                         v1::DeleteAdapterResponse* response) override {
    return RunUnary<bool>(
        core_, context, Rpc::kDeleteAdapter, *request, response,
        [](Engine& engine, std::string id, auto done) {
          engine.DeleteAdapter(std::move(id), std::move(done));
        },
        [](bool) {});
  }

  Reactor* SaveCheckpoint(Context* context,
                          const v1::SaveCheckpointRequest* request,
                          v1::SaveCheckpointResponse* response) override {
    return RunUnary<StepReply<CheckpointInfo>>(
        core_, context, Rpc::kSaveCheckpoint, *request, response,
        [](Engine& engine, SaveCheckpointRequest plain, auto done) {
          return engine.SaveCheckpoint(std::move(plain), std::move(done));
        },
        [response](const CheckpointInfo& info) {
          ToProto(info, response->mutable_checkpoint());
        });
  }

  Reactor* LoadCheckpoint(Context* context,
                          const v1::LoadCheckpointRequest* request,
                          v1::LoadCheckpointResponse* response) override {
    return RunUnary<StepReply<AdapterInfo>>(
        core_, context, Rpc::kLoadCheckpoint, *request, response,
        [](Engine& engine, LoadCheckpointRequest plain, auto done) {
          return engine.LoadCheckpoint(std::move(plain), std::move(done));
        },
        [response](const AdapterInfo& info) {
          ToProto(info, response->mutable_adapter());
        });
  }

  Reactor* ListCheckpoints(Context* context,
                           const v1::ListCheckpointsRequest* request,
                           v1::ListCheckpointsResponse* response) override {
    return RunUnary<std::vector<CheckpointInfo>>(
        core_, context, Rpc::kListCheckpoints, *request, response,
        [](Engine& engine, std::string id, auto done) {
          engine.ListCheckpoints(std::move(id), std::move(done));
        },
        [response](const std::vector<CheckpointInfo>& checkpoints) {
          for (const CheckpointInfo& info : checkpoints) {
            ToProto(info, response->add_checkpoints());
          }
        });
  }

  Reactor* DeleteCheckpoint(Context* context,
                            const v1::DeleteCheckpointRequest* request,
                            v1::DeleteCheckpointResponse* response) override {
    return RunUnary<bool>(
        core_, context, Rpc::kDeleteCheckpoint, *request, response,
        [](Engine& engine, std::pair<std::string, std::string> names,
           auto done) {
          engine.DeleteCheckpoint(std::move(names.first),
                                  std::move(names.second), std::move(done));
        },
        [](bool) {});
  }

  grpc::ServerWriteReactor<v1::DownloadCheckpointResponse>* DownloadCheckpoint(
      Context* context, const v1::DownloadCheckpointRequest* request) override {
    return StartDownload(core_, context, *request);
  }

  grpc::ServerReadReactor<v1::UploadCheckpointRequest>* UploadCheckpoint(
      Context* context, v1::UploadCheckpointResponse* response) override {
    return StartUpload(core_, context, response);
  }

  Reactor* PublishSnapshot(Context* context,
                           const v1::PublishSnapshotRequest* request,
                           v1::PublishSnapshotResponse* response) override {
    return RunUnary<StepReply<PublishedSnapshot>>(
        core_, context, Rpc::kPublishSnapshot, *request, response,
        [](Engine& engine, PublishSnapshotRequest plain, auto done) {
          return engine.PublishSnapshot(std::move(plain), std::move(done));
        },
        [response](PublishedSnapshot snapshot) {
          response->set_version(snapshot.version);
        });
  }

  Reactor* ReleaseSnapshot(Context* context,
                           const v1::ReleaseSnapshotRequest* request,
                           v1::ReleaseSnapshotResponse* response) override {
    return RunUnary<bool>(
        core_, context, Rpc::kReleaseSnapshot, *request, response,
        [](Engine& engine, ReleaseSnapshotRequest plain, auto done) {
          engine.ReleaseSnapshot(std::move(plain), std::move(done));
        },
        [](bool) {});
  }

  grpc::ServerWriteReactor<v1::ExportAdapterResponse>* ExportAdapter(
      Context* context, const v1::ExportAdapterRequest* request) override {
    return StartExport(core_, context, *request);
  }

  grpc::ServerReadReactor<v1::ImportAdapterRequest>* ImportAdapter(
      Context* context, v1::ImportAdapterResponse* response) override {
    return StartImport(core_, context, response);
  }

 private:
  ServiceCore* const core_;
};

}  // namespace

std::unique_ptr<grpc::Service> MakeAdapterService(ServiceCore* core) {
  return std::make_unique<AdapterService>(core);
}

}  // namespace weft
