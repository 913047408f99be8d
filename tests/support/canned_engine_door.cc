// CannedEngine's methods that override Engine's. The server's threads call
// them.
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "src/request/field_names.h"
#include "tests/support/canned_engine.h"

namespace weft {
namespace {

dispatch::WorkItem ItemOf(const StepRequest& request) {
  dispatch::WorkItem item{.kind = dispatch::WorkKind::kAdapterOp, .tokens = 1};
  if (const auto* const train = std::get_if<TrainRequest>(&request)) {
    item = {.kind = dispatch::WorkKind::kTrain,
            .backward = train->backward,
            .unnumbered = train->unnumbered};
    for (const Datum& datum : train->data) {
      item.datum_tokens.push_back(datum.num_tokens());
    }
  } else if (std::holds_alternative<OptimStepRequest>(request)) {
    item.kind = dispatch::WorkKind::kOptim;
  }
  item.empty = std::holds_alternative<RefusedStep>(request);
  item.numbered = std::holds_alternative<LoadCheckpointRequest>(request);
  return item;
}

}  // namespace

template <typename Result>
bool CannedEngine::Admit(const char* rpc, uint64_t step,
                         const Callback<Result>& done) {
  absl::Status refusal;
  {
    MutexLock lock(&mu_);
    seen_.arrived.emplace_back(rpc, step);
    refusal = Take(refusals_, rpc);
  }
  if (!refusal.ok()) done(refusal);
  return refusal.ok();
}

template <typename Result>
bool CannedEngine::CheckOpen(const Callback<Result>& done) const {
  const absl::Status open = dispatcher_.CheckOpen();
  if (!open.ok()) done(open);
  return open.ok();
}

template <typename... Args>
std::function<void(Args...)> CannedEngine::Counted(
    std::function<void(Args...)> done) {
  {
    MutexLock lock(&mu_);
    ++seen_.num_waiting;
  }
  return [this, done = std::move(done)](auto result, auto... more) {
    {
      MutexLock lock(&mu_);
      --seen_.num_waiting;
      if (absl::IsCancelled(result.status())) ++seen_.num_cancelled;
    }
    done(std::move(result), more...);
  };
}

void CannedEngine::Keep(const StepRequest& request) {
  MutexLock lock(&mu_);
  if (const auto* const train = std::get_if<TrainRequest>(&request)) {
    seen_.last_train = *train;
    seen_.last_train.charge = nullptr;
    seen_.train_thread = std::this_thread::get_id();
  } else if (const auto* const optim =
                 std::get_if<OptimStepRequest>(&request)) {
    seen_.last_optim = *optim;
    seen_.last_optim.charge = nullptr;
  }
}

CancelHandle CannedEngine::Submit(StepRequest request, KeepStep keep,
                                  StepCallback done) {
  Callback<StepResultPtr> end = [done](absl::StatusOr<StepResultPtr> result) {
    done(std::move(result), /*replayed=*/false);
  };
  const dispatch::WorkItem item = ItemOf(request);
  const bool refused = std::holds_alternative<RefusedStep>(request);
  if (!refused && !Admit(RpcOf(request), StepOf(request), end)) return {};
  Keep(request);
  if (auto* const train = std::get_if<TrainRequest>(&request)) {
    train->replay = {};  // There are no records.
  }
  auto* const load = std::get_if<LoadCheckpointRequest>(&request);
  if (load != nullptr && !dispatcher_.adapters().KeyOf(load->adapter_id)) {
    if (!CheckOpen(end)) return {};
    adapters_.LoadNew(
        std::move(*load), [end](absl::StatusOr<AdapterInfo> info) {
          if (!info.ok()) return end(info.status());
          end(std::make_shared<const StepResult>(*std::move(info)));
        });
    return {};
  }
  if (item.kind != dispatch::WorkKind::kAdapterOp)
    done = Counted(std::move(done));
  return dispatcher_.steps().Submit(std::move(request), item, std::move(done),
                                    {.step = std::move(keep)});
}

CancelHandle CannedEngine::Sample(SampleRequest request,
                                  std::function<void(SampleDelta)> on_delta,
                                  Callback<SampleResult> done) {
  if (!Admit(on_delta ? "SampleStream" : "Sample", 0, done)) return {};
  {
    MutexLock lock(&mu_);
    seen_.last_sample = request;
    seen_.last_sample.charge = nullptr;
  }
  done = Counted(std::move(done));
  if (request.checkpoint.empty()) {
    return dispatcher_.samples().Submit(std::move(request), std::move(on_delta),
                                        std::move(done));
  }
  SampleFrom(std::move(request), std::move(on_delta), std::move(done));
  return {};
}

void CannedEngine::SampleFrom(SampleRequest request,
                              std::function<void(SampleDelta)> on_delta,
                              Callback<SampleResult> done) {
  const std::string adapter = std::exchange(request.adapter_id, "");
  adapters_.ListCheckpoints(
      adapter,
      [this, request = std::move(request), field = NameOfField("checkpoint"),
       on_delta = std::move(on_delta), done = std::move(done)](
          const absl::StatusOr<std::vector<CheckpointInfo>>& found) {
        absl::Status failed = found.status();
        if (failed.ok()) {
          MutexLock lock(&mu_);
          failed = Take(run_failures_, "Sample");
        }
        if (!failed.ok()) return done(failed);
        for (const CheckpointInfo& info : *found) {
          if (info.name != request.checkpoint) continue;
          dispatcher_.samples().Submit(request, on_delta, done);
          return;
        }
        done(absl::NotFoundError(
            absl::StrCat(field, ": no checkpoint '", request.checkpoint, "'")));
      });
}

void CannedEngine::CreateAdapter(CreateAdapterRequest request,
                                 Callback<AdapterInfo> done) {
  if (!Admit("CreateAdapter", 0, done) || !CheckOpen(done)) return;
  adapters_.Create(std::move(request), std::move(done));
}

void CannedEngine::GetAdapter(std::string adapter_id,
                              Callback<AdapterInfo> done) {
  done(dispatcher_.adapters().Info(adapter_id));
}

void CannedEngine::ReportMetrics(MetricReport report, Callback<bool> done) {
  if (!Admit("ReportMetrics", 0, done)) return;
  const absl::Status status = dispatcher_.adapters().Report(report);
  status.ok() ? done(true) : done(status);
}

void CannedEngine::ListAdapters(ListAdaptersRequest request,
                                Callback<AdapterPage> done) {
  done(dispatcher_.adapters().List(request));
}

size_t CannedEngine::num_adapters() const {
  return dispatcher_.adapters().Count();
}

Activity CannedEngine::activity(const ActivityQuery& query) const {
  return dispatcher_.adapters().Watch(query);
}

void CannedEngine::DeleteAdapter(std::string adapter_id, Callback<bool> done) {
  if (!Admit("DeleteAdapter", 0, done) || !CheckOpen(done)) return;
  adapters_.Delete(adapter_id, std::move(done));
}

void CannedEngine::MoveAdapter(MoveAdapterRequest request,
                               Callback<bool> done) {
  if (!Admit("MoveAdapter", 0, done) || !CheckOpen(done)) return;
  const auto found = dispatcher_.adapters().Info(request.adapter_id);
  found.ok() ? done(true) : done(found.status());
}

void CannedEngine::ListCheckpoints(std::string adapter_id,
                                   Callback<std::vector<CheckpointInfo>> done) {
  adapters_.ListCheckpoints(std::move(adapter_id), std::move(done));
}

void CannedEngine::DeleteCheckpoint(std::string adapter_id, std::string name,
                                    Callback<bool> done) {
  if (!Admit("DeleteCheckpoint", 0, done) || !CheckOpen(done)) return;
  adapters_.DeleteCheckpoint(std::move(adapter_id), std::move(name),
                             std::move(done));
}

void CannedEngine::SetCheckpointTtl(SetCheckpointTtlRequest request,
                                    Callback<CheckpointInfo> done) {
  if (!Admit("SetCheckpointTtl", 0, done) || !CheckOpen(done)) return;
  adapters_.SetCheckpointTtl(std::move(request), std::move(done));
}

void CannedEngine::DownloadCheckpoint(std::string adapter_id, std::string name,
                                      Callback<std::vector<FileSource>> done) {
  if (!Admit("DownloadCheckpoint", 0, done)) return;
  {
    MutexLock lock(&mu_);
    if (downloads_) {
      downloads_->push_back([this, adapter_id, name, done] {
        adapters_.DownloadCheckpoint(adapter_id, name, done);
      });
      return;
    }
  }
  adapters_.DownloadCheckpoint(std::move(adapter_id), std::move(name),
                               std::move(done));
}

void CannedEngine::HoldDownloads() {
  MutexLock lock(&mu_);
  downloads_.emplace();
}

void CannedEngine::ReleaseDownloads() {
  std::optional<std::vector<std::function<void()>>> held;
  {
    MutexLock lock(&mu_);
    held.swap(downloads_);
  }
  for (const std::function<void()>& download : *held) download();
}

void CannedEngine::UploadCheckpoint(UploadCheckpointRequest request,
                                    Callback<CheckpointInfo> done) {
  if (!Admit("UploadCheckpoint", 0, done) || !CheckOpen(done)) return;
  adapters_.UploadCheckpoint(std::move(request), std::move(done));
}

void CannedEngine::ReleaseSnapshot(ReleaseSnapshotRequest request,
                                   Callback<bool> done) {
  if (!Admit("ReleaseSnapshot", 0, done) || !CheckOpen(done)) return;
  adapters_.ReleaseSnapshot(request, std::move(done));
}

void CannedEngine::ExportAdapter(ExportAdapterRequest request,
                                 Callback<PeftFiles> done) {
  if (!Admit("ExportAdapter", 0, done)) return;
  std::optional<PeftFiles> given;
  {
    MutexLock lock(&mu_);
    given = std::exchange(next_export_, std::nullopt);
  }
  if (given) {
    replies_.Post(
        [done = std::move(done), files = *std::move(given)] { done(files); });
    return;
  }
  adapters_.Export(request, std::move(done));
}

void CannedEngine::ImportAdapter(ImportAdapterRequest request,
                                 Callback<AdapterInfo> done) {
  if (!Admit("ImportAdapter", 0, done) || !CheckOpen(done)) return;
  adapters_.Import(std::move(request), std::move(done));
}

CancelHandle CannedEngine::Profile(const ProfileRequest& request,
                                   Callback<std::string> done) {
  return profile_.Start(request, std::move(done));
}

void CannedEngine::Drain(Callback<bool> done) {
  profile_.EndEarly();
  dispatcher_.Drain(std::move(done));
}

void CannedEngine::Finish(Callback<bool> done) {
  profile_.EndEarly();
  dispatcher_.Finish(std::move(done));
}

void CannedEngine::Undrain() { dispatcher_.Undrain(); }

void CannedEngine::DrainLog(Callback<bool> done) {
  if (!Admit("DrainLog", 0, done)) return;
  done(absl::FailedPreconditionError("this server has the only log"));
}

void CannedEngine::WriteSnapshot(Callback<bool> done) {
  if (Admit("WriteSnapshot", 0, done)) done(true);
}

}  // namespace weft
