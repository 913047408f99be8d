#include "server/wire/datum_reader.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "server/wire/field_checks.h"
#include "src/base/status_macros.h"

namespace weft::server {
namespace {

static_assert(std::endian::native == std::endian::little,
              "raw fields are copied, not swapped");

// Reads one datum. Do not reorder the calls in Read(), because later checks use
// the lengths of parts that were read earlier.
class DatumReader {
 public:
  DatumReader(const v1::Datum& datum, int index, LossFunction function,
              const RequestLimits& limits)
      : in_(datum), index_(index), function_(function), limits_(limits) {}

  absl::StatusOr<Datum> Read() {
    WEFT_RETURN_IF_ERROR(ReadTokens());
    WEFT_RETURN_IF_ERROR(ReadTargets());
    WEFT_RETURN_IF_ERROR(ReadWeights());
    WEFT_RETURN_IF_ERROR(ReadPolicyInputs());
    WEFT_RETURN_IF_ERROR(ReadRouting());
    WEFT_RETURN_IF_ERROR(ReadSupport());
    WEFT_RETURN_IF_ERROR(ReadTeacherInput());
    return std::move(out_);
  }

 private:
  std::string Path(absl::string_view field) const {
    return absl::StrCat("data[", index_, "].", field);
  }

  // Copies a field from its packed or its raw form. `*out` becomes empty if
  // neither form is set. Out is int32_t for ids (CheckIds checks their range
  // later), uint32_t for offsets and float for reals. Errors: INVALID_ARGUMENT
  // if both forms are set, or if the raw form's size is not a multiple of 4.
  template <typename In, typename Out>
  absl::Status Copy(absl::string_view field,
                    const google::protobuf::RepeatedField<In>& packed,
                    const std::string& raw, std::vector<Out>* out) const {
    static_assert(sizeof(In) == sizeof(Out) && sizeof(Out) == 4);
    if (!packed.empty() && !raw.empty()) {
      return BadField(Path(field), "and ", Path(field),
                      "_le are both set, must be "
                      "one of them");
    }
    if (raw.size() % sizeof(Out) != 0) {
      return BadField(Path(absl::StrCat(field, "_le")), "has ", raw.size(),
                      " bytes, must be a multiple of 4");
    }
    const size_t count =
        raw.empty() ? static_cast<size_t>(packed.size()) : raw.size() / 4;
    out->resize(count);
    if (count > 0) {
      std::memcpy(out->data(),
                  raw.empty() ? static_cast<const void*>(packed.data())
                              : static_cast<const void*>(raw.data()),
                  count * sizeof(Out));
    }
    return absl::OkStatus();
  }

  absl::Status CheckLength(absl::string_view field, size_t length,
                           size_t expected) const {
    if (length == expected) return absl::OkStatus();
    const std::string shape =
        out_.target_offsets.empty()
            ? absl::StrCat(std::max(out_.targets_per_token, 1),
                           " targets per token")
            : "the last of target_offsets";
    return BadField(Path(field), "has ", length, " values, must have ",
                    expected, " (", out_.tokens.size(), " tokens, ", shape,
                    ")");
  }

  absl::Status CheckFinite(absl::string_view field,
                           const std::vector<float>& values) const {
    const int64_t bad = FindNonFinite(values);
    if (bad < 0) return absl::OkStatus();
    return BadField(absl::StrCat(Path(field), "[", bad, "]"), "is ",
                    values[static_cast<size_t>(bad)], ", must be finite");
  }

  absl::Status ReadTokens() {
    WEFT_RETURN_IF_ERROR(
        Copy("tokens", in_.tokens(), in_.tokens_le(), &out_.tokens));
    if (out_.tokens.empty()) return BadField(Path("tokens"), "is empty");
    return CheckInput("tokens", out_.tokens);
  }

  // Checks tokens that a model reads.
  absl::Status CheckInput(absl::string_view field,
                          const std::vector<int32_t>& tokens) const {
    if (tokens.size() > static_cast<size_t>(limits_.context_length)) {
      return BadField(Path(field), "has ", tokens.size(),
                      " values, must be in [1, context length ",
                      limits_.context_length, "]");
    }
    return CheckIds(Path(field), tokens, limits_.vocab_size);
  }

