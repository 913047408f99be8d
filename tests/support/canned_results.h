// The canned engine's results: fixed functions of the request, so that a test
// knows every number.
#ifndef WEFT_TESTS_SUPPORT_CANNED_RESULTS_H_
#define WEFT_TESTS_SUPPORT_CANNED_RESULTS_H_

#include <cstdint>

#include "absl/time/time.h"
#include "src/engine/engine.h"

namespace weft {

inline constexpr absl::Time kCannedCreation = absl::FromUnixSeconds(1700000000);
inline constexpr uint64_t kCannedAdapterBytes = 16000;
inline constexpr uint64_t kCannedAdapterParameters = 1000;
inline constexpr uint64_t kCannedCheckpointBytes = 4096;
inline constexpr const char* kCannedBaseModel = "canned";
inline constexpr const char* kCannedFingerprint = "c0ffee";
inline constexpr double kCannedGradNorm = 2.5;

// Describes a model of two layers, with a vocabulary of 100, a context of 32
// tokens, and room for four adapters.
EngineInfo CannedInfo();

// The log-probability of target t is -(t + 1) / 8, or 0 if the target has
// weight 0 and score_all is not set. A loss is -weight times a log-probability.
// Entropies are 0.5.
TrainResult CannedTrain(const TrainRequest& request, uint64_t step);

// Returns 0 for the prompt's first token and -1 for all others.
std::vector<float> CannedPromptLogprobs(const SampleRequest& request);
// Returns no entries for the prompt's first token. Each later token gets as
// many entries as the request asks for. Each of its entries is the token
// itself, with log-probability -1.
std::vector<TopLogprobs> CannedPromptTop(const SampleRequest& request);

// Fills what else the request asks of its prompt: each of its targets has
// log-probability -0.5, and each alternative is the token of its position, with
// -0.75. One token of the prompt was cached.
void FillCannedPrompt(const SampleRequest& request, SampleResult* result);

// Draws one token. The first token of sample i is the prompt's last token plus
// i + 1, and each next token is one higher, modulo the vocabulary. The
// log-probability is -0.25.
Sample CannedToken(const SampleRequest& request, int vocab_size,
                   int sample_index, int position);

}  // namespace weft

#endif  // WEFT_TESTS_SUPPORT_CANNED_RESULTS_H_
