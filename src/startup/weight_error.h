// Measures what the rounding of weights to 8 bits does to a model.
#ifndef WEFT_SRC_STARTUP_WEIGHT_ERROR_H_
#define WEFT_SRC_STARTUP_WEIGHT_ERROR_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "src/model/decoder.h"
#include "src/weights/checkpoint.h"

namespace weft::engine {

// How the next-token distribution of a decoder differs from that of the
// checkpoint in f32, over the tokens of one text.
struct WeightError {
  int64_t num_tokens = 0;
  double mean_kl = 0;  // Nats for each token, KL(f32 || decoder).
  double top1 = 0;     // The share of tokens whose likeliest next token is the
                       // same.
};

// Returns the text on which models are compared: 64 token ids that are spread
// over the vocabulary, the same for every start. They are no words, because the
// daemon does not encode text. Models are less sure about them than about
// words, so likeliest tokens are closer to each other than in real text.
[[nodiscard]] std::vector<int64_t> FixedText(int64_t vocab);

// Compares the decoder, which has whole layers, with the checkpoint from which
// it was loaded. Reads the checkpoint a second time: one layer in f32 at a
// time, and the head in slices of the vocabulary.
// Errors:  those of reading.   Throws c10::Error.   Threads: the engine's.
[[nodiscard]] absl::StatusOr<WeightError> CompareWithCheckpoint(
    const model::Decoder& decoder, const weights::Checkpoint& checkpoint);

}  // namespace weft::engine

#endif  // WEFT_SRC_STARTUP_WEIGHT_ERROR_H_
