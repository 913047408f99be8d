// Regular expressions of an adapter_config.json, which pick modules by their
// path. PEFT uses Python's `re`. Weft uses RE2, whose time is linear in the
// path, because a client wrote the expressions. Private to peft/.
#ifndef WEFT_SRC_PEFT_PATH_EXPRESSION_H_
#define WEFT_SRC_PEFT_PATH_EXPRESSION_H_

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace re2 {
class RE2;
}  // namespace re2

namespace weft::lora {

// The most RE2 instructions that the expressions of one file may have together.
// A letter is about one instruction. Expressions that only spell out a path are
// free, so that each linear layer may have its own rank. The limit bounds the
// time to match all modules of a model of 126 layers to about two seconds.
inline constexpr int kMaxInstructions = 1 << 13;

// How PEFT matches a path.
enum class PathMatch : uint8_t {
  kWhole,  // re.fullmatch(text, path): target_modules, exclude_modules.
  kEnd,    // re.match(rf"(.*\.)?({text})$", path): keys of the patterns.
};

// Threads: any.
class PathExpression {
 public:
  // Subtracts the expression's cost from `instructions_left`.
  // Errors: INVALID_ARGUMENT naming the field, the text and what is wrong with
  // it: RE2 does not compile it, it is too big, or Python reads it differently.
  [[nodiscard]] static absl::StatusOr<PathExpression> Parse(
      absl::string_view field, absl::string_view text, PathMatch match,
      int& instructions_left);

  [[nodiscard]] bool Matches(absl::string_view path) const;

 private:
  PathExpression(std::shared_ptr<const re2::RE2> compiled, PathMatch match);

  std::shared_ptr<const re2::RE2> compiled_;
  PathMatch match_;
};

// Returns why Python's `re` would refuse the expression or read it differently
// from RE2; empty if both agree. Does not look for syntax that RE2 does not
// compile, such as lookaround.
[[nodiscard]] absl::string_view DiffersInPython(absl::string_view text);

}  // namespace weft::lora

#endif  // WEFT_SRC_PEFT_PATH_EXPRESSION_H_
