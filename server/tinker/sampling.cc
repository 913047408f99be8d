#include <algorithm>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "server/http/replies.h"
#include "server/tinker/checkpoints.h"
#include "server/tinker/credentials.h"
#include "server/tinker/handlers.h"
#include "server/tinker/logs.h"
#include "server/tinker/sessions.h"
#include "server/tinker/steps.h"
#include "server/tinker/wire/fields.h"
#include "server/tinker/wire/sample_wire.h"
#include "server/wire/field_checks.h"
#include "server/wire/status_conversion.h"
#include "src/base/clock.h"
#include "src/base/sha256.h"
#include "src/base/status_macros.h"
#include "weft/v1/adapters.pb.h"

namespace weft::server::tinker {
namespace {

// The memory of a sample besides its request.
constexpr int64_t kSampleBytes = 1024;

// A client that has been silent for so long is gone. The SDK asks for a result
// at least every 45 s, and sends a heartbeat every 10 s.
constexpr absl::Duration kGone = absl::Minutes(2);

// Returns the sampling session that the body names. If the body names none,
// returns a temporary session for this request only: of the base model, or of a
// checkpoint.
absl::StatusOr<Sampler> ReadSampler(Front& front, const Call& call) {
  WEFT_ASSIGN_OR_RETURN(const std::string id,
                        Text(call.body, "sampling_session_id", ""));
  if (!id.empty()) {
    WEFT_ASSIGN_OR_RETURN(Sampler* const sampler,
                          front.samplers.FindOf(call.owner(), id));
    sampler->used = SteadyNow();
    return *sampler;
  }
  WEFT_ASSIGN_OR_RETURN(const std::string path,
                        Text(call.body, "model_path", ""));
  WEFT_ASSIGN_OR_RETURN(const std::string base,
                        Text(call.body, "base_model", ""));
  if (path.empty() && base.empty()) {
    return BadField("sampling_session_id",
                    "is required, or model_path or base_model");
  }
  if (!base.empty()) WEFT_RETURN_IF_ERROR(CheckBaseModel(front, base));
  const std::string log = LogPrefix(front);
  if (path.empty()) {
    return Sampler{.id = absl::StrCat(log, "base:", call.owner())};
  }
  return Sampler{.id = absl::StrCat(log, "path:", call.owner()),
                 .model_path = path};
}

// Returns the last part of the future's id. Nobody can guess it, so nobody but
// the client can fetch the result. A request that repeats a `seq_id` gets the
// same id again. A request without a `seq_id` or a sampling session cannot be a
// repeat of an earlier one, so its id is random.
absl::StatusOr<std::string> NumberOf(const Call& call, const Sampler& sampler) {
  if (sampler.session.empty() || Find(call.body, "seq_id") == nullptr) {
    return NewId();
  }
  WEFT_ASSIGN_OR_RETURN(const int64_t seq, Int(call.body, "seq_id", 0));
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

// Says in the request what to sample from. Errors: those of
// ParseCheckpointPath.
absl::Status SetSource(const Sampler& sampler, v1::SampleRequest* request) {
  if (sampler.model_path.empty()) {
    request->set_adapter_id(sampler.adapter);
    request->set_in_flight(sampler.in_flight);
    if (!sampler.in_flight) request->set_snapshot(sampler.snapshot);
    return absl::OkStatus();
  }
  WEFT_ASSIGN_OR_RETURN(const CheckpointPath path,
                        ParseCheckpointPath(sampler.model_path, "model_path"));
  request->set_adapter_id(AdapterOfModel(path.run));
  request->set_checkpoint(path.WeftName());
  return absl::OkStatus();
}

// Ends the future of a sample that failed. A client whose future is dropped
// sends the sample again.
void GiveUp(Front& front, const std::string& id, const absl::Status& failed) {
  if (RetryMillis(failed).has_value()) {
    front.futures.Drop(id);
  } else {
    front.futures.Finish(id, FutureResult::Failed(failed));
  }
}

// Returns what ends the future `id` of a sample.
Callback<SampleResult> EndOf(Front& front, const Caller& caller,
                             const Sampler& sampler, const std::string& id,
                             const TranslatedSample& sample) {
  return [&front, caller, sampler, id, format = sample.format,
          prompt = sample.request.prompt_size()](
             const absl::StatusOr<SampleResult>& result) {
    const std::optional<RunningSample> ended = front.running.Take(id);
    if (!result.ok() && ended && ended->unwanted) return front.futures.Drop(id);
    if (!result.ok()) return GiveUp(front, id, result.status());
    front.accounts.Count(OwnerKey(caller), sampler.session,
                         UsageOf(prompt, *result));
    if (sampler.session.empty() && !sampler.model_path.empty()) {
      front.accounts.NoteSample(caller,
                                *ParseCheckpointPath(sampler.model_path));
    }
    front.futures.Finish(
        id, FutureResult{SampleOutput(*result, format), SampleOutputJson});
  };
}

// Translates the request and gives it to the engine. `id` is the id of the
// future. If StartSample returns an error, the caller must finish or drop the
// future.
absl::Status StartSample(Front& front, const CallPtr& call,
                         const Sampler& sampler, const std::string& id) {
  WEFT_ASSIGN_OR_RETURN(const engine::Engine* const engine,
                        front.port.engine());
  WEFT_RETURN_IF_ERROR(front.CheckOffered(call->body));
  WEFT_ASSIGN_OR_RETURN(TranslatedSample sample, TranslateSample(call->body));
  WEFT_RETURN_IF_ERROR(SetSource(sampler, &sample.request));
  // Without records the client's own values serve.
  if (!engine->info().keeps_sample_records) sample.request.clear_record();
  // The message becomes a plain request, and `format` stays beside it.
  const auto bytes =
      static_cast<int64_t>(sample.request.SpaceUsedLong() +
                           sample.format.targets.SpaceUsedLong()) +
      kSampleBytes;
  CallOrigin origin = call->origin();
  WEFT_ASSIGN_OR_RETURN(
      origin.charge,
      front.port.core()->memory->ReserveRequest(call->owner(), bytes,
                                                /*beside=*/0, /*ahead=*/0));
  const absl::Status refused = front.port.CallWith<SampleResult>(
      origin, Rpc::kSample, sample.request,
      [&front, id, owner = call->owner(), created_ns = sampler.created_ns](
          engine::Engine& port, SampleRequest plain, auto then) {
        // RespondSamplePromise names the sequences by the future.
        if (!plain.record.empty()) plain.record = id;
        if (created_ns != 0) {
          plain.checkpoint_created_at = absl::FromUnixNanos(created_ns);
        }
        CancelHandle cancel =
            port.Sample(std::move(plain), nullptr, std::move(then));
        front.running.Add(id, {.owner = owner, .cancel = std::move(cancel)});
      },
      EndOf(front, call->caller, sampler, id, sample));
  if (!refused.ok()) front.running.Take(id);
  return refused;
}

// Returns whether an earlier version gave this name to an adapter that it had
// loaded from the checkpoint.
bool IsAdapterOf(const CheckpointInfo& info, absl::string_view adapter) {
  const std::string key = absl::StrCat(info.adapter_id, "/", info.name, "@",
                                       absl::ToUnixNanos(info.created_at));
  return absl::StartsWith(
      adapter, absl::StrCat("tinker-sampler.",
                            absl::BytesToHexString(Sha256(key).substr(0, 16))));
}

// Does what StartSample does for a sampling session that an earlier version
// made. Then the session knows when its checkpoint was created.
absl::Status StartOldSample(Front& front, const CallPtr& call,
                            const Sampler& sampler, const std::string& id) {
  WEFT_ASSIGN_OR_RETURN(const CheckpointPath path,
                        ParseCheckpointPath(sampler.model_path, "model_path"));
  const auto start = [&front, call, id](Sampler* known,
                                        const CheckpointInfo& info) {
    if (known == nullptr) return absl::NotFoundError("the session has ended");
    // Another sample may have found the checkpoint meanwhile.
    if (known->adapter.empty()) return StartSample(front, call, *known, id);
    if (!IsAdapterOf(info, known->adapter)) {
      return absl::FailedPreconditionError(
          "model_path: the checkpoint was overwritten, and its old weights are "
          "gone: make a new sampling session to sample from the new ones");
    }
    known->adapter.clear();
    known->created_ns = absl::ToUnixNanos(info.created_at);
    return StartSample(front, call, *known, id);
  };
  return FindCheckpoint(front, call, path,
                        [&front, start, id, of = sampler.id](
                            const absl::StatusOr<CheckpointInfo>& info) {
                          const absl::Status refused =
                              info.ok() ? start(front.samplers.Find(of), *info)
                                        : info.status();
                          if (!refused.ok()) GiveUp(front, id, refused);
                        });
}

}  // namespace

absl::Status RunSample(Front& front, const CallPtr& call,
                       const Respond& respond) {
  WEFT_ASSIGN_OR_RETURN(const Sampler sampler, ReadSampler(front, *call));
  WEFT_ASSIGN_OR_RETURN(const int64_t num_samples,
                        Int(call->body, "num_samples", 1));
  WEFT_RETURN_IF_ERROR(CheckCount(
      "num_samples", static_cast<uint64_t>(std::max<int64_t>(num_samples, 0)),
      1, static_cast<uint64_t>(front.port.core()->options.max_samples),
      "max-samples"));
  WEFT_ASSIGN_OR_RETURN(const std::string number, NumberOf(*call, sampler));
  const std::string id = absl::StrCat(sampler.id, ":", number);
  if (front.futures.Open(id, call->owner(), Scope::kSample)) {
    const bool is_old = !sampler.model_path.empty() && !sampler.adapter.empty();
    const absl::Status refused = is_old
                                     ? StartOldSample(front, call, sampler, id)
                                     : StartSample(front, call, sampler, id);
    if (!refused.ok()) {
      GiveUp(front, id, refused);
      if (RetryMillis(refused).has_value()) return refused;
    }
  }
  RespondSamplePromise(id, num_samples, respond);
  return absl::OkStatus();
}

absl::StatusOr<Json> CancelFuture(Front& front, const Call& call) {
  WEFT_ASSIGN_OR_RETURN(const std::string id, Text(call.body, "request_id"));
  const auto found = front.running.FindOf(call.owner(), id);
  if (found.ok()) (*found)->cancel.Cancel();
  return Json::object();
}

void CancelSamples(Front& front, const std::string& prefix) {
  std::vector<CancelHandle> handles;
  for (const auto& [id, sample] : front.running) {
    if (id.starts_with(prefix)) handles.push_back(sample.cancel);
  }
  // A cancelled sample may end at once, and then leaves front.running.
  for (CancelHandle& handle : handles) handle.Cancel();
}

void SweepSamples(Front& front, absl::Time now) {
  std::vector<CancelHandle> handles;
  for (auto& [future, sample] : front.running) {
    const Session* const session =
        front.sessions.Find(std::string(SessionOf(future)));
    const bool beats = session != nullptr && now - session->last_beat < kGone;
    if (sample.unwanted || beats ||
        now - front.futures.LastAsked(future) < kGone) {
      continue;
    }
    sample.unwanted = true;
    handles.push_back(sample.cancel);
  }
  for (CancelHandle& handle : handles) handle.Cancel();
}

namespace {

void RespondSampler(const std::string& id, const Respond& respond) {
  respond(JsonReply(
      {{"type", "create_sampling_session"}, {"sampling_session_id", id}}));
}

// Writes the sampler to the ledger, and then adds it to front.samplers. `done`
// gets false if an equal call has added the sampler meanwhile, NOT_FOUND if the
// session has ended meanwhile, or the error of the write.
void Keep(Front& front, const Sampler& sampler, const Callback<bool>& done) {
  front.ledger.Put(EntryKind::kSampler, {.id = sampler.id, .fields = sampler},
                   [&front, sampler, done](absl::Status put) {
                     if (put.ok() && !front.sessions.Has(sampler.session)) {
                       front.ledger.Erase(EntryKind::kSampler, sampler.id);
                       put = absl::NotFoundError("the session has ended");
                     }
                     if (!put.ok()) return done(put);
                     const auto [entry, added] =
                         front.samplers.Add(sampler.id, sampler);
                     entry->used = SteadyNow();
                     done(added);
                   });
}

// Keeps a sampler that a client has asked for, and responds. Runs `note` if no
// equal call has.
void KeepMade(Front& front, const Sampler& sampler, const Respond& respond,
              const std::function<void()>& note) {
  Keep(front, sampler,
       IfOk(respond, [id = sampler.id, respond, note](bool added) {
         if (added) note();
         RespondSampler(id, respond);
       }));
}

void Forget(Front& front, const std::string& id) {
  front.ledger.Erase(EntryKind::kSampler, id);
  front.samplers.Take(id);
}

// Releases the sampler's snapshot. `end` gets OK also if there is none.
void Release(Front& front, const CallOrigin& origin, const Sampler& sampler,
             const std::function<void(const absl::Status&)>& end) {
  v1::ReleaseSnapshotRequest request;
  request.set_adapter_id(sampler.adapter);
  request.set_name(sampler.snapshot);
  const Callback<bool> gone = [end](const absl::StatusOr<bool>& released) {
    const absl::Status& status = released.status();
    end(absl::IsNotFound(status) ? absl::OkStatus() : status);
  };
  const absl::Status refused =
      front.port.Call(origin, Rpc::kReleaseSnapshot, request,
                      &engine::Engine::ReleaseSnapshot, gone);
  if (!refused.ok()) gone(refused);
}

// If the adapter of `newest` has too many snapshots, releases the snapshot that
// was used least recently, and forgets its sampling session. If the release
// fails, the next publication tries again.
void ReleaseOldest(Front& front, const CallOrigin& origin,
                   const Sampler& newest) {
  const Sampler* oldest = nullptr;
  size_t count = 0;
  for (const auto& [id, sampler] : front.samplers) {
    if (sampler.adapter != newest.adapter || sampler.snapshot.empty()) continue;
    ++count;
    if (oldest == nullptr || sampler.used < oldest->used) oldest = &sampler;
  }
  if (count <= kMaxSnapshots) return;
  Release(front, origin, *oldest,
          [&front, id = oldest->id](const absl::Status& released) {
            if (released.ok()) Forget(front, id);
          });
}

// The name of a sampling session's snapshot begins with one of these.
constexpr char kSnapshotPrefix[] = "sample-";
constexpr char kInFlightPrefix[] = "inflight-";

// Returns the name of the snapshot that this step publishes. No other snapshot
// of the session's models has it. The request's sampling_session_seq_id is not
// part of it: an SDK that sends the step again counts it up.
std::string SnapshotName(absl::string_view prefix, const StepPlace& place) {
  const size_t number = place.model.rfind(':') + 1;
  return absl::StrCat(prefix, place.model.substr(number), "-", place.seq);
}

std::string SamplerId(absl::string_view session, absl::string_view number) {
  return absl::StrCat(session, ":sample:", number);
}

absl::Status CheckSamplerCount(const Front& front, const std::string& session) {
  const auto is_such = [&](const Sampler& sampler) {
    return sampler.session == session && sampler.snapshot.empty();
  };
  const size_t count = front.samplers.Where(is_such).size();
  if (count < kMaxSamplers) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "the session has ", count, " sampling sessions, as many as it may"));
}

}  // namespace

