// Decides, token by token, whether a sample is finished.
#ifndef WEFT_SRC_SAMPLING_STOP_MATCHER_H_
#define WEFT_SRC_SAMPLING_STOP_MATCHER_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "src/request/sample.h"

namespace weft::sampling {

// Bytes of each token id, read from a Hugging Face folder's tokenizer.json.
// Immutable after Load; shared by the engine and every matcher.
class TokenBytes {
 public:
  // Reads added tokens and BPE vocabularies: byte-level ones (GPT-2, Llama 3,
  // Qwen, SmolLM), and SentencePiece's with byte fallback (Llama 2, Mistral,
  // Gemma). The bytes are those within a text: at its beginning the second kind
  // drops a space. NOT_FOUND without the file, UNIMPLEMENTED for other kinds of
  // tokenizers, INVALID_ARGUMENT for a damaged file.
  [[nodiscard]] static absl::StatusOr<TokenBytes> Load(
      const std::string& model_dir);

  // Empty for an id that has no bytes (out of range or a gap).
  [[nodiscard]] const std::string& Bytes(int32_t token) const;

 private:
  std::vector<std::string> bytes_;
};

// Threads: one matcher per sample, one thread at a time. `rule` is copied;
// `token_bytes` may be null when the rule has no byte strings, else it outlives
// the matcher.
class StopMatcher {
 public:
  StopMatcher(const StopRule& rule, const TokenBytes* token_bytes);

  // Takes the next token. Returns true if the sample ends with it.
  [[nodiscard]] bool Push(int32_t token);

 private:
  StopRule rule_;
  const TokenBytes* token_bytes_;
  std::vector<int32_t> recent_;  // At most the longest sequence's tokens.
  std::string tail_;             // Decoded bytes that a match can still use.
  size_t longest_sequence_ = 0;
  size_t longest_string_ = 0;
};

}  // namespace weft::sampling

#endif  // WEFT_SRC_SAMPLING_STOP_MATCHER_H_
