#include "server/peft_streams.h"

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/call.h"
#include "server/file_assembler.h"
#include "server/request_validation.h"
#include "server/response_conversion.h"
#include "src/base/file_source.h"
#include "src/base/reason.h"
#include "weft/v1/adapters.pb.h"

namespace weft {
namespace {

constexpr uint64_t kChunkBytes = 1 << 20;
// What a call that sends files takes: a piece as it is read, as a message and
// as bytes, and open files. These are scarcer than memory, so it is much.
constexpr int64_t kSendBytes = 8 << 20;
// An export holds the weights and the file made of them, 4 bytes a parameter.
constexpr int64_t kExportBytesPerParameter = 8;
// What a reservation itself takes, so that tiny pieces of an import count.
constexpr int64_t kReservationBytes = 128;

using Files = std::vector<FileSource>;

// Charges the caller for the files before the engine makes them, and then has
// the engine make them.
void Run(Engine& engine, CallRecord& record,
         const ExportAdapterRequest& request, const Callback<Files>& done) {
  engine.GetAdapter(
      request.adapter_id, [&engine, &record, request,
                           done](const absl::StatusOr<AdapterInfo>& info) {
        if (!info.ok()) return done(info.status());
        const absl::Status held =
            record.Hold(kExportBytesPerParameter *
                        static_cast<int64_t>(info->num_parameters));
        if (!held.ok()) return done(held);
        engine.ExportAdapter(request, [done](absl::StatusOr<PeftFiles> made) {
          if (!made.ok()) return done(made.status());
          Files files;
          for (auto& [name, contents] : *made) {
            files.emplace_back(std::move(name), std::move(contents));
          }
          done(std::move(files));
        });
      });
}

void Run(Engine& engine, CallRecord& /*record*/,
         std::pair<std::string, std::string> checkpoint, Callback<Files> done) {
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
    absl::Status refused;
    const absl::Status begun =
        call->record_.Begin(request, [&](Engine& engine, auto plain) {
          refused = call->record_.Hold(kSendBytes);
          if (!refused.ok()) return;
          Run(engine, call->record_, std::move(plain),
              [call](absl::StatusOr<Files> files) {
                if (!files.ok()) return call->End(files.status());
                call->files_ = *std::move(files);
                call->SendNext();
              });
        });
    refused.Update(begun);
    if (!refused.ok()) call->End(refused);
    return call.get();
  }

 private:
  // Reads and sends the next piece, or sends the status after the last one. An
  // empty file is sent as one empty piece, so that the client gets its name.
  void SendNext() {
    if (file_ == files_.size()) return End(absl::OkStatus());
    record_.core()->files.Post([this] {
      absl::StatusOr<std::string> piece =
          files_[file_].Read(offset_, kChunkBytes);
      piece.ok() ? Send(*std::move(piece)) : End(piece.status());
    });
  }

  void Send(std::string piece) {
    const FileSource& file = files_[file_];
    Response message;
    message.mutable_chunk()->set_name(file.name());
    offset_ += piece.size();
    if (piece.empty() && offset_ < file.size()) {
      return End(absl::DataLossError(file.name() + " has become shorter"));
    }
    message.mutable_chunk()->set_data(std::move(piece));
    if (offset_ == file.size()) {
      ++file_;
      offset_ = 0;
    }
    record_.CountSent();
    record_.AwaitClient();
    bytes_ = ToBytes(message);
    StartWrite(&bytes_);
  }

  void End(const absl::Status& status) {
    record_.AwaitClient();
    Finish(record_.Close(status));
  }

  void OnWriteDone(bool ok) override {
    record_.StopAwaiting();
    if (!ok) return End(absl::CancelledError("the client went away"));
    SendNext();
  }

  void OnDone() override {
    record_.Release();
    const std::shared_ptr<SendCall> self = std::move(self_);
  }

  CallRecord record_;
  Files files_;
  size_t file_ = 0;         // The next file to send.
  uint64_t offset_ = 0;     // The next byte of this file to send.
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
      call->ReadNext();
    } else {
      call->End(engine.status());
    }
    return call.get();
  }

 private:
  void OnReadDone(bool ok) override {
    record_.StopAwaiting();
    if (!ok) return HandOver();
    record_.CountReceived();
    typename Kind::Request message;
    const auto charge = record_.Parse(&bytes_, &message);
    absl::Status status = charge.status();
    if (status.ok()) status = Hold(message.chunk().data().size());
    if (status.ok()) status = assembler_.Add(message);
    if (!status.ok()) return End(status);
    ReadNext();
  }

  void ReadNext() {
    record_.AwaitClient();
    StartRead(&bytes_);
  }

  // Reserves bytes in the tenant's part of --max-import-bytes.
  absl::Status Hold(size_t bytes) {
    const ServiceCore& core = *record_.core();
    const auto count = static_cast<int64_t>(bytes);
    if (count == 0) return absl::OkStatus();
    auto reserved = core.imports->Reserve(OwnerKey(*record_.caller()),
                                          count + kReservationBytes);
    if (reserved.ok()) {
      held_bytes_ += count;
      held_.push_back(*std::move(reserved));
      return absl::OkStatus();
    }
    const int64_t share = core.imports->most() / 2;
    const bool too_large = held_bytes_ + count > share;
    return WithReason(absl::ResourceExhaustedError(absl::StrCat(
                          "this call has sent ", held_bytes_ + count,
                          " bytes; imports and uploads under way may hold ",
                          share, " of one tenant (--max-import-bytes ",
                          core.options.max_import_bytes,
                          too_large ? "): send less"
                                    : "), and there is no room now: send it "
                                      "again when others have ended")),
                      {.name = too_large ? "TOO_LARGE" : "IMPORTS_UNDER_WAY",
                       .values = {{"limit", absl::StrCat(share)}}});
  }

  void Release() {
    assembler_ = typename Kind::Assembler();
    held_.clear();
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
    record_.AwaitClient();
    Finish(record_.Close(status));
  }

  void OnDone() override {
    record_.Release();
    const std::shared_ptr<ReceiveCall> self = std::move(self_);
  }

  CallRecord record_;
  grpc::ByteBuffer* const response_;
  Engine* engine_ = nullptr;
  grpc::ByteBuffer bytes_;  // Belongs to gRPC during a read.
  typename Kind::Assembler assembler_;
  int64_t held_bytes_ = 0;
  std::vector<std::shared_ptr<void>> held_;  // Reservations of these bytes.
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
