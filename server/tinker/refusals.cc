#include "server/tinker/refusals.h"

namespace weft::tinker {
namespace {

struct Refusal {
  const char* field;
  const char* message;
};
constexpr char kNoStableReinforce[] =
    "record_stability_info (loss stable_reinforce) is not offered: set loss_fn "
    "to importance_sampling, ppo, cispo or gspo";
constexpr Refusal kRefusals[] = {
    {"age_encryption_recipients",
     "age_encryption_recipients is not offered, because files are not "
     "encrypted here: leave it out, and have TLS protect the download. "
     "weights.download of the cookbook always sends it, except for a path that "
     "save_weights_external returned"},
    {"record_stability_info", kNoStableReinforce},
    {"weights_access_token",
     "weights_access_token is not offered: checkpoints are their tenant's"},
    {"target_prompt_logprobs",
     "target_prompt_logprobs is not offered: use topk_prompt_logprobs, or a "
     "training client's forward with several target_tokens for each token"},
    {"prompt_alt_tokens_k",
     "prompt_alt_tokens_k is not offered: use topk_prompt_logprobs"},
    {"optimizer_params", "optimizer_params is not offered: use adam_params"}};

bool AsksForNothing(const Json& value) {
  if (value.is_boolean()) return !value.get<bool>();
  if (value.is_number()) return value == 0;
  if (value.is_string()) return value == "";
  return value.empty();
}

}  // namespace

absl::Status NoStableReinforce() {
  return absl::UnimplementedError(kNoStableReinforce);
}

absl::Status RefuseFields(const Json& body) {
  for (const Refusal& refusal : kRefusals) {
    const Json* const value = Find(body, refusal.field);
    if (value == nullptr || AsksForNothing(*value)) continue;
    return absl::UnimplementedError(refusal.message);
  }
  return absl::OkStatus();
}

}  // namespace weft::tinker
