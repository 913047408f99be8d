#include "server/peft_streams.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/call.h"
#include "server/request_validation.h"
#include "server/response_conversion.h"
#include "src/base/reason.h"

namespace weft {
namespace {

constexpr size_t kChunkBytes = 1 << 20;

// Ownership: shared by gRPC (until OnDone) and the engine's callback.
class ExportCall final
    : public grpc::ServerWriteReactor<v1::ExportAdapterResponse> {
 public:
  ExportCall(ServiceCore* core, grpc::CallbackServerContext* context)
      : record_(core, context, Rpc::kExportAdapter) {}

  static ExportCall* Start(ServiceCore* core,
                           grpc::CallbackServerContext* context,
                           const v1::ExportAdapterRequest& request) {
    const auto call = std::make_shared<ExportCall>(core, context);
    call->self_ = call;
    call->record_.CountReceived();
    const absl::Status refused = call->record_.Begin(
        request, [&call](Engine& engine, ExportAdapterRequest plain) {
          engine.ExportAdapter(std::move(plain),
                               [call = call](absl::StatusOr<PeftFiles> files) {
                                 if (!files.ok())
                                   return call->End(files.status());
                                 call->files_ = *std::move(files);
                                 call->SendNext();
                               });
        });
    if (!refused.ok()) call->End(refused);
    return call.get();
  }

 private:
  // An empty file is sent as one empty piece, so that the client gets its name.
  void SendNext() {
    if (file_ == files_.size()) return End(absl::OkStatus());
    const auto& [name, contents] = files_[file_];
    const size_t count = std::min(kChunkBytes, contents.size() - offset_);
    message_.mutable_chunk()->set_name(name);
    message_.mutable_chunk()->set_data(contents.data() + offset_, count);
    offset_ += count;
    if (offset_ == contents.size()) {
      ++file_;
      offset_ = 0;
    }
    record_.CountSent();
    StartWrite(&message_);
  }

  void End(const absl::Status& status) { Finish(record_.Close(status)); }

  void OnWriteDone(bool ok) override {
    if (!ok) return End(absl::CancelledError("the client went away"));
    SendNext();
  }

  void OnDone() override {
    const std::shared_ptr<ExportCall> self = std::move(self_);
  }

  CallRecord record_;
  PeftFiles files_;
  size_t file_ = 0;    // The next file to send.
  size_t offset_ = 0;  // The next byte to send of that file.
  v1::ExportAdapterResponse message_;
  std::shared_ptr<ExportCall> self_;
};

// Ownership: shared by gRPC (until OnDone) and the engine's callback.
class ImportCall final
    : public grpc::ServerReadReactor<v1::ImportAdapterRequest> {
 public:
  ImportCall(ServiceCore* core, grpc::CallbackServerContext* context,
             v1::ImportAdapterResponse* response)
      : record_(core, context, Rpc::kImportAdapter), response_(response) {}
  ~ImportCall() override { record_.core()->import_bytes -= held_bytes_; }

  static ImportCall* Start(ServiceCore* core,
                           grpc::CallbackServerContext* context,
                           v1::ImportAdapterResponse* response) {
    const auto call = std::make_shared<ImportCall>(core, context, response);
    call->self_ = call;
    const absl::StatusOr<Engine*> engine = call->record_.Admit();
    if (engine.ok()) {
      call->engine_ = *engine;
      call->assembler_ = ImportAssembler(call->record_.caller()->sees_all());
      call->StartRead(&call->message_);
    } else {
      call->End(engine.status());
    }
    return call.get();
  }

 private:
  void OnReadDone(bool ok) override {
    if (!ok) return HandOver();
    record_.CountReceived();
    absl::Status status = Hold(message_.chunk().data().size());
    if (status.ok()) status = assembler_.Add(message_);
    if (!status.ok()) return End(status);
    StartRead(&message_);
  }

  // Counts bytes against the limit that all imports share.
  absl::Status Hold(size_t bytes) {
    ServiceCore* const core = record_.core();
    const auto count = static_cast<int64_t>(bytes);
    held_bytes_ += count;
    const int64_t total = core->import_bytes += count;
    if (total <= core->options.max_import_bytes) return absl::OkStatus();
    const int64_t most = core->options.max_import_bytes;
    return WithReason(
        absl::ResourceExhaustedError(
            absl::StrCat("imports under way hold ", total,
                         " bytes, must be at most --max-import-bytes ", most)),
        {.name = held_bytes_ > most ? "TOO_LARGE" : "IMPORTS_UNDER_WAY",
         .values = {{"limit", absl::StrCat(most)}}});
  }

  void HandOver() {
    if (record_.context()->IsCancelled()) {
      return End(absl::CancelledError("the client went away"));
    }
    auto request = assembler_.Finish();
    if (!request.ok()) return End(request.status());
    const absl::Status own = record_.caller()->Qualify(&*request);
    if (!own.ok()) return End(own);
    record_.SetObject(*request);
    const TraceScope scope(record_.trace());
    engine_->ImportAdapter(
        *std::move(request), [call = self_](absl::StatusOr<AdapterInfo> info) {
          if (info.ok()) {
            call->record_.caller()->Reveal(&*info);
            ToProto(*info, call->response_->mutable_adapter());
            call->record_.CountSent();
          }
          call->End(info.status());
        });
  }

  void End(const absl::Status& status) { Finish(record_.Close(status)); }

  void OnDone() override {
    const std::shared_ptr<ImportCall> self = std::move(self_);
  }

  CallRecord record_;
  v1::ImportAdapterResponse* const response_;
  Engine* engine_ = nullptr;
  v1::ImportAdapterRequest message_;
  ImportAssembler assembler_;
  int64_t held_bytes_ = 0;
  std::shared_ptr<ImportCall> self_;
};

}  // namespace

grpc::ServerWriteReactor<v1::ExportAdapterResponse>* StartExport(
    ServiceCore* core, grpc::CallbackServerContext* context,
    const v1::ExportAdapterRequest& request) {
  return ExportCall::Start(core, context, request);
}

grpc::ServerReadReactor<v1::ImportAdapterRequest>* StartImport(
    ServiceCore* core, grpc::CallbackServerContext* context,
    v1::ImportAdapterResponse* response) {
  return ImportCall::Start(core, context, response);
}

}  // namespace weft
