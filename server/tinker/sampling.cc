#include "server/tinker/sampling.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "server/status_conversion.h"
#include "server/tinker/models.h"
#include "server/tinker/sample_wire.h"
#include "server/tinker/sessions.h"
#include "src/base/status_macros.h"

namespace weft::tinker {
namespace {

// A sampling session, or for one sample the base model.
absl::StatusOr<Sampler> ReadSampler(Front& front, const Call& call) {
  WEFT_ASSIGN_OR_RETURN(const std::string id,
                        StringOr(call.body, "sampling_session_id", ""));
  if (!id.empty()) {
    WEFT_ASSIGN_OR_RETURN(const Sampler* const sampler,
                          front.FindSampler(call, id));
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

absl::Status StartSample(Front& front, const CallPtr& call,
                         const Sampler& sampler, const std::string& id) {
  WEFT_ASSIGN_OR_RETURN(const Engine* const engine, front.port.engine());
  WEFT_ASSIGN_OR_RETURN(
      TranslatedSample sample,
      TranslateSample(call->body, engine->info().context_length));
  sample.request.set_adapter_id(sampler.adapter);
  sample.request.set_snapshot(sampler.snapshot);
  const std::string cancel = absl::StrCat(call->owner(), "/", id);
  return front.port.Call<SampleResult>(
      call->origin(), Rpc::kSample, sample.request,
      [&front, cancel](Engine& port, SampleRequest plain, auto then) {
        front.cancels[cancel] =
            port.Sample(std::move(plain), nullptr, std::move(then));
      },
      [&front, id, cancel,
       last_n = sample.last_n](const absl::StatusOr<SampleResult>& result) {
        front.cancels.erase(cancel);
        front.futures.Finish(
            id, result.ok() ? FutureResult{SampleOutput(*result, last_n),
                                           SampleOutputJson}
                            : FutureResult::Failed(result.status()));
      });
}

// Returns what names the request among those of its sampler. Without a number,
// and without a session that numbers, no two requests are the same one.
absl::StatusOr<std::string> NumberOf(const Call& call, const Sampler& sampler) {
  if (sampler.session.empty() || Find(call.body, "seq_id") == nullptr) {
    return NewId();
  }
  WEFT_ASSIGN_OR_RETURN(const int64_t seq, IntOr(call.body, "seq_id", 0));
  return absl::StrCat(seq);
}

void RespondSamplePromise(const std::string& id, int64_t num_samples,
                          const Respond& respond) {
  Json sequences = Json::array();
  for (int64_t i = 0; i < num_samples; ++i) {
    sequences.push_back(absl::StrCat(id, ":", i));
  }
  respond(JsonReply({{"request_id", id}, {"sample_sequence_ids", sequences}}));
}

}  // namespace

absl::Status RunSample(Front& front, const CallPtr& call,
                       const Respond& respond) {
  WEFT_ASSIGN_OR_RETURN(const Sampler sampler, ReadSampler(front, *call));
  WEFT_ASSIGN_OR_RETURN(const int64_t num_samples,
                        IntOr(call->body, "num_samples", 1));
  WEFT_ASSIGN_OR_RETURN(const std::string number, NumberOf(*call, sampler));
  const std::string id = absl::StrCat(sampler.id, ":", number);
  if (front.futures.Open(id, call->owner())) {
    const absl::Status refused = StartSample(front, call, sampler, id);
    if (!refused.ok())
      front.cancels.erase(absl::StrCat(call->owner(), "/", id));
    if (!refused.ok() && RetryMillis(refused).has_value()) {
      front.futures.Drop(id);
      return refused;
    }
    if (!refused.ok()) {
      front.futures.Finish(id, FutureResult::Failed(refused));
    }
  }
  RespondSamplePromise(id, std::min<int64_t>(num_samples, 1 << 16), respond);
  return absl::OkStatus();
}

}  // namespace weft::tinker
