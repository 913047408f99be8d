// Decides after each token whether a sample is finished.
#ifndef WEFT_SRC_SAMPLING_STOP_MATCHER_H_
#define WEFT_SRC_SAMPLING_STOP_MATCHER_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "src/request/sample.h"

namespace weft::sampling {

// The bytes of each token id, from the tokenizer.json of a Hugging Face folder.
// Immutable after Load, so the engine and all matchers share one object.
class TokenBytes {
 public:
  // Reads added tokens and two kinds of BPE vocabularies: byte-level ones
  // (GPT-2, Llama 3, Qwen, SmolLM), and those of SentencePiece with byte
  // fallback (Llama 2, Mistral, Gemma). The bytes of a token are its bytes
  // inside a text; at the beginning of a text, SentencePiece drops a space.
  // Errors: NOT_FOUND if there is no tokenizer.json, UNIMPLEMENTED for other
  // kinds of tokenizers, INVALID_ARGUMENT if the file is damaged or exceeds
  // 256 MiB.
  static absl::StatusOr<TokenBytes> Load(const std::string& model_dir);

  // Returns the token's bytes, or an empty string for an id that has no token.
  const std::string& Bytes(int32_t token) const;

 private:
  std::vector<std::string> bytes_;
};

// Finds the end of one sample. `rule` is copied. `token_bytes` outlives the
// matcher; it may be null if the rule has no byte strings.
// Threads: not thread-safe; each sample has its own matcher.
class StopMatcher {
 public:
  StopMatcher(const StopRule& rule, const TokenBytes* token_bytes);

  // Takes the next token. Returns true if the rule matches with it, and so the
  // sample ends unless it is too short (SamplingConfig::min_tokens).
  [[nodiscard]] bool Push(int32_t token);

 private:
  StopRule rule_;
  const TokenBytes* token_bytes_;
  std::vector<int32_t> recent_;  // The last longest_sequence_ tokens.
  std::string tail_;             // The last bytes, in which a match may begin.
  size_t longest_sequence_ = 0;
  size_t longest_string_ = 0;
};

}  // namespace weft::sampling

#endif  // WEFT_SRC_SAMPLING_STOP_MATCHER_H_