  absl::Status ReadTeacherInput() {
    WEFT_RETURN_IF_ERROR(Copy("teacher_tokens", in_.teacher_tokens(),
                              in_.teacher_tokens_le(), &out_.teacher_tokens));
    const auto count = static_cast<int64_t>(out_.teacher_tokens.size());
    if (count == 0) {
      if (!in_.has_teacher_offset()) return absl::OkStatus();
      return BadField(Path("teacher_offset"), "is ", in_.teacher_offset(),
                      ", must be absent without teacher_tokens");
    }
    if (!HasTeacher(function_)) {
      return BadField(Path("teacher_tokens"), "has ", count,
                      " values, must be empty for every loss but "
                      "forward_kl, reverse_kl and js");
    }
    WEFT_RETURN_IF_ERROR(CheckInput("teacher_tokens", out_.teacher_tokens));
    out_.teacher_offset = in_.has_teacher_offset() ? in_.teacher_offset()
                                                   : count - out_.num_tokens();
    return CheckPairs(count);
  }

  // Checks the teacher's place of every token that is compared. If the token
  // before is compared, too, both models must have read its target, or the
  // offset is wrong.
  absl::Status CheckPairs(int64_t teacher_tokens) const {
    bool follows = false;  // The token before is compared.
    for (int64_t i = 0; i < out_.num_tokens(); ++i) {
      const bool compared = out_.weights.empty() || out_.weights[i] != 0;
      const int64_t place = i + out_.teacher_offset;
      if (compared && (place < 0 || place >= teacher_tokens)) {
        return BadPair(
            i, absl::StrCat("must be in [", -i, ", ", teacher_tokens - 1 - i,
                            "], or the token have weight 0"));
      }
      if (compared && follows && out_.tokens[i] != out_.teacher_tokens[place]) {
        return BadPair(
            i, absl::StrCat("which are ", out_.tokens[i], " and ",
                            out_.teacher_tokens[place],
                            ", must pair equal tokens of the same reply"));
      }
      follows = compared;
    }
    return absl::OkStatus();
  }

  absl::Status BadPair(int64_t token, const std::string& problem) const {
    return BadField(Path("teacher_offset"), "is ", out_.teacher_offset,
                    ", which pairs tokens[", token, "] with teacher_tokens[",
                    token + out_.teacher_offset, "], ", problem);
  }

  absl::Status ReadTargets() {
    WEFT_RETURN_IF_ERROR(ReadTargetsPerToken());
    WEFT_RETURN_IF_ERROR(ReadTargetOffsets());
    WEFT_RETURN_IF_ERROR(
        Copy("targets", in_.targets(), in_.targets_le(), &out_.targets));
    WEFT_RETURN_IF_ERROR(
        CheckLength("targets", out_.targets.size(), NumTargets()));
    return CheckIds(Path("targets"), out_.targets, limits_.vocab_size);
  }

  absl::Status ReadTargetsPerToken() {
    const uint32_t per_token = in_.targets_per_token();
    if (per_token > 1 && function_ != LossFunction::kCrossEntropy &&
        function_ != LossFunction::kCustom) {
      return BadField(Path("targets_per_token"), "is ", per_token,
                      ", must be 0 or 1 for every loss but "
                      "cross_entropy and custom");
    }
    if (per_token > MaxTargetsPerToken()) {
      return CheckCount(Path("targets_per_token"), per_token, 0,
                        MaxTargetsPerToken());
    }
    out_.targets_per_token = static_cast<int>(per_token);
    return absl::OkStatus();
  }

  absl::Status ReadTargetOffsets() {
    WEFT_RETURN_IF_ERROR(Copy("target_offsets", in_.target_offsets(),
                              in_.target_offsets_le(), &out_.target_offsets));
    const std::vector<uint32_t>& offsets = out_.target_offsets;
    if (offsets.empty()) return absl::OkStatus();
    if (function_ != LossFunction::kCrossEntropy) {
      return BadField(Path("target_offsets"), "has ", offsets.size(),
                      " values, must be empty for every loss but "
                      "cross_entropy");
    }
    if (out_.targets_per_token > 1) {
      return BadField(Path("targets_per_token"), "is ", out_.targets_per_token,
                      ", must be 0 or 1 with target_offsets");
    }
    return CheckOffsets("target_offsets", offsets, MaxTargetsPerToken(),
                        "targets");
  }

