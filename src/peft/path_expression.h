// Regular expressions of an adapter_config.json, which pick modules by their
// path. PEFT runs them by Python's `re`; here RE2 does, whose time is linear in
// the path, since a client wrote them. Private to lora/.
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

// What the expressions of one file may cost together, in instructions of RE2:
// a letter is about one of them. Those that only spell a path out are free, so
// that each linear layer may have a rank of its own. Bounds the time to match
// all modules of a model of 126 layers to some two seconds.
inline constexpr int kMaxInstructions = 1 << 13;

// What PEFT asks of a path.
enum class PathMatch : uint8_t {
  kWhole,  // re.fullmatch(text, path): target_modules, exclude_modules.
  kEnd,    // re.match(rf"(.*\.)?({text})$", path): keys of the patterns.
};

// Threads: any.
class PathExpression {
 public:
  // `instructions_left` goes down by what the expression costs.
  // Errors: INVALID_ARGUMENT naming the field, the text and what is wrong with
  // it: RE2 does not compile it, it is too big, or Python reads it otherwise.
  [[nodiscard]] static absl::StatusOr<PathExpression> Parse(
      absl::string_view field, absl::string_view text, PathMatch match,
      int& instructions_left);

  [[nodiscard]] bool Matches(absl::string_view path) const;

 private:
  PathExpression(std::shared_ptr<const re2::RE2> compiled, PathMatch match);

  std::shared_ptr<const re2::RE2> compiled_;
  PathMatch match_;
};

// Why Python's `re` would read the expression otherwise than RE2 does, or not
// at all; empty when it reads it alike. What RE2 does not compile is not looked
// for: lookaround, for one.
[[nodiscard]] absl::string_view DiffersInPython(absl::string_view text);

}  // namespace weft::lora

#endif  // WEFT_SRC_PEFT_PATH_EXPRESSION_H_
