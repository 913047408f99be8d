#include "src/recovery/recovery.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "src/adapters/state_image.h"
#include "src/base/log.h"
#include "src/base/status_macros.h"

namespace weft::engine {
namespace {

// Equal to the bit, not a number included.
bool SameBits(double a, double b) {
  return std::memcmp(&a, &b, sizeof(a)) == 0;
}

// Of two results of the same kind.
bool SameResult(const StepResult& a, const StepResult& b) {
  const auto* optim = std::get_if<OptimStepResult>(&a);
  if (optim == nullptr) return true;
  const auto& other = std::get<OptimStepResult>(b);
  return optim->version == other.version &&
         SameBits(optim->grad_norm, other.grad_norm);
}

// How a step ended, for a message.
std::string EndOf(const absl::StatusOr<StepResult>& result) {
  if (!result.ok()) return result.status().ToString();
  const auto* failure = std::get_if<StepFailure>(&*result);
  return failure == nullptr ? "OK" : failure->status.ToString();
}

dispatch::StoredReply Stored(const records::ReplyRecord& reply) {
  return {.step = reply.step,
          .digest = reply.digest,
          .result = std::make_shared<const StepResult>(reply.result)};
}

lora::AdapterImage ImageOf(const records::ImageRecord& record) {
  lora::AdapterImage image;
  image.optim_steps = record.optim_steps;
  for (const uint64_t number : record.versions) {
    image.versions.push_back({.number = number});
  }
  return image;
}

}  // namespace

void Recovery::Start(std::function<void(absl::StatusOr<RecoveryReport>)> done) {
  done_ = std::move(done);
  context_.dispatcher.Post([this](const absl::Status& open) {
    absl::Status status = open;
    if (status.ok()) status = ReadSnapshot();
    if (status.ok()) {
      Advance();
    } else {
      Finish(status);
    }
  });
}

absl::Status Recovery::ReadSnapshot() {
  WEFT_ASSIGN_OR_RETURN(const std::optional<journal::Snapshot> file,
                        context_.state->ReadSnapshot());
  uint64_t first = 1;
  if (file) {
    WEFT_ASSIGN_OR_RETURN(const records::Snapshot snapshot,
                          records::DecodeSnapshot(file->bytes));
    context_.dispatcher.recovery().Reserve(snapshot.next_key,
                                           snapshot.last_epoch);
    for (const records::AdapterRecord& adapter : snapshot.adapters) {
      Restore(adapter);
    }
    first = file->next_sequence;
  }
  WEFT_ASSIGN_OR_RETURN(journal::LogReader reader,
                        journal::LogReader::Open(*context_.state, first));
  reader_ = std::move(reader);
  progress_ = std::make_unique<Progress>(
      "running the log again", static_cast<int64_t>(reader_->total_bytes()),
      "B");
  return absl::OkStatus();
}

void Recovery::Restore(const records::AdapterRecord& adapter) {
  const records::ImageRecord& image = *adapter.image;
  context_.adapters.AddOnDisk(adapter.key, adapter.config, ImageOf(image),
                              image.snapshots, image.file, adapter.created_at);
  dispatch::AdapterHistory history;
  history.info.adapter_id = adapter.adapter_id;
  history.info.tenant = adapter.tenant;
  history.info.epoch = adapter.epoch;
  history.info.last_step = adapter.last_step;
  history.info.durable_step = adapter.last_step;
  history.info.last_used_at = adapter.created_at;
  for (const records::ReplyRecord& reply : adapter.replies) {
    history.replies.push_back(Stored(reply));
  }
  if (adapter.origin) {
    dispatch::StoredReply origin = Stored(*adapter.origin);
    history.origin = dispatch::LoadOrigin{.step = origin.step,
                                          .digest = std::move(origin.digest),
                                          .result = std::move(origin.result)};
  }
  context_.dispatcher.recovery().AddOnDisk(
      adapter.key, history, context_.adapters.Facts(adapter.key));
  snapshots_.Restored(adapter.key, image);
  ++report_.adapters;
}

void Recovery::Advance() {
  context_.dispatcher.Post([this](const absl::Status& open) {
    if (!open.ok()) {
      Finish(open);
      return;
    }
    const uint64_t before = reader_->read_bytes();
    absl::StatusOr<std::optional<journal::LogReader::Record>> bytes =
        reader_->Next();
    progress_->Add(static_cast<int64_t>(reader_->read_bytes() - before));
    if (!bytes.ok() || !*bytes) {
      Finish(bytes.ok() ? FinishLog() : bytes.status());
      return;
    }
    absl::StatusOr<records::Record> record =
        records::DecodeRecord((*bytes)->bytes);
    if (!record.ok()) {
      Finish(absl::DataLossError(
          absl::StrCat("record ", (*bytes)->sequence,
                       " of the log: ", record.status().message())));
      return;
    }
    ++report_.records;
    const Next next = [this, sequence = (*bytes)->sequence](
                          const absl::Status& status) {
      if (status.ok()) {
        Advance();
      } else {
        Finish(absl::Status(status.code(),
                            absl::StrCat("record ", sequence,
                                         " of the log: ", status.message())));
      }
    };
    std::visit([this, &next](auto& kind) { Apply(kind, next); }, *record);
  });
}

absl::Status Recovery::FinishLog() {
  report_.log_bytes = reader_->read_bytes();
  while (!begun_.empty()) {
    report_.given_up.push_back(begun_.begin()->first);
    GiveUp(begun_.begin());
  }
  report_.torn_bytes = reader_->torn_bytes();
  WEFT_RETURN_IF_ERROR(reader_->Repair());
  report_.next_sequence = reader_->next_sequence();
  return absl::OkStatus();
}

void Recovery::Finish(const absl::Status& status) {
  progress_.reset();
  reader_.reset();
  if (status.ok()) {
    done_(std::move(report_));
  } else {
    done_(status);
  }
}

void Recovery::Apply(records::AdapterRecord& adapter, const Next& next) {
  context_.dispatcher.recovery().Reserve(static_cast<uint64_t>(adapter.key) + 1,
                                         adapter.epoch);
  if (adapter.image) {
    context_.recorder.AddImage(adapter.image->file, /*recorded=*/true);
    Restore(adapter);
    next(absl::OkStatus());
    return;
  }
  ++report_.adapters;
  const absl::Status fits = CheckSlots({adapter.key});
  if (!fits.ok()) {
    next(fits);
    return;
  }
  context_.dispatcher.adapters().WhenSlot(
      [this, adapter = std::move(adapter), next](const absl::Status& room) {
        next(room.ok() ? manager_.MakeAgain(adapter) : room);
      });
}

void Recovery::Apply(records::RemovedRecord& removed, const Next& next) {
  std::erase_if(begun_, [&](const auto& entry) {
    return entry.second.step.adapter == removed.key;
  });
  if (!context_.dispatcher.adapters().NameOf(removed.key).empty()) {
    manager_.Remove(removed.key);
  }
  next(absl::OkStatus());
}

void Recovery::Apply(records::BeginRecord& begin, const Next& next) {
  begun_[begin.work].step = context_.dispatcher.recovery().BeginStep(
      begin.key, begin.step, std::move(begin.digest), std::move(begin.request));
  next(absl::OkStatus());
}

void Recovery::Apply(records::GivenUpRecord& given_up, const Next& next) {
  const auto begun = begun_.find(given_up.work);
  if (begun != begun_.end()) GiveUp(begun);
  next(absl::OkStatus());
}

void Recovery::GiveUp(BegunRequests::iterator begun) {
  const dispatch::StepTask step = begun->second.step;
  begun_.erase(begun);
  trainer_.Forget(step.id);
  context_.dispatcher.recovery().AbandonStep(step.id);
  Unpin(step.adapter);
}

void Recovery::Unpin(AdapterKey key) {
  const bool busy = std::ranges::any_of(begun_, [key](const auto& entry) {
    return entry.second.between_slices && entry.second.step.adapter == key;
  });
  if (!busy) context_.dispatcher.recovery().Pin(key, false);
}

void Recovery::Apply(records::BatchRecord& batch, const Next& next) {
  std::vector<AdapterKey> keys;
  for (const sched::TrainSlice& slice : batch.slices) {
    const auto step = begun_.find(slice.work_id);
    if (step == begun_.end()) {
      next(absl::DataLossError(absl::StrCat(
          "a batch names request ", slice.work_id, ", which has not begun")));
      return;
    }
    keys.push_back(step->second.step.adapter);
  }
  WithAdapters(
      keys, [this, batch = std::move(batch)] { return RunBatch(batch); }, next);
}

absl::Status Recovery::RunBatch(const records::BatchRecord& batch) {
  dispatch::RunTrain train{.backward = true, .slices = batch.slices};
  for (sched::TrainSlice& slice : train.slices) {
    const auto begun = begun_.find(slice.work_id);
    train.steps.push_back(begun->second.step);
    begun->second.between_slices = true;
    if (slice.last) begun_.erase(begun);
    slice.work_id = train.steps.back().id;
  }
  const absl::Status status = trainer_.Run(train);
  if (status.ok()) return status;
  return absl::InternalError(
      absl::StrCat("a batch that succeeded once fails now: ", status.message(),
                   " (its first step is ", train.steps.front().step,
                   " of adapter '", NameOf(train.steps.front().adapter), "')"));
}

void Recovery::Apply(records::DoneRecord& done, const Next& next) {
  if (!done.request) {
    context_.dispatcher.recovery().AddReply(
        done.key, Stored({.step = done.step,
                          .digest = std::move(done.digest),
                          .result = std::move(done.result)}));
    next(absl::OkStatus());
    return;
  }
  const AdapterKey key = done.key;
  WithAdapters(
      {key}, [this, done = std::move(done)] { return RunAgain(done); }, next);
}

absl::Status Recovery::RunAgain(const records::DoneRecord& done) {
  dispatch::RecoveryDesk& desk = context_.dispatcher.recovery();
  if (context_.adapters.Find(done.key) == nullptr) return absl::OkStatus();
  const absl::StatusOr<StepResult> result = steps_.RunNow(
      desk.BeginStep(done.key, done.step, done.digest, *done.request));
  if (!result.ok() || result->index() != done.result.index()) {
    return absl::InternalError(
        absl::StrCat("step ", done.step, " of adapter '", NameOf(done.key),
                     "' ends otherwise than it did: ", EndOf(result),
                     ", it was ", EndOf(done.result)));
  }
  if (!SameResult(*result, done.result)) {
    ++report_.mismatches;
    Log(LogLevel::kWarning, "a step has another result than it had",
        {{"adapter", NameOf(done.key)}, {"step", done.step}});
  }
  return absl::OkStatus();
}

void Recovery::Apply(records::LoadedRecord& loaded, const Next& next) {
  const AdapterKey key = loaded.key;
  context_.recorder.AddImage(loaded.file, /*recorded=*/true);
  context_.dispatcher.recovery().Reserve(1, loaded.epoch);
  WithAdapters(
      {key},
      [this, loaded = std::move(loaded)]() -> absl::Status {
        const lora::Adapter* adapter = context_.adapters.Find(loaded.key);
        if (adapter == nullptr) return absl::OkStatus();
        WEFT_ASSIGN_OR_RETURN(lora::AdapterState state,
                              ReadState(*context_.state, loaded.file,
                                        adapter->layout().num_parameters()));
        state.optim_steps = loaded.optim_steps;
        return Install(loaded, state);
      },
      next);
}

absl::Status Recovery::Install(const records::LoadedRecord& loaded,
                               const lora::AdapterState& state) {
  context_.before_change(loaded.key);
  WEFT_RETURN_IF_ERROR(context_.guard.Guarded("LoadCheckpoint", [&] {
    context_.adapters.Find(loaded.key)->SetState(state);
  }));
  dispatch::AdapterFacts facts = context_.adapters.Facts(loaded.key);
  facts.info.epoch = loaded.epoch;
  const dispatch::StepTask step = context_.dispatcher.recovery().BeginStep(
      loaded.key, loaded.step, loaded.digest, loaded.request);
  context_.dispatcher.steps().CompleteLoad(step, loaded.last_step, facts);
  return absl::OkStatus();
}

void Recovery::Apply(records::ReleaseRecord& release, const Next& next) {
  context_.before_change(release.key);
  const absl::Status status =
      context_.adapters.ReleaseSnapshot(release.key, release.name);
  if (status.ok()) context_.Publish(release.key);
  next(status);
}

void Recovery::Apply(records::SettingsRecord& record, const Next& next) {
  if (record.settings != settings_ && record.settings != other_settings_) {
    other_settings_ = record.settings;
    Log(LogLevel::kWarning,
        "the log was written under other settings: its numbers may come out "
        "otherwise in their last bits",
        {{"then", record.settings}, {"now", settings_}});
  }
  next(absl::OkStatus());
}

std::string Recovery::NameOf(AdapterKey key) const {
  return context_.dispatcher.adapters().NameOf(key);
}

absl::Status Recovery::CheckSlots(const std::vector<AdapterKey>& keys) const {
  std::set<AdapterKey> together(keys.begin(), keys.end());
  for (const auto& [work, begun] : begun_) {
    if (begun.between_slices) together.insert(begun.step.adapter);
  }
  const auto limit =
      static_cast<size_t>(context_.options.max_resident_adapters);
  if (together.size() <= limit) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "a batch of the log has ", together.size(),
      " adapters on the device together, and now there is room for ", limit,
      " (--max-resident-adapters)"));
}

void Recovery::WithAdapters(const std::vector<AdapterKey>& keys,
                            const std::function<absl::Status()>& body,
                            const Next& next) {
  const absl::Status fits = CheckSlots(keys);
  if (!fits.ok()) {
    next(fits);
    return;
  }
  BringIn(keys, 0, [this, keys, body, next](const absl::Status& room) {
    const absl::Status status = room.ok() ? body() : room;
    for (const AdapterKey key : keys) Unpin(key);
    next(status);
  });
}

void Recovery::BringIn(const std::vector<AdapterKey>& keys, size_t first,
                       const Next& ready) {
  if (first == keys.size()) {
    ready(absl::OkStatus());
    return;
  }
  context_.dispatcher.recovery().Pin(keys[first], true);
  context_.dispatcher.adapters().WhenOnDevice(
      keys[first], [this, keys, first, ready](const absl::Status& room) {
        if (room.ok()) {
          BringIn(keys, first + 1, ready);
        } else {
          ready(room);
        }
      });
}

}  // namespace weft::engine
