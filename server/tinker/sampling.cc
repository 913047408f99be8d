#include "server/tinker/sampling.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "server/field_checks.h"
#include "server/status_conversion.h"
#include "server/tinker/models.h"
#include "server/tinker/sample_wire.h"
#include "server/tinker/samplers.h"
#include "server/tinker/sessions.h"
#include "server/tinker/signature.h"
#include "src/base/reason.h"
#include "src/base/status_macros.h"

namespace weft::tinker {
namespace {

// The memory of a sample besides its request.
constexpr int64_t kSampleBytes = 1024;

// Returns the sampling session that the body names. If the body names none,
// returns a temporary session of the base model for this request only.
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
  if (!path.empty()) {
    return absl::UnimplementedError(
        "model_path is not offered here: make a sampling session");
  }
  WEFT_ASSIGN_OR_RETURN(const std::string base,
                        StringField(call.body, "base_model"));
  WEFT_RETURN_IF_ERROR(CheckBaseModel(front, base));
  return Sampler{.id = absl::StrCat("base:", call.owner())};
}

std::string CancelKey(const std::string& owner, const std::string& id) {
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

// Translates the request and gives it to the engine. `id` is the id of the
// future. If StartSample returns an error, the caller must finish or drop the
// future.
absl::Status StartSample(Front& front, const CallPtr& call,
                         const Sampler& sampler, const std::string& id) {
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
      static_cast<int64_t>(sample.request.SpaceUsedLong()) + kSampleBytes;
  const auto reserved = front.waiting->Reserve(call->owner(), bytes);
  if (!reserved.ok()) {
    return WithReason(absl::ResourceExhaustedError("too many samples wait"),
                      {.name = "QUEUE_FULL", .values = {}});
  }
  const std::string cancel = CancelKey(call->owner(), id);
  const absl::Status refused = front.port.CallWith<SampleResult>(
      call->origin(), Rpc::kSample, sample.request,
      [&front, cancel, id](Engine& port, SampleRequest plain, auto then) {
        // RespondSamplePromise names the sequences by the future.
        if (!plain.record.empty()) plain.record = id;
        front.cancels[cancel] =
            port.Sample(std::move(plain), nullptr, std::move(then));
      },
      [&front, cancel, id, format = sample.format,
       reserved](const absl::StatusOr<SampleResult>& result) {
        front.cancels.erase(cancel);
        front.futures.Finish(
            id, result.ok() ? FutureResult{SampleOutput(*result, format),
                                           SampleOutputJson}
                            : FutureResult::Failed(result.status()));
      });
  if (!refused.ok()) front.cancels.erase(cancel);
  return refused;
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
    const absl::Status refused = StartSample(front, call, sampler, id);
    if (!refused.ok() && RetryMillis(refused).has_value()) {
      front.futures.Drop(id);
      return refused;
    }
    if (!refused.ok()) {
      front.futures.Finish(id, FutureResult::Failed(refused));
    }
  }
  RespondSamplePromise(id, num_samples, respond);
  return absl::OkStatus();
}

void CancelSample(Front& front, const std::string& owner,
                  const std::string& id) {
  const auto found = front.cancels.find(CancelKey(owner, id));
  if (found != front.cancels.end()) found->second.Cancel();
}

}  // namespace weft::tinker