  // Checks the offsets of lists, one for each token, of at most `most` of
  // `what`.
  absl::Status CheckOffsets(absl::string_view field,
                            const std::vector<uint32_t>& offsets, uint32_t most,
                            absl::string_view what) const {
    if (offsets.size() != out_.tokens.size() + 1) {
      return BadField(Path(field), "has ", offsets.size(),
                      " values, must have ", out_.tokens.size() + 1, " (",
                      out_.tokens.size(), " tokens, and the end)");
    }
    if (offsets.front() != 0) {
      return BadField(absl::StrCat(Path(field), "[0]"), "is ", offsets.front(),
                      ", must be 0");
    }
    for (size_t i = 1; i < offsets.size(); ++i) {
      const uint64_t low = offsets[i - 1];
      if (offsets[i] >= low && offsets[i] <= low + most) continue;
      return BadField(absl::StrCat(Path(field), "[", i, "]"), "is ", offsets[i],
                      ", must be in [", low, ", ", low + most,
                      "] (a token has 0 to ", most, " ", what, ")");
    }
    return absl::OkStatus();
  }

  absl::Status ReadWeights() {
    WEFT_RETURN_IF_ERROR(
        Copy("weights", in_.weights(), in_.weights_le(), &out_.weights));
    if (out_.weights.empty()) return absl::OkStatus();
    WEFT_RETURN_IF_ERROR(
        CheckLength("weights", out_.weights.size(), NumTargets()));
    return CheckFinite("weights", out_.weights);
  }

  // Reads logprobs and advantages. Ignores them for losses without a policy, so
  // that a client may send the same data with them and with a policy loss.
  absl::Status ReadPolicyInputs() {
    if (!HasPolicy(function_)) return absl::OkStatus();
    WEFT_RETURN_IF_ERROR(
        Copy("logprobs", in_.logprobs(), in_.logprobs_le(), &out_.logprobs));
    // ReadReplay checks that records have the logprobs that are absent.
    if (in_.sampled_spans_size() == 0 || !out_.logprobs.empty()) {
      WEFT_RETURN_IF_ERROR(
          CheckLength("logprobs", out_.logprobs.size(), NumTargets()));
    }
    WEFT_RETURN_IF_ERROR(CheckFinite("logprobs", out_.logprobs));
    const int64_t bad = FindPositive(out_.logprobs);
    if (bad >= 0) {
      return BadField(absl::StrCat(Path("logprobs"), "[", bad, "]"), "is ",
                      out_.logprobs[static_cast<size_t>(bad)],
                      ", must be at most 0");
    }
    WEFT_RETURN_IF_ERROR(Copy("advantages", in_.advantages(),
                              in_.advantages_le(), &out_.advantages));
    WEFT_RETURN_IF_ERROR(
        CheckLength("advantages", out_.advantages.size(), NumTargets()));
    return CheckFinite("advantages", out_.advantages);
  }

  absl::Status ReadRouting() {
    const std::string& raw = in_.routing_le();
    if (raw.empty()) return absl::OkStatus();
    WEFT_RETURN_IF_ERROR(CheckRouting(Path("routing_le"), true, limits_));
    const auto per_token = static_cast<size_t>(limits_.experts_per_token);
    const size_t row = static_cast<size_t>(limits_.expert_layers) * per_token;
    const size_t expected = out_.tokens.size() * row;
    if (raw.size() != expected * sizeof(uint16_t)) {
      return BadField(Path("routing_le"), "has ", raw.size(),
                      " bytes, must have ", expected * sizeof(uint16_t), " (",
                      out_.tokens.size(), " tokens, ", limits_.expert_layers,
                      " layers, ", per_token, " experts of 2 bytes)");
    }
    std::vector<uint16_t>& routing = out_.routing;
    routing.resize(expected);
    std::memcpy(routing.data(), raw.data(), raw.size());
    for (size_t i = 0; i < expected; ++i) {
      const absl::string_view wrong = WrongExpert(routing, i);
      if (wrong.empty()) continue;
      return BadField(
          absl::StrCat(Path("routing_le"), "[", i / row, "][",
                       i % row / per_token, "][", i % per_token, "]"),
          "is ", routing[i], wrong, limits_.num_experts, ")");
    }
    return absl::OkStatus();
  }

