#include "server/peft_streams.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/call.h"
#include "server/file_assembler.h"
#include "server/request_validation.h"
#include "server/response_conversion.h"
#include "src/base/reason.h"
#include "weft/v1/adapters.pb.h"

namespace weft {
namespace {

constexpr size_t kChunkBytes = 1 << 20;

void Run(Engine& engine, ExportAdapterRequest request,
         Callback<PeftFiles> done) {
  engine.ExportAdapter(std::move(request), std::move(done));
}

void Run(Engine& engine, std::pair<std::string, std::string> checkpoint,
         Callback<PeftFiles> done) {
  engine.DownloadCheckpoint(std::move(checkpoint.first),
                            std::move(checkpoint.second), std::move(done));
}

// A call that sends files: ExportAdapter or DownloadCheckpoint. Ownership:
// shared by gRPC (until OnDone) and the engine's callback.
template <typename Request, typename Response>
class SendCall final : public grpc::ServerWriteReactor<grpc::ByteBuffer> {
 public:
  SendCall(ServiceCore* core, grpc::CallbackServerContext* context, Rpc rpc)
      : record_(core, context, rpc) {}

  static SendCall* Start(ServiceCore* core,
                         grpc::CallbackServerContext* context, Rpc rpc,
                         const grpc::ByteBuffer* bytes) {
    const auto call = std::make_shared<SendCall>(core, context, rpc);
    call->self_ = call;
    call->record_.CountReceived();
    Request request;
    const auto charge = call->record_.Parse(bytes, &request);
    if (!charge.ok()) {
      call->End(charge.status());
      return call.get();
    }
    const absl::Status refused =
        call->record_.Begin(request, [&call](Engine& engine, auto plain) {
          Run(engine, std::move(plain),
              [call = call](absl::StatusOr<PeftFiles> files) {
                if (!files.ok()) return call->End(files.status());
                call->files_ = *std::move(files);
                call->SendNext();
              });
        });
    if (!refused.ok()) call->End(refused);
    return call.get();
  }

 private:
  // Sends the next piece, or the status after the last one. An empty file is
  // sent as one empty piece, so that the client gets its name.
  void SendNext() {
    if (file_ == files_.size()) return End(absl::OkStatus());
    const auto& [name, contents] = files_[file_];
    const size_t count = std::min(kChunkBytes, contents.size() - offset_);
    Response message;
    message.mutable_chunk()->set_name(name);
    message.mutable_chunk()->set_data(contents.data() + offset_, count);
    offset_ += count;
    if (offset_ == contents.size()) {
      ++file_;
      offset_ = 0;
    }
    record_.CountSent();
    bytes_ = ToBytes(message);
    StartWrite(&bytes_);
  }

  void End(const absl::Status& status) { Finish(record_.Close(status)); }

  void OnWriteDone(bool ok) override {
    if (!ok) return End(absl::CancelledError("the client went away"));
    SendNext();
  }

  void OnDone() override {
    const std::shared_ptr<SendCall> self = std::move(self_);
  }

  CallRecord record_;
  PeftFiles files_;
  size_t file_ = 0;         // The next file to send.
  size_t offset_ = 0;       // The next byte of this file to send.
  grpc::ByteBuffer bytes_;  // Belongs to gRPC during a write.
  std::shared_ptr<SendCall> self_;
};

// ImportKind and UploadKind hold what differs between ImportAdapter and
// UploadCheckpoint.
struct ImportKind {
  using Request = v1::ImportAdapterRequest;
  using Response = v1::ImportAdapterResponse;
  using Assembler = ImportAssembler;
  using Result = AdapterInfo;
  static constexpr Rpc kRpc = Rpc::kImportAdapter;

  static void Run(Engine& engine, ImportAdapterRequest request,
                  Callback<Result> done) {
    engine.ImportAdapter(std::move(request), std::move(done));
  }
  static void Put(const Result& info, Response* response) {
    ToProto(info, response->mutable_adapter());
  }
};

struct UploadKind {
  using Request = v1::UploadCheckpointRequest;
  using Response = v1::UploadCheckpointResponse;
  using Assembler = UploadAssembler;
  using Result = CheckpointInfo;
  static constexpr Rpc kRpc = Rpc::kUploadCheckpoint;

  static void Run(Engine& engine, UploadCheckpointRequest request,
                  Callback<Result> done) {
    engine.UploadCheckpoint(std::move(request), std::move(done));
  }
  static void Put(const Result& info, Response* response) {
    ToProto(info, response->mutable_checkpoint());
  }
};

// A call that receives files: ImportAdapter or UploadCheckpoint. Ownership:
// shared by gRPC (until OnDone) and the engine's callback.
template <typename Kind>
class ReceiveCall final : public grpc::ServerReadReactor<grpc::ByteBuffer> {
 public:
  ReceiveCall(ServiceCore* core, grpc::CallbackServerContext* context,
              grpc::ByteBuffer* response)
      : record_(core, context, Kind::kRpc), response_(response) {}