absl::Status PublishSampler(Front& front, const CallPtr& call,
                            const Respond& respond) {
  WEFT_ASSIGN_OR_RETURN(const StepPlace place, ReadPlace(call->body));
  WEFT_ASSIGN_OR_RETURN(const std::string kind,
                        Text(call->body, "kind", "snapshot"));
  const auto start = [&front, kind, place](const CallOrigin& origin,
                                           const StepDone& done) {
    if (kind != "snapshot" && kind != "inflight") {
      return absl::UnimplementedError(absl::StrCat(
          "kind ", Quoted(kind), " is not offered: use snapshot or inflight"));
    }
    auto request = RequestOf<v1::PublishSnapshotRequest>(place);
    request.set_name(SnapshotName(
        kind == "inflight" ? kInFlightPrefix : kSnapshotPrefix, place));
    return front.port.Submit(
        origin, Rpc::kPublishSnapshot, request, [](auto* /*plain*/) {}, done);
  };
  return PromiseStep(front, call, Rpc::kPublishSnapshot, place, Json::object(),
                     start, respond);
}

std::string SamplerOf(absl::string_view model, absl::string_view snapshot) {
  return SamplerId(SessionOf(model), snapshot.substr(snapshot.find('-') + 1));
}

void KeepPublished(Front& front, const Model& model,
                   const std::string& snapshot,
                   const std::function<void(const absl::Status&)>& done) {
  const bool in_flight = snapshot.starts_with(kInFlightPrefix);
  const bool ours = in_flight || snapshot.starts_with(kSnapshotPrefix);
  Sampler sampler{.id = SamplerOf(model.id, snapshot),
                  .owner = model.owner,
                  .session = model.session,
                  .adapter = model.adapter,
                  .snapshot = snapshot,
                  .in_flight = in_flight,
                  .charge = front.ledger.ChargeIfRoom(model.owner, 0)};
  if (!ours || front.samplers.Has(sampler.id)) return done(absl::OkStatus());
  const CallOrigin origin{.caller = model.caller};
  Keep(front, sampler,
       [&front, origin, sampler, done](const absl::StatusOr<bool>& added) {
         if (!added.ok()) return done(added.status());
         ReleaseOldest(front, origin, sampler);
         // If the release fails, ReleaseOldest tries again.
         if (sampler.in_flight) {
           Release(front, origin, sampler, [](const absl::Status&) {});
         }
         done(absl::OkStatus());
       });
}