  absl::Status ReadSupport() {
    TokenSupport& support = out_.support;
    const google::protobuf::RepeatedField<uint32_t> no_packed_form;
    WEFT_RETURN_IF_ERROR(Copy("support_offsets", no_packed_form,
                              in_.support_offsets_le(), &support.offsets));
    WEFT_RETURN_IF_ERROR(Copy("support_tokens", no_packed_form,
                              in_.support_tokens_le(), &support.tokens));
    if (support.offsets.empty() && support.tokens.empty()) {
      return absl::OkStatus();
    }
    if (HasTeacher(function_)) {
      return BadField(Path("support_offsets_le"),
                      "is set, but losses with a teacher compare distributions "
                      "over the whole vocabulary: leave it out");
    }
    if (out_.targets_per_token > 1 || !out_.target_offsets.empty()) {
      return BadField(Path("support_offsets_le"),
                      "is set, must be empty unless every token has one target "
                      "(no target_offsets, targets_per_token 0 or 1)");
    }
    WEFT_RETURN_IF_ERROR(CheckOffsets("support_offsets_le", support.offsets,
                                      kMaxSupport, "ids"));
    if (support.offsets.back() != support.tokens.size()) {
      return BadField(Path("support_tokens_le"), "has ", support.tokens.size(),
                      " values, must have ", support.offsets.back(),
                      " (the last of support_offsets_le)");
    }
    WEFT_RETURN_IF_ERROR(CheckIds(Path("support_tokens_le"), support.tokens,
                                  limits_.vocab_size));
    return CheckSupportIds(support);
  }

  // Checks that each token's ids increase and contain the token's target.
  absl::Status CheckSupportIds(const TokenSupport& support) const {
    for (size_t i = 0; i + 1 < support.offsets.size(); ++i) {
      const auto first = support.tokens.begin() + support.offsets[i];
      const auto last = support.tokens.begin() + support.offsets[i + 1];
      const auto low = std::adjacent_find(first, last, std::greater_equal<>());
      if (low != last) {
        return BadField(absl::StrCat(Path("support_tokens_le"), "[",
                                     low + 1 - support.tokens.begin(), "]"),
                        "is ", *(low + 1), " after ", *low,
                        ", the ids of a token must increase");
      }
      const int32_t target = out_.targets[i];
      if (first == last || std::binary_search(first, last, target)) continue;
      return BadField(Path("support_tokens_le"), "has no target ", target,
                      " among the ", last - first, " ids of token ", i,
                      ": the target must be one of them, or there must be no "
                      "ids (the whole vocabulary)");
    }
    return absl::OkStatus();
  }

  // Checks the expert at `index`. Returns the text that follows the expert's id
  // in the error message, or an empty string if the expert is valid.
  absl::string_view WrongExpert(const std::vector<uint16_t>& routing,
                                size_t index) const {
    if (routing[index] >= limits_.num_experts) return ", must be in [0, ";
    const auto at = routing.begin() + static_cast<int64_t>(index);
    const auto first =
        at - static_cast<int64_t>(
                 index % static_cast<size_t>(limits_.experts_per_token));
    if (std::find(first, at, *at) == at) return "";
    return " again, must be another expert in [0, ";
  }

  uint32_t MaxTargetsPerToken() const {
    return std::min(kMaxTargetsPerToken,
                    static_cast<uint32_t>(limits_.vocab_size));
  }

  size_t NumTargets() const {
    return static_cast<size_t>(out_.targets_of(out_.num_tokens() - 1).end);
  }

  const v1::Datum& in_;
  const int index_;
  const LossFunction function_;
  const RequestLimits& limits_;
  Datum out_;
};

}  // namespace

absl::StatusOr<Datum> ReadDatum(const v1::Datum& datum, int index,
                                LossFunction function,
                                const RequestLimits& limits) {
  return DatumReader(datum, index, function, limits).Read();
}

}  // namespace weft::server