  static ReceiveCall* Start(ServiceCore* core,
                            grpc::CallbackServerContext* context,
                            grpc::ByteBuffer* response) {
    const auto call = std::make_shared<ReceiveCall>(core, context, response);
    call->self_ = call;
    const absl::StatusOr<Engine*> engine = call->record_.Admit();
    if (engine.ok()) {
      call->engine_ = *engine;
      call->assembler_ =
          typename Kind::Assembler(call->record_.caller()->sees_all());
      call->StartRead(&call->bytes_);
    } else {
      call->End(engine.status());
    }
    return call.get();
  }

 private:
  void OnReadDone(bool ok) override {
    if (!ok) return HandOver();
    record_.CountReceived();
    typename Kind::Request message;
    const auto charge = record_.Parse(&bytes_, &message);
    absl::Status status = charge.status();
    if (status.ok()) status = Hold(message.chunk().data().size());
    if (status.ok()) status = assembler_.Add(message);
    if (!status.ok()) return End(status);
    StartRead(&bytes_);
  }

  // Counts bytes against the limit that all imports and uploads share. Returns
  // RESOURCE_EXHAUSTED above the limit.
  absl::Status Hold(size_t bytes) {
    ServiceCore* const core = record_.core();
    const auto count = static_cast<int64_t>(bytes);
    held_bytes_ += count;
    const int64_t total = core->import_bytes += count;
    if (total <= core->options.max_import_bytes) return absl::OkStatus();
    const int64_t most = core->options.max_import_bytes;
    return WithReason(
        absl::ResourceExhaustedError(
            absl::StrCat("imports and uploads under way hold ", total,
                         " bytes, must be at most --max-import-bytes ", most)),
        {.name = held_bytes_ > most ? "TOO_LARGE" : "IMPORTS_UNDER_WAY",
         .values = {{"limit", absl::StrCat(most)}}});
  }

  void Release() {
    assembler_ = typename Kind::Assembler();
    record_.core()->import_bytes -= std::exchange(held_bytes_, 0);
  }

  // Passes the whole request to the engine when the client has half-closed.
  void HandOver() {
    if (record_.context()->IsCancelled()) {
      return End(absl::CancelledError("the client went away"));
    }
    auto request = assembler_.Finish();
    if (!request.ok()) return End(request.status());
    const absl::Status own = record_.Take(FieldsOf(&*request));
    if (!own.ok()) return End(own);
    const TraceScope scope(record_.trace());
    Kind::Run(*engine_, *std::move(request),
              [call = self_](absl::StatusOr<typename Kind::Result> info) {
                if (info.ok()) {
                  call->record_.caller()->Reveal(&*info);
                  typename Kind::Response reply;
                  Kind::Put(*info, &reply);
                  *call->response_ = ToBytes(reply);
                  call->record_.CountSent();
                }
                call->End(info.status());
              });
  }

  // Releases the held bytes before the reply, because a client that has the
  // reply may begin its next upload at once.
  void End(const absl::Status& status) {
    Release();
    Finish(record_.Close(status));
  }

  void OnDone() override {
    const std::shared_ptr<ReceiveCall> self = std::move(self_);
  }

  CallRecord record_;
  grpc::ByteBuffer* const response_;
  Engine* engine_ = nullptr;
  grpc::ByteBuffer bytes_;  // Belongs to gRPC during a read.
  typename Kind::Assembler assembler_;
  int64_t held_bytes_ = 0;
  std::shared_ptr<ReceiveCall> self_;
};

}  // namespace

grpc::ServerWriteReactor<grpc::ByteBuffer>* StartExport(
    ServiceCore* core, grpc::CallbackServerContext* context,
    const grpc::ByteBuffer* request) {
  using Call = SendCall<v1::ExportAdapterRequest, v1::ExportAdapterResponse>;
  return Call::Start(core, context, Rpc::kExportAdapter, request);
}

grpc::ServerWriteReactor<grpc::ByteBuffer>* StartDownload(
    ServiceCore* core, grpc::CallbackServerContext* context,
    const grpc::ByteBuffer* request) {
  using Call =
      SendCall<v1::DownloadCheckpointRequest, v1::DownloadCheckpointResponse>;
  return Call::Start(core, context, Rpc::kDownloadCheckpoint, request);
}

grpc::ServerReadReactor<grpc::ByteBuffer>* StartImport(
    ServiceCore* core, grpc::CallbackServerContext* context,
    grpc::ByteBuffer* response) {
  return ReceiveCall<ImportKind>::Start(core, context, response);
}

grpc::ServerReadReactor<grpc::ByteBuffer>* StartUpload(
    ServiceCore* core, grpc::CallbackServerContext* context,
    grpc::ByteBuffer* response) {
  return ReceiveCall<UploadKind>::Start(core, context, response);
}

}  // namespace weft
