// Compiles the regular expressions of an adapter_config.json, which select
// modules by their path. PEFT uses Python's `re`. Weft uses RE2, because
// clients write the expressions and RE2's time is linear in the path. Private
// to src/lora.
#ifndef WEFT_SRC_LORA_PATH_EXPRESSION_H_
#define WEFT_SRC_LORA_PATH_EXPRESSION_H_

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace re2 {
class RE2;
}  // namespace re2

namespace weft::lora {

// Limits the RE2 instructions of all expressions of one file together. A letter
// takes about one instruction. Expressions that only spell out a path cost
// nothing, so a file may have one such expression for each linear layer. With
// this limit, matching all modules of a model of 126 layers takes about two
// seconds.
inline constexpr int kMaxInstructions = 1 << 13;

// How PEFT matches a path.
enum class PathMatch : uint8_t {
  kWhole,  // re.fullmatch(text, path), for target_modules and exclude_modules.
  kEnd,    // re.match(rf"(.*\.)?({text})$", path), for the keys of
           // rank_pattern and alpha_pattern.
};

// Threads: any.
class PathExpression {
 public:
  // Compiles `text` and subtracts its cost from `instructions_left`. Errors:
  // INVALID_ARGUMENT, which names the field, the text and the problem: RE2 does
  // not compile the text, Python reads it differently, or too few instructions
  // are left.
  static absl::StatusOr<PathExpression> Parse(absl::string_view field,
                                              absl::string_view text,
                                              PathMatch match,
                                              int& instructions_left);

  bool Matches(absl::string_view path) const;

 private:
  PathExpression(std::shared_ptr<const re2::RE2> compiled, PathMatch match);

  std::shared_ptr<const re2::RE2> compiled_;
  PathMatch match_;
};

// Returns why Python's `re` would refuse the expression or read it in another
// way than RE2. Returns an empty string if both read it alike. Does not look
// for syntax that RE2 does not compile, such as lookaround.
absl::string_view DiffersInPython(absl::string_view text);

}  // namespace weft::lora

#endif  // WEFT_SRC_LORA_PATH_EXPRESSION_H_
