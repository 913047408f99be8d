#include "src/lora/peft_fields.h"

#include <cstdint>

#include "absl/strings/str_cat.h"
#include "src/lora/peft_config.h"

namespace weft::lora {

std::string Shown(const PeftJson& value) {
  constexpr size_t kMaxShown = 80;
  std::string text = value.dump(-1, ' ', /*ensure_ascii=*/true,
                                PeftJson::error_handler_t::replace);
  if (text.size() > kMaxShown) text = text.substr(0, kMaxShown) + "...";
  return text;
}

absl::Status Refused(absl::string_view field, const PeftJson& value,
                     absl::string_view accepted) {
  return absl::InvalidArgumentError(absl::StrCat(kPeftConfigFile, ": ", field,
                                                 " is ", Shown(value),
                                                 "; accepted: ", accepted));
}

const PeftJson& FieldOf(const PeftJson& root, const char* field) {
  static const PeftJson& null = *new PeftJson();
  const auto found = root.find(field);
  return found == root.end() ? null : *found;
}

absl::StatusOr<int> ReadRank(absl::string_view field, const PeftJson& value) {
  if (!value.is_number_unsigned() || value.get<uint64_t>() < 1 ||
      value.get<uint64_t>() > kMaxFileRank) {
    return Refused(field, value,
                   absl::StrCat("an integer in [1, ", kMaxFileRank, "]"));
  }
  return value.get<int>();
}

absl::StatusOr<double> ReadAlpha(absl::string_view field,
                                 const PeftJson& value) {
  constexpr double kMaxAlpha = 1e6;
  if (!value.is_number() || !(value.get<double>() > 0) ||
      !(value.get<double>() <= kMaxAlpha)) {
    return Refused(field, value, "a number in (0, 1e6]");
  }
  return value.get<double>();
}

}  // namespace weft::lora
