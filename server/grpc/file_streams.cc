#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/grpc/send_call.h"
#include "server/grpc/services.h"
#include "server/wire/file_assembler.h"
#include "server/wire/response_conversion.h"
#include "src/base/files/file_source.h"
#include "src/base/reason.h"
#include "weft/v1/adapters.pb.h"

namespace weft::server {
namespace {

// What a reservation itself takes, so that tiny pieces of an import count.
constexpr int64_t kReservationBytes = 128;

using Files = std::vector<FileSource>;

// Returns about the bytes that an export holds: the weights, their copy with
// one scale, the tensors that the file has in another form, and the file. The
// last two are up to half as large again where modules are one. For llama.cpp
// they have the largest rank in place of a module's own.
int64_t ExportBytes(const AdapterInfo& info, Loader loader) {
  const auto of_weights = static_cast<int64_t>(4 * info.num_parameters);
  if (loader == Loader::kPeft) return 4 * of_weights;
  if (loader == Loader::kVllm) return 5 * of_weights;
  int lowest = info.config.rank, highest = info.config.rank;
  for (const LoraOverride& other : info.config.overrides) {
    if (other.shape.rank == 0) continue;
    lowest = std::min(lowest, other.shape.rank);
    highest = std::max(highest, other.shape.rank);
  }
  const int times = (highest + lowest - 1) / lowest;
  return (4 + 2 * int64_t{times}) * of_weights;
}

// Charges the caller for the files before the engine makes them, and then has
// the engine make them.
void MakeFiles(engine::Engine& engine, CallRecord& record,
               const ExportAdapterRequest& request,
               const Callback<Files>& done) {
  engine.GetAdapter(
      request.adapter_id, [&engine, &record, request,
                           done](const absl::StatusOr<AdapterInfo>& info) {
        if (!info.ok()) return done(info.status());
        const absl::Status held =
            record.Hold(ExportBytes(*info, request.loader));
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

void MakeFiles(engine::Engine& engine, CallRecord& /*record*/,
               std::pair<std::string, std::string> checkpoint,
               Callback<Files> done) {
  engine.DownloadCheckpoint(std::move(checkpoint.first),
                            std::move(checkpoint.second), std::move(done));
}

// A call that sends files which the engine makes: ExportAdapter or
// DownloadCheckpoint.
template <typename Request, typename Response>
class SendMadeFiles final : public SendCall<Request, Response> {
 public:
  using SendCall<Request, Response>::SendCall;

 private:
  void Run(const Request& request) override {
    absl::Status refused;
    const absl::Status begun =
        this->record().Begin(request, [&](engine::Engine& engine, auto plain) {
          refused = this->HoldPieces();
          if (!refused.ok()) return;
          MakeFiles(engine, this->record(), std::move(plain),
                    [this, call = this->self()](absl::StatusOr<Files> files) {
                      files.ok() ? this->SendFiles(*std::move(files))
                                 : this->End(files.status());
                    });
        });
    refused.Update(begun);
    if (!refused.ok()) this->End(refused);
  }
};

// A call that receives files: ImportAdapter or UploadCheckpoint.
template <typename Message, typename Response, auto kMethod>
class ReceiveCall final : public CallReactor {
 public:
  using CallReactor::CallReactor;

 private:
  void Begin() override {
    const absl::StatusOr<engine::Engine*> engine = record().Admit();
    if (!engine.ok()) return End(engine.status());
    engine_ = *engine;
    assembler_ = FileAssembler<Message>(record().caller()->sees_all());
    Read();
  }

  void OnRead(bool ok) override {
    if (!ok) return HandOver();
    Message message;
    const auto charge = Parse(&message);
    absl::Status status = charge.status();
    if (status.ok()) status = Hold(message.chunk().data().size());
    if (status.ok()) status = assembler_.Add(message);
    status.ok() ? Read() : Fail(status);
  }

  // Reserves bytes in the tenant's part of --max-import-bytes.
  absl::Status Hold(size_t bytes) {
    const ServiceCore& core = *record().core();
    const auto count = static_cast<int64_t>(bytes);
    if (count == 0) return absl::OkStatus();
    auto reserved = core.imports->Reserve(OwnerKey(*record().caller()),
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

  // Passes the whole request to the engine when the client has half-closed.
  void HandOver() {
    if (record().context()->IsCancelled()) {
      return Fail(absl::CancelledError("the client went away"));
    }
    auto request = assembler_.Finish();
    if (!request.ok()) return Fail(request.status());
    const absl::Status own = record().Take(FieldsOf(&*request));
    if (!own.ok()) return Fail(own);
    const TraceScope scope(record().trace());
    (engine_->*kMethod)(*std::move(request),
                        [this, call = self()](auto info) -> void {
                          if (!info.ok()) return Fail(info.status());
                          record().caller()->Reveal(&*info);
                          Response reply;
                          ToProto(*info, &reply);
                          ReleaseFiles();
                          Send(reply);
                        });
  }

  void Fail(const absl::Status& status) {
    ReleaseFiles();
    End(status);
  }

  // Releases the held bytes before the reply, because a client that has the
  // reply may begin its next upload at once.
  void ReleaseFiles() {
    assembler_ = FileAssembler<Message>();
    held_.clear();
  }

  engine::Engine* engine_ = nullptr;
  FileAssembler<Message> assembler_;
  int64_t held_bytes_ = 0;
  std::vector<std::shared_ptr<void>> held_;  // Reservations of these bytes.
};

}  // namespace

void AddFileStreams(RawService* service) {
  service
      ->Add<SendMadeFiles<v1::ExportAdapterRequest, v1::ExportAdapterResponse>>(
          Rpc::kExportAdapter);
  service->Add<SendMadeFiles<v1::DownloadCheckpointRequest,
                             v1::DownloadCheckpointResponse>>(
      Rpc::kDownloadCheckpoint);
  service->Add<ReceiveCall<v1::ImportAdapterRequest, v1::ImportAdapterResponse,
                           &engine::Engine::ImportAdapter>>(
      Rpc::kImportAdapter);
  service->Add<
      ReceiveCall<v1::UploadCheckpointRequest, v1::UploadCheckpointResponse,
                  &engine::Engine::UploadCheckpoint>>(Rpc::kUploadCheckpoint);
}

}  // namespace weft::server
