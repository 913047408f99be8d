// Measures what the rounding of weights to 8 bits does to a model.
#ifndef WEFT_SRC_STARTUP_WEIGHT_ERROR_H_
#define WEFT_SRC_STARTUP_WEIGHT_ERROR_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "src/model/decoder.h"
#include "src/weights/checkpoint.h"

namespace weft::engine {

// The difference between the next-token distributions of a decoder and of its
// checkpoint in f32, over the tokens of one text.
struct WeightError {
  int64_t num_tokens = 0;
  double mean_kl = 0;  // Mean of KL(f32 || decoder) over the tokens, in nats.
  double top1 = 0;     // Share of tokens with the same likeliest next token.
};

// Returns the text on which models are compared: 64 token ids that are spread
// over the vocabulary, the same at every start. The ids form no words, because
// the daemon has no tokenizer. Models are less sure about the next id than in
// real text, so rounding changes the likeliest token more often.
[[nodiscard]] std::vector<int64_t> FixedText(int64_t vocab);

// Compares a decoder with the checkpoint from which it was loaded. Reads the
// checkpoint again in f32: one layer at a time, and the head in slices of the
// vocabulary. REQUIRES: this rank has the decoder's whole layers.
// Errors: those of model::LoadEntries. Throws c10::Error.
// Threads: the loading thread.
[[nodiscard]] absl::StatusOr<WeightError> CompareWithCheckpoint(
    const model::Decoder& decoder, const weights::Checkpoint& checkpoint);

}  // namespace weft::engine

#endif  // WEFT_SRC_STARTUP_WEIGHT_ERROR_H_