absl::Status CreateSampler(Front& front, const CallPtr& call,
                           const Respond& respond) {
  WEFT_ASSIGN_OR_RETURN(
      const Session* const session,
      front.sessions.FindOf(call->owner(), Text(call->body, "session_id")));
  WEFT_ASSIGN_OR_RETURN(const int64_t number,
                        Int(call->body, "sampling_session_seq_id"));
  Sampler sampler{.id = SamplerId(session->id, absl::StrCat(number)),
                  .owner = call->owner(),
                  .session = session->id};
  if (front.samplers.Has(sampler.id)) {
    RespondSampler(sampler.id, respond);
    return absl::OkStatus();
  }
  WEFT_RETURN_IF_ERROR(front.CheckOffered(call->body));
  WEFT_RETURN_IF_ERROR(CheckSamplerCount(front, session->id));
  WEFT_ASSIGN_OR_RETURN(sampler.model_path, Text(call->body, "model_path", ""));
  WEFT_ASSIGN_OR_RETURN(
      sampler.charge,
      front.ledger.Charge(sampler.owner, sampler.model_path.size()));
  if (sampler.model_path.empty()) {
    WEFT_RETURN_IF_ERROR(CheckBaseModel(front, Text(call->body, "base_model")));
    KeepMade(front, sampler, respond, [] {});
    return absl::OkStatus();
  }
  WEFT_ASSIGN_OR_RETURN(const CheckpointPath path,
                        ParseCheckpointPath(sampler.model_path, "model_path"));
  const auto keep = [&front, caller = call->caller, sampler, path,
                     respond](const CheckpointInfo& info) {
    Sampler made = sampler;
    made.created_ns = absl::ToUnixNanos(info.created_at);
    KeepMade(front, made, respond, [&front, caller, path] {
      front.accounts.Note(caller, "read", path, "sample");
    });
  };
  return FindCheckpoint(front, call, path, IfOk(respond, keep));
}

