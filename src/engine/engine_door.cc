// The methods of EngineImpl that other threads call for clients. They use no
// tensor and never wait for the device.
#include <algorithm>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "src/base/observe/log.h"
#include "src/base/reason.h"
#include "src/base/status_macros.h"
#include "src/engine/engine_impl.h"
#include "src/engine/train/prefix_tree.h"
#include "src/request/loss_graph.h"
#include "src/request/move_unit.h"
#include "src/request/request_bytes.h"

namespace weft::engine {
namespace {

// This many targets take about as much time and memory as one token.
constexpr int64_t kTargetsOfOneRow = 64;

// Custom losses of one micro-batch have at most so many calls, and may have so
// many values. Either takes about a third of a second, in which nobody else has
// a turn.
constexpr int64_t kCallsOfMicroBatch = int64_t{32} << 10;
constexpr int64_t kValuesOfMicroBatch = int64_t{32} << 20;

// A step that ran when this many processes ended does not run again. Two may
// have been killed by chance, where machines may die.
constexpr uint64_t kMaxEnds = 3;

// Returns LossGraph::num_calls. Reads the graph of a step from the log for it.
int64_t CallsOf(const CustomLoss& loss) {
  if (loss.num_calls > 0) return loss.num_calls;
  const absl::StatusOr<LossGraph> graph = ReadLossGraph(loss);
  return graph.ok() ? graph->num_calls() : 0;
}

// Returns a function of a datum's number of targets: how many tokens of a
// micro-batch its custom loss takes.
std::function<int64_t(int64_t)> TokensOfLoss(const TrainRequest& request,
                                             int64_t max_batch_tokens) {
  if (request.loss.function != LossFunction::kCustom) {
    return [](int64_t /*num_targets*/) { return 0; };
  }
  const int64_t calls = CallsOf(request.loss.custom);
  const size_t num_data = request.data.size();
  return [calls, num_data, max_batch_tokens](int64_t num_targets) {
    const int64_t values = GraphLimitsOf(num_targets, num_data).values;
    return std::max(calls * max_batch_tokens / kCallsOfMicroBatch,
                    values * max_batch_tokens / kValuesOfMicroBatch);
  };
}

// Returns the scheduler's work item for a training request.
dispatch::WorkItem TrainItem(const TrainRequest& request,
                             const EngineOptions& options) {
  dispatch::WorkItem item{.kind = dispatch::WorkKind::kTrain,
                          .backward = request.backward,
                          .unnumbered = request.unnumbered};
  const auto tokens_of_loss = TokensOfLoss(request, options.max_batch_tokens);
  item.datum_tokens.reserve(request.data.size());
  item.datum_prefix.reserve(request.data.size());
  for (size_t d = 0; d < request.data.size(); ++d) {
    const Datum& datum = request.data[d];
    const int64_t rows = d > 0 && options.share_prompts
                             ? AddedRows(request.data[d - 1], datum)
                             : datum.num_tokens();
    item.datum_prefix.push_back(datum.num_tokens() - rows);
    const auto num_targets = static_cast<int64_t>(datum.targets.size());
    item.datum_tokens.push_back(std::max({rows, num_targets / kTargetsOfOneRow,
                                          tokens_of_loss(num_targets)}) +
                                request.teacher_tokens_of(datum));
  }
  return item;
}

// Returns the scheduler's work item for a step.
dispatch::WorkItem ItemOf(const StepRequest& request,
                          const EngineOptions& options) {
  if (const auto* const train = std::get_if<TrainRequest>(&request)) {
    return TrainItem(*train, options);
  }
  if (std::holds_alternative<OptimStepRequest>(request)) {
    return {.kind = dispatch::WorkKind::kOptim, .tokens = 1};
  }
  return {.kind = dispatch::WorkKind::kAdapterOp,
          .empty = std::holds_alternative<RefusedStep>(request),
          .numbered = std::holds_alternative<LoadCheckpointRequest>(request),
          .tokens = 1};
}

// Returns the bytes of a step's AcceptedRecord without `work` and `key`. Leaves
// the request as it was, which may be large.
std::string AcceptedBytes(StepRequest* request, const std::string& note) {
  log::AcceptedRecord accepted{.step = StepOf(*request),
                               .digest = PayloadDigest(*request),
                               .note = note};
  if (const auto* refused = std::get_if<RefusedStep>(request)) {
    accepted.refused = StepFailure{.status = refused->status};
    return Encode(log::Record(std::move(accepted)));
  }
  accepted.request = std::move(*request);
  log::Record record(std::move(accepted));
  std::string bytes = Encode(record);
  auto& kept = std::get<log::AcceptedRecord>(record);
  *request = *std::move(kept.request);
  if (auto* const train = std::get_if<TrainRequest>(request)) {
    train->digest = std::move(kept.digest);  // Takes long for large data.
  }
  return bytes;
}

// Returns a step that fails in place of the request.
RefusedStep Refuse(const StepRequest& request, absl::Status status) {
  return {.adapter_id = AdapterIdOf(request),
          .step = StepOf(request),
          .epoch = EpochOf(request),
          .deadline = DeadlineOf(request),
          .charge = ChargeOf(request),
          .digest = PayloadDigest(request),
          .status = std::move(status)};
}

// Returns PayloadDigest, which takes long for large data. So a TrainRequest
// keeps it.
std::string KeepDigest(StepRequest* request) {
  std::string digest = PayloadDigest(*request);
  if (auto* const train = std::get_if<TrainRequest>(request)) {
    train->digest = digest;
  }
  return digest;
}

// Returns true if clients may use the adapter. If the replay of the log has not
// restored it yet, returns false and gives the error to `done`.
template <typename Result>
bool IsReady(const dispatch::Dispatcher& dispatcher,
             const std::string& adapter_id, const Callback<Result>& done) {
  const absl::Status ready = dispatcher.adapters().CheckReady(adapter_id);
  if (!ready.ok()) done(ready);
  return ready.ok();
}

}  // namespace

template <typename Result>
bool EngineImpl::IsOpenFor(const Callback<Result>& done) const {
  const absl::Status open = dispatcher_.CheckOpen();
  if (!open.ok()) done(open);
  return open.ok();
}

template <typename Result>
bool EngineImpl::Admit(const Callback<Result>& done) const {
  if (!IsOpenFor(done)) return false;
  const absl::Status room = recorder_.CheckRoom();
  if (!room.ok()) done(room);
  return room.ok();
}

template <typename Result>
bool EngineImpl::Finds(const std::string& adapter_id,
                       const Callback<Result>& done) const {
  if (!IsReady(dispatcher_, adapter_id, done)) return false;
  if (dispatcher_.adapters().KeyOf(adapter_id)) return true;
  if (!IsOpenFor(done)) return false;
  context_.PostIo(adapter_id, [this, adapter_id, done] {
    absl::Status absent;
    if (context_.directory != nullptr) {
      absent = context_.directory->Find(adapter_id);
    }
    if (absent.ok()) {
      absent = context_.files.NameOthers(dispatch::NoSuchAdapter(adapter_id),
                                         adapter_id);
    }
    context_.Reply(done, absent);
  });
  return false;
}

absl::Status EngineImpl::CheckStep(StepRequest* request, bool* alone) {
  auto* const train = std::get_if<TrainRequest>(request);
  const bool replays = train != nullptr && !train->replay.spans.empty();
  const bool may_be_suspect =
      parts_.running != nullptr && parts_.running->has_suspects();
  if (!replays && !may_be_suspect) return absl::OkStatus();
  const std::string digest = KeepDigest(request);
  const std::string& adapter_id = AdapterIdOf(*request);
  const uint64_t step = StepOf(*request);
  const std::optional<AdapterKey> key =
      dispatcher_.adapters().KeyOf(adapter_id);
  if (!key || dispatcher_.steps().Knows(adapter_id, step, digest)) {
    return absl::OkStatus();
  }
  WEFT_RETURN_IF_ERROR(CheckSuspect(*key, step, digest, alone));
  if (!replays) return absl::OkStatus();
  return sample_records_.Replay(*key, train);
}

absl::Status EngineImpl::CheckSuspect(AdapterKey key, uint64_t step,
                                      const std::string& digest, bool* alone) {
  if (parts_.running == nullptr || step == 0) return absl::OkStatus();
  const uint64_t ends = parts_.running->EndsOf(key, step, digest);
  *alone = ends > 0;
  if (ends < kMaxEnds) return absl::OkStatus();
  const std::string adapter = dispatcher_.adapters().NameOf(key);
  log_metrics_->set_aside.Increment();
  Log(LogLevel::kError, "a step that ended the process is set aside",
      {{"adapter", adapter}, {"step", step}, {"ends", ends}});
  return absl::FailedPreconditionError(
      absl::StrCat("step ", step, " of adapter '", adapter,
                   "' ran when the server's process ended, ", ends,
                   " times, so it does not run again: send other or less "
                   "work in the next step"));
}

CancelHandle EngineImpl::Submit(StepRequest request, KeepStep keep,
                                StepCallback done) {
  const Callback<StepResultPtr> end =
      [done](absl::StatusOr<StepResultPtr> result) {
        done(std::move(result), /*replayed=*/false);
      };
  const std::string& adapter_id = AdapterIdOf(request);
  // Asked first, because a restored adapter exists when it is ready.
  if (!IsReady(dispatcher_, adapter_id, end)) return {};
  if (auto* const load = std::get_if<LoadCheckpointRequest>(&request);
      load != nullptr && load->step == 0 &&
      !dispatcher_.adapters().KeyOf(adapter_id)) {
    if (Admit(end)) {
      manager_.LoadNew(
          std::move(*load), [end](absl::StatusOr<AdapterInfo> info) {
            if (!info.ok()) return end(info.status());
            end(std::make_shared<const StepResult>(*std::move(info)));
          });
    }
    return {};
  }
  if (!Finds(adapter_id, end)) return {};
  if (const auto* const train = std::get_if<TrainRequest>(&request);
      train != nullptr &&
      !IsReady(dispatcher_, train->loss.teacher.adapter_id, end)) {
    return {};
  }
  bool alone = false;
  const absl::Status refused = CheckStep(&request, &alone);
  if (!refused.ok() && StepOf(request) == 0) {
    end(refused);
    return {};
  }
  if (!refused.ok()) request = Refuse(request, refused);
  dispatch::WorkItem item = ItemOf(request, parts_.options);
  item.alone = alone;
  dispatch::Keeping keeping{.step = std::move(keep)};
  if (keeping.step.kept) {
    keeping.record = [this, bytes = AcceptedBytes(&request, keeping.step.note)](
                         uint64_t work, AdapterKey key) {
      recorder_.Accept(work, key, bytes);
    };
  }
  return dispatcher_.steps().Submit(std::move(request), std::move(item),
                                    std::move(done), std::move(keeping));
}

void EngineImpl::Resume(log::AcceptedRecord& step) {
  const std::string id = dispatcher_.adapters().NameOf(step.key);
  bool alone = false;
  const absl::Status suspect =
      CheckSuspect(step.key, step.step, step.digest, &alone);
  if (!suspect.ok()) step.refused = StepFailure{.status = suspect};
  StepRequest request =
      step.refused ? StepRequest(RefusedStep{.adapter_id = id,
                                             .step = step.step,
                                             .digest = step.digest,
                                             .status = step.refused->status})
                   : *std::move(step.request);
  {
    MutexLock lock(&resumed_mu_);
    resumed_.push_back(
        {.adapter_id = id,
         .step = step.step,
         .note = step.note,
         .bytes = std::visit([](const auto& kind) { return NumBytes(kind); },
                             request)});
  }
  dispatch::WorkItem item = ItemOf(request, parts_.options);
  item.alone = alone;
  dispatcher_.recovery().Resume(step.key, step.work, std::move(step.digest),
                                std::move(request), std::move(step.note),
                                std::move(item));
}

void EngineImpl::Retrieve(std::string adapter_id, uint64_t step,
                          Callback<StepResultPtr> done) {
  if (Finds(adapter_id, done)) {
    dispatcher_.steps().Retrieve(adapter_id, step, std::move(done));
  }
}

void EngineImpl::PutNote(const std::string& name, std::string value,
                         std::function<void(const absl::Status&)> done) {
  const absl::Status room = recorder_.CheckRoom();
  if (!room.ok()) return done(room);
  const std::string unit = UnitOfNote(name);
  if (!unit.empty() && moves_.empties() && !recorder_.HasNotes(unit)) {
    return done(absl::UnavailableError(
        "this server gives its log away: try again, at another one"));
  }
  if (!recorder_.PutNote(name, std::move(value))) {
    const absl::Status held = CheckHeld(unit);
    if (!held.ok()) return done(held);
    return done(WithReason(
        absl::UnavailableError(absl::StrCat(
            "'", unit, "' is on its way to another server: try again")),
        {.name = "ADAPTER_RECOVERING", .values = {}}));
  }
  context_.PostReply([done = std::move(done)] { done(absl::OkStatus()); });
}

void EngineImpl::EraseNote(const std::string& name) {
  recorder_.EraseNote(name);
  const std::string unit = UnitOfNote(name);
  if (!unit.empty() && parts_.info.num_logs > 1 && !recorder_.HasNotes(unit)) {
    manager_.FreeName(unit);
  }
}

std::string EngineImpl::OwnerOf(const std::string& adapter_id) const {
  if (parts_.info.num_logs == 1) return "";
  // An adapter that has come here counts, whatever is remembered.
  if (dispatcher_.adapters().KeyOf(adapter_id)) return "";
  return context_.directory->memory().OwnerOf(UnitOf(adapter_id));
}

std::string EngineImpl::ChooseSampler() {
  return parts_.members == nullptr ? "" : parts_.members->Choose();
}

void EngineImpl::SetTakesSamples(bool takes) {
  if (parts_.bucket_metrics == nullptr) return;
  parts_.bucket_metrics->owner.samples.SetOpen(takes);
}

void EngineImpl::FindOwner(const std::string& unit, int home,
                           Callback<std::string> done) {
  if (parts_.info.num_logs == 1) {
    return done(absl::NotFoundError("there is no other log"));
  }
  parts_.directory->FindOwner(unit, home, std::move(done));
}

void EngineImpl::Agree(const std::string& name, const std::string& bytes,
                       Callback<std::string> done) {
  if (context_.directory == nullptr) return done(bytes);
  RunOnDisk("", std::move(done), [this, name, bytes] {
    return context_.directory->Agree(name, bytes);
  });
}

CancelHandle EngineImpl::Sample(SampleRequest request,
                                std::function<void(SampleDelta)> on_delta,
                                Callback<SampleResult> done) {
  const bool from_checkpoint = !request.checkpoint.empty();
  if (!from_checkpoint && !Finds(request.adapter_id, done)) return {};
  const absl::Status fits = sample_loop_.CheckFits(request);
  if (!fits.ok()) {
    done(fits);
    return {};
  }
  if (parts_.bucket_metrics != nullptr) {
    done = [load =
                parts_.bucket_metrics->owner.samples.Add(request.num_tokens()),
            done = std::move(done)](absl::StatusOr<SampleResult> result) {
      done(std::move(result));
    };
  }
  if (from_checkpoint) {
    return samplers_.Sample(std::move(request), std::move(on_delta),
                            std::move(done));
  }
  return dispatcher_.samples().Submit(std::move(request), std::move(on_delta),
                                      std::move(done));
}

void EngineImpl::CreateAdapter(CreateAdapterRequest request,
                               Callback<AdapterInfo> done) {
  if (IsReady(dispatcher_, request.adapter_id, done) && Admit(done)) {
    manager_.Create(std::move(request), std::move(done));
  }
}

void EngineImpl::GetAdapter(std::string adapter_id,
                            Callback<AdapterInfo> done) {
  if (Finds(adapter_id, done)) done(dispatcher_.adapters().Info(adapter_id));
}

void EngineImpl::ListAdapters(ListAdaptersRequest request,
                              Callback<AdapterPage> done) {
  absl::StatusOr<AdapterPage> page = dispatcher_.adapters().List(request);
  const bool has_others =
      context_.directory != nullptr && context_.directory->has_others();
  if (!page.ok() || !request.others || !has_others) {
    return done(std::move(page));
  }
  RunOnDisk(request.prefix, std::move(done),
            [this, page = *std::move(page)]() -> absl::StatusOr<AdapterPage> {
              AdapterPage all = page;
              WEFT_ASSIGN_OR_RETURN(all.others,
                                    context_.directory->OtherOwners());
              return all;
            });
}

void EngineImpl::ReportMetrics(MetricReport report, Callback<bool> done) {
  if (!Finds(report.adapter_id, done)) return;
  const absl::Status status = dispatcher_.adapters().Report(report);
  status.ok() ? done(true) : done(status);
}

CancelHandle EngineImpl::Profile(const ProfileRequest& request,
                                 Callback<std::string> done) {
  return profile_.Start(request, std::move(done));
}

void EngineImpl::Drain(Callback<bool> done) {
  SetTakesSamples(false);
  profile_.EndEarly();
  dispatcher_.Drain(std::move(done));
}

void EngineImpl::Finish(Callback<bool> done) {
  SetTakesSamples(false);
  profile_.EndEarly();
  dispatcher_.Finish(std::move(done));
}

void EngineImpl::Undrain() {
  dispatcher_.Undrain();
  SetTakesSamples(true);
}

void EngineImpl::DrainLog(Callback<bool> done) {
  const Callback<bool> reply =
      [this, done = std::move(done)](const absl::StatusOr<bool>& result) {
        context_.Reply(done, result);
      };
  dispatcher_.Post([this, reply](const absl::Status& open) {
    if (!open.ok()) return reply(open);
    moves_.DrainLog(recovery_.succeeded(), reply);
  });
}

void EngineImpl::WriteSnapshot(Callback<bool> done) {
  if (parts_.state == nullptr) {
    return done(absl::FailedPreconditionError(
        "this server runs without --state-dir, so it writes no snapshots"));
  }
  dispatcher_.Post([this, done = std::move(done)](const absl::Status& open) {
    if (!open.ok()) {
      context_.Reply(done, open);
    } else if (!recovery_.succeeded()) {
      context_.Reply(
          done, absl::UnavailableError(
                    "adapters are being restored; try again when all are"));
    } else {
      snapshots_.Request(done);
    }
  });
}

absl::Status EngineImpl::failure() const {
  absl::Status failure = guard_.failure();
  if (failure.ok() && parts_.state != nullptr) {
    failure = parts_.state->failure();
  }
  if (failure.ok()) failure = recorder_.failure();
  return failure.ok() ? recovery_.failure() : failure;
}

void EngineImpl::ExcuseRunning() {
  if (parts_.running != nullptr && guard_.failure().ok()) {
    parts_.running->Excuse();
  }
}

size_t EngineImpl::num_adapters() const {
  return dispatcher_.adapters().Count();
}

Activity EngineImpl::activity(const ActivityQuery& query) const {
  return dispatcher_.adapters().Watch(query);
}

// Calls IsOpenFor and not Admit, because a deletion must work on a full disk,
// where Admit fails.
void EngineImpl::DeleteAdapter(std::string adapter_id, Callback<bool> done) {
  if (Finds(adapter_id, done) && IsOpenFor(done)) {
    manager_.Delete(std::move(adapter_id), std::move(done));
  }
}

void EngineImpl::MoveAdapter(MoveAdapterRequest request, Callback<bool> done) {
  const Callback<bool> reply =
      [this, done = std::move(done)](const absl::StatusOr<bool>& result) {
        context_.Reply(done, result);
      };
  dispatcher_.Post(
      [this, request = std::move(request), reply](const absl::Status& open) {
        if (!open.ok()) return reply(open);
        // Asked first, because the adapter is held.
        if (moves_.Join(request, reply)) return;
        const std::string unit = UnitOf(request.adapter_id);
        const bool has = !dispatcher_.recovery().AdaptersOf(unit).empty() ||
                         recorder_.HasNotes(unit);
        if (!has && !Finds(request.adapter_id, reply)) return;
        if (!Admit(reply)) return;
        moves_.Start(request, recovery_.succeeded(), reply);
      });
}

template <typename Result, typename Work>
void EngineImpl::RunOnDisk(const std::string& adapter_id, Callback<Result> done,
                           Work work) {
  context_.PostIo(adapter_id,
                  [this, done = std::move(done), work = std::move(work)] {
                    context_.Reply(done, work());
                  });
}

void EngineImpl::ListCheckpoints(std::string adapter_id,
                                 Callback<std::vector<CheckpointInfo>> done) {
  RunOnDisk(adapter_id, std::move(done),
            [this, adapter_id] { return adapter_io_.List(adapter_id); });
}

void EngineImpl::DeleteCheckpoint(std::string adapter_id, std::string name,
                                  Callback<bool> done) {
  if (!IsOpenFor(done)) return;
  RunOnDisk(
      adapter_id, std::move(done),
      [this, adapter_id, name = std::move(name)]() -> absl::StatusOr<bool> {
        WEFT_RETURN_IF_ERROR(adapter_io_.Delete(adapter_id, name));
        return true;
      });
}

void EngineImpl::SetCheckpointTtl(SetCheckpointTtlRequest request,
                                  Callback<CheckpointInfo> done) {
  if (!IsOpenFor(done)) return;
  RunOnDisk(request.adapter_id, std::move(done),
            [this, request] { return adapter_io_.SetTtl(request); });
}

void EngineImpl::DownloadCheckpoint(std::string adapter_id, std::string name,
                                    Callback<std::vector<FileSource>> done) {
  RunOnDisk(adapter_id, std::move(done),
            [this, adapter_id, name = std::move(name)] {
              return adapter_io_.Download(adapter_id, name);
            });
}

void EngineImpl::UploadCheckpoint(UploadCheckpointRequest request,
                                  Callback<CheckpointInfo> done) {
  if (!IsOpenFor(done)) return;
  const std::string adapter_id = request.adapter_id;
  RunOnDisk(adapter_id, std::move(done), [this, request = std::move(request)] {
    return request.source_adapter_id.empty() ? adapter_io_.Upload(request)
                                             : adapter_io_.Copy(request);
  });
}

void EngineImpl::ReleaseSnapshot(ReleaseSnapshotRequest request,
                                 Callback<bool> done) {
  if (Finds(request.adapter_id, done) && IsOpenFor(done)) {
    manager_.ReleaseSnapshot(std::move(request), std::move(done));
  }
}

void EngineImpl::ExportAdapter(ExportAdapterRequest request,
                               Callback<PeftFiles> done) {
  if (Finds(request.adapter_id, done)) {
    manager_.Export(std::move(request), std::move(done));
  }
}

void EngineImpl::ImportAdapter(ImportAdapterRequest request,
                               Callback<AdapterInfo> done) {
  if (IsReady(dispatcher_, request.adapter_id, done) && Admit(done)) {
    manager_.Import(std::move(request), std::move(done));
  }
}

}  // namespace weft::engine
