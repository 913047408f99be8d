#include "src/lora/path_expression.h"

#include <re2/re2.h>

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "src/lora/peft_config.h"

namespace weft::lora {
namespace {

// Limits the memory of a compiled expression and its matching states.
constexpr int64_t kMaxBytes = int64_t{2} << 20;

bool IsDigit(char c) {
  return absl::ascii_isdigit(static_cast<unsigned char>(c));
}

bool IsLetter(char c) {
  return absl::ascii_isalpha(static_cast<unsigned char>(c));
}

// Scans an expression from left to right for syntax that Python and RE2 read
// differently. The methods Escape, Class, Repetition, Group and Next consume
// the beginning of text_. They return the problem, or an empty string if there
// is none.
class Scanner {
 public:
  explicit Scanner(absl::string_view text) : text_(text) {}

  absl::string_view Scan() {
    TakeFlags();
    while (!text_.empty()) {
      const absl::string_view wrong = Next();
      if (!wrong.empty()) return wrong;
    }
    return "";
  }

 private:
  static constexpr absl::string_view kFlags = "ims";

  // Skips flags of the whole expression, such as (?i). Python accepts these
  // flags only at the beginning of the expression.
  void TakeFlags() {
    if (!absl::StartsWith(text_, "(?")) return;
    const size_t end = text_.find_first_not_of(kFlags, 2);
    if (end != absl::string_view::npos && end > 2 && text_[end] == ')') {
      text_.remove_prefix(end + 1);
    }
  }

  absl::string_view Next() {
    const char c = text_.front();
    const bool after_anchor = std::exchange(after_anchor_, false);
    if (after_anchor && absl::StrContains("*+?{", c)) {
      return "Python repeats no ^, $, \\b, \\B and \\A";
    }
    switch (c) {
      case '\\':
        return Escape(/*in_class=*/false);
      case '[':
        return Class();
      case '{':
        return Repetition();
      case '(':
        return Group();
      case '^':
      case '$':
        after_anchor_ = true;
        break;
      default:
        break;
    }
    text_.remove_prefix(1);
    return "";
  }

  absl::string_view Escape(bool in_class) {
    constexpr absl::string_view kClasses = "dDsSwW";
    constexpr absl::string_view kAnchors = "bBA";
    if (text_.size() < 2) return "it ends with a backslash";
    const char c = text_[1];
    after_anchor_ = absl::StrContains(kAnchors, c);
    if ((IsLetter(c) || IsDigit(c)) && !absl::StrContains(kClasses, c) &&
        (in_class || !after_anchor_)) {
      return "a backslash before a letter or digit may begin \\d, \\D, \\s, "
             "\\S, \\w, \\W, \\b, \\B and \\A";
    }
    text_.remove_prefix(2);
    if (in_class && absl::StrContains(kClasses, c) && text_.size() >= 2 &&
        text_[0] == '-' && text_[1] != ']') {
      return "a range of characters cannot begin with a class";
    }
    return "";
  }

  absl::string_view Class() {
    text_.remove_prefix(1);
    if (absl::StartsWith(text_, "^")) text_.remove_prefix(1);
    if (absl::StartsWith(text_, "]")) text_.remove_prefix(1);
    while (!text_.empty() && text_.front() != ']') {
      if (text_.front() == '\\') {
        const absl::string_view wrong = Escape(/*in_class=*/true);
        if (!wrong.empty()) return wrong;
        continue;
      }
      if (text_.front() == '[') return "write [ in a class as \\[";
      text_.remove_prefix(1);
    }
    after_anchor_ = false;
    if (!text_.empty()) text_.remove_prefix(1);
    return "";
  }

  // Refuses {,3} and {01}, for example: Python reads them as repetitions, but
  // RE2 reads them as literal text.
  absl::string_view Repetition() {
    constexpr absl::string_view kWrong =
        "{ begins a repetition {n}, {n,} or {n,m}, or is written as \\{";
    text_.remove_prefix(1);
    if (!TakeNumber()) return kWrong;
    if (absl::StartsWith(text_, ",")) {
      text_.remove_prefix(1);
      if (!absl::StartsWith(text_, "}") && !TakeNumber()) return kWrong;
    }
    if (!absl::StartsWith(text_, "}")) return kWrong;
    text_.remove_prefix(1);
    return "";
  }

