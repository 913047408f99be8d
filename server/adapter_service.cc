// weft.v1.AdapterService: adapters, checkpoints, snapshots, PEFT folders.
#include <string>
#include <utility>
#include <vector>

#include "server/peft_streams.h"
#include "server/raw_services.h"
#include "server/response_conversion.h"
#include "server/services.h"
#include "server/unary_call.h"

namespace weft {
namespace {

using Reactor = grpc::ServerUnaryReactor;
using Context = grpc::CallbackServerContext;

class AdapterService final : public RawAdapterService {
 public:
  explicit AdapterService(ServiceCore* core) : core_(core) {}

  Reactor* CreateAdapter(Context* context, const grpc::ByteBuffer* request,
                         grpc::ByteBuffer* response) override {
    return RunUnary<AdapterInfo, v1::CreateAdapterRequest,
                    v1::CreateAdapterResponse>(
        core_, context, Rpc::kCreateAdapter, request, response,
        [](Engine& engine, CreateAdapterRequest plain, auto done) {
          engine.CreateAdapter(std::move(plain), std::move(done));
        },
        [](const AdapterInfo& info, auto* out) {
          ToProto(info, out->mutable_adapter());
        });
  }

  Reactor* GetAdapter(Context* context, const grpc::ByteBuffer* request,
                      grpc::ByteBuffer* response) override {
    return RunUnary<AdapterInfo, v1::GetAdapterRequest, v1::GetAdapterResponse>(
        core_, context, Rpc::kGetAdapter, request, response,
        [](Engine& engine, std::string id, auto done) {
          engine.GetAdapter(std::move(id), std::move(done));
        },
        [](const AdapterInfo& info, auto* out) {
          ToProto(info, out->mutable_adapter());
        });
  }

  Reactor* ListAdapters(Context* context, const grpc::ByteBuffer* request,
                        grpc::ByteBuffer* response) override {
    return RunUnary<AdapterPage, v1::ListAdaptersRequest,
                    v1::ListAdaptersResponse>(
        core_, context, Rpc::kListAdapters, request, response,
        [](Engine& engine, ListAdaptersRequest plain, auto done) {
          engine.ListAdapters(std::move(plain), std::move(done));
        },
        [](const AdapterPage& page, auto* out) {
          for (const AdapterInfo& info : page.adapters) {
            ToProto(info, out->add_adapters());
          }
          if (page.more) {
            out->set_next_page_token(page.adapters.back().adapter_id);
          }
        });
  }

  Reactor* DeleteAdapter(Context* context, const grpc::ByteBuffer* request,
                         grpc::ByteBuffer* response) override {
    return RunUnary<bool, v1::DeleteAdapterRequest, v1::DeleteAdapterResponse>(
        core_, context, Rpc::kDeleteAdapter, request, response,
        [](Engine& engine, std::string id, auto done) {
          engine.DeleteAdapter(std::move(id), std::move(done));
        },
        [](bool, auto*) {});
  }

  Reactor* SaveCheckpoint(Context* context, const grpc::ByteBuffer* request,
                          grpc::ByteBuffer* response) override {
    return RunUnary<StepReply<CheckpointInfo>, v1::SaveCheckpointRequest,
                    v1::SaveCheckpointResponse>(
        core_, context, Rpc::kSaveCheckpoint, request, response,
        [](Engine& engine, SaveCheckpointRequest plain, auto done) {
          return engine.SaveCheckpoint(std::move(plain), std::move(done));
        },
        [](const CheckpointInfo& info, auto* out) {
          ToProto(info, out->mutable_checkpoint());
        });
  }

  Reactor* LoadCheckpoint(Context* context, const grpc::ByteBuffer* request,
                          grpc::ByteBuffer* response) override {
    return RunUnary<StepReply<AdapterInfo>, v1::LoadCheckpointRequest,
                    v1::LoadCheckpointResponse>(
        core_, context, Rpc::kLoadCheckpoint, request, response,
        [](Engine& engine, LoadCheckpointRequest plain, auto done) {
          return engine.LoadCheckpoint(std::move(plain), std::move(done));
        },
        [](const AdapterInfo& info, auto* out) {
          ToProto(info, out->mutable_adapter());
        });
  }

  Reactor* ListCheckpoints(Context* context, const grpc::ByteBuffer* request,
                           grpc::ByteBuffer* response) override {
    return RunUnary<std::vector<CheckpointInfo>, v1::ListCheckpointsRequest,
                    v1::ListCheckpointsResponse>(
        core_, context, Rpc::kListCheckpoints, request, response,
        [](Engine& engine, std::string id, auto done) {
          engine.ListCheckpoints(std::move(id), std::move(done));
        },
        [](const std::vector<CheckpointInfo>& checkpoints, auto* out) {
          for (const CheckpointInfo& info : checkpoints) {
            ToProto(info, out->add_checkpoints());
          }
        });
  }

  Reactor* DeleteCheckpoint(Context* context, const grpc::ByteBuffer* request,
                            grpc::ByteBuffer* response) override {
    return RunUnary<bool, v1::DeleteCheckpointRequest,
                    v1::DeleteCheckpointResponse>(
        core_, context, Rpc::kDeleteCheckpoint, request, response,
        [](Engine& engine, std::pair<std::string, std::string> names,
           auto done) {
          engine.DeleteCheckpoint(std::move(names.first),
                                  std::move(names.second), std::move(done));
        },
        [](bool, auto*) {});
  }

  grpc::ServerWriteReactor<grpc::ByteBuffer>* DownloadCheckpoint(
      Context* context, const grpc::ByteBuffer* request) override {
    return StartDownload(core_, context, request);
  }

  grpc::ServerReadReactor<grpc::ByteBuffer>* UploadCheckpoint(
      Context* context, grpc::ByteBuffer* response) override {
    return StartUpload(core_, context, response);
  }

  Reactor* PublishSnapshot(Context* context, const grpc::ByteBuffer* request,
                           grpc::ByteBuffer* response) override {
    return RunUnary<StepReply<PublishedSnapshot>, v1::PublishSnapshotRequest,
                    v1::PublishSnapshotResponse>(
        core_, context, Rpc::kPublishSnapshot, request, response,
        [](Engine& engine, PublishSnapshotRequest plain, auto done) {
          return engine.PublishSnapshot(std::move(plain), std::move(done));
        },
        [](PublishedSnapshot snapshot, auto* out) {
          out->set_version(snapshot.version);
        });
  }

  Reactor* ReleaseSnapshot(Context* context, const grpc::ByteBuffer* request,
                           grpc::ByteBuffer* response) override {
    return RunUnary<bool, v1::ReleaseSnapshotRequest,
                    v1::ReleaseSnapshotResponse>(
        core_, context, Rpc::kReleaseSnapshot, request, response,
        [](Engine& engine, ReleaseSnapshotRequest plain, auto done) {
          engine.ReleaseSnapshot(std::move(plain), std::move(done));
        },
        [](bool, auto*) {});
  }

  grpc::ServerWriteReactor<grpc::ByteBuffer>* ExportAdapter(
      Context* context, const grpc::ByteBuffer* request) override {
    return StartExport(core_, context, request);
  }

  grpc::ServerReadReactor<grpc::ByteBuffer>* ImportAdapter(
      Context* context, grpc::ByteBuffer* response) override {
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
