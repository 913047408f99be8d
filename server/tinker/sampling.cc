#include "server/tinker/sampling.h"

#include <functional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/field_checks.h"
#include "server/status_conversion.h"
#include "server/tinker/audit.h"
#include "server/tinker/checkpoint_path.h"
#include "server/tinker/loaded_adapters.h"
#include "server/tinker/models.h"
#include "server/tinker/runs.h"
#include "server/tinker/sample_wire.h"
#include "server/tinker/samplers.h"
#include "server/tinker/sessions.h"
#include "server/tinker/signature.h"
#include "server/tinker/usage.h"
#include "src/base/reason.h"
#include "src/base/status_macros.h"

namespace weft::tinker {
namespace {

// The memory of a sample besides its request.
constexpr int64_t kSampleBytes = 1024;

// The adapter of a checkpoint that a sample named itself stays for so long, so
// that not each of many such samples loads it.
constexpr absl::Duration kLinger = absl::Minutes(1);

// A client that has been silent for so long is gone. The SDK asks for a result
// at least every 45 s, and sends a heartbeat every 10 s.
constexpr absl::Duration kGone = absl::Minutes(2);

// Returns the sampling session that the body names. If the body names none,
// returns a temporary session for this request only: of the base model, or of a
// checkpoint, whose adapter is not set.
absl::StatusOr<Sampler> ReadSampler(Front& front, const Call& call) {
  WEFT_ASSIGN_OR_RETURN(const std::string id,
                        StringOr(call.body, "sampling_session_id", ""));
  if (!id.empty()) {
    WEFT_ASSIGN_OR_RETURN(Sampler* const sampler, front.FindSampler(call, id));
    TouchSampler(front, *sampler);
    return *sampler;
  }
  WEFT_ASSIGN_OR_RETURN(const std::string path,
                        StringOr(call.body, "model_path", ""));
  WEFT_ASSIGN_OR_RETURN(const std::string base,
                        StringOr(call.body, "base_model", ""));
  if (path.empty() && base.empty()) {
    return BadField("sampling_session_id",
                    "is required, or model_path or base_model");
  }
  if (!base.empty()) WEFT_RETURN_IF_ERROR(CheckBaseModel(front, base));
  if (path.empty()) return Sampler{.id = absl::StrCat("base:", call.owner())};
  return Sampler{.id = absl::StrCat("path:", call.owner()), .model_path = path};
}

// Returns the key in Front::running.
std::string RunningKey(const std::string& owner, const std::string& id) {
  return absl::StrCat(owner, "/", id);
}

// Returns the last part of the future's id. Nobody can guess it, so nobody but
// the client can fetch the result. A request that repeats a `seq_id` gets the
// same id again. A request without a `seq_id` or a sampling session cannot be a
// repeat of an earlier one, so its id is random.
absl::StatusOr<std::string> NumberOf(const Call& call, const Sampler& sampler) {
  if (sampler.session.empty() || Find(call.body, "seq_id") == nullptr) {
    return NewId();
  }
  WEFT_ASSIGN_OR_RETURN(const int64_t seq, IntOr(call.body, "seq_id", 0));
  WEFT_ASSIGN_OR_RETURN(const std::string signature,
                        Sign(absl::StrCat("sample ", sampler.id, ":", seq)));
  return absl::StrCat(seq, "-", signature.substr(0, 32));
}

void RespondSamplePromise(const std::string& id, int64_t num_samples,
                          const Respond& respond) {
  Json sequences = Json::array();
  for (int64_t i = 0; i < num_samples; ++i) {
    sequences.push_back(absl::StrCat(id, ":", i));
  }
  respond(JsonReply({{"request_id", id}, {"sample_sequence_ids", sequences}}));
}

// Returns what a sample of a prompt with so many tokens has used.
UsageCounts UsageOf(int64_t prompt, const SampleResult& result) {
  UsageCounts counts{.prompt_tokens = prompt - result.prompt_cached_tokens,
                     .cached_tokens = result.prompt_cached_tokens};
  for (const Sample& sample : result.samples) {
    counts.sampled_tokens += static_cast<int64_t>(sample.tokens.size());
  }
  return counts;
}

// Translates the request and gives it to the engine. `id` is the id of the
// future. Runs `end` when the sample ends. If StartSample returns an error, the
// caller must finish or drop the future, and `end` does not run.
absl::Status StartSample(Front& front, const CallPtr& call,
                         const Sampler& sampler, const std::string& id,
                         const std::function<void()>& end) {
  WEFT_ASSIGN_OR_RETURN(const Engine* const engine, front.port.engine());
  WEFT_RETURN_IF_ERROR(front.CheckOffered(call->body));
  WEFT_ASSIGN_OR_RETURN(
      TranslatedSample sample,
      TranslateSample(call->body, engine->info().context_length));
  sample.request.set_adapter_id(sampler.adapter);
  // Without records the client's own values serve.
  if (!engine->info().keeps_sample_records) sample.request.clear_record();
  sample.request.set_in_flight(sampler.in_flight);
  if (!sampler.in_flight) sample.request.set_snapshot(sampler.snapshot);
  const auto bytes =
      static_cast<int64_t>(sample.request.SpaceUsedLong() +
                           sample.format.targets.SpaceUsedLong()) +
      kSampleBytes;
  const auto reserved = front.waiting->Reserve(call->owner(), bytes);
  if (!reserved.ok()) {
    return WithReason(absl::ResourceExhaustedError("too many samples wait"),
                      {.name = "QUEUE_FULL", .values = {}});
  }
  const std::string key = RunningKey(call->owner(), id);
  const absl::Status refused = front.port.CallWith<SampleResult>(
      call->origin(), Rpc::kSample, sample.request,
      [&front, key, id](Engine& port, SampleRequest plain, auto then) {
        // RespondSamplePromise names the sequences by the future.
        if (!plain.record.empty()) plain.record = id;
        front.running[key] = {
            .future = id,
            .cancel = port.Sample(std::move(plain), nullptr, std::move(then))};
      },
      [&front, key, id, end, format = sample.format,
       prompt = sample.request.prompt_size(), owner = call->owner(),
       session = sampler.session,
       reserved](const absl::StatusOr<SampleResult>& result) {
        end();
        const auto ended = front.running.extract(key);
        if (!result.ok() && !ended.empty() && ended.mapped().unwanted) {
          return front.futures.Drop(id);
        }
        if (result.ok()) {
          CountUsage(front, owner, session, UsageOf(prompt, *result));
        }
        front.futures.Finish(
            id, result.ok() ? FutureResult{SampleOutput(*result, format),
                                           SampleOutputJson}
                            : FutureResult::Failed(result.status()));
      });
  if (!refused.ok()) front.running.erase(key);
  return refused;
}

// Ends the future of a sample that could not start. A client whose future is
// dropped sends the sample again.
void GiveUp(Front& front, const std::string& id, const absl::Status& refused) {
  if (RetryMillis(refused).has_value()) {
    front.futures.Drop(id);
  } else {
    front.futures.Finish(id, FutureResult::Failed(refused));
  }
}

// Does what StartSample does, from the checkpoint `sampler.model_path`, which
// it loads if no adapter has it. Errors: as StartSample.
absl::Status StartFromPath(Front& front, const CallPtr& call,
                           const Sampler& sampler, const std::string& id) {
  WEFT_ASSIGN_OR_RETURN(const CheckpointPath path,
                        ParseCheckpointPath(sampler.model_path));
  const auto start = [&front, call, sampler,
                      id](const absl::StatusOr<std::string>& used) {
    if (!used.ok()) return GiveUp(front, id, used.status());
    // No sampling session may use the adapter at a restart.
    GoAtNextStart(front, call->caller, *used);
    const auto leave = [&front, caller = call->caller, adapter = *used] {
      front.after(kLinger, [&front, caller, adapter] {
        LeaveAdapter(front, caller, adapter);
      });
    };
    Sampler loaded = sampler;
    loaded.adapter = *used;
    const absl::Status refused = StartSample(front, call, loaded, id, leave);
    if (refused.ok()) return;
    leave();
    GiveUp(front, id, refused);
  };
  const auto use = [&front, call, path, id,
                    start](const absl::StatusOr<CheckpointInfo>& info) {
    if (!info.ok()) return GiveUp(front, id, info.status());
    if (!HasCheckpoint(front, call->owner(), *info)) {
      NoteEvent(front, call->caller, "read", path, "sample");
    }
    UseAdapter(front, call->origin(), *info, start);
  };
  return FindCheckpoint(front, call, path, use);
}

}  // namespace

absl::Status RunSample(Front& front, const CallPtr& call,
                       const Respond& respond) {
  WEFT_ASSIGN_OR_RETURN(const Sampler sampler, ReadSampler(front, *call));
  WEFT_ASSIGN_OR_RETURN(const int64_t num_samples,
                        IntOr(call->body, "num_samples", 1));
  WEFT_RETURN_IF_ERROR(CheckCount(
      "num_samples", static_cast<uint64_t>(std::max<int64_t>(num_samples, 0)),
      1, static_cast<uint64_t>(front.port.core()->options.max_samples),
      "max-samples"));
  WEFT_ASSIGN_OR_RETURN(const std::string number, NumberOf(*call, sampler));
  const std::string id = absl::StrCat(sampler.id, ":", number);
  if (front.futures.Open(id, call->owner(), Scope::kSample)) {
    const absl::Status refused =
        sampler.adapter.empty() && !sampler.model_path.empty()
            ? StartFromPath(front, call, sampler, id)
            : StartSample(front, call, sampler, id, [] {});
    if (!refused.ok()) {
      GiveUp(front, id, refused);
      if (RetryMillis(refused).has_value()) return refused;
    }
  }
  RespondSamplePromise(id, num_samples, respond);
  return absl::OkStatus();
}

void CancelSample(Front& front, const std::string& owner,
                  const std::string& id) {
  const auto found = front.running.find(RunningKey(owner, id));
  if (found != front.running.end()) found->second.cancel.Cancel();
}

void CancelSamplesOf(Front& front, const std::string& owner,
                     const std::string& session) {
  const std::string prefix = RunningKey(owner, absl::StrCat(session, ":"));
  std::vector<CancelHandle> handles;
  for (auto it = front.running.lower_bound(prefix);
       it != front.running.end() && it->first.starts_with(prefix); ++it) {
    handles.push_back(it->second.cancel);
  }
  // A cancelled sample may end at once, and then leaves front.running.
  for (CancelHandle& handle : handles) handle.Cancel();
}

void SweepSamples(Front& front, absl::Time now) {
  std::vector<CancelHandle> handles;
  for (auto& [key, sample] : front.running) {
    const std::string& future = sample.future;
    const auto session =
        front.sessions.find(future.substr(0, future.find(':')));
    const bool beats = session != front.sessions.end() &&
                       now - session->second.last_beat < kGone;
    if (sample.unwanted || beats ||
        now - front.futures.LastAsked(future) < kGone) {
      continue;
    }
    sample.unwanted = true;
    handles.push_back(sample.cancel);
  }
  for (CancelHandle& handle : handles) handle.Cancel();
}

}  // namespace weft::tinker
