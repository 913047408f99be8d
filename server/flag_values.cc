#include "server/flag_values.h"

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"

namespace weft {

const EnumNames<Device>& NamesOf(Device /*tag*/) {
  static const auto& names = *new EnumNames<Device>{
      {"cpu", Device::kCpu}, {"cuda", Device::kCuda}, {"auto", Device::kAuto}};
  return names;
}

const EnumNames<GradientCheckpointing>& NamesOf(GradientCheckpointing /*tag*/) {
  static const auto& names = *new EnumNames<GradientCheckpointing>{
      {"off", GradientCheckpointing::kOff},
      {"all", GradientCheckpointing::kAll},
      {"auto", GradientCheckpointing::kAuto}};
  return names;
}

const EnumNames<Dtype>& NamesOf(Dtype /*tag*/) {
  static const auto& names = *new EnumNames<Dtype>{
      {"auto", Dtype::kAuto}, {"f32", Dtype::kF32}, {"bf16", Dtype::kBf16}};
  return names;
}

const EnumNames<CpuBf16>& NamesOf(CpuBf16 /*tag*/) {
  static const auto& names =
      *new EnumNames<CpuBf16>{{"auto", CpuBf16::kAuto}, {"off", CpuBf16::kOff}};
  return names;
}

const EnumNames<BaseWeights>& NamesOf(BaseWeights /*tag*/) {
  static const auto& names = *new EnumNames<BaseWeights>{
      {"dtype", BaseWeights::kDtype}, {"int8", BaseWeights::kInt8}};
  return names;
}

const EnumNames<LoadFormat>& NamesOf(LoadFormat /*tag*/) {
  static const auto& names = *new EnumNames<LoadFormat>{
      {"auto", LoadFormat::kAuto}, {"dummy", LoadFormat::kDummy}};
  return names;
}

const EnumNames<LogStyle>& NamesOf(LogStyle /*tag*/) {
  static const auto& names =
      *new EnumNames<LogStyle>{{"text", LogStyle::kText},
                               {"json", LogStyle::kJson},
                               {"auto", LogStyle::kAuto}};
  return names;
}

const EnumNames<LogLevel>& NamesOf(LogLevel /*tag*/) {
  static const auto& names =
      *new EnumNames<LogLevel>{{"debug", LogLevel::kDebug},
                               {"info", LogLevel::kInfo},
                               {"warning", LogLevel::kWarning},
                               {"error", LogLevel::kError}};
  return names;
}

bool ReadFlagValue(absl::string_view text, std::string* out) {
  *out = std::string(text);
  return true;
}

bool ReadFlagValue(absl::string_view text, int* out) {
  return absl::SimpleAtoi(text, out);
}

bool ReadFlagValue(absl::string_view text, int64_t* out) {
  return absl::SimpleAtoi(text, out);
}

bool ReadFlagValue(absl::string_view text, double* out) {
  return absl::SimpleAtod(text, out);
}

bool ReadFlagValue(absl::string_view text, bool* out) {
  return absl::SimpleAtob(text, out);
}

bool ReadFlagValue(absl::string_view text, std::vector<std::string>* out) {
  *out = absl::StrSplit(text, ',', absl::SkipEmpty());
  return true;
}

}  // namespace weft