  // Takes a number of at most four digits without leading zeros.
  bool TakeNumber() {
    const size_t size =
        std::ranges::find_if_not(text_, IsDigit) - text_.begin();
    if (size == 0 || size > 4 || (size > 1 && text_[0] == '0')) return false;
    text_.remove_prefix(size);
    return true;
  }

  // Reads the start of a group. After "(?", accepts only what has the same
  // meaning in Python and RE2.
  absl::string_view Group() {
    text_.remove_prefix(1);
    if (!absl::StartsWith(text_, "?")) return "";
    text_.remove_prefix(1);
    if (absl::StartsWith(text_, "P<")) {
      text_.remove_prefix(2);
      if (!text_.empty() && IsDigit(text_[0])) {
        return "the name of a group begins with a digit";
      }
      return "";
    }
    text_.remove_prefix(
        std::min(text_.size(), text_.find_first_not_of(kFlags)));
    if (absl::StartsWith(text_, ":")) {
      text_.remove_prefix(1);
      return "";
    }
    return "(? begins (?: or (?P<name>, with flags i, m and s (?i:, and at the "
           "beginning of a whole expression (?i)";
  }

  absl::string_view text_;
  bool after_anchor_ = false;
};

// Returns the expression's cost in RE2 instructions. An expression without
// groups, alternatives and repetitions costs nothing, because matching it is
// one comparison.
int CostOf(const RE2& compiled, absl::string_view text) {
  const bool compares = text.find_first_of("(|*+?{") == absl::string_view::npos;
  return compares ? 0 : compiled.ProgramSize();
}

absl::Status RefusedExpression(absl::string_view field, absl::string_view text,
                               absl::string_view reason) {
  return Refused(field, PeftJson(std::string(text)),
                 absl::StrCat("regular expressions that RE2 has and reads as "
                              "Python does (",
                              reason, ")"));
}

}  // namespace

absl::string_view DiffersInPython(absl::string_view text) {
  if (!std::ranges::all_of(text, [](char c) { return c >= ' ' && c <= '~'; })) {
    return "printable ASCII alone";
  }
  return Scanner(text).Scan();
}

PathExpression::PathExpression(std::shared_ptr<const re2::RE2> compiled,
                               PathMatch match)
    : compiled_(std::move(compiled)), match_(match) {}

absl::StatusOr<PathExpression> PathExpression::Parse(absl::string_view field,
                                                     absl::string_view text,
                                                     PathMatch match,
                                                     int& instructions_left) {
  RE2::Options options;
  options.set_log_errors(false);
  options.set_max_mem(kMaxBytes);
  const std::string whole = match == PathMatch::kWhole
                                ? std::string(text)
                                : absl::StrCat("(.*\\.)?(", text, ")$");
  auto compiled = std::make_shared<const RE2>(whole, options);
  if (!compiled->ok()) {
    return RefusedExpression(field, text, compiled->error());
  }
  const absl::string_view differs = DiffersInPython(whole);
  if (!differs.empty()) return RefusedExpression(field, text, differs);
  instructions_left -= CostOf(*compiled, text);
  if (instructions_left < 0) {
    return RefusedExpression(field, text,
                             absl::StrCat("those of one file take at most ",
                                          kMaxInstructions, " instructions"));
  }
  return PathExpression(std::move(compiled), match);
}

bool PathExpression::Matches(absl::string_view path) const {
  const RE2::Anchor anchor =
      match_ == PathMatch::kWhole ? RE2::ANCHOR_BOTH : RE2::ANCHOR_START;
  return compiled_->Match({path.data(), path.size()}, 0, path.size(), anchor,
                          /*submatch=*/nullptr, /*nsubmatch=*/0);
}

}  // namespace weft::lora