absl::Status GetSampler(Front& front, const CallPtr& call,
                        const Respond& respond) {
  WEFT_ASSIGN_OR_RETURN(const Sampler* const sampler,
                        front.samplers.FindOf(call->owner(), call->args[0]));
  const Json reply = {{"sampler_id", sampler->id},
                      {"base_model", front.model_name()}};
  if (sampler->model_path.empty()) {
    respond(JsonReply(reply));
    return absl::OkStatus();
  }
  WEFT_ASSIGN_OR_RETURN(const CheckpointPath path,
                        ParseCheckpointPath(sampler->model_path));
  // The session goes on if its checkpoint is gone.
  const auto describe = [&front, reply, respond, from = sampler->model_path](
                            const absl::StatusOr<CheckpointInfo>& info) {
    if (!info.ok() && !absl::IsNotFound(info.status())) {
      return Fail(respond, info.status());
    }
    Json described = reply;
    described["model_path"] = from;
    if (info.ok()) described["base_model"] = BaseModelOf(front, *info);
    respond(JsonReply(described));
  };
  return FindCheckpoint(front, call, path, describe);
}

void DropSamplersOf(Front& front, const std::string& session) {
  for (const std::string& id : front.samplers.OfSession(session)) {
    Forget(front, id);
  }
}

void DropSnapshotsOf(Front& front, const Model& model) {
  const auto is_of = [&model](const Sampler& sampler) {
    return sampler.owner == model.owner && sampler.adapter == model.adapter;
  };
  for (const std::string& id : front.samplers.Where(is_of)) {
    Forget(front, id);
  }
}

void RestoreSamplers(Front& front, const std::string& session) {
  for (const LedgerEntry& entry :
       front.ledger.ReadAll(EntryKind::kSampler, session)) {
    auto sampler = entry.fields.get<Sampler>();
    sampler.id = entry.id;
    if (!front.sessions.Has(sampler.session)) {
      front.ledger.Erase(EntryKind::kSampler, entry.id);
      continue;
    }
    const Caller caller = front.CallerOf(sampler.session);
    sampler.owner = OwnerKey(caller);
    sampler.charge =
        front.ledger.ChargeIfRoom(sampler.owner, sampler.model_path.size());
    // An earlier version had loaded the checkpoint into an adapter.
    if (!sampler.model_path.empty() && !sampler.adapter.empty()) {
      front.adapters.Delete(caller, sampler.adapter);
    }
    front.samplers.Add(entry.id, std::move(sampler));
  }
}

}  // namespace weft::server::tinker
